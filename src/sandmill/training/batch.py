"""Groups of episodes in, rows of training arrays out, with the account of what gave no row.

Axis letters: B rows of a micro-batch, T positions of a row, N packed positions, K sampled tokens.

Which episodes count where:

| episode                                       | baseline | divisor of the loss          | row        |
|-----------------------------------------------|----------|------------------------------|------------|
| failed (no reward)                            | no       | no                           | no         |
| in a group below the minimum size             | no       | no                           | no         |
| graded, no token sampled                      | yes      | as an episode with 0 tokens  | no         |
| graded, in a constant group                   | yes      | yes                          | no         |
| graded, all else                              | yes      | yes                          | yes        |

A constant group has no policy gradient, and gets no entropy bonus either. Without an entropy bonus a row whose advantage is exactly 0
is left out as well, which changes nothing but the time taken.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from sandmill.config.manifest import LossScale, Parameters
from sandmill.errors import NonFinite, TrainingError
from sandmill.rollouts.trajectory import Episode, Group
from sandmill.training.advantages import GroupAdvantages, controlled_rewards, group_advantages


class Layout(enum.StrEnum):
    """How the rows of a micro-batch lie in memory; the gradient is the same."""

    PADDED = "padded"
    PACKED = "packed"
    TREE = "tree"
    """What rows begin with alike, sampled tokens included, is there once."""


@dataclass(frozen=True)
class Row:
    """One episode as the learner sees it, cut after its last sampled token."""

    group: str
    index: int
    ids_T: torch.Tensor
    """int64: contexts and replies of all turns, end to end."""
    sampled_T: torch.Tensor
    """bool: true where the policy sampled the token; never at position 0."""
    logprobs_K: torch.Tensor
    """float64, nats: as recorded when sampled."""
    versions_K: torch.Tensor
    """int64: policy version each token was sampled under."""
    advantage: float
    weight: float
    """What each of the row's token losses is multiplied by: one over the divisor of the loss convention."""

    @property
    def name(self) -> str:
        return f"episode {self.index} of group {self.group!r}"


class Counts(NamedTuple):
    """What became of the episodes of a step."""

    episodes: int
    failed: int
    dropped: int
    empty: int
    skipped: int
    """Graded episodes with tokens and without a row."""
    constant_groups: int
    dropped_groups: int
    sampled_tokens: int
    """Tokens of all graded episodes in groups that were kept."""


@dataclass(frozen=True)
class Batch:
    """The rows that have a gradient, and the counts of what became of every episode."""

    rows: tuple[Row, ...]
    counts: Counts


@dataclass(frozen=True)
class MicroBatch:
    """Some rows laid out for one forward pass. `row_K` says which of `rows` each selected token belongs to."""

    rows: tuple[Row, ...]
    layout: Layout
    ids: torch.Tensor
    """int64, [B, T] padded with 0 on the right, or [N] packed or as a tree."""
    select: torch.Tensor
    """bool, the shape of `ids`, in a tree of `paths_BT`."""
    lengths_B: torch.Tensor
    starts: tuple[int, ...]
    """Where each row begins when they are laid end to end."""
    paths_BT: torch.Tensor | None
    """int64, of a tree only: indices into `ids` of each row's tokens, the last one repeated behind its end."""
    row_K: torch.Tensor
    logprobs_K: torch.Tensor
    versions_K: torch.Tensor

    def place(self, token: int) -> str:
        """Where selected token `token` comes from, in words."""
        row = int(self.row_K[token])
        return f"sampled token {token - int((self.row_K < row).sum())} of {self.rows[row].name}"


def step_advantages(groups: Sequence[Group], parameters: Parameters) -> tuple[GroupAdvantages, ...]:
    """Each group's advantages as training uses them: the manifest's reward control, scale and minimum size applied."""
    return tuple(
        group_advantages(
            controlled_rewards([episode.reward for episode in group.episodes], parameters.reward, parameters.seed, group.id),
            parameters.advantage,
            parameters.min_group_size,
            group=group.id,
        )
        for group in groups
    )


class _Graded(NamedTuple):
    episode: Episode
    advantage: float
    constant: bool


def make_batch(groups: Sequence[Group], parameters: Parameters, *, policy_version: int) -> Batch:
    """Advantages and loss weights of one step's groups.

    Raises TrainingError for an episode whose tokens lack log-probabilities or policy versions, or that claims a version newer than
    `policy_version`; NonFinite for a reward, advantage or log-probability that is not finite. Both name the episode.
    """
    graded: list[_Graded] = []
    results = step_advantages(groups, parameters)
    for group, result in zip(groups, results, strict=True):
        members = zip(group.episodes, result.values, strict=True)
        graded += [_Graded(episode, value, result.constant) for episode, value in members if value is not None]
    lengths = [member.episode.trajectory.sampled_count for member in graded]
    weights = _token_weights(lengths, parameters)
    rows = tuple(
        _row(member.episode, member.advantage, weight, policy_version)
        for member, length, weight in zip(graded, lengths, weights, strict=True)
        if length > 0 and not member.constant and (member.advantage != 0.0 or parameters.entropy_bonus > 0.0)
    )
    empty = sum(length == 0 for length in lengths)
    return Batch(
        rows,
        Counts(
            episodes=sum(len(group.episodes) for group in groups),
            failed=sum(result.failed for result in results),
            dropped=sum(result.dropped for result in results),
            empty=empty,
            skipped=len(graded) - empty - len(rows),
            constant_groups=sum(result.constant for result in results),
            dropped_groups=sum(all(value is None for value in result.values) for result in results),
            sampled_tokens=sum(lengths),
        ),
    )


def micro_batches(rows: Sequence[Row], size: int, layout: Layout) -> Iterator[MicroBatch]:
    """`size` rows at a time, longest first (so that the largest allocation comes first). In a tree the rows of a group stay together."""
    longest: dict[str, int] = {}
    for row in rows:
        longest[row.group] = max(longest.get(row.group, 0), len(row.ids_T))
    first = longest if layout is Layout.TREE else {}
    ordered = sorted(rows, key=lambda row: (-first.get(row.group, 0), row.group if first else "", -len(row.ids_T), row.group, row.index))
    for start in range(0, len(ordered), size):
        yield _micro_batch(tuple(ordered[start : start + size]), layout)


def _token_weights(lengths: Sequence[int], parameters: Parameters) -> list[float]:
    """One over the divisor of each episode's token losses, for the E = len(lengths) graded episodes of the step.

    token     sum of all lengths                          DAPO, arXiv:2503.14476, equation 8
    sequence  E x the episode's own length                GRPO, arXiv:2402.03300, equation 3
    constant  E x maxCompletionLength x maxTurns          Dr. GRPO, arXiv:2503.20783, section 3.2
    """
    total = sum(lengths)
    count = len(lengths)
    if parameters.loss is LossScale.TOKEN:
        return [1.0 / total if length else 0.0 for length in lengths]
    if parameters.loss is LossScale.SEQUENCE:
        return [1.0 / (count * length) if length else 0.0 for length in lengths]
    return [1.0 / (count * parameters.max_completion_length * parameters.max_turns) for _ in lengths]


def _row(episode: Episode, advantage: float, weight: float, policy_version: int) -> Row:
    name = f"episode {episode.index} of group {episode.group!r}"
    ids: list[int] = []
    sampled: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in episode.trajectory.turns:
        if not len(turn.token_ids) == len(turn.logprobs) == len(turn.policy_versions):
            raise TrainingError(
                f"{name} cannot be trained on: a turn has {len(turn.token_ids)} sampled tokens, {len(turn.logprobs)} log-probabilities "
                f"and {len(turn.policy_versions)} policy versions"
            )
        ids += (*turn.context_ids, *turn.token_ids)
        sampled += [False] * len(turn.context_ids) + [True] * len(turn.token_ids)
        logprobs += turn.logprobs
        versions += turn.policy_versions
    if sampled[0]:
        raise TrainingError(f"{name} cannot be trained on: its first token was sampled from no context")
    for position, logprob in enumerate(logprobs):
        if not math.isfinite(logprob):
            raise NonFinite(f"the recorded log-probability of sampled token {position} of {name}")
    if not 0 <= min(versions) <= max(versions) <= policy_version:
        raise TrainingError(
            f"{name} cannot be trained on: it claims policy versions {min(versions)} to {max(versions)}, the newest is {policy_version}"
        )
    end = len(sampled) - sampled[::-1].index(True)
    return Row(
        group=episode.group,
        index=episode.index,
        ids_T=torch.tensor(ids[:end], dtype=torch.int64),
        sampled_T=torch.tensor(sampled[:end], dtype=torch.bool),
        logprobs_K=torch.tensor(logprobs, dtype=torch.float64),
        versions_K=torch.tensor(versions, dtype=torch.int64),
        advantage=advantage,
        weight=weight,
    )


def _micro_batch(rows: tuple[Row, ...], layout: Layout) -> MicroBatch:
    lengths = [len(row.ids_T) for row in rows]
    starts = tuple(sum(lengths[:i]) for i in range(len(rows)))
    paths = None
    if layout is Layout.PACKED:
        ids = torch.cat([row.ids_T for row in rows])
        select = torch.cat([row.sampled_T for row in rows])
    else:
        ids = pad_sequence([row.ids_T for row in rows], batch_first=True, padding_value=0)
        select = pad_sequence([row.sampled_T for row in rows], batch_first=True, padding_value=False)
    if layout is Layout.TREE:
        ids, paths = _tree(rows)
    return MicroBatch(
        rows=rows,
        layout=layout,
        ids=ids,
        select=select,
        lengths_B=torch.tensor(lengths, dtype=torch.int64),
        starts=starts,
        paths_BT=paths,
        row_K=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row.logprobs_K) for row in rows])),
        logprobs_K=torch.cat([row.logprobs_K for row in rows]),
        versions_K=torch.cat([row.versions_K for row in rows]),
    )


def _tree(rows: tuple[Row, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of all rows, those with the same tokens before them once, and each row's path through them."""
    ids: list[int] = []
    known: dict[tuple[int, int], int] = {}
    paths = []
    for row in rows:
        path: list[int] = []
        for token in row.ids_T.tolist():
            place = known.setdefault((path[-1] if path else -1, token), len(ids))
            if place == len(ids):
                ids.append(token)
            path.append(place)
        paths.append(path)
    columns = max(map(len, paths))
    return torch.tensor(ids), torch.tensor([path + path[-1:] * (columns - len(path)) for path in paths])
