"""TextArena's games for one player, played to their own rewards.

Installs textarena 0.7.4 with its dependencies (about 60 MB).
"""

import asyncio

import pytest
from dialogues import said
from playing import environment

from sandmill.environments.task import AgentLimited, Graded, Limit, NoAnswer, Submission
from sandmill.environments.verdicts import with_limit
from sandmill.errors import EnvironmentFailed

MOVES = [f"I move [{move}]." for move in ("A C", "A B", "C B", "A C", "B A", "B C", "A C")]
SEVERAL = ("Blackjack-v0", "FrozenLake-v0", "LightsOut-v0", "Mastermind-v0", "PegJump-v0", "Secretary-v0", "Sudoku-v0")


def ended(hanoi, *episodes):
    """Outcomes of (turns, limit) pairs; ends the package."""

    async def main():
        try:
            return [await said(hanoi, *turns, limit=limit) for turns, limit in episodes]
        finally:
            await hanoi.close()

    return asyncio.run(main())


def test_a_game_is_played_to_its_reward():
    hanoi = environment("textarena/TowerOfHanoi-v0@0.7.4")
    won, lost = ended(hanoi, (MOVES, None), (["[C A]", "nonsense"], None))
    assert [reaction.over for reaction in won[0]] == [False] * 6 + [True]
    assert "You moved disk 1 from A to C." in won[0][0].text
    assert "[A C]" not in won[0][0].text
    assert (won[1].reward, won[1].passed, won[1].parts) == (1.0, True, {"turns": 7.0, "invalid_move": 0.0})
    assert (lost[0][1].over, lost[1].reward, lost[1].parts["invalid_move"]) == (True, 0.0, 1.0)


def test_a_game_that_is_cut_short_gets_what_the_user_says_and_its_limit():
    hanoi = environment("textarena/TowerOfHanoi-v0@0.7.4", unfinished=-0.25)
    ((_, verdict),) = ended(hanoi, (MOVES[:2], Limit.TURNS))
    limited = with_limit(verdict, Submission(answer=None, limit=Limit.TURNS))
    assert isinstance(limited, AgentLimited)
    assert (limited.reward, limited.passed) == (-0.25, False)


def test_a_seed_decides_a_game_and_splits_share_none():
    boards = [environment("textarena/Minesweeper-v0@0.7.4", 3, 2) for _ in range(2)]
    prompts = [[task.prompt for split in one.splits.values() for task in split] for one in boards]
    for one in boards:
        ended(one)
    assert prompts[0] == prompts[1]
    identities = [task.identity for split in boards[0].splits.values() for task in split]
    assert len(set(identities)) == 5


def test_random_games_go_the_same_way_twice_whatever_runs_beside_them():
    game = environment("textarena/GuessTheNumber-v0@0.7.4")

    async def main():
        turns = [f"[{number}]" for number in range(1, 6)]
        try:
            first = await said(game, *turns)
            many = await asyncio.gather(*(said(game, *turns) for _ in range(6)))
            return first, many
        finally:
            await game.close()

    first, many = asyncio.run(main())
    assert all(one == first for one in many)


@pytest.mark.parametrize("game", SEVERAL)
def test_an_invalid_move_is_forgiven_once(game):
    (first, second) = ended(environment(f"textarena/{game}@0.7.4"), (["nonsense"], None), (["nonsense"] * 2, None))
    assert (first[0][0].over, type(first[1])) == (False, NoAnswer)
    assert second[0][1].over
    assert isinstance(second[1], Graded)
    assert second[1].parts["invalid_move"] == 1.0
    assert not second[1].passed


@pytest.mark.parametrize(
    ("game", "reason"), [("TicTacToe-v0", "no game for one player"), ("TowerOfHanoy-v0", "the nearest is TowerOfHanoi-v0")]
)
def test_what_cannot_be_played_alone_says_so(game, reason):
    with pytest.raises(EnvironmentFailed, match=reason):
        environment(f"textarena/{game}@0.7.4")
