"""Reward files: json before txt, finite numbers and nothing else, and never a number where there is none."""

import pytest

from sandmill.environments.formats.harbor.rewards import combined, parse, scalar
from sandmill.errors import GraderFailed


@pytest.mark.parametrize(
    ("as_json", "as_text", "rewards"),
    [
        (b'{"reward": 0.5}', b"1", {"reward": 0.5}),
        (b'{"correctness": 1, "speed": 0.25}', None, {"correctness": 1.0, "speed": 0.25}),
        (None, b" 1.0\n", {"reward": 1.0}),
        (None, b"-2e-1", {"reward": -0.2}),
        (None, b"0", {"reward": 0.0}),
    ],
)
def test_what_counts(as_json, as_text, rewards):
    assert parse(as_json, as_text) == rewards


@pytest.mark.parametrize(
    ("as_json", "as_text"),
    [
        (None, None),
        (b"", b"1"),
        (b" \n", b"1"),
        (b"{}", b"1"),
        (b"[1]", None),
        (b"1", None),
        (b'{"reward": NaN}', None),
        (b'{"reward": Infinity}', None),
        (b'{"reward": 1e999}', None),
        (b'{"reward": true}', None),
        (b'{"reward": "1"}', None),
        (b'{"reward": null}', None),
        (b'{"reward": [1]}', None),
        (b'{"reward": 1', None),
        (b"[" * 100_000, None),
        (b"\xff{}", None),
        (b'{"reward": ' + b"9" * 400 + b"}", None),
        (None, b""),
        (None, b"nan"),
        (None, b"inf"),
        (None, b"1 1"),
        (None, b"1_0"),
        (None, "٣".encode()),
        (None, b"one"),
        (None, b"True"),
        (None, b"\xff"),
    ],
)
def test_what_is_no_reward_never_becomes_one(as_json, as_text):
    with pytest.raises(GraderFailed):
        parse(as_json, as_text)


def test_the_one_number_is_reward_or_the_mean_of_all():
    assert scalar({"reward": 0.5, "other": 1.0}) == 0.5
    assert scalar({"a": 0.5, "b": 1.0}) == 0.75


def test_steps_that_were_not_reached_count_nothing():
    assert combined([{"reward": 1.0}], 2, "mean") == {"reward": 0.5}
    assert combined([{"a": 1.0}, {"b": 1.0}], 2, "mean") == {"a": 0.5, "b": 0.5}
    assert combined([{"reward": 0.2}, {"reward": 1.0}], 2, "final") == {"reward": 1.0}
    assert combined([{"reward": 1.0}], 2, "final") == {"reward": 0.0}
