"""Seeds: the same place gives the same number, different places different ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sandmill.rollouts.seeds import derive

part = st.one_of(st.integers(), st.text(alphabet=st.characters(blacklist_categories=("Cs",))))


@given(st.lists(part, min_size=1, max_size=4))
def test_a_place_has_one_seed_of_64_bits(parts: list[int | str]) -> None:
    assert derive(*parts) == derive(*parts)
    assert 0 <= derive(*parts) < 2**64


def test_neighbouring_places_do_not_collide() -> None:
    seeds = {
        derive(0, "episode", f"{step}-{place}", index, attempt)
        for step in range(9)
        for place in range(9)
        for index in range(9)
        for attempt in (0, 1)
    }
    assert len(seeds) == 9 * 9 * 9 * 2


def test_a_number_and_its_text_are_different_places() -> None:
    assert derive(1) != derive("1")
