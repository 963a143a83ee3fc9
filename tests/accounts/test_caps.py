"""Caps: spending never passes the limit, and a cap that cannot be held is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmill.accounts import CostCap, RunPrices
from sandmill.errors import ConfigError

KNOWN = RunPrices(machine_microusd_per_hour=1, sandbox_microusd_per_hour=1)


@given(st.integers(0, 1000), st.lists(st.tuples(st.integers(0, 300), st.floats(0, 1), st.booleans()), max_size=40))
def test_what_was_admitted_never_costs_more_than_the_limit(limit, work):
    cap = CostCap(limit)
    flying = []
    for reserved, share, ends_now in work:
        if cap.reserve(reserved):
            flying.append((reserved, int(reserved * share)))
        if ends_now and flying:
            cap.settle(*flying.pop(0))
        assert cap.spent_microusd <= limit
    for reserved, cost in flying:
        cap.settle(reserved, cost)
    assert cap.spent_microusd <= limit
    assert cap.remaining_microusd == limit - cap.spent_microusd


def test_the_last_cent_may_be_spent_and_not_one_more():
    cap = CostCap(100)
    assert cap.reserve(60)
    assert not cap.reserve(41)
    assert cap.reserve(40)
    assert not cap.reserve(1)


def test_a_reservation_that_cost_less_frees_the_rest():
    cap = CostCap(100)
    assert cap.reserve(100)
    cap.settle(100, 10)
    assert cap.remaining_microusd == 90


def test_a_cost_above_its_reservation_is_counted_in_full():
    cap = CostCap(100)
    assert cap.reserve(50)
    cap.settle(50, 120)
    assert cap.spent_microusd == 120
    assert cap.remaining_microusd == 0
    assert not cap.reserve(1)


def test_no_limit_admits_everything():
    cap = CostCap.of(None, RunPrices())
    assert cap.reserve(10**15)
    assert cap.remaining_microusd is None


@pytest.mark.parametrize(
    ("prices", "missing"),
    [(RunPrices(sandbox_microusd_per_hour=1), "machinePerHour"), (RunPrices(machine_microusd_per_hour=1), "sandboxPerHour")],
)
def test_a_cap_with_an_unknown_price_is_refused(prices, missing):
    with pytest.raises(ConfigError, match=rf"spec\.maxCostUSD: .*spec\.prices\.{missing} is unknown"):
        CostCap.of("10", prices)


def test_a_resumed_run_goes_on_counting():
    cap = CostCap.of("0.000100", KNOWN, spent_microusd=70)
    assert not cap.reserve(31)
    assert cap.reserve(30)


def test_a_resumed_run_with_unknown_spending_cannot_be_capped():
    with pytest.raises(ConfigError, match="no known cost"):
        CostCap.of("10", KNOWN, spent_microusd=None)


def test_the_reason_names_both_amounts_and_the_way_on():
    cap = CostCap.of("10", KNOWN, spent_microusd=9_990_000)
    assert cap.reason() == "stopped at $9.99: the next step could exceed the cap of $10.00; raise spec.maxCostUSD and resume"


@pytest.mark.parametrize("settled", [(1, 0), (-1, 0), (0, -1)])
def test_settling_what_was_never_reserved_is_an_error(settled):
    with pytest.raises(ValueError, match="nothing like this is reserved"):
        CostCap(10).settle(*settled)
