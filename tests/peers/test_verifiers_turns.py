"""Environments of verifiers 0.1.x that take part in the dialogue, and those with tools, by verifiers' own rollout under two versions of it.

Installs verifiers 0.1.14 and 0.1.9.post3 with their dependencies (about 500 MB each), each with a small project of this file's own.
"""

import asyncio
import json
import re

import pytest
from dialogues import left, said
from playing import environment
from projects import write

from sandmill.environments.grading import grade_group
from sandmill.environments.task import Graded, InfrastructureFailure, Limit
from sandmill.errors import GraderFailed

SOURCE = '''
import json

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"Think of {n}: what is it doubled?", "answer": str(2 * n), "info": json.dumps({"n": n}), "hint": n} for n in range(8)]


def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: The number.
    """
    return 2 * number


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["tries"] = 0
        return state

    @vf.stop
    async def solved(self, state):
        last = state["trajectory"][-1]["completion"][-1]["content"] if state["trajectory"] else ""
        return state["answer"] in last

    async def env_response(self, messages, state, **kwargs):
        state["tries"] += 1
        return [{"role": "user", "content": f"no, try {state['tries'] + 1}"}]


def right(completion, answer):
    return 1.0 if answer in completion[-1]["content"] else 0.0


def few(state):
    return 1.0 / max(1, len(state["trajectory"]))


def attributes(completion):
    return float(all(message.role in ("assistant", "user", "tool") for message in completion))


def informed(info, answer):
    return float(2 * info["n"] == int(answer))


def hinted(**known):
    return float(known.get("hint", -1) == known["info"]["n"])


def words(completion):
    return float(len([m for m in completion if m["role"] == "assistant" and m["content"]]))


def called(completion):
    return float(sum(len(m.get("tool_calls") or []) for m in completion))


class Telling(Guess):
    async def env_response(self, messages, state, **kwargs):
        answer = await super().env_response(messages, state)
        if state["tries"] == 2:
            state["final_env_response"] = answer
        return answer


class Forgetful(Guess):
    async def get_prompt_messages(self, state):
        return [{"role": "user", "content": f"turn {len(state['trajectory'])}"}]


class Broken(Guess):
    async def env_response(self, messages, state, **kwargs):
        raise (vf.Error if "error" in messages[-1]["content"] else KeyError)("gone")


def shortest(completions):
    sizes = [sum(len(m["content"]) for m in one if m["role"] == "assistant") for one in completions]
    return [float(size == min(sizes)) for size in sizes]


def attempts(states, parser):
    return [float(state["tries"]) for state in states]


ODD = {"one": [1.0], "few": [1.0], "text": ["1.0", "1.0"], "nan": float("nan"), "none": None}


def odd(completions):
    found = ODD.get(completions[0][-1]["content"], [0.0 for _ in completions])
    return found if isinstance(found, list) else [found, 0.0]


def odd_alone(completion):
    said = completion[-1]["content"]
    if said == "raise":
        raise KeyError("gone")
    return ODD.get(said.removeprefix("alone "), 0.0) if said.startswith("alone ") else 0.0


class Holding(Guess):
    async def setup_state(self, state):
        state["lock"] = open("/dev/null")
        return await super().setup_state(state)


def load_environment(kind="guess", max_turns=5):
    rubric = vf.Rubric(funcs=[right, few, attributes, words, called, informed, hinted], weights=[1.0, *[0.0] * 6])
    if kind == "tools":
        return vf.ToolEnv(tools=[double], dataset=Dataset.from_list(ROWS), rubric=rubric, max_turns=max_turns)
    if kind in ("group", "holding"):
        rubric.add_reward_func(shortest, weight=0.5)
        rubric.add_reward_func(attempts, weight=0.0)
    if kind == "odd":
        rubric = vf.Rubric(funcs=[right, odd_alone, odd], weights=[1.0, -0.25, 0.5])
        return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=rubric)
    if kind == "several":
        rows = [{**row, "question": f"Again: {row['question']}"} for row in ROWS]
        more = vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right, odd_alone], weights=[2.0, -0.25]))
        return vf.EnvGroup([Guess(dataset=Dataset.from_list(ROWS), rubric=rubric, max_turns=max_turns), more], ["guess", "more"])
    kinds = {"telling": Telling, "forgetful": Forgetful, "broken": Broken, "holding": Holding}
    return kinds.get(kind, Guess)(dataset=Dataset.from_list(ROWS), rubric=rubric, max_turns=max_turns)
'''
VERSIONS = ("0.1.14", "0.1.9.post3")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return write(tmp_path_factory.mktemp("verifiers"), "sm-turns", SOURCE)


@pytest.fixture(params=VERSIONS)
def play(project, request):
    """Loads the project with options; plays each list of turns (of the first task's row) and ends it."""

    def played(*episodes, limit=None, cut=None, **options):
        turns = environment(f"verifiers/{project}", 4, 2, verifiers=request.param, **options)
        row = json.loads(bytes(turns.row(turns.splits["train"][0])))

        async def main():
            try:
                return [await said(turns, *episode(row), limit=limit, cut=cut) for episode in episodes]
            finally:
                await turns.close()

        return asyncio.run(main())

    return played


def test_the_environments_replies_and_its_own_stop_conditions(play, request):
    right, wrong = play(lambda row: ["-1", "-2", row["answer"]], lambda row: ["-1"] * 5)
    assert [(one.text, one.over) for one in right[0]] == [("no, try 2", False), ("no, try 3", False), ("", True)]
    assert (right[1].reward, right[1].parts["few"], right[1].parts["words"], right[1].parts["attributes"]) == (1.0, 1 / 3, 3.0, 1.0)
    assert (right[1].parts["informed"], right[1].parts["hinted"]) == (
        1.0,
        float(request.node.callspec.params["play"] == "0.1.14"),
    )  # 0.1.9 has no columns for it
    assert (wrong[0][-1].over, wrong[1].reward, wrong[1].parts["num_turns"]) == (True, 0.0, 5.0)


def test_an_episode_that_is_cut_short_is_scored_on_what_was_said(play):
    ((reactions, verdict),) = play(lambda row: ["-1", "-2"], limit=Limit.TURNS)
    assert not reactions[-1].over
    assert isinstance(verdict, Graded)
    assert (verdict.reward, verdict.parts["words"]) == (0.0, 2.0)


def test_a_reply_that_was_cut_is_scored_and_so_is_silence(play):
    ((_, cut),) = play(lambda row: ["-1"], limit=Limit.TOKENS, cut="it is, let me th")
    assert (cut.reward, cut.parts["words"], cut.parts["num_turns"]) == (0.0, 2.0, 2.0)
    ((_, silent),) = play(lambda row: [], limit=Limit.CONTEXT)
    assert (silent.reward, silent.parts["words"]) == (0.0, 0.0)


def test_tools_are_called_and_what_they_raise_goes_to_the_model(play):
    calls = [("double", {"number": 21}), ("double", {"bad": 1})]
    ((reactions, verdict),) = play(lambda row: [*calls, f"it is {row['answer']}"], kind="tools")
    assert reactions[0].text == "42"
    assert "unexpected keyword argument 'bad'" in reactions[1].text
    assert reactions[2].over
    assert verdict.reward == 1.0
    assert {name: verdict.parts[name] for name in ("called", "words", "total_tool_calls", "double_calls")} == {
        "called": 2.0,
        "words": 3.0,
        "total_tool_calls": 2.0,
        "double_calls": 2.0,
    }


def test_a_last_reply_of_the_environment_ends_the_episode(play):
    ((reactions, verdict),) = play(lambda row: ["-1", "-2"], kind="telling")
    assert [one.over for one in reactions] == [False, True]
    assert verdict.parts["num_turns"] == 2.0


@pytest.mark.parametrize(("said_first", "reason"), [("an error", "says that the episode broke"), ("anything", "KeyError: 'gone'")])
def test_what_the_environment_raises_is_no_reward(play, said_first, reason):
    with pytest.raises(GraderFailed, match=reason):
        play(lambda row: [said_first], kind="broken")


def test_an_environment_that_rewrites_its_history_is_refused(play):
    with pytest.raises(GraderFailed, match="rewrites what was said before"):
        play(lambda row: ["-1"], kind="forgetful")


@pytest.fixture(params=VERSIONS)
def together(project, request):
    """Loads the project with options; plays each group of lists of turns (of the first task's row) and grades it as a group."""

    def played(*groups, **options):
        loaded = environment(f"verifiers/{project}", 4, 2, verifiers=request.param, **options)
        task = loaded.splits["train"][0]
        answer = json.loads(bytes(loaded.row(task)))["answer"]

        async def main():
            try:
                ended = [[await left(loaded, *(answer if text is True else text for text in one)) for one in group] for group in groups]
                return [await grade_group(loaded, task, group, timeout_s=60.0) for group in ended]
            finally:
                await loaded.close()

        return asyncio.run(main())

    return played


RIGHT = True
"""A turn that says the answer."""


def test_rewards_over_a_whole_group_see_every_member(together):
    ((quick, slow, wrong), (alone,)) = together([[RIGHT], ["-1", "-2", RIGHT], ["-1"] * 5], [["-1"]], kind="group")
    assert [one.reward for one in (quick, slow, wrong, alone)] == [1.5, 1.0, 0.0, 0.5]
    assert [one.parts["attempts"] for one in (quick, slow, wrong)] == [0.0, 2.0, 4.0]
    assert [one.parts["shortest"] for one in (quick, slow, wrong)] == [1.0, 0.0, 0.0]
    assert (quick.parts["attributes"], quick.passed, slow.passed) == (1.0, True, False)


def test_a_reward_that_is_no_number_is_none_for_the_member_or_the_group_that_it_is_about(together):
    for_all, alone = ("few", "text", "nan", "none"), ("raise", "alone one", "alone text", "alone nan", "alone none")
    found = together(*([[text], [RIGHT]] for text in (*for_all, *alone)), [["no"], [RIGHT]], kind="odd")
    for text, verdicts in zip(for_all, found, strict=False):
        assert all(isinstance(one, InfrastructureFailure) for one in verdicts)
        assert all(re.search(r"reward function odd gave .* for 2 rollouts", one.reason) for one in verdicts), text
    for text, (broken, other) in zip(alone, found[len(for_all) :], strict=False):
        assert isinstance(broken, InfrastructureFailure), text
        assert re.search(r"reward function odd_alone (gave .*, which is no number|raised KeyError: 'gone')", broken.reason)
        assert other.reward == 1.0
    assert [one.reward for one in found[-1]] == [0.0, 1.0]


def test_an_episode_that_cannot_be_taken_to_its_group_is_refused_before_its_first_turn(together):
    with pytest.raises(GraderFailed, match=r"state\['lock'\] cannot be taken to another process"):
        together([[RIGHT]], kind="holding")


def test_a_group_of_environments_grades_by_the_one_that_a_task_is_from_and_hides_no_failure(project):
    loaded = environment(f"verifiers/{project}", 14, 2, kind="several")
    tasks = {task.prompt.startswith("Again"): task for task in loaded.splits["train"]}

    async def main():
        try:
            rows = {again: json.loads(bytes(loaded.row(task))) for again, task in tasks.items()}
            found = [(await said(loaded, rows[again]["answer"], task=tasks[again]))[1] for again in (False, True)]
            with pytest.raises(GraderFailed, match="odd_alone raised KeyError"):
                await said(loaded, "raise", task=tasks[True])
            return found
        finally:
            await loaded.close()

    one, other = asyncio.run(main())
    assert (one.reward, one.passed, other.reward, other.passed) == (1.0, True, 2.0, True)
