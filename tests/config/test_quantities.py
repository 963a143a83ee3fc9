"""Amounts as people write them: exact values, and refusals that name the nearest valid spelling."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmill.config.quantities import format_usd, parse_bytes, parse_cpu, parse_duration, parse_usd
from sandmill.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("250ms", 0.25),
        ("1.5h", 5400.0),
        ("0", 0.0),
        ("0s", 0.0),
        ("100us", 1e-4),
        (".5s", 0.5),
        (90, 90.0),
    ],
)
def test_durations_mean_what_go_means(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "size"),
    [("2Gi", 2**31), ("512Mi", 2**29), ("1G", 10**9), ("64k", 64000), ("4096", 4096), ("1.5Ki", 1536), ("0.1Ki", 103), (7, 7)],
)
def test_sizes_mean_what_kubernetes_means(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(("text", "cores"), [("500m", 0.5), ("1", 1.0), ("0.25", 0.25), (2, 2.0), (0.5, 0.5)])
def test_cpu_means_what_kubernetes_means(text, cores):
    assert parse_cpu(text) == cores


@pytest.mark.parametrize(
    ("text", "microusd"), [("12.50", 12_500_000), ("0.0179", 17_900), (1, 1_000_000), (0.1, 100_000), (Decimal("2.6"), 2_600_000), ("0", 0)]
)
def test_money_is_exact(text, microusd):
    assert parse_usd(text) == microusd


@pytest.mark.parametrize(
    ("parse", "text", "hint"),
    [
        (parse_duration, "5min", '"5m"'),
        (parse_duration, "5", '"5s"'),
        (parse_duration, "1h 30m", '"5m"'),
        (parse_duration, "2 hours", '"5m"'),
        (parse_duration, "3hours", '"3h"'),
        (parse_bytes, "2GB", '"2G"'),
        (parse_bytes, "2GiB", '"2Gi"'),
        (parse_bytes, "512mi", '"512Mi"'),
        (parse_bytes, "-1", '"512Mi"'),
        (parse_cpu, "500mi", '"500m"'),
        (parse_usd, "$12.5", '"12.5"'),
        (parse_usd, "1,000", '"1000"'),
        (parse_usd, "0.0000001", "six decimals"),
    ],
)
def test_a_refusal_is_one_sentence_with_the_nearest_spelling(parse, text, hint):
    with pytest.raises(ConfigError) as caught:
        parse(text, field="spec.x")
    assert hint in str(caught.value)
    assert caught.value.field == "spec.x"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("parse", [parse_duration, parse_bytes, parse_cpu, parse_usd])
@pytest.mark.parametrize("value", [True, None, [], float("nan"), float("inf"), -1, "", " ", "x", "1e400", "9" * 30, "\x1b[2J", "٣"])
def test_what_is_no_amount_is_refused(parse, value):
    with pytest.raises(ConfigError) as caught:
        parse(value)
    assert str(caught.value).isprintable()


@given(st.text(max_size=12) | st.from_regex(r"[0-9.]{1,6}[a-zA-Z]{0,3}", fullmatch=True))
def test_any_text_is_an_amount_or_a_config_error(text):
    for parse in (parse_duration, parse_bytes, parse_cpu, parse_usd):
        try:
            assert parse(text) >= 0
        except ConfigError:
            continue


@given(st.integers(min_value=0, max_value=10**14))
def test_money_survives_the_round_trip_through_text(microusd):
    assert parse_usd(format_usd(microusd, decimals=6).replace("$", "").replace(",", "")) == microusd


def test_unknown_money_is_never_shown_as_zero():
    assert format_usd(None) == "unknown"
    assert format_usd(0) == "$0.00"
    assert format_usd(346_374_000) == "$346.37"
    assert format_usd(5_000) == "$0.01"
    assert format_usd(1_234_567_890_000) == "$1,234,567.89"
