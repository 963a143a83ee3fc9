"""Runs beside TextArena, in its sandbox: one game for one player. A task is a seed; each episode plays in a process of its own."""

from __future__ import annotations

import difflib
import importlib.metadata
from typing import Any


class TextArena:
    """The game; in an episode's process also the game that is being played."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.name, self.arguments, self.seeds = options["game"], options["arguments"], options["seeds"]
        self.unfinished = options["unfinished"]
        self.env: Any = None
        self.seen = ""
        self.over = False

    def describe(self) -> dict[str, Any]:
        """See protocol.Description."""
        meta = importlib.metadata.metadata("textarena").json
        return {
            "name": self.name,
            "version": str(meta["version"]),
            "licence": str(meta.get("license_expression") or meta.get("license") or "").strip().split("\n")[0][:80],
            "splits": {"train": None, "heldout": None},
            "reward": "the game's own, usually from -1 to 1",
            "multi_turn": True,
        }

    def tasks(self, split: str, start: int, stop: int) -> list[dict[str, Any]]:
        """See protocol.Row. A game that begins the same for every seed is a different task for each all the same."""
        return [self._row(self.seeds[split] + number) for number in range(start, stop)]

    def _row(self, seed: int) -> dict[str, Any]:
        prompt = self.open({"seed": seed})["prompt"]
        return {"prompt": prompt, "identity": f"{self.name} {seed}", "metadata": {"seed": str(seed)}, "row": {"seed": seed}}

    def open(self, row: dict[str, Any]) -> dict[str, Any]:
        """See protocol.Opened."""
        import textarena

        self.env = textarena.make(self.name, **self.arguments)
        self.env.reset(num_players=1, seed=row["seed"])
        self.seen, self.over = "", False
        return {"prompt": self._news("")}

    def reply(self, text: str) -> dict[str, Any]:
        """A move. See protocol.Step."""
        self.over, _ = self.env.step(text)
        return {"observation": "" if self.over else self._news(text), "done": self.over}

    def finish(self, answer: str | None, limit: str | None, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """See protocol.Score."""
        if not self.over:
            return {"reward": self.unfinished, "answered": False}
        rewards, info = self.env.close()
        mine = (info or {}).get(0) or {}
        parts = {"turns": float(mine.get("turn_count") or 0), "invalid_move": float(bool(mine.get("invalid_move")))}
        return {"reward": (rewards or {}).get(0), "parts": parts}

    def _news(self, move: str) -> str:
        """What the player has not seen yet: most wrappers repeat the whole game each time."""
        _, observation = self.env.get_observation()
        if isinstance(observation, str):
            whole, news = observation, observation.removeprefix(self.seen)
            self.seen = whole
        else:
            news = "\n".join(str(message[1]) for message in observation)
        line = next((one for one in news.strip().split("\n") if move and one.endswith(f"] {move.strip()}")), None)
        return (news.replace(f"{line}\n", "", 1) if line else news).strip()


def load(options: dict[str, Any]) -> TextArena:
    """The game that `options` name, once it has been begun; another name is refused with the nearest one."""
    from textarena.envs.registration import ENV_REGISTRY

    if options["game"] not in ENV_REGISTRY:
        near = difflib.get_close_matches(options["game"], ENV_REGISTRY, n=1, cutoff=0.0)
        raise LookupError(f"there is no game {options['game']!a}; the nearest is {near[0] if near else 'none'}")
    game = TextArena(options)
    try:
        game.open({"seed": options["seeds"]["train"]})
    except AssertionError as error:
        if "num_players" in str(error) or "players" in str(error):
            raise ValueError(f"{options['game']} is no game for one player: {error}") from None
        raise
    return game
