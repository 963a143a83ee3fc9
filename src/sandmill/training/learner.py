"""Groups of graded episodes in, one AdamW update of the policy's adapter and its statistics out.

A step is all or nothing: a non-finite number anywhere raises NonFinite before the optimiser has touched a weight or a moment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from sandmill.config.manifest import Parameters, RateSchedule
from sandmill.errors import NonFinite, TrainingError
from sandmill.models.policy import Policy, Scored, SharesPrefixes
from sandmill.rollouts.trajectory import Group
from sandmill.training.batch import Batch, Layout, MicroBatch, make_batch, micro_batches
from sandmill.training.losses import policy_loss

BETAS = (0.9, 0.95)
EPSILON = 1e-8
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did. Where nothing was computed the figure is None, never 0. Means are over the tokens used."""

    version: int
    """Number of updates applied so far, this one included."""
    applied: bool
    """False when no token had a gradient: the step was skipped."""
    learning_rate: float | None = None
    """Of this update; None when it was skipped."""
    loss: float | None = None
    grad_norm: float | None = None
    """Before clipping."""
    entropy: float | None = None
    """Nats per token, of the distribution sampled from."""
    kl: float | None = None
    """k3 estimate of KL(sampler || trainer), nats per token."""
    clip_fraction: float | None = None
    max_logprob_mismatch: float | None = None
    """Largest |trainer - sampler| over tokens sampled under the current weights without top-p; None when there are none."""
    rows_used: int
    rows_skipped: int
    """Graded episodes with tokens that had no gradient (constant groups; advantage exactly 0)."""
    rows_empty: int
    rows_failed: int
    rows_dropped: int
    """Graded episodes in groups below the minimum size."""
    groups_constant: int
    groups_dropped: int
    tokens_used: int
    tokens_sampled: int
    seconds: float


@dataclass
class Tally:
    """Sums over the micro-batches of a step."""

    loss: float = 0.0
    tokens: int = 0
    entropy: float = 0.0
    kl: float = 0.0
    clipped: int = 0
    mismatch: float | None = None


def learning_rate_at(parameters: Parameters, update: int) -> float:
    """The rate of the update that follows `update` others."""
    if parameters.learning_rate_schedule is RateSchedule.CONSTANT:
        return parameters.learning_rate
    return parameters.learning_rate * max(0.0, 1.0 - update / max(1, parameters.steps))


class Learner:
    """Owns the optimiser of a policy's adapter. Not for concurrent use."""

    def __init__(self, policy: Policy, parameters: Parameters, *, layout: Layout | None = None) -> None:
        """`layout` None: as a tree where the policy shares prefixes, else packed."""
        self.policy = policy
        self.parameters = parameters
        self.layout = layout or (Layout.TREE if isinstance(policy, SharesPrefixes) else Layout.PACKED)
        self.version = 0
        self._trainable = dict(policy.trainable())
        self._optimizer = torch.optim.AdamW(
            self._trainable.values(), lr=parameters.learning_rate, betas=BETAS, eps=EPSILON, weight_decay=parameters.weight_decay
        )

    def step(self, groups: Sequence[Group]) -> StepStats:
        """One update from one step's groups; `parameters.reward` (the control) is applied here, verdicts come as graded.

        A step without a token to learn from is skipped: no update, no change of `version`. Raises NonFinite and TrainingError with
        weights, moments and version untouched.
        """
        started = time.monotonic()
        batch = make_batch(groups, self.parameters, policy_version=self.version)
        if not batch.rows:
            return self._stats(batch, Tally(), None, started)
        rate = learning_rate_at(self.parameters, self.version)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        try:
            tally = accumulate_gradient(self.policy, batch, self.parameters, self.layout, policy_version=self.version)
            norm = self._clip()
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return self._stats(batch, tally, norm, started, rate)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything the next step depends on, as named tensors: weights, moments, version, torch's generator."""
        state = {f"weight.{name}": parameter.detach().clone() for name, parameter in self._trainable.items()}
        for name, parameter in self._trainable.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                state[f"{key}.{name}"] = value.detach().clone()
        state["version"] = torch.tensor(self.version, dtype=torch.int64)
        state["generator"] = torch.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes over a `state_dict` bit for bit. Raises TrainingError, with nothing changed, when its tensors are not this adapter's."""
        moments = _MOMENTS if any(key.startswith("exp_avg.") for key in state) else ()
        wanted = {f"{key}.{name}" for key in ("weight", *moments) for name in self._trainable} | {"version", "generator"}
        if wanted != set(state):
            odd = sorted(wanted ^ set(state))[0]
            raise TrainingError(f"the saved optimiser state belongs to another adapter: {odd} is in only one of the two")
        for name, parameter in self._trainable.items():
            if state[f"weight.{name}"].shape != parameter.shape:
                raise TrainingError(
                    f"the saved adapter has another shape: {name} is {tuple(state[f'weight.{name}'].shape)}, not {tuple(parameter.shape)}"
                )
        with torch.no_grad():
            for name, parameter in self._trainable.items():
                parameter.copy_(state[f"weight.{name}"])
        self._optimizer.state.clear()
        for name, parameter in self._trainable.items() if moments else ():
            self._optimizer.state[parameter] = {key: state[f"{key}.{name}"].clone() for key in moments}
        self.version = int(state["version"])
        torch.set_rng_state(state["generator"])

    def _clip(self) -> float:
        """Scales the gradient to at most `max_grad_norm`; its norm before. Raises NonFinite naming the parameter."""
        gradients = {name: parameter.grad for name, parameter in self._trainable.items() if parameter.grad is not None}
        norms = {name: float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) for name, gradient in gradients.items()}
        for name, norm in norms.items():
            if not math.isfinite(norm):
                raise NonFinite(f"the gradient of {name}")
        total = math.sqrt(math.fsum(norm * norm for norm in norms.values()))
        if total > self.parameters.max_grad_norm:
            for gradient in gradients.values():
                gradient.mul_(self.parameters.max_grad_norm / total)
        return total

    def _stats(self, batch: Batch, tally: Tally, norm: float | None, started: float, rate: float | None = None) -> StepStats:
        counts = batch.counts
        used = tally.tokens
        return StepStats(
            version=self.version,
            applied=norm is not None,
            learning_rate=rate,
            loss=tally.loss if used else None,
            grad_norm=norm,
            entropy=tally.entropy / used if used else None,
            kl=tally.kl / used if used else None,
            clip_fraction=tally.clipped / used if used else None,
            max_logprob_mismatch=tally.mismatch if self.parameters.sampling.top_p == 1.0 else None,
            rows_used=len(batch.rows),
            rows_skipped=counts.skipped,
            rows_empty=counts.empty,
            rows_failed=counts.failed,
            rows_dropped=counts.dropped,
            groups_constant=counts.constant_groups,
            groups_dropped=counts.dropped_groups,
            tokens_used=used,
            tokens_sampled=counts.sampled_tokens,
            seconds=time.monotonic() - started,
        )


def accumulate_gradient(policy: Policy, batch: Batch, parameters: Parameters, layout: Layout, *, policy_version: int) -> Tally:
    """Adds the gradient of the batch's loss to the `.grad` of the policy's parameters, micro-batch by micro-batch.

    Raises NonFinite for a log-probability, entropy or loss that is not finite, naming the episode.
    """
    tally = Tally()
    for micro in micro_batches(batch.rows, parameters.micro_batch_size, layout):
        scored = _score(policy, micro, parameters.sampling.temperature)
        _require_finite(scored, micro)
        surrogate = policy_loss(
            scored.logprobs_K,
            scored.entropies_K,
            micro.logprobs_K,
            micro.row_K,
            torch.tensor([row.advantage for row in micro.rows], dtype=torch.float64),
            torch.tensor([row.weight for row in micro.rows], dtype=torch.float64),
            clip_low=parameters.clip_low,
            clip_high=parameters.clip_high,
            importance=parameters.importance,
            entropy_bonus=parameters.entropy_bonus,
        )
        loss = float(surrogate.loss.detach())
        if not math.isfinite(loss):
            raise NonFinite(f"the loss of {', '.join(row.name for row in micro.rows)}")
        surrogate.loss.backward()  # type: ignore[no-untyped-call]
        tally.loss += loss
        tally.tokens += len(micro.row_K)
        tally.entropy += float(scored.entropies_K.detach().double().sum())
        tally.kl += float(surrogate.kl_K.sum())
        tally.clipped += int(surrogate.clipped_K.sum())
        _note_mismatch(tally, scored, micro, policy_version)
    return tally


def _score(policy: Policy, micro: MicroBatch, temperature: float) -> Scored:
    if micro.paths_BT is not None:
        if not isinstance(policy, SharesPrefixes):
            raise TypeError(f"{type(policy).__name__} cannot score a tree of rows")
        return policy.score_tree(micro.ids, micro.paths_BT, micro.lengths_B, micro.select, temperature)
    if micro.layout is Layout.PACKED:
        return policy.score_packed(micro.ids, micro.starts, micro.select, temperature)
    return policy.score(micro.ids, micro.lengths_B, micro.select, temperature)


def _require_finite(scored: Scored, micro: MicroBatch) -> None:
    for what, values_K in (("log-probability", scored.logprobs_K), ("entropy", scored.entropies_K)):
        if len(values_K) != len(micro.row_K):
            raise TrainingError(f"the policy answered {len(values_K)} values for {len(micro.row_K)} selected tokens")
        finite_K = torch.isfinite(values_K.detach())
        if not bool(finite_K.all()):
            raise NonFinite(f"the {what} of {micro.place(int((~finite_K).nonzero()[0]))}")


def _note_mismatch(tally: Tally, scored: Scored, micro: MicroBatch, policy_version: int) -> None:
    current_K = micro.versions_K == policy_version
    if bool(current_K.any()):
        gap = float((scored.logprobs_K.detach().double() - micro.logprobs_K)[current_K].abs().max())
        tally.mismatch = gap if tally.mismatch is None else max(gap, tally.mismatch)
