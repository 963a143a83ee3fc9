"""An environment of a user's own whose grader asks, in its real sandbox, and a judge on loopback."""

import asyncio
import textwrap

import pytest
from judge_server import KEY, judge_server

from sandmill.config.manifest import EnvironmentSection, GradingSection, JudgeSection, TokenPricesSection, ToolsSection
from sandmill.environments import registry
from sandmill.environments.access.access import access_of
from sandmill.environments.access.meter import Meter
from sandmill.environments.grading import grade_episode
from sandmill.environments.task import Submission
from sandmill.sandboxes import loop

SOURCE = """
import json, os, subprocess, sys, threading, time, urllib.error, urllib.request
SPLITS = ("train", "heldout")

def tasks(split):
    for n in range(8):
        yield {"prompt": f"{split} {n}?", "answer": str(n)}

def post(path, body, method="POST", base="http://127.0.0.1:8399", **more):
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data=data, method=method, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as reply:
        return reply.read().decode()

def ask(word, model=None, **more):
    messages = [{"role": "user", "content": "is it right? " + word}]
    model = model or os.environ["SANDMILL_JUDGE_MODEL"]
    return json.loads(post("/v1/chat/completions", {"model": model, "messages": messages, **more}))["choices"][0]["message"]["content"]

def unsized():
    request = urllib.request.Request("http://127.0.0.1:8399/v1/chat/completions", data=iter([b"{}"]), method="POST")
    urllib.request.urlopen(request, timeout=20)

def judged(word, **more):
    return 1.0 if ask(word, **more) == "yes" else 0.0

def reward(completion, answer):
"""


NO_TOOLS = ToolsSection()


@pytest.fixture
def judge():
    with judge_server() as server:
        yield server


@pytest.fixture(autouse=True)
def installs(clean):
    """Removed after every test."""


@pytest.fixture
def allowed(judge, monkeypatch):
    """What a manifest with this judge allows."""
    monkeypatch.setenv("TEST_JUDGE_KEY", KEY)

    defaults = {"name": "judge-1", "url": judge.url, "model": "real-judge", "key": "TEST_JUDGE_KEY"}

    def make(tools=NO_TOOLS, mcp=(), network=None, max_parallel=8, **terms):
        prices = TokenPricesSection(input="1.00", output="2.00")
        section = JudgeSection(**{**defaults, "prices": prices, **terms})
        return access_of(GradingSection(judge=(section,), mcp=mcp, network=network, max_parallel=max_parallel), tools, no_model)

    return make


def no_model(section):
    raise AssertionError("no model is served here")


@pytest.fixture
def graded(tmp_path):
    """Verdicts of a grader with this body on these answers, and their meters."""

    def grade(body, answers, access, *, retries=0, timeout_s=20.0, then=None, module=""):
        place = tmp_path / "asks.py"
        place.write_text(SOURCE + "\n".join(f"    {line}" for line in textwrap.dedent(body).strip().splitlines()) + f"\n{module}\n")
        name = f"python/{place}"
        environment = registry.get(name, EnvironmentSection(name=name, train_tasks=4, held_out_tasks=2), access=access)

        async def main():
            task, found = environment.splits["train"][0], []
            try:
                for answer in answers:
                    meter = Meter()
                    submission = Submission(answer=answer)
                    verdict = await grade_episode(environment, task, submission, None, timeout_s=timeout_s, retries=retries, meter=meter)
                    found.append((verdict, meter))
                return found if then is None else await then(environment)
            finally:
                await environment.close()

        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(main(), 60), loop()).result()

    return grade
