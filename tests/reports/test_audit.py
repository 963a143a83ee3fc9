"""The audit of a run: solved episodes that named something of the grader's, and no others."""

from pathlib import Path

import pytest
from synthetic_run import MANIFEST

from sandmill.config.load import parse_manifest
from sandmill.environments.task import Boundary, Command, Graded, InfrastructureFailure, NoAnswer
from sandmill.reports.audit import audit, named
from sandmill.rollouts.events import EpisodeRecord
from sandmill.rollouts.trajectory import Episode, Trajectory
from sandmill.store import RunFolder, Stream


def command(script: str) -> Command:
    return Command(script=script, exit_code=0, output="")


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ("cat /tests/test_outputs.py", ["tests"]),
        ("ls ../tests", ["tests"]),
        ("echo 1 > /logs/verifier/reward.txt", ["rewards"]),
        ("cat > conftest.py", ["test configuration"]),
        ("python3 -c 'import os; os._exit(0)'", ["a way out of the tests"]),
        ("bash /solution/solve.sh", ["reference solution"]),
        ("touch sitecustomize.py; env | grep SANDMILL_RECORD", ["start-up files", "the verifier's tools"]),
        ("pytest tests/ && ls /app/tests mytests latests; cat rewards.csv; python solver.py", []),
        ("", []),
    ],
)
def test_what_a_command_names(script, names):
    assert [name for _, name in named([command(script)])] == names


def test_solved_episodes_alone_are_listed(tmp_path: Path):
    solved, failed = Graded(reward=1.0, passed=True), Graded(reward=0.0, passed=False)
    lost = InfrastructureFailure(boundary=Boundary.GRADER, reason="x", retryable=False)
    cheat, honest = "cat /tests/x", "ls"
    rows = [(solved, cheat), (solved, honest), (failed, cheat), (lost, cheat), (NoAnswer(reward=0.0), cheat)]
    with RunFolder.create(tmp_path / "run", parse_manifest(MANIFEST)) as run:
        for index, (verdict, script) in enumerate(rows):
            trajectory = Trajectory(turns=(), commands=(command(honest), command(script)), spans=())
            episode = Episode(group="g", index=index, task_id=f"t{index}", trajectory=trajectory, verdict=verdict)
            run.append(Stream.TRAJECTORIES, EpisodeRecord(step=3, split="train", episode=episode))
    with open(tmp_path / "run" / "trajectories.jsonl", "ab") as file:
        file.write(b"rubbish\n")
    found = audit(tmp_path / "run")
    assert (found.solved, found.unreadable_rows) == (2, 1)
    assert [(one.task, one.step, one.commands) for one in found.touched] == [("t0", 3, ((1, "tests"),))]
