"""A grader asks a judge through the broker: it never holds the key, and no failure of the judge becomes a number."""

import asyncio
import json

import msgspec
import pytest
from judge_server import KEY

from sandmill.config.manifest import TokenPricesSection
from sandmill.environments.access.meter import Meter, metered
from sandmill.environments.packages.loaded import Launch, LoadedPackage
from sandmill.environments.task import Boundary, Graded, InfrastructureFailure
from sandmill.errors import EnvironmentFailed

FORGIVING = """
try:
    return judged(completion, **{})
except Exception:
    return 0.5
"""


def test_a_grader_asks_a_judge_and_its_verdict_stands(judge, allowed, graded):
    [(verdict, meter)] = graded("return judged(completion)", ["yes"], allowed())
    assert verdict == Graded(reward=1.0, passed=True)
    assert judge.heard[0]["model"] == "real-judge"
    assert judge.keys == [f"Bearer {KEY}"]
    [call] = meter.calls
    assert (call.judge, call.outcome, call.tokens_in, call.tokens_out, call.cost_microusd) == ("judge-1", "answered", 20, 3, 26)
    assert call.seconds > 0


def test_the_key_is_nowhere_in_the_sandbox(allowed, graded):
    body = """
    found = [dict(os.environ).__repr__()]
    for pid in os.listdir("/proc"):
        try:
            found.append(open(f"/proc/{pid}/environ").read() + open(f"/proc/{pid}/cmdline").read())
        except OSError:
            pass
    found.append(subprocess.run(["grep", "-rls", completion, "/opt", "/tmp", "/etc", "/var/tmp"], capture_output=True, text=True).stdout)
    return float(completion in "".join(found))
    """
    assert [verdict.reward for verdict, _ in graded(body, [KEY, "judge-1"], allowed())] == [0.0, 1.0]


BREAKS = {
    "busy": (True, "answered 429"),
    "error": (True, "answered 500"),
    "denied": (False, "answered 401"),
    "cut": (True, "peer closed connection"),
    "html": (True, "the judge's reply is none"),
    "other": (True, "missing required field `choices`"),
    "nothing": (True, "said nothing (finish_reason 'length')"),
    "hang": (True, "took longer than the 1 s of one grading"),
}


def test_a_judge_that_breaks_is_a_failure_of_its_own_even_where_the_grader_catches_it(judge, allowed, graded):
    found = graded(FORGIVING, list(BREAKS), allowed(timeout="1s", retries=0))
    for (word, (retryable, said)), (verdict, meter) in zip(BREAKS.items(), found, strict=True):
        assert isinstance(verdict, InfrastructureFailure), word
        assert (verdict.boundary, verdict.retryable) == (Boundary.JUDGE, retryable), word
        assert said in verdict.reason
        assert KEY not in verdict.reason
        assert [call.outcome for call in meter.calls] == ["failed"]
    assert len(judge.heard) == len(BREAKS)


def test_a_busy_judge_is_asked_again_by_the_broker_and_the_grader_sees_only_the_answer(judge, allowed, graded):
    [(verdict, meter)] = graded("return judged(completion)", ["once-busy"], allowed(retries=2))
    assert verdict == Graded(reward=1.0, passed=True)
    assert len(judge.heard) == 2
    assert len(meter.calls) == 1


def test_a_grading_whose_judge_broke_is_tried_again_without_the_episode(judge, allowed, graded):
    [(verdict, meter), (given_up, again)] = graded(FORGIVING, ["once-busy", "error"], allowed(retries=0), retries=1)
    assert verdict == Graded(reward=1.0, passed=True)
    assert meter.gradings == again.gradings == 2
    assert [call.outcome for call in meter.calls] == ["failed", "answered"]
    assert given_up == InfrastructureFailure(boundary=Boundary.JUDGE, reason=given_up.reason, retryable=False)


REFUSED = {
    "other model": ("ask('yes', model='judge-2')", "asked for model 'judge-2', which it was not given; the nearest is judge-1"),
    "other path": ("post('/v1/embeddings', {})", "'POST' '/v1/embeddings', which is not served"),
    "no request": ("post('/v1/chat/completions', b'[1]')", "sent a request that is none"),
    "no length": ("unsized()", "without a Content-Length"),
    "too large": ("post('/v1/chat/completions', b'x' * (9 << 20))", "it may have 8388608"),
    "too many": ("[ask('yes') for _ in range(4)]", "one grading may use 3 requests of judge judge-1"),
    "too many tokens": ("[ask('yes'), ask('yes')]", "one grading may use 20 tokens of judge judge-1"),
    "too much money": ("[ask('yes'), ask('yes')]", "one grading may use 20 micro-dollars of judge judge-1"),
    "too long": ("ask('x' * 20_000)", "bytes has more than the 1000 tokens of judge judge-1 that are left"),
    "cut by the bound": ("ask('long', max_tokens=100)", "was cut at the 60 tokens of one grading"),
}
TERMS = {
    "too many tokens": {"max_tokens": 20},
    "too long": {"max_tokens": 1000},
    "too much money": {"max_cost_usd": "0.00002"},
    "cut by the bound": {"max_tokens": 60},
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_a_grader_may_not_ask_is_refused_and_leaves_no_verdict(judge, allowed, graded, case):
    work, said = REFUSED[case]
    body = f"try:\n    {work}\nexcept Exception as error:\n    pass\nreturn 1.0"
    [(verdict, _)] = graded(body, ["x"], allowed(**{"max_requests": 3, **TERMS.get(case, {})}), retries=1)
    assert isinstance(verdict, InfrastructureFailure)
    assert (verdict.boundary, verdict.retryable) == (Boundary.JUDGE, False)
    assert said in verdict.reason


def test_a_request_that_names_its_own_bound_gets_what_is_left(judge, allowed, graded):
    graded("ask('yes', max_tokens=100)\nreturn judged('yes', max_completion_tokens=1000)", ["x"], allowed(max_tokens=90))
    assert [asked.get("max_tokens") for asked in judge.heard] == [90, None]
    assert judge.heard[1]["max_completion_tokens"] == 67


def test_what_broke_off_and_what_was_not_counted_is_charged_the_most_that_it_can_be(judge, allowed, graded):
    [(_, cut), (verdict, uncounted)] = graded("return judged(completion, max_tokens=10)", ["cut", "uncounted"], allowed(retries=0))
    assert verdict == Graded(reward=1.0, passed=True)
    for meter in (cut, uncounted):
        [call] = meter.calls
        assert call.cost_microusd is not None
        assert call.cost_microusd > 10 * 2 + 50


def test_what_an_endpoint_refuses_costs_nothing_and_each_attempt_that_broke_off_counts(judge, allowed, graded):
    found = graded("return judged(completion, max_tokens=10)", ["error", "cut"], allowed(retries=1))
    (refused,), (cut,) = (meter.calls for _, meter in found)
    assert refused.cost_microusd == 0
    size = len(json.dumps({"model": "judge-1", "messages": [{"role": "user", "content": "is it right? cut"}], "max_tokens": 10}))
    assert cut.cost_microusd == 2 * (size + 10 * 2)


def test_an_unknown_price_is_an_unknown_cost(allowed, graded):
    [(_, meter)] = graded("return judged(completion)", ["yes"], allowed(prices=TokenPricesSection()))
    assert [call.cost_microusd for call in meter.calls] == [None]


def test_a_request_that_is_still_running_when_the_verdict_comes_spoils_it(judge, allowed, graded):
    body = """
    threading.Thread(target=ask, args=("hang",), daemon=True).start()
    time.sleep(0.7)
    return 1.0
    """
    [(verdict, meter)] = graded(body, ["x"], allowed())
    assert isinstance(verdict, InfrastructureFailure)
    assert (verdict.boundary, verdict.reason) == (Boundary.JUDGE, "the grader's time was over before its request was answered")
    assert [call.outcome for call in meter.calls] == ["failed"]


def test_a_grader_that_is_killed_while_its_judge_thinks_is_the_judges_failure(allowed, graded):
    [(verdict, _)] = graded("return judged('hang')", ["x"], allowed(), timeout_s=2.0)
    assert isinstance(verdict, InfrastructureFailure)
    assert (verdict.boundary, verdict.retryable) == (Boundary.JUDGE, True)


WHO = """
import urllib.error, urllib.request
try:
    print(urllib.request.urlopen("http://127.0.0.1:8399/v1/models", timeout=5).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


def test_nobody_but_a_grading_may_ask(allowed, graded):
    """Not another user's program, such as one that a completion wrote, and not root."""

    async def others(environment):
        box = environment.service._live._sandbox
        return [(await box.run.aio("/usr/bin/python3", "-c", WHO, user=who)).stdout.decode().strip() for who in ("user", "root")]

    body = "return float(subprocess.run([sys.executable, '-c', completion], capture_output=True, text=True).stdout.strip() == '200')"
    assert graded(body, [WHO], allowed(), then=others) == ["403", "403"]
    assert graded(body, [WHO], allowed())[0][0] == Graded(reward=1.0, passed=True)


PROGRAMS = """
import os, subprocess, sys

class Adapter:
    keeps_root = True

    def describe(self):
        return {"name": "programs", "version": "1", "splits": {"train": 1}}

    def grade(self, row, answer, context):
        who = int(os.environ["SANDMILL_UID"])
        said = [subprocess.run([sys.executable, "-c", answer], user=user, capture_output=True, text=True).stdout for user in (who, None)]
        return {"reward": 1.0, "parts": {",".join(one.strip() for one in said): 1.0}}

def load(options):
    return Adapter()
"""


def test_a_completions_program_may_not_ask_where_the_grader_runs_it_as_the_sessions_user(allowed):
    async def main():
        access = allowed()
        package = await LoadedPackage.start(Launch(adapter=PROGRAMS, access=access))
        try:
            with metered(Meter()):
                return await package.grade(msgspec.Raw(b"{}"), WHO, timeout_s=20)
        finally:
            await package.close()
            await access.close()

    assert list(asyncio.run(main()).parts) == ["403,403"]


def test_what_is_asked_before_any_grading_is_refused(judge, allowed, graded):
    with pytest.raises(EnvironmentFailed, match="HTTP Error 403"):
        graded("return 1.0", ["x"], allowed(), module="ask('yes')")
    assert judge.heard == []


def test_a_stream_is_a_whole_reply_in_pieces(allowed, graded):
    body = """
    messages = [{"role": "user", "content": "yes"}]
    lines = post("/v1/chat/completions", {"model": "judge-1", "messages": messages, "stream": True}).split("\\n\\n")
    said = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert lines[-2] == "data: [DONE]", lines
    assert said[0]["object"] == "chat.completion.chunk" and said[-1]["usage"]["total_tokens"] == 23
    return float(said[0]["choices"][0]["delta"]["content"] == "yes")
    """
    [(verdict, _)] = graded(body, ["x"], allowed())
    assert verdict == Graded(reward=1.0, passed=True)


def test_the_judges_there_are_can_be_listed(allowed, graded):
    body = 'return float([one["id"] for one in json.loads(post("/v1/models", None, "GET"))["data"]] == ["judge-1"])'
    [(verdict, _)] = graded(body, ["x"], allowed())
    assert verdict == Graded(reward=1.0, passed=True)
