"""OpenEnv: what a server's steps say reaches the model and their rewards the grader; its errors are failures, except the action's own."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from openenv_server import MCP, TEXT, TWO, make, serving

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments import registry
from sandmill.environments.formats import plan
from sandmill.environments.interaction import episode_turn
from sandmill.environments.task import Graded, NoAnswer, Submission
from sandmill.errors import ConfigError, EnvironmentFailed, GraderFailed, UnknownEnvironment

SERVED = """
import asyncio, json, os, sys
sys.path.insert(0, sys.argv[1])
from sandmill.environments.formats.adapters import openenv
options = {"name": "w", "folder": sys.argv[1], "app": "openenv_server:app", "arguments": {}, "act": "auto", "instructions": "Guess.",
           "unfinished": 0.0, "sessions": 4, "step_errors": "action", "seeds": {"train": 3, "heldout": 100}}
served = openenv.load(options)
about = served.describe()
async def main():
    opened = await served.open({"seed": 4})
    return [about["tools"], opened["prompt"], await served.reply("sun"), await served.reply("moon"), await served.finish(None, None, [])]
print(json.dumps(asyncio.run(main())))
"""


def section(url, **options):
    return EnvironmentSection(name=f"openenv/{url}", train_tasks=2, held_out_tasks=1, options=options)


def play(work, app, **options):
    """Runs `work(environment, episode)` with an episode at seed 0 of a server of one's own."""

    async def main(environment):
        episode = await environment.interact(environment.splits["train"][0], 1)
        try:
            return await work(environment, episode)
        finally:
            await episode.close()
            await environment.close()

    with serving(app) as url:
        asked = section(url, **options)
        return asyncio.run(main(registry.get(asked.name, asked)))


def word(environment):
    seed = json.loads(bytes(environment.row(environment.splits["train"][0])))["seed"]
    return ("sun", "moon", "star")[seed % 3]


async def graded(environment, episode):
    record = await episode.finish(Submission(answer=None))
    return await environment.grade(environment.splits["train"][0], Submission(answer=None, record=record), {})


def test_a_reply_is_an_action_where_an_action_is_one_text():
    async def work(environment, episode):
        right = word(environment)
        return [await episode.reply("earth"), await episode.reply(right), await graded(environment, episode)], episode.opening, right

    (wrong, right, verdict), (first,), _ = play(work, make(), instructions="Say a word.")
    assert first.text.startswith("Say a word.\n\na word of ")
    assert (wrong.text, wrong.over, right.text, right.over) == ("wrong", False, "right", True)
    assert verdict == Graded(reward=1.0, passed=True, parts={"steps": 2.0, "refused": 0.0})


def test_an_action_of_several_fields_is_the_tool_step():
    async def work(environment, episode):
        (tool,) = environment.offer.tools
        missing = await episode.call("step", {"sure": True})
        right = await episode.call("step", {"word": word(environment), "sure": True})
        return tool, missing, right, await graded(environment, episode)

    tool, missing, right, verdict = play(work, make(TWO))
    parameters = json.loads(tool.parameters)
    assert (tool.name, tool.description, parameters["required"], sorted(parameters["properties"])) == (
        "step",
        "Guess a word.",
        ["word", "sure"],
        ["sure", "word"],
    )
    assert (missing.ok, missing.text, missing.over) == (False, "no; word: Field required", False)
    assert right.over
    assert isinstance(verdict, Graded)


def test_tools_of_a_server_are_offered_by_name():
    async def work(environment, episode):
        return environment.offer.tools, await episode.call("guess", {"word": word(environment)}), await graded(environment, episode)

    tools, said, verdict = play(work, make(MCP))
    assert [tool.name for tool in tools] == ["guess"]
    assert (said.text, verdict.reward) == ("right", 0.5)


def test_a_step_that_the_environment_raises_in_is_the_actions_fault_and_counted():
    async def work(environment, episode):
        return [await episode.reply("raise"), await episode.reply(word(environment)), await graded(environment, episode)]

    refused, right, verdict = play(work, make())
    assert (refused.ok, refused.over, refused.text) == (False, False, "no; word: Field required")
    assert right.over
    assert verdict == Graded(reward=1.0, passed=True, parts={"steps": 1.0, "refused": 1.0})


def test_it_is_the_servers_where_a_person_says_so():
    async def work(environment, episode):
        with pytest.raises(GraderFailed, match="EXECUTION_ERROR"):
            await episode.reply("raise")
        with pytest.raises(GraderFailed, match="EXECUTION_ERROR"):
            await episode.finish(Submission(answer=None))

    play(work, make(), stepErrors="server")


@pytest.mark.parametrize(("said", "code"), [("crash", "SESSION_ERROR"), ("factory", "FACTORY_ERROR")])
def test_every_other_error_is_a_failure(said, code):
    async def work(environment, episode):
        with pytest.raises(GraderFailed, match=code):
            await episode.reply(said)

    play(work, make())


def test_a_reset_that_raises_is_a_failure():
    with serving(make(resets=False)) as url, pytest.raises(EnvironmentFailed, match="EXECUTION_ERROR"):
        registry.get(f"openenv/{url}", section(url))


def test_what_a_tool_raises_goes_to_the_model_and_a_broken_transport_does_not():
    async def work(environment, episode):
        found = [await episode.call("guess", {"word": kind}) for kind in ("execution_error", "timeout")]
        with pytest.raises(GraderFailed, match="could not reach its tool: gone"):
            await episode.call("guess", {"word": "transport_error"})
        return found

    assert [(one.ok, "gone" in one.text) for one in play(work, make(MCP))] == [(False, True), (False, True)]


def test_a_server_that_is_full_is_a_failure_that_says_so():
    async def work(environment, episode):
        with pytest.raises(GraderFailed, match=r"raise max_concurrent_envs, or lower options\.sessions"):
            await environment.interact(environment.splits["train"][0], 1)

    play(work, make(capacity=1), sessions=2)


def test_episodes_wait_for_a_place_on_a_server_that_has_one():
    async def work(environment, episode):
        await episode.close()
        playing, most = [], 0

        async def one():
            nonlocal most
            async with episode_turn(environment):
                playing.append(await environment.interact(environment.splits["train"][0], 1))
                most = max(most, len(playing))
                await playing[-1].reply("earth")
                await playing.pop().close()

        await asyncio.gather(*(one() for _ in range(3)))
        return most

    assert play(work, make()) == 1


def test_an_episode_without_any_reward_has_none_unless_it_was_cut_short():
    async def cut(environment, episode):
        await episode.reply("earth")
        return await graded(environment, episode)

    async def done(environment, episode):
        await episode.reply(word(environment))
        with pytest.raises(GraderFailed, match="no step of it gave a reward"):
            await episode.finish(Submission(answer=None))

    assert play(cut, make(), unfinished=-0.5) == NoAnswer(reward=-0.5, parts={"steps": 1.0, "refused": 0.0})
    play(done, make(final=None))


def test_a_reward_that_is_no_number_is_a_failure():
    async def work(environment, episode):
        with pytest.raises(GraderFailed, match=r"the reward of a step is '1\.0', not a number"):
            await episode.reply(word(environment))

    play(work, make(final="1.0"))


def test_tasks_of_the_servers_own_task_api_are_split_as_it_splits_them():
    with serving(make(tasks={"train": 3, "test": 1})) as url:
        asked = section(url)
        environment = registry.get(asked.name, asked)
        rows = {name: [json.loads(bytes(environment.row(task))) for task in tasks] for name, tasks in environment.splits.items()}
        asyncio.run(environment.close())
    assert ({row["split"] for row in rows["train"]}, [row["split"] for row in rows["heldout"]]) == ({"train"}, ["test"])


def test_an_application_is_served_by_each_episodes_own_process():
    done = subprocess.run(
        [sys.executable, "-c", SERVED, str(Path(__file__).parent)], capture_output=True, timeout=60, check=True, text=True
    )
    tools, prompt, wrong, right, score = json.loads(done.stdout)
    assert (tools, prompt) == ([], "Guess.\n\na word of 4 letters")
    assert (wrong["done"], right["done"], score) == (False, True, {"reward": 1.0, "parts": {"steps": 2.0, "refused": 0.0}})


@pytest.mark.parametrize("what", ["http://localhost:1", "ws://", "ws://name@localhost"])
def test_a_server_is_named_by_a_ws_url(what):
    with pytest.raises(UnknownEnvironment, match="write openenv/ws://HOST:PORT"):
        plan(f"openenv/{what}", section("x"))


def test_a_server_that_is_not_there_says_so():
    with pytest.raises(EnvironmentFailed, match="could not be asked"):
        registry.get("openenv/ws://127.0.0.1:9", section("ws://127.0.0.1:9"))


def test_a_folder_without_a_manifest_or_with_a_broken_one_is_named(tmp_path):
    with pytest.raises(UnknownEnvironment, match=r"openenv\.yaml"):
        plan(f"openenv/{tmp_path}", section("x"))
    (tmp_path / "openenv.yaml").write_text("name: [")
    with pytest.raises(ConfigError, match=r"openenv\.yaml"):
        plan(f"openenv/{tmp_path}", section("x"))


def test_text_is_refused_where_an_action_is_no_single_text():
    with serving(make(TWO)) as url, pytest.raises(EnvironmentFailed, match=r"set options\.act to tool"):
        registry.get(f"openenv/{url}", section(url, act="text"))
    with serving(make(TEXT)) as url:
        environment = registry.get(f"openenv/{url}", section(url, act="tool"))
        assert [tool.name for tool in environment.offer.tools] == ["step"]
        asyncio.run(environment.close())
