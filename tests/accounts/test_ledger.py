"""The ledger: nothing spent is lost, nothing torn is believed."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandmill.accounts import Activity, LedgerRow, read_ledger, spend
from sandmill.config.manifest import EnvironmentSection, Manifest, ModelSection, Spec
from sandmill.errors import RunIncompatible
from sandmill.store import RunFolder, Stream

MANIFEST = Manifest(spec=Spec(model=ModelSection(uri="sandmill/tiny-shell"), environment=EnvironmentSection(name="shell@1.0.0")))

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


@given(st.lists(rows, min_size=1, max_size=12))
@settings(max_examples=25)
def test_what_is_appended_is_read_back(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("ledger") / "run"
    with RunFolder.create(path, MANIFEST) as folder:
        for one in written:
            folder.append(Stream.LEDGER, one)
        assert list(read_ledger(path / Stream.LEDGER)) == written


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
def test_a_torn_last_line_is_passed_over(tmp_path, torn):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(msgspec.json.encode(row(step=1)) + b"\n" + b"x" * torn)
    assert [one.step for one in read_ledger(path)] == [1]


@pytest.mark.parametrize("line", [b"{}\n", b"\xff\n", b'{"run": 1}\n', b"[1\n"])
def test_a_foreign_line_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(msgspec.json.encode(row()) + b"\n" + line)
    with pytest.raises(RunIncompatible, match="line 2"):
        list(read_ledger(path))


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(msgspec.json.encode(row(schema_version=2)) + b"\n")
    with pytest.raises(RunIncompatible, match="ledger version 2, this program reads 1"):
        list(read_ledger(path))
