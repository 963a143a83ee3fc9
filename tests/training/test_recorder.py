"""What a run keeps of its graders' requests: a row each, in the same books as everything else."""

from __future__ import annotations

from pathlib import Path

from sandmill.accounts.ledger import Activity, read_ledger
from sandmill.accounts.prices import RunPrices
from sandmill.config.load import parse_manifest
from sandmill.environments.access.meter import JudgeCall
from sandmill.environments.task import Boundary, InfrastructureFailure
from sandmill.reports.metrics import read_run
from sandmill.rollouts.events import Silent
from sandmill.rollouts.trajectory import Episode, Trajectory
from sandmill.store import RunFolder, Stream
from sandmill.training.recorder import Recorder

MANIFEST = b"spec: {model: {uri: sandmill/tiny-text}, environment: {name: reasoning-gym/chain_sum@0.1.25}}"
FREE = RunPrices(machine_microusd_per_hour=0, sandbox_microusd_per_hour=0)
CALLS = (
    JudgeCall(judge="j", outcome="answered", seconds=1.5, tokens_in=20, tokens_out=3, cost_microusd=26),
    JudgeCall(judge="j", outcome="failed", seconds=0.5, cost_microusd=900),
)


def recorded(folder: Path, *calls: JudgeCall) -> Recorder:
    """A run in which one attempt asked these, and broke."""
    broke = InfrastructureFailure(boundary=Boundary.JUDGE, reason="the judge answered 500", retryable=False)
    nothing = Trajectory(turns=(), commands=(), spans=())
    episode = Episode(group="g", index=2, task_id="t", trajectory=nothing, verdict=broke, attempt=1, gradings=2, judge_calls=calls)
    with RunFolder.create(folder, parse_manifest(MANIFEST)) as run:
        recorder = Recorder(run, Silent(), FREE, start=0, elapsed_s=0.0)
        recorder.watch(Activity.EPISODE, step=3, total=1)(episode)
    return recorder


def test_judge_dollars_are_in_the_books_also_of_attempts_that_broke(tmp_path: Path) -> None:
    assert recorded(tmp_path / "run", *CALLS).spent_microusd == 926
    rows = [row for row in read_ledger(tmp_path / "run" / Stream.LEDGER) if row.activity is Activity.JUDGE]
    assert [(row.step, row.group, row.index, row.attempt, row.judge) for row in rows] == [(3, "g", 2, 1, "j")] * 2
    assert [(row.outcome, row.latency_s, row.tokens_in, row.tokens_out, row.cost_microusd) for row in rows] == [
        ("answered", 1.5, 20, 3, 26),
        ("failed", 0.5, 0, 0, 900),
    ]
    line = next(line for line in read_run(tmp_path / "run").costs if line.what == "judge")
    assert (line.rows, line.failures, line.cost_microusd) == (2, 1, 926)


def test_a_judge_of_unknown_price_makes_the_sum_unknown(tmp_path: Path) -> None:
    unknown = JudgeCall(judge="j", outcome="answered", seconds=1.0, tokens_in=20, tokens_out=3, cost_microusd=None)
    assert recorded(tmp_path / "run", CALLS[0], unknown).spent_microusd is None
