"""Episodes of a step or an evaluation in; the figures that a run keeps and shows out. What has no value is None, never 0."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from sandmill.accounts.ledger import Activity, LedgerRow
from sandmill.accounts.prices import RunPrices
from sandmill.environments.task import AgentLimited, Graded, InfrastructureFailure, NoAnswer, Verdict
from sandmill.rollouts.events import EpisodeFinished, EvaluationFinished, EvaluationPhase, StepFinished, TaskOutcome
from sandmill.rollouts.trajectory import Episode, Group, Stage
from sandmill.training.learner import StepStats


def passed(verdict: Verdict) -> bool | None:
    """The pass rate's bit, or None where the infrastructure failed."""
    return None if isinstance(verdict, InfrastructureFailure) else verdict.passed


def outcome_name(verdict: Verdict) -> str:
    """One word for counts and the ledger."""
    match verdict:
        case Graded():
            return "graded"
        case NoAnswer():
            return "no-answer"
        case AgentLimited():
            return "agent-limited"
        case InfrastructureFailure():
            return "infrastructure-failure"


def lifetime_s(episode: Episode, *, without: frozenset[Stage] = frozenset({Stage.QUEUE, Stage.IDLE})) -> float:
    """Seconds of the episode's spans, waiting for admission and for its group left out."""
    return sum(span.end_s - span.start_s for span in episode.trajectory.spans if span.stage not in without)


def sandbox_s(episode: Episode) -> float:
    """Seconds its sandbox was alive: from the start of its creation to the end of grading; 0 when it never had one."""
    spans = episode.trajectory.spans
    born = [span.start_s for span in spans if span.stage is Stage.SANDBOX]
    ends = [span.end_s for span in spans if span.stage is not Stage.IDLE]
    return max(ends) - min(born) if born and ends else 0.0


def ledger_row(episode: Episode, *, run: str, activity: Activity, step: int, start: int, prices: RunPrices) -> LedgerRow:
    """The row of one attempt: sandbox time is its own; the machine's time is charged once, by the step."""
    seconds = sandbox_s(episode)
    return LedgerRow(
        run=run,
        activity=activity,
        step=step,
        group=episode.group,
        index=episode.index,
        attempt=episode.attempt,
        start=start,
        outcome=outcome_name(episode.verdict),
        sandbox_s=seconds,
        tokens_in=len(episode.trajectory.token_ids) - episode.trajectory.sampled_count,
        tokens_out=episode.trajectory.sampled_count,
        cost_microusd=prices.cost(sandbox_s=seconds),
    )


def judge_rows(episode: Episode, *, run: str, step: int, start: int) -> list[LedgerRow]:
    """A row for each request to a judge of one attempt's gradings."""
    return [
        LedgerRow(
            run=run,
            activity=Activity.JUDGE,
            step=step,
            group=episode.group,
            index=episode.index,
            attempt=episode.attempt,
            start=start,
            outcome=call.outcome,
            judge=call.judge,
            latency_s=call.seconds,
            tokens_in=call.tokens_in,
            tokens_out=call.tokens_out,
            cost_microusd=call.cost_microusd,
        )
        for call in episode.judge_calls
    ]


def episode_finished(episode: Episode) -> EpisodeFinished:
    """What a listener is told of one attempt."""
    verdict = episode.verdict
    return EpisodeFinished(
        group=episode.group,
        index=episode.index,
        task_id=episode.task_id,
        reward=episode.reward,
        passed=passed(verdict),
        failure=str(verdict.boundary) if isinstance(verdict, InfrastructureFailure) else None,
        turns=len(episode.trajectory.turns),
        sampled_tokens=episode.trajectory.sampled_count,
        seconds=lifetime_s(episode),
    )


def stage_seconds(episodes: Iterable[Episode]) -> Mapping[str, float]:
    """Seconds by stage, summed over episodes."""
    total: defaultdict[str, float] = defaultdict(float)
    for episode in episodes:
        for span in episode.trajectory.spans:
            total[span.stage.value] += span.end_s - span.start_s
    return dict(total)


def step_finished(
    groups: Sequence[Group],
    stats: StepStats,
    *,
    step: int,
    steps: int,
    at_s: float,
    seconds: Mapping[str, float],
    cost_microusd: int | None,
) -> StepFinished:
    """The row of one training step."""
    episodes = [episode for group in groups for episode in group.episodes]
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    verdicts = [episode.verdict for episode in episodes]
    trajectories = [episode.trajectory for episode in episodes]
    sampled = sum(one.sampled_count for one in trajectories)
    return StepFinished(
        step=step,
        steps=steps,
        at_s=at_s,
        seconds=dict(seconds),
        episode_seconds=stage_seconds(episodes),
        episodes=len(episodes),
        graded=len(rewards),
        passed=sum(passed(verdict) is True for verdict in verdicts),
        failures=len(episodes) - len(rewards),
        limited=sum(isinstance(verdict, AgentLimited) for verdict in verdicts),
        groups_trained=len(groups) - stats.groups_constant - stats.groups_dropped,
        groups_constant=stats.groups_constant,
        groups_dropped=stats.groups_dropped,
        reward=sum(rewards) / len(rewards) if rewards else None,
        sampled_tokens=sampled,
        given_tokens=sum(len(one.token_ids) for one in trajectories) - sampled,
        turns=sum(len(one.turns) for one in trajectories),
        malformed_calls=sum(one.malformed_calls for one in trajectories),
        loss=stats.loss,
        grad_norm=stats.grad_norm,
        entropy=stats.entropy,
        kl_sampler=stats.kl,
        clip_fraction=stats.clip_fraction,
        learning_rate=stats.learning_rate,
        policy_version=stats.version,
        cost_microusd=cost_microusd,
    )


def evaluation_finished(
    groups: Sequence[Group],
    *,
    split: str,
    phase: EvaluationPhase,
    step: int,
    greedy: bool,
    seconds: float,
    at_s: float,
    temperature: float,
    policy_version: int,
) -> EvaluationFinished:
    """The row of one evaluated split."""
    return EvaluationFinished(
        split=split,
        phase=phase,
        step=step,
        greedy=greedy,
        samples_per_task=max((len(group.episodes) for group in groups), default=0),
        tasks=tuple(_outcome(group) for group in groups),
        seconds=seconds,
        at_s=at_s,
        temperature=0.0 if greedy else temperature,
        sampled_tokens=sum(episode.trajectory.sampled_count for group in groups for episode in group.episodes),
        policy_version=policy_version,
    )


def _outcome(group: Group) -> TaskOutcome:
    verdicts = [episode.verdict for episode in group.episodes]
    graded = [episode.reward for episode in group.episodes if episode.reward is not None]
    return TaskOutcome(
        task_id=group.task_id,
        passed=sum(passed(verdict) is True for verdict in verdicts),
        graded=len(graded),
        failures=len(verdicts) - len(graded),
        reward_sum=sum(graded),
    )
