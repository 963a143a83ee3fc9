"""Prices: exact arithmetic, and unknown stays unknown."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmill.accounts import RunPrices, TokenPrices, Usage, cost_of_hours, load_price_book, total
from sandmill.config.manifest import PricesSection
from sandmill.errors import ConfigError

prices = st.integers(0, 10**9)
seconds = st.floats(0, 10**7, allow_nan=False)


def test_the_list_prices_of_the_package():
    assert load_price_book().hours == {"h100-sxm": 2_600_000, "l40s": 793_000, "rtx-4090": 290_000, "sandbox": 17_900}


def test_an_unknown_name_has_no_price():
    assert load_price_book().per_hour("h200") is None


@given(prices, seconds, st.integers(0, 10**5))
def test_cost_is_within_half_a_microdollar_of_the_exact_value(price, duration, count):
    assert abs(cost_of_hours(price, duration, count) - Fraction(duration) * price * count / 3600) <= Fraction(1, 2)


@given(prices, seconds, seconds)
def test_more_time_never_costs_less(price, one, other):
    assert cost_of_hours(price, min(one, other)) <= cost_of_hours(price, max(one, other))


@pytest.mark.parametrize(("microusd_per_hour", "duration_s", "cost"), [(3600, 0.5, 0), (3600, 1.5, 2), (3600, 2.5, 2), (3600, 2.6, 3)])
def test_halves_round_to_even(microusd_per_hour, duration_s, cost):
    assert cost_of_hours(microusd_per_hour, duration_s) == cost


@given(seconds.filter(lambda s: s > 0))
def test_time_at_an_unknown_price_has_an_unknown_cost(duration):
    assert cost_of_hours(None, duration) is None
    assert RunPrices(machine_microusd_per_hour=1).cost(machine_s=1, sandbox_s=duration) is None


def test_nothing_used_costs_nothing_even_at_an_unknown_price():
    assert cost_of_hours(None, 0) == 0
    assert RunPrices().cost() == 0


@pytest.mark.parametrize("duration", [float("nan"), float("inf"), -1.0])
def test_impossible_durations_are_refused(duration):
    with pytest.raises(ValueError, match="finite and not negative"):
        cost_of_hours(1, duration)


def test_a_total_with_an_unknown_part_is_unknown():
    assert total((1, None, 2)) is None
    assert total((1, 2)) == 3
    assert total(()) == 0


def test_ones_own_machine_costs_an_unknown_amount():
    assert RunPrices.of(PricesSection()).cost(machine_s=60, sandbox_s=5) is None


def test_run_prices_from_a_manifest():
    mine = RunPrices.of(PricesSection(machine_per_hour="0.36", sandbox_per_hour="0.0179"))
    assert mine.cost(machine_s=10, sandbox_s=3600) == 1000 + 17_900


def test_a_bad_price_names_its_field():
    with pytest.raises(ConfigError, match=r"spec\.prices\.machinePerHour: .*cheap"):
        RunPrices.of(PricesSection(machine_per_hour="cheap"))


def test_token_prices_count_every_bucket():
    price = TokenPrices(input=3_000_000, output=15_000_000, cache_read=300_000, cache_write=3_750_000, thinking=15_000_000)
    usage = Usage(input=1000, output=200, cache_read=50_000, cache_write=4000, thinking=3000)
    assert price.cost(usage) == 3000 + 3000 + 15_000 + 15_000 + 45_000


@given(st.builds(Usage, **{bucket: st.integers(0, 10**9) for bucket in ("input", "output", "cache_read", "cache_write", "thinking")}))
def test_a_used_bucket_without_a_price_makes_the_cost_unknown(usage):
    price = TokenPrices(input=1_000_000, output=2_000_000)
    unpriced = usage.cache_read or usage.cache_write or usage.thinking
    assert price.cost(usage) == (None if unpriced else usage.input + 2 * usage.output)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hours: {gpu: 2.5}", r"hours\.gpu: a price is written as a string .* found 2\.5"),
        ("hours: {gpu: '-1'}", r"hours\.gpu: .*-1"),
        ("hurs: {}", "unknown key 'hurs'; did you mean 'hours'"),
        ("tokens: {m: {inptu: '1'}}", r"tokens\.m: unknown key 'inptu'; did you mean 'input'"),
        ("hours: [1]", "hours: expected names with prices"),
        ("a: b: c", r"book\.yaml:1: the price book is not YAML"),
    ],
)
def test_a_wrong_price_book_names_file_and_field(tmp_path, text, message):
    path = tmp_path / "book.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_price_book(path)
    assert str(path) in str(caught.value)


def test_a_missing_price_book(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_price_book(tmp_path / "none.yaml")


def test_ones_own_price_book(tmp_path):
    path = tmp_path / "book.yaml"
    path.write_text("hours: {mine: '0.10'}\ntokens: {judge: {input: '0.25', output: '1'}}\n")
    book = load_price_book(path)
    assert book.per_hour("mine") == 100_000
    assert book.token_cost("judge", Usage(input=4_000_000, output=1)) == 1_000_001
    assert book.token_cost("other", Usage(input=1)) is None
