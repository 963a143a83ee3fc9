"""The ledger: nothing spent is lost, nothing torn is believed."""

import os
import resource
import signal
import subprocess
import sys
import textwrap

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandmill.accounts import Activity, Ledger, LedgerRow, read_ledger, spend
from sandmill.errors import DiskFull, RunIncompatible

rows = st.builds(
    LedgerRow,
    run=st.text(max_size=8),
    activity=st.sampled_from(Activity),
    step=st.integers(0, 1000),
    group=st.text(max_size=12),
    index=st.integers(0, 64),
    attempt=st.integers(0, 3),
    outcome=st.sampled_from(["graded", "infrastructure-failure"]),
    machine_s=st.floats(0, 1e6),
    sandbox_s=st.floats(0, 1e6),
    tokens_in=st.integers(0, 10**9),
    tokens_out=st.integers(0, 10**9),
    cost_microusd=st.none() | st.integers(0, 10**12),
)


def row(step=0, cost=5, **others):
    return LedgerRow(**{"run": "r", "activity": Activity.EPISODE, "step": step, "outcome": "graded", "cost_microusd": cost} | others)


@given(st.lists(rows, max_size=12))
@settings(max_examples=40)
def test_what_is_appended_is_read_back(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    with Ledger(path) as ledger:
        for one in written:
            ledger.append(one)
        assert ledger.spent == spend(written)
    assert list(read_ledger(path)) == written
    with Ledger(path) as again:
        assert again.spent == spend(written)


@given(st.lists(rows), st.integers(0, 20))
def test_a_sum_does_not_depend_on_grouping(many, cut):
    first, second = spend(many[:cut]), spend(many[cut:])
    whole = spend(many)
    assert whole.known_microusd == first.known_microusd + second.known_microusd
    assert whole.unknown_rows == first.unknown_rows + second.unknown_rows
    assert whole.rows == len(many)


def test_one_unknown_cost_makes_the_total_unknown():
    assert spend([row(cost=5), row(cost=None)]).microusd is None
    assert spend([row(cost=5), row(cost=0)]).microusd == 5


@pytest.mark.parametrize("torn", [1, 17, 100_000])
def test_a_torn_last_line_is_cut_off_and_the_rest_kept(tmp_path, torn):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.append(row(step=1))
    with path.open("ab") as file:
        file.write(b"x" * torn)
    assert [one.step for one in read_ledger(path)] == [1]
    with Ledger(path) as ledger:
        ledger.append(row(step=2))
    assert [one.step for one in read_ledger(path)] == [1, 2]


def test_kill_9_while_writing_loses_no_finished_row(tmp_path):
    path = tmp_path / "ledger.jsonl"
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from sandmill.accounts import Activity, Ledger, LedgerRow
        ledger = Ledger(Path(sys.argv[1]))
        for step in range(10**9):
            ledger.append(LedgerRow(run="r", activity=Activity.TRAINING, step=step, outcome="done", cost_microusd=1))
            if step % 100 == 99:
                print(step, flush=True)
        """
    )
    writer = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
    reported = [int(writer.stdout.readline()) for _ in range(5)]
    writer.send_signal(signal.SIGKILL)
    writer.wait(10)
    writer.stdout.close()
    steps = [one.step for one in read_ledger(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) > reported[-1]
    with Ledger(path) as ledger:
        assert ledger.spent.microusd >= len(steps)


def test_a_full_disk_is_named_and_leaves_no_half_row(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.append(row(step=1))
        before = path.read_bytes()
        previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
        try:
            with pytest.raises(DiskFull, match=r"ledger\.jsonl; free some and resume"):
                ledger.append(row(step=2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, previous)
        assert path.read_bytes() == before
        assert ledger.spent.rows == 1
        ledger.append(row(step=3))
    assert [one.step for one in read_ledger(path)] == [1, 3]


@pytest.mark.parametrize("line", [b"{}\n", b"\xff\n", b'{"run": 1}\n', b"[1\n"])
def test_a_foreign_line_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(msgspec.json.encode(row()) + b"\n" + line)
    with pytest.raises(RunIncompatible, match="line 2"):
        Ledger(path)


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(msgspec.json.encode(row(schema_version=2)) + b"\n")
    with pytest.raises(RunIncompatible, match="ledger version 2, this program reads 1"):
        list(read_ledger(path))


def test_closing_twice_is_harmless_and_leaks_no_descriptor(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.close()
    ledger.close()
    assert len(os.listdir("/proc/self/fd")) == before
