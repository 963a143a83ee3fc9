"""All episodes of a run in, one at a time; the few that a page shows turn by turn, the timelines it draws, and means over all, out.

Kept are, for up to MAX_STEPS steps evenly chosen and every evaluation, a few episodes of each outcome, picked by a hash of their
identity and not by who finished first. Everything is bounded: episodes, turns, characters and tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from sandmill.environments.task import AgentLimited, InfrastructureFailure, Verdict
from sandmill.reports.breakdown import EPISODE_LABELS, episode_seconds
from sandmill.reports.inert import inert, inert_block
from sandmill.reports.words import dollars
from sandmill.rollouts.events import EpisodeRecord
from sandmill.rollouts.trajectory import Episode, Span, Turn

MAX_STEPS = 60
PER_OUTCOME = 3
MAX_EPISODES = 480
MAX_ROWS = 48
"""Episodes in one step's timeline."""
MAX_TURNS = 40
MAX_TEXT = 3000
MAX_TOKENS = 400

_STAGES = {stage: index for index, stage in enumerate(EPISODE_LABELS)}

T = TypeVar("T")
Key = tuple[str, int, str]
"""Kind, step and outcome of an episode."""


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """What of the episodes a page carries. `mean_seconds` follows EPISODE_LABELS and covers every training episode."""

    episodes: tuple[Mapping[str, object], ...]
    timelines: tuple[Mapping[str, object], ...]
    vocabulary: Mapping[str, str]
    mean_seconds: tuple[float, ...]
    trained: int
    total: int


@dataclass
class _Gathered:
    kept: dict[Key, list[tuple[bytes, EpisodeRecord]]] = field(default_factory=lambda: defaultdict(list))
    rows: dict[int, list[tuple[bytes, tuple[Span, ...]]]] = field(default_factory=lambda: defaultdict(list))
    per_step: Counter[int] = field(default_factory=Counter)
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(EPISODE_LABELS, 0.0))
    trained: int = 0
    total: int = 0


def make_excerpt(records: Iterable[EpisodeRecord], steps: Iterable[int], folder: Path) -> Excerpt:
    """One pass over `records`. `steps` are the finished training steps; later ones are in hand and kept.

    `folder` may hold the tokenizer that names tokens.
    """
    known = sorted(set(steps))
    wanted, last = _evenly(known, MAX_STEPS), known[-1] if known else 0
    gathered = _Gathered()
    for record in records:
        _take(gathered, record, record.step in wanted or record.step > last)
    chosen = _chosen(gathered.kept)
    return Excerpt(
        episodes=tuple(_episode(record) for record in chosen),
        timelines=tuple(_timeline(step, gathered) for step in sorted(gathered.rows)),
        vocabulary=_vocabulary(folder, chosen),
        mean_seconds=tuple(total / gathered.trained if gathered.trained else 0.0 for total in gathered.sums.values()),
        trained=gathered.trained,
        total=gathered.total,
    )


def outcome_of(episode: Episode) -> str:
    """`passed`, `failed` (graded and not passed) or `failure` (of the infrastructure)."""
    if isinstance(episode.verdict, InfrastructureFailure):
        return "failure"
    return "passed" if episode.verdict.passed else "failed"


def kind_of(record: EpisodeRecord) -> str:
    """Where an episode comes from, in words: `training`, `heldout before, greedy`."""
    if record.phase is None:
        return "training"
    when = "" if record.phase.value == "alone" else f" {record.phase.value}"
    return f"{inert(record.split, limit=40)}{when}, {'greedy' if record.greedy else 'sampled'}"


def _take(gathered: _Gathered, record: EpisodeRecord, wanted: bool) -> None:
    gathered.total += 1
    training = record.phase is None
    order = hashlib.blake2b(f"{record.episode.group}\0{record.episode.index}".encode("utf-8", "replace"), digest_size=8).digest()
    if training:
        gathered.trained += 1
        gathered.per_step[record.step] += 1
        for stage, seconds in episode_seconds(record.episode).items():
            gathered.sums[stage] += seconds if math.isfinite(seconds) else 0.0
        if not wanted:
            return
        _keep_lowest(gathered.rows[record.step], (order, record.episode.trajectory.spans), MAX_ROWS)
    key = (kind_of(record), record.step, outcome_of(record.episode))
    _keep_lowest(gathered.kept[key], (order, record), PER_OUTCOME if training else 2 * PER_OUTCOME)


def _keep_lowest(kept: list[tuple[bytes, T]], entry: tuple[bytes, T], most: int) -> None:
    kept.append(entry)
    if len(kept) > most:
        kept.remove(max(kept, key=lambda one: one[0]))


def _evenly(steps: list[int], most: int) -> frozenset[int]:
    if len(steps) <= most:
        return frozenset(steps)
    return frozenset(steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most))


def _chosen(kept: Mapping[Key, list[tuple[bytes, EpisodeRecord]]]) -> list[EpisodeRecord]:
    """Failures first, then one of each kind, step and outcome in turn, until the page is full; in reading order."""
    ranked = sorted(
        ((key[2] != "failure", place, order, record) for key, entries in kept.items() for place, (order, record) in _placed(entries)),
        key=lambda entry: entry[:3],
    )
    return sorted((entry[3] for entry in ranked[:MAX_EPISODES]), key=_reading_order)


def _placed(entries: list[tuple[bytes, EpisodeRecord]]) -> Iterator[tuple[int, tuple[bytes, EpisodeRecord]]]:
    yield from enumerate(sorted(entries, key=_order))


def _reading_order(record: EpisodeRecord) -> tuple[bool, str, int, str, int]:
    return (record.phase is not None, kind_of(record), record.step, record.episode.group, record.episode.index)


def _order(entry: tuple[bytes, EpisodeRecord]) -> bytes:
    return entry[0]


def _timeline(step: int, gathered: _Gathered) -> dict[str, object]:
    rows = sorted((spans for _, spans in gathered.rows[step] if spans), key=lambda spans: min(span.start_s for span in spans))
    return {"step": step, "count": gathered.per_step[step], "rows": [_spans(spans) for spans in rows]}


def _spans(spans: Iterable[Span]) -> list[list[float]]:
    return [[_STAGES[span.stage], round(span.start_s, 4), round(span.end_s, 4)] for span in spans if span.stage in _STAGES]


def _episode(record: EpisodeRecord) -> dict[str, object]:
    episode, trajectory = record.episode, record.episode.trajectory
    text = [[inert(role, limit=20), inert_block(words, limit=MAX_TEXT)] for role, words in trajectory.text[: 3 * MAX_TURNS]]
    return {
        "step": record.step,
        "kind": kind_of(record),
        "group": inert(episode.group, limit=80),
        "index": episode.index,
        "task": inert(episode.task_id, limit=120),
        "title": next((inert(words, limit=90) for role, words in trajectory.text if role == "task"), inert(episode.task_id, limit=90)),
        "outcome": outcome_of(episode),
        "reward": episode.reward,
        "advantage": record.advantage,
        "limit": _limit(episode),
        "failure": _failure(episode.verdict),
        "parts": _reward_parts(episode.verdict),
        "answer": None if trajectory.answer is None else inert(trajectory.answer, limit=300),
        "sampled": trajectory.sampled_count,
        "given": sum(len(turn.context_ids) for turn in trajectory.turns),
        "cost": dollars(episode.cost_microusd) if episode.cost_microusd else None,
        "spans": _spans(trajectory.spans),
        "exits": [command.exit_code for command in trajectory.commands[: 3 * MAX_TURNS]],
        "turns": [_turn(turn) for turn in trajectory.turns[:MAX_TURNS]],
        "text": text,
    }


def _limit(episode: Episode) -> str | None:
    if isinstance(episode.verdict, AgentLimited):
        return episode.verdict.limit.value
    return episode.trajectory.limit.value if episode.trajectory.limit is not None else None


def _failure(verdict: Verdict) -> str | None:
    return inert(f"{verdict.boundary.value}: {verdict.reason}", limit=400) if isinstance(verdict, InfrastructureFailure) else None


def _reward_parts(verdict: Verdict) -> dict[str, float]:
    if isinstance(verdict, InfrastructureFailure):
        return {}
    return {inert(name, limit=40): value for name, value in verdict.parts.items() if math.isfinite(value)}


def _turn(turn: Turn) -> dict[str, object]:
    versions = sorted(set(turn.policy_versions))
    return {
        "context": list(turn.context_ids[:MAX_TOKENS]),
        "ids": list(turn.token_ids[:MAX_TOKENS]),
        "logprobs": [round(value, 4) if math.isfinite(value) else None for value in turn.logprobs[:MAX_TOKENS]],
        "versions": "–".join(str(version) for version in dict.fromkeys((versions[0], versions[-1]))) if versions else "",
        "stop": turn.stop.value,
    }


def _vocabulary(folder: Path, chosen: Iterable[EpisodeRecord]) -> dict[str, str]:
    """Token id to its text for the tokens shown, from a tokenizer.json in the run folder; empty without one."""
    used = {
        str(token)
        for record in chosen
        for turn in record.episode.trajectory.turns
        for token in (*turn.context_ids[:MAX_TOKENS], *turn.token_ids)
    }
    path = next((path for path in (folder / "tokenizer.json", *sorted(folder.glob("*/tokenizer.json"))) if path.is_file()), None)
    if path is None or not used:
        return {}
    try:
        read = json.loads(path.read_bytes())
        pieces = {str(index): piece for piece, index in read["model"]["vocab"].items()}
        pieces |= {str(token["id"]): token["content"] for token in read.get("added_tokens", [])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    spelled = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "↵", "\n": "↵"})
    return {index: inert(str(pieces[index]).translate(spelled), limit=40) for index in used if index in pieces}
