"""Writes a run folder as a real run would, through the real store and of the real records, from a seed; no model, no sandbox."""

from __future__ import annotations

import json
import random
from pathlib import Path

from sandmill.accounts.ledger import Activity, LedgerRow
from sandmill.config.load import parse_manifest
from sandmill.environments.task import AgentLimited, Boundary, Command, Graded, InfrastructureFailure, Limit, NoAnswer, Verdict
from sandmill.models.model import StopReason
from sandmill.rollouts.events import (
    EpisodeRecord,
    EvaluationFinished,
    EvaluationPhase,
    RunSummary,
    StepFinished,
    StepPart,
    TaskOutcome,
    Warned,
)
from sandmill.rollouts.trajectory import Episode, Span, Stage, Trajectory, Turn
from sandmill.store import RunFolder, Stream, encode

MANIFEST = b"""
spec:
  model: {uri: sandmill/tiny-shell}
  environment: {name: shell@1.0.0, trainTasks: 64, heldOutTasks: 48, options: {note: "<script>alert(1)</script>"}}
  parameters: {steps: 40, batchSize: 4, numGenerations: 8, learningRate: 2e-3}
  evaluation: {splits: [heldout, unseen]}
  prices: {machinePerHour: "0.35", sandboxPerHour: "0.0179"}
"""

HOSTILE = (
    "<script>window.pwned=1</script><img src=x onerror=window.pwned=1>",
    "</script><script>window.pwned=1</script>",
    "\x1b[2J\x1b[31mred\x1b]0;title\x07 \x00 \x9b31m \u202etxt.exe\u2066 \ud835 \r\nline",
    '"><svg/onload=window.pwned=1> <!-- ]]> javascript:window.pwned=1',
    '=HYPERLINK("http://x")\t{{7*7}} ${7*7} %s [red]markup[/red]',
)

PIECES = ["<eos>", "\n", "Q:", "$", "=", "wc", "-l", "a.txt", "grep", "cat", "ls", "|", "3", "7", "12", "how", "many", "lines", "in", "?"]


class SyntheticRun:
    """Writes `steps` of 40 steps; `finished` adds the evaluations after training and the summary."""

    def __init__(self, folder: Path, *, seed: int = 0, steps: int = 40, finished: bool = True, priced: bool = True) -> None:
        self.folder = folder
        self._random = random.Random(seed)
        self._steps = steps
        self._finished = finished
        self._priced = priced
        self._clock = 6.0

    def write(self) -> Path:
        with RunFolder.create(self.folder, parse_manifest(MANIFEST)) as run:
            self._evaluate(run, EvaluationPhase.BEFORE, 0)
            for step in range(1, self._steps + 1):
                self._step(run, step)
            if self._finished:
                self._evaluate(run, EvaluationPhase.AFTER, self._steps)
                cost = 11_300 if self._priced else None
                ended = RunSummary(
                    run=str(self.folder),
                    steps_done=40,
                    steps=40,
                    interrupted=False,
                    seconds=93.0,
                    peak_rss_bytes=912 * 2**20,
                    cost_microusd=cost,
                )
                run.write("summary.json", encode(ended, "summary"))
        tokens = {"model": {"vocab": {piece: index for index, piece in enumerate(PIECES)}}}
        (self.folder / "tokenizer.json").write_text(json.dumps(tokens))
        return self.folder

    def _skill(self, step: int) -> float:
        return 0.2 + 0.72 * (1 - 0.92**step)

    def _step(self, run: RunFolder, step: int) -> None:
        start = self._clock
        episodes = [self._episode(f"s{step}-t{task}", index, self._skill(step), start) for task in range(4) for index in range(8)]
        end = max(span.end_s for episode in episodes for span in episode.trajectory.spans)
        graded = [episode for episode in episodes if not isinstance(episode.verdict, InfrastructureFailure)]
        seconds = {
            StepPart.ROLLOUT: end - start,
            StepPart.TRAINING: 0.38 + 0.05 * self._random.random(),
            StepPart.PUBLISH: 0.01,
            StepPart.SAVING: 0.02,
        }
        self._clock = start + sum(seconds.values())
        for episode in episodes:
            run.append(Stream.TRAJECTORIES, EpisodeRecord(step=step, split="train", episode=episode, advantage=self._random.gauss(0, 1)))
            self._pay(run, Activity.EPISODE, step, episode)
        run.append(Stream.METRICS, self._row(step, episodes, graded, {str(key): value for key, value in seconds.items()}))
        if step % 13 == 0:
            run.append(Stream.METRICS, Warned(sentence=f"the grader was slow: {HOSTILE[0]}", at_s=self._clock, step=step))

    def _row(self, step: int, episodes: list[Episode], graded: list[Episode], seconds: dict[str, float]) -> StepFinished:
        spans = [span for episode in episodes for span in episode.trajectory.spans]
        return StepFinished(
            step=step,
            steps=40,
            at_s=self._clock,
            seconds=seconds,
            episode_seconds={str(stage): sum(span.end_s - span.start_s for span in spans if span.stage is stage) for stage in Stage},
            episodes=len(episodes),
            graded=len(graded),
            passed=sum(episode.verdict.passed for episode in graded),
            failures=len(episodes) - len(graded),
            groups_trained=4,
            reward=sum(episode.verdict.reward for episode in graded) / len(graded),
            sampled_tokens=sum(episode.trajectory.sampled_count for episode in episodes) * 12,
            given_tokens=4000,
            turns=sum(len(episode.trajectory.turns) for episode in episodes),
            loss=self._random.gauss(0, 0.02),
            grad_norm=0.4 + 0.2 * self._random.random(),
            entropy=1.4 * 0.95**step + 0.02 * self._random.random(),
            kl_sampler=3e-5 * self._random.random(),
            learning_rate=2e-3,
            policy_version=step,
            cost_microusd=300 * step if self._priced else None,
        )

    def _episode(self, group: str, index: int, skill: float, start: float) -> Episode:
        chance = self._random.random
        passed = chance() < skill
        verdict: Verdict = Graded(
            reward=1.0 if passed else 0.1 * (chance() < 0.7), passed=passed, parts={"answer": float(passed), "call": 0.1}
        )
        if chance() < 0.02:
            verdict = InfrastructureFailure(boundary=Boundary.SANDBOX_LOST, reason=f"gone: {HOSTILE[2]}", retryable=True)
        elif not passed and chance() < 0.25:
            verdict = AgentLimited(limit=Limit.TURNS, reward=0.0, passed=False)
        elif not passed and chance() < 0.1:
            verdict = NoAnswer(reward=0.0)
        words = self._random.choice(HOSTILE) if chance() < 0.3 else "3 a.txt\n7 b.txt"
        script = self._random.choice(["wc -l a.txt", "grep -c fox notes.txt", "ls | wc -l", f"echo {HOSTILE[0]}"])
        turns = tuple(self._turn(12 if number == 0 else 5) for number in range(2))
        text = (("task", f"how many lines in a.txt of {self._task(group)} ?"), ("model", f"$ {script}"), ("tool", words), ("model", "= 3"))
        trajectory = Trajectory(
            turns=turns,
            commands=(Command(script=script, exit_code=self._random.choice([0, 0, 0, 1, None]), output=words),),
            spans=self._spans(start),
            limit=verdict.limit if isinstance(verdict, AgentLimited) else None,
            answer="3" if chance() < 0.5 else HOSTILE[3],
            text=text,
        )
        return Episode(
            group=group, index=index, task_id=f"{self._task(group)}/<b>../x", trajectory=trajectory, verdict=verdict, cost_microusd=9
        )

    def _task(self, group: str) -> str:
        """Which task a group attempts: training comes back to each of 24 time and again; an evaluation's groups are tasks of their own."""
        step, _, task = group.partition("-t")
        return f"t{(4 * int(step[1:]) + int(task)) % 24}" if task.isdigit() and step[1:].isdigit() else group

    def _turn(self, context: int) -> Turn:
        count = self._random.randint(3, 6)
        return Turn(
            context_ids=tuple(self._random.randrange(len(PIECES)) for _ in range(context)),
            token_ids=tuple(self._random.randrange(len(PIECES) + 4) for _ in range(count)),
            logprobs=tuple(-abs(self._random.gauss(0, 1.2)) for _ in range(count)),
            policy_versions=(1,) * count,
            stop=StopReason.STOP,
        )

    def _spans(self, start: float) -> tuple[Span, ...]:
        now, spans = start + 0.2 * self._random.random(), []
        spans.append(Span(stage=Stage.QUEUE, start_s=start, end_s=now))
        for stage, mean in (
            (Stage.MODEL, 0.25),
            (Stage.SANDBOX, 0.05),
            (Stage.COMMAND, 0.08),
            (Stage.MODEL, 0.2),
            (Stage.GRADING, 0.04),
            (Stage.IDLE, 0.1),
        ):
            end = now + mean * (0.5 + self._random.random())
            spans.append(Span(stage=stage, start_s=now, end_s=end))
            now = end
        return tuple(spans)

    def _evaluate(self, run: RunFolder, phase: EvaluationPhase, step: int) -> None:
        for split, loss in (("heldout", 0.0), ("unseen", 0.05)):
            for greedy in (False, True):
                samples = 1 if greedy else 4
                episodes = [
                    self._episode(f"{phase.value}-{split}-t{task}", index, self._skill(step) - loss + 0.04 * greedy, self._clock)
                    for task in range(48)
                    for index in range(samples)
                ]
                for episode in episodes[:40]:
                    run.append(Stream.TRAJECTORIES, EpisodeRecord(step=step, split=split, episode=episode, phase=phase, greedy=greedy))
                    self._pay(run, Activity.EVALUATION, step, episode)
                tasks = tuple(self._outcome(episodes[at : at + samples]) for at in range(0, len(episodes), samples))
                done = EvaluationFinished(
                    split=split, phase=phase, step=step, greedy=greedy, samples_per_task=samples, tasks=tasks, seconds=1.4, at_s=self._clock
                )
                run.append(Stream.EVALUATIONS, done)

    def _outcome(self, episodes: list[Episode]) -> TaskOutcome:
        graded = [episode for episode in episodes if not isinstance(episode.verdict, InfrastructureFailure)]
        name = episodes[0].task_id.split("-", 1)[1]
        return TaskOutcome(
            task_id=name, passed=sum(one.verdict.passed for one in graded), graded=len(graded), failures=len(episodes) - len(graded)
        )

    def _pay(self, run: RunFolder, activity: Activity, step: int, episode: Episode) -> None:
        outcome = "infrastructure-failure" if isinstance(episode.verdict, InfrastructureFailure) else "graded"
        cost = 9 if self._priced else None
        row = LedgerRow(
            run="synthetic",
            activity=activity,
            step=step,
            group=episode.group,
            index=episode.index,
            outcome=outcome,
            sandbox_s=0.7,
            cost_microusd=cost,
        )
        run.append(Stream.LEDGER, row)
