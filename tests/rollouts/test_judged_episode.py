"""Whole episodes with a package that talks back and asks a judge: what is scored again, what is played again, and what is never trusted."""

import sys
from pathlib import Path

import playground as pg
import pytest
from judge_server import judge_server

from sandmill.config.manifest import GradingSection, JudgeSection, ToolsSection
from sandmill.environments.access.access import access_of
from sandmill.environments.task import Boundary, Graded, InfrastructureFailure
from sandmill.rollouts.group import Breaker, run_groups

sys.path.append(str(Path(__file__).parent.parent / "environments"))
from countdown import ADAPTER, countdown

ASK = """
def ask(word):
    import urllib.request
    body = json.dumps({"model": "j", "messages": [{"role": "user", "content": word}]}).encode()
    request = urllib.request.Request("http://127.0.0.1:8399/v1/chat/completions", body, {"Content-Type": "application/json"})
    try:
        return json.load(urllib.request.urlopen(request, timeout=10))["choices"][0]["message"]["content"]
    except Exception:
        return "no"

class Adapter:
"""


def source(word, *, again=False):
    """A game whose move `double`, and whose end, asks the judge `word`; it takes every failure for a no."""
    made = ADAPTER.replace("class Adapter:\n", ASK.lstrip("\n")).replace('"sessions": 2', f'"sessions": 2, "finishes_again": {again}')
    made = made.replace(
        '        if text == "hang":', f'        if text == "double":\n            ask("{word}")\n        if text == "hang":'
    )
    return made.replace("float(self.left == 0)", f'float(ask("{word}") == "yes")')


def played(word, lines, *, again=False, retries=1):
    """One episode with its retries."""
    with judge_server() as judge:
        section = JudgeSection(name="j", url=judge.url, retries=0)
        environment = countdown(source=source(word, again=again), access=access_of(GradingSection(judge=(section,)), ToolsSection(), None))
        task, seen = environment.splits["train"][0], []

        async def go():
            try:
                async with pg.arena(environment, pg.play(lines), {"g": task}, retries=retries) as arena:
                    [group] = await run_groups(
                        arena, [("g", task)], generations=1, sampling=pg.SAMPLING, breaker=Breaker(9), watch=seen.append
                    )
                    return group.episodes[0], arena.health
            finally:
                await environment.close()

        episode, health = pg.run(go())
        return episode, seen, health


def test_an_episode_that_can_be_scored_again_is_not_played_again():
    episode, seen, health = played("once-busy", ["= 1", "= stop"], again=True)
    assert isinstance(episode.verdict, Graded)
    assert (episode.verdict.reward, episode.attempt, len(seen)) == (1.0, 0, 1)
    assert [call.outcome for call in episode.judge_calls] == ["failed", "answered"]
    assert (health.episodes, health.failures) == (1, 0)


def test_one_that_cannot_is_played_again():
    episode, seen, health = played("once-busy", ["= 1", "= stop"])
    assert isinstance(episode.verdict, Graded)
    assert (episode.verdict.reward, episode.attempt) == (1.0, 1)
    assert isinstance(seen[0].verdict, InfrastructureFailure)
    assert (seen[0].verdict.boundary, [call.outcome for call in seen[0].judge_calls]) == (Boundary.JUDGE, ["failed"])
    assert (health.episodes, health.failures) == (2, 1)


@pytest.mark.parametrize("again", [False, True])
def test_a_judge_that_stays_broken_gives_no_reward(again):
    episode, seen, _ = played("error", ["= 1", "= stop"], again=again)
    assert isinstance(episode.verdict, InfrastructureFailure)
    assert (episode.verdict.boundary, len(seen)) == (Boundary.JUDGE, 1 if again else 2)


def test_what_broke_while_an_episode_was_played_is_not_made_good_by_its_end():
    episode, _, _ = played("once-busy", ["= double", "= 1", "= stop"], again=True, retries=0)
    assert isinstance(episode.verdict, InfrastructureFailure)
    assert (episode.verdict.boundary, episode.verdict.retryable) == (Boundary.JUDGE, True)
    assert [call.outcome for call in episode.judge_calls] == ["failed", "answered"]
