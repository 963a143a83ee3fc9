"""Estimates: the worked example to the cent, and unknown prices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmill.accounts import Plan, estimate, load_price_book
from sandmill.config.quantities import format_usd


def worked_example(minutes_per_step):
    book = load_price_book()
    return estimate(
        Plan(
            steps=300,
            seconds_per_step=60 * minutes_per_step,
            machines=8,
            machine_microusd_per_hour=book.per_hour("h100-sxm"),
            sandboxes=128,
            sandbox_microusd_per_hour=book.per_hour("sandbox"),
        )
    )


@pytest.mark.parametrize(
    ("minutes", "hours", "machines", "sandboxes", "total"),
    [(3, 15, "$312.00", "$34.37", "$346.37"), (1.5, 7.5, "$156.00", "$17.18", "$173.18")],
)
def test_the_worked_example_comes_out_to_the_cent(minutes, hours, machines, sandboxes, total):
    answer = worked_example(minutes)
    assert answer.seconds == hours * 3600
    assert [format_usd(cost) for cost in (answer.machines_microusd, answer.sandboxes_microusd, answer.total_microusd)] == [
        machines,
        sandboxes,
        total,
    ]
    assert f"{answer.sandbox_share:.1%}" == "9.9%"


def test_the_worked_example_is_exact_in_microdollars():
    answer = worked_example(3)
    assert (answer.machines_microusd, answer.sandboxes_microusd, answer.total_microusd) == (312_000_000, 34_368_000, 346_368_000)


def test_an_unknown_price_makes_the_total_unknown_and_never_zero():
    answer = estimate(Plan(steps=10, seconds_per_step=1, machine_microusd_per_hour=None, sandboxes=4, sandbox_microusd_per_hour=3600))
    assert answer.sandboxes_microusd == 40
    assert answer.machines_microusd is answer.total_microusd is answer.sandbox_share is None
    assert format_usd(answer.total_microusd) == "unknown"


@given(st.integers(0, 500), st.floats(0, 1000), st.integers(0, 64), st.integers(0, 10**7), st.integers(0, 512), st.integers(0, 10**6))
def test_twice_the_steps_cost_twice_as_much(steps, seconds, machines, machine_price, sandboxes, sandbox_price):
    def cost(count):
        plan = Plan(
            steps=count,
            seconds_per_step=seconds,
            machines=machines,
            machine_microusd_per_hour=machine_price,
            sandboxes=sandboxes,
            sandbox_microusd_per_hour=sandbox_price,
        )
        answer = estimate(plan)
        assert answer.total_microusd == answer.machines_microusd + answer.sandboxes_microusd
        return answer.total_microusd

    assert abs(cost(2 * steps) - 2 * cost(steps)) <= 3


@pytest.mark.parametrize("wrong", [{"steps": -1}, {"seconds_per_step": float("nan")}, {"extra_s": -1.0}, {"sandboxes": -1}])
def test_an_impossible_plan_is_refused(wrong):
    plan = {"steps": 1, "seconds_per_step": 1.0, "machine_microusd_per_hour": 1, "sandboxes": 1, "sandbox_microusd_per_hour": 1}
    with pytest.raises(ValueError, match="finite and not negative"):
        Plan(**plan | wrong)
