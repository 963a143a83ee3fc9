"""One episode of a package that talks back: what it says arrives, what breaks is its failure and never a score."""

import asyncio

import pytest
from countdown import ADAPTER, countdown

from sandmill.environments.interaction import interactive, offer_of
from sandmill.environments.task import Graded, Limit, Message, NoAnswer, Role, Submission
from sandmill.errors import GraderFailed


def play(work, **made):
    """Runs `work(environment)`; the environment is closed after it."""

    async def main():
        environment = await asyncio.to_thread(lambda: countdown(**made))
        try:
            return await work(environment)
        finally:
            await environment.close()

    return asyncio.run(main())


def task_of(environment):
    return environment.splits["train"][0]


async def verdict(environment, episode, **submission):
    submission = Submission(**{"answer": None, **submission})
    record = await episode.finish(submission)
    return await environment.grade(task_of(environment), Submission(answer=submission.answer, limit=submission.limit, record=record), {})


def test_calls_and_replies_are_answered_by_the_package_and_graded_there():
    async def work(environment):
        assert [tool.name for tool in offer_of(environment).tools] == ["guess"]
        episode = await interactive(environment).interact(task_of(environment), 1)
        start = int(episode.opening[0].text.split()[1])
        said = [await episode.call("guess", {"number": "10"}), await episode.reply("x"), await episode.reply(str(start - 10))]
        messages = (Message(role=Role.ASSISTANT, text="x"),)
        found = await verdict(environment, episode, messages=messages)
        await episode.close()
        return start, said, found

    start, said, found = play(work)
    assert [(one.text, one.ok, one.over) for one in said] == [
        (f"left {start - 10}", True, False),
        ("a number, please", False, False),
        ("left 0", True, True),
    ]
    assert isinstance(found, Graded)
    assert (found.reward, found.passed, found.parts["moves"], found.parts["messages"]) == (1.0, True, 2.0, 1.0)


def test_an_answer_without_an_episode_is_played_as_its_only_turn():
    async def work(environment):
        task = task_of(environment)
        said = [await environment.grade(task, Submission(answer=answer), {}) for answer in ("10", None)]
        return said, environment.seats._taken

    (ten, none), taken = play(work)
    assert (ten.parts["moves"], type(none), taken) == (1.0, NoAnswer, [0])


def test_episodes_of_one_task_share_nothing_but_the_seed():
    async def work(environment):
        task = task_of(environment)
        episodes = [await environment.interact(task, seed) for seed in (1, 1, 2)]
        await episodes[0].reply("10")
        found = [await verdict(environment, episode) for episode in episodes]
        for episode in episodes:
            await episode.close()
        return found

    first, second, third = play(work)
    assert (type(first), type(second)) == (Graded, NoAnswer)
    assert first.parts["drawn"] == second.parts["drawn"] != third.parts["drawn"]


def test_more_episodes_than_one_worker_has_places_get_another_worker():
    async def work(environment):
        episodes = await asyncio.gather(*(environment.interact(task_of(environment), 1) for _ in range(5)))
        replies = await asyncio.gather(*(episode.reply("1") for episode in episodes))
        for episode in episodes:
            await episode.close()
            await episode.close()
        again = await environment.interact(task_of(environment), 1)
        await again.close()
        return {reply.text for reply in replies}, len(environment.seats._services), environment.seats._taken

    replies, workers, taken = play(work)
    assert (len(replies), workers, taken) == (1, 3, [0, 0, 0])


@pytest.mark.parametrize(
    ("said", "reason"),
    [("raise", "RuntimeError: the game broke"), ("5", "exit code 7"), ("lower", "Expected `str`, got `array`")],
)
def test_what_breaks_in_a_turn_is_raised_and_the_episode_has_no_score(said, reason):
    async def work(environment):
        episode = await environment.interact(task_of(environment), 1)
        for ask in (lambda: episode.reply(said), lambda: episode.reply("1"), lambda: episode.finish(Submission(answer=None))):
            with pytest.raises(GraderFailed, match=reason):
                await ask()
        await episode.close()

    play(work)


def test_what_a_model_says_cannot_break_an_episode_by_its_form():
    nested = "x"
    for _ in range(150):
        nested = [nested]

    async def work(environment):
        episode = await environment.interact(task_of(environment), 1)
        odd = [await episode.call("guess", {"number": one}) for one in ("\ud800", nested)]
        said = await episode.reply("\ud800")
        messages = (Message(role=Role.ASSISTANT, text="\udfff"),)
        await episode.call("guess", {"number": "1"})
        found = await verdict(environment, episode, messages=messages)
        await episode.close()
        return odd, said, found

    odd, said, found = play(work)
    assert [(one.ok, "cannot be passed on" in one.text) for one in odd] == [(False, True)] * 2
    assert (said.text, found.parts["moves"]) == ("a number, please", 1.0)


def test_a_score_that_is_none_is_refused():
    async def work(environment):
        episode = await environment.interact(task_of(environment), 1)
        with pytest.raises(GraderFailed, match=r"the reward is 'nothing' \(str\), not a finite number"):
            await episode.finish(Submission(answer="stop"))
        await episode.close()

    play(work)


def test_a_turn_that_nobody_waits_for_still_counts_when_the_episode_is_graded():
    async def work(environment):
        episode = await environment.interact(task_of(environment), 1)
        await episode.reply("1")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await episode.reply("sleep")
        found = await verdict(environment, episode, limit=Limit.TIME)
        await episode.close()
        return found

    assert play(work).parts["moves"] == 1.0


def test_a_turn_that_hangs_ends_with_its_episode():
    async def work(environment):
        episode = await environment.interact(task_of(environment), 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await episode.reply("hang")
        async with asyncio.timeout(10):
            await episode.close()
            other = await environment.interact(task_of(environment), 1)
            assert (await other.reply("1")).ok
            await other.close()

    play(work)


@pytest.mark.parametrize(
    ("opened", "reason"),
    [
        ('{"prompt": 1}', "Expected `str | array`|Expected"),
        ('{"prompt": [{"role": "narrator", "content": "x"}]}', "'narrator', which is no role"),
        ('{"prompt": "x", "tools": [json.dumps(TOOL).replace("guess", "other")]}', "a tool other that its package did not announce"),
        ('{"prompt": "x", "tools": ["{}"]}', "is none"),
    ],
)
def test_an_episode_that_does_not_begin_is_a_failure_and_gives_its_place_back(opened, reason):
    async def work(environment):
        with pytest.raises(GraderFailed, match=reason):
            await environment.interact(task_of(environment), 1)
        return environment.seats._taken

    assert play(work, opened=opened) == [0]


def test_two_different_tools_of_one_name_are_refused():
    twice = '"tools": [json.dumps(TOOL), json.dumps(TOOL).replace("Take", "Put")]'
    with pytest.raises(GraderFailed, match="two different tools of the name guess"):
        countdown(source=ADAPTER.replace('"tools": [json.dumps(TOOL)]', twice))
