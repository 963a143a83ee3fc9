"""Parts of the server whose edges a whole server reaches only slowly: history, output, money, patches, selectors, keys."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmill.accounts.prices import load_price_book
from sandmill.server.answers import Answers
from sandmill.server.api.selecting import selection
from sandmill.server.billing import Billing
from sandmill.server.costs import Meter, microusd, rate_of, usd
from sandmill.server.outputs import KEPT_BYTES, Log
from sandmill.server.patching import MERGE, OPERATIONS, merged, patched
from sandmill.server.records import Records, fresh
from sandmill.server.refusals import Refusal
from sandmill.server.store import Store
from sandmill.server.tables import KEPT_CHANGES

Body = Callable[[Records], Coroutine[Any, Any, None]]


def with_records(folder: Path, body: Body) -> None:
    async def run() -> None:
        store, loaded = Store.open(folder, None, asyncio.get_running_loop())
        try:
            await body(Records(store, loaded))
        finally:
            store.close()

    asyncio.run(run())


def test_a_sync_reaches_the_disk_with_what_was_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []

    def fdatasync(descriptor: int) -> None:
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((place.name, b"a value of note" in place.read_bytes()))

    async def body(records: Records) -> None:
        await records.save("Secret", "default", fresh("Secret", "s", "default", {"said": "a value of note"}))
        records.store.sync()

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with_records(tmp_path, body)
    assert synced == [("server.db-wal", True)]


def test_history_that_is_full_says_expired(tmp_path: Path) -> None:
    async def first(records: Records) -> None:
        start = records.version
        value = fresh("Secret", "s", "p", {})
        done = [records.put("Secret", "p", value) for _ in range(KEPT_CHANGES + 50)]
        await done[-1]
        await asyncio.sleep(0)
        with pytest.raises(Refusal, match="not known any more"):
            records.watch("Secret", "p", start)
        watch = records.watch("Secret", "p", records.version - 3)
        assert [(await watch.next(1)).version for _ in range(3)] == list(range(records.version - 2, records.version + 1))  # type: ignore[union-attr]
        assert await watch.next(0.01) is None

    async def second(records: Records) -> None:
        await records.save("Secret", "p", fresh("Secret", "t", "p", {}))
        with pytest.raises(Refusal, match="not known any more"):
            records.watch("Secret", "p", 2)

    with_records(tmp_path, first)
    with_records(tmp_path, second)


def test_old_usage_is_summed_and_not_a_micro_dollar_is_lost(tmp_path: Path) -> None:
    async def body(records: Records) -> None:
        billing = Billing(records, kept=100)
        spent = 0
        for number in range(2500):
            box = fresh("Sandbox", f"b{number}", f"p{number % 2}", {}, labels={"team": str(number % 3)})
            meter = Meter(rate_microusd_per_hour=17_900, limit_microusd=None)
            billing.run(box, meter, 1_800_000_000 + number * 60, number / 7)
            spent += meter.total(number / 7) or 0
        found = records.list("UsageRecord")
        assert len(found) < 750
        assert sum(microusd(value["amountUSD"]) for value in found) == spent
        assert sum(value.get("folded", 1) for value in found) == 2500
        assert {value["project"] for value in found if "folded" in value} == {"p0", "p1"}
        await records.save("Secret", "p", fresh("Secret", "last", "p", {}))

    async def again(records: Records) -> None:
        found = records.list("UsageRecord")
        assert sum(value.get("folded", 1) for value in found) == 2500

    with_records(tmp_path, body)
    with_records(tmp_path, again)


def test_a_slow_watcher_is_told(tmp_path: Path) -> None:
    async def body(records: Records) -> None:
        watch = records.watch("Secret", "p", None)
        done = [records.put("Secret", "p", fresh("Secret", "s", "p", {})) for _ in range(10_050)]
        await done[-1]
        await asyncio.sleep(0)
        with pytest.raises(Refusal, match="could not keep up"):
            await watch.next(1)

    with_records(tmp_path, body)


@given(st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(max_size=20)), max_size=30), st.integers(0, 400))
def test_output_is_whole_from_every_offset(pieces: list[tuple[str, bytes]], after: int) -> None:
    log = Log("p")
    for stream, data in pieces:
        log.add(stream, data)
    for stream in ("stdout", "stderr"):
        whole = b"".join(data for name, data in pieces if name == stream)
        assert b"".join(frame.data for frame in log.frames(stream, after, 1 << 30)) == whole[after:]
    everything = b"".join(data for _, data in pieces)
    assert b"".join(frame.data for frame in log.frames(None, after, 1 << 30)) == everything[after:]


def test_output_has_a_bound() -> None:
    log = Log("p")
    for _ in range(20):
        log.add("stdout", bytes(1 << 20))
    assert (log.size_bytes, log.truncated) == (KEPT_BYTES, True)


@given(st.integers(0, 10**15))
def test_dollars_survive_the_wire(amount: int) -> None:
    assert microusd(usd(amount)) == amount


def test_list_prices_to_the_micro_dollar() -> None:
    prices = load_price_book()
    one = rate_of(prices, {"cpu": "1", "memory": "2Gi"})
    assert (one, rate_of(prices, {"cpu": "500m", "memory": "4Gi"}), rate_of(prices, {"cpu": "4", "memory": "1Gi"})) == (
        17_900,
        35_800,
        71_600,
    )
    assert Meter(rate_microusd_per_hour=one, limit_microusd=None).total(15 * 3600) == 268_500  # x 128 is the $34.37 of the worked example
    capped = Meter(rate_microusd_per_hour=one, limit_microusd=1_000_000, before_microusd=999_000)
    assert capped.seconds_left() == pytest.approx(1000 / 17_900 * 3600)
    assert [capped.total(seconds) for seconds in (0, 100, 10**9)] == [999_000, 999_497, 1_000_000]
    assert Meter(rate_microusd_per_hour=None, limit_microusd=None).total(5) is None


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [  # RFC 7386, appendix A
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "foo"}, "bar", "bar"),
    ],
)
def test_merge_patches(target: Any, patch: Any, result: Any) -> None:
    before = repr(target)
    assert merged(target, patch) == result
    assert repr(target) == before


def test_json_patches_that_would_grow_or_break() -> None:
    grow = [{"op": "copy", "from": "/a", "path": f"/b{number}"} for number in range(900)]
    with pytest.raises(Refusal, match="copies too much"):
        patched({"a": "x" * 10_000}, grow, OPERATIONS)
    for bad in (
        [{"op": "remove", "path": "/no"}],
        [{"op": "no"}],
        [1],
        [None],
        [{}],
        {},
        [{"op": "add", "path": 1, "value": 2}],
        [[]] * 2000,
    ):
        with pytest.raises(Refusal):
            patched({"a": 1}, bad, OPERATIONS)
    for bad in ([], "x", None, 1):
        with pytest.raises(Refusal):
            patched({"a": 1}, bad, MERGE)


@given(st.text(max_size=60), st.text(max_size=60))
def test_selectors_hold_or_are_refused(labels: str, fields: str) -> None:
    reason = "chosen"
    try:
        chosen = selection(labels, fields)
        assert chosen.holds({"metadata": {"name": "x", "labels": {"a": "b"}}}) in (True, False)
    except Refusal as refusal:
        reason = refusal.reason
    assert reason in ("chosen", "BadRequest")


def test_answers_wait_for_each_other_and_are_kept() -> None:
    async def run() -> None:
        answers = Answers([])
        order: list[str] = []

        async def ask(name: str) -> bytes:
            with await answers.turn("me", "key", b"same") as turn:
                if turn.before is not None:
                    return turn.before.body
                order.append(name)
                await asyncio.sleep(0.01)
                turn.answer(201, name.encode())
                return name.encode()

        assert set(await asyncio.gather(*(ask(str(number)) for number in range(5)))) == {b"0"}
        assert order == ["0"]
        with pytest.raises(Refusal, match="another request"):
            await answers.turn("me", "key", b"other")
        assert (await answers.turn("you", "key", b"other")).before is None

    asyncio.run(run())
