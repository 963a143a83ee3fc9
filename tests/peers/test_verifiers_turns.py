"""Environments of verifiers 0.1.x that take part in the dialogue, and those with tools, by verifiers' own rollout under two versions of it.

Installs verifiers 0.1.14 and 0.1.9.post3 with their dependencies (about 500 MB each), each with a small project of this file's own.
"""

import asyncio
import json

import pytest
from dialogues import said
from playing import environment
from projects import write

from sandmill.environments.task import Graded, Limit
from sandmill.errors import EnvironmentFailed, GraderFailed

SOURCE = '''
import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"Think of {n}: what is it doubled?", "answer": str(2 * n), "info": {"n": n}} for n in range(8)]


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


def best_of(completions):
    return [1.0 for _ in completions]


def load_environment(kind="guess", max_turns=5):
    rubric = vf.Rubric(funcs=[right, few, attributes, words, called], weights=[1.0, 0.0, 0.0, 0.0, 0.0])
    if kind == "tools":
        return vf.ToolEnv(tools=[double], dataset=Dataset.from_list(ROWS), rubric=rubric, max_turns=max_turns)
    if kind in ("group", "group metric"):
        rubric.add_reward_func(best_of, weight=1.0 if kind == "group" else 0.0)
    kinds = {"telling": Telling, "forgetful": Forgetful, "broken": Broken}
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


def test_the_environments_replies_and_its_own_stop_conditions(play):
    right, wrong = play(lambda row: ["-1", "-2", row["answer"]], lambda row: ["-1"] * 5)
    assert [(one.text, one.over) for one in right[0]] == [("no, try 2", False), ("no, try 3", False), ("", True)]
    assert (right[1].reward, right[1].parts["few"], right[1].parts["words"], right[1].parts["attributes"]) == (1.0, 1 / 3, 3.0, 1.0)
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


def test_rewards_over_a_whole_group_are_refused(play):
    with pytest.raises(EnvironmentFailed, match="best_of scores all replies to a prompt at once"):
        play(kind="group")
    ((_, verdict),) = play(lambda row: [row["answer"]], kind="group metric")
    assert verdict.reward == 1.0
    assert "best_of" not in verdict.parts
