"""Where sandboxes go, and in whose turn: properties of the pure choice and of the queue."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from sandmill.server.machine import Amounts, Machine
from sandmill.server.placement import FairQueue, Need, Place, burden, choose, explain, obstacle

GIB = 1 << 30
amounts = st.builds(
    Amounts,
    cpu=st.floats(1, 256),
    memory_bytes=st.integers(GIB, 1024 * GIB),
    disk_bytes=st.integers(GIB, 1024 * GIB),
    pids=st.integers(1000, 4_000_000),
)
free = st.builds(
    Amounts,
    cpu=st.floats(0, 256),
    memory_bytes=st.integers(0, GIB),
    disk_bytes=st.integers(0, GIB),
    pids=st.integers(0, 4000),
)
machines = st.builds(Machine, architecture=st.sampled_from(["amd64", "arm64"]), capacity=amounts, free=free, load=st.floats(0, 500))
places = st.builds(
    Place,
    name=st.uuids().map(str),
    machine=machines,
    most=st.integers(0, 100),
    most_starting=st.integers(1, 16),
    held=st.integers(0, 100),
    starting=st.integers(0, 16),
    held_cpu=st.floats(0, 1000),
    held_memory_bytes=st.integers(0, 1024 * GIB),
    images=st.frozensets(st.sampled_from(["one", "two"])),
    closed=st.none() | st.just("is being drained"),
)
needs = st.builds(
    Need,
    cpu=st.floats(0.01, 64),
    memory_bytes=st.integers(1 << 20, 64 * GIB),
    image=st.none() | st.sampled_from(["one", "two", "three"]),
    architecture=st.none() | st.sampled_from(["amd64", "arm64"]),
)


@given(needs, st.lists(places, max_size=6), st.randoms())
def test_the_choice_is_the_best_that_is_able_in_any_order(need: Need, given_places: list[Place], order: random.Random) -> None:
    chosen = choose(need, given_places)
    able = [place for place in given_places if obstacle(need, place) is None]
    shuffled = order.sample(given_places, len(given_places))
    assert choose(need, shuffled) == chosen
    if chosen is None:
        assert not able
        assert explain(need, given_places)
        return
    assert chosen in able
    assert burden(need, chosen) == min(burden(need, place) for place in able)


@given(needs, places)
def test_what_cannot_take_it_is_never_chosen(need: Need, place: Place) -> None:
    if choose(need, [place]) is None:
        return
    assert place.closed is None
    assert place.held < place.most
    assert place.starting < place.most_starting
    assert need.architecture in (None, place.machine.architecture)
    assert place.machine.free.memory_bytes > 0
    assert place.machine.free.disk_bytes > 0
    assert place.machine.free.pids > 0


def _even(name: str, held: int, most: int = 1000) -> Place:
    whole = Amounts(cpu=8, memory_bytes=64 * GIB, disk_bytes=100 * GIB, pids=100_000)
    machine = Machine(architecture="amd64", capacity=whole, free=whole, load=0.0)
    return Place(
        name=name, machine=machine, most=most, most_starting=1000, held=held, held_cpu=float(held), held_memory_bytes=held * 2 * GIB
    )


@given(st.integers(1, 6), st.integers(0, 60))
def test_equal_places_fill_evenly(count: int, sandboxes: int) -> None:
    held: Counter[str] = Counter({f"n{number}": 0 for number in range(count)})
    for _ in range(sandboxes):
        chosen = choose(Need(cpu=1, memory_bytes=2 * GIB), [_even(name, taken) for name, taken in held.items()])
        assert chosen is not None
        held[chosen.name] += 1
    assert max(held.values()) - min(held.values()) <= 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_caps_are_hard(caps: list[int]) -> None:
    held = dict.fromkeys(range(len(caps)), 0)
    for _ in range(sum(caps) + 3):
        chosen = choose(Need(cpu=1, memory_bytes=GIB), [_even(str(place), held[place], most) for place, most in enumerate(caps)])
        if chosen is None:
            break
        held[int(chosen.name)] += 1
    assert list(held.values()) == caps


def test_a_loaded_machine_is_spared() -> None:
    calm, busy = _even("z", 5), _even("a", 0)
    busy = Place(
        name="a",
        machine=Machine(architecture="amd64", capacity=busy.machine.capacity, free=busy.machine.free, load=16.0),
        most=9,
        most_starting=9,
    )
    assert choose(Need(cpu=1, memory_bytes=GIB), [busy, calm]) == calm


def test_a_place_that_has_the_image_is_preferred_until_it_is_much_more_burdened() -> None:
    need = Need(cpu=1, memory_bytes=GIB, image="one")
    with_it = [msgspec.structs.replace(_even("with", held), images=frozenset({"one"})) for held in (1, 2, 4)]
    chosen = [choose(need, [_even("without", 0), place]) for place in with_it]
    assert [place and place.name for place in chosen] == ["with", "with", "without"]


asks = st.lists(st.sampled_from("abcd"), min_size=1, max_size=60)


@given(asks)
def test_everybody_is_served_once_and_in_the_order_of_the_project(projects: list[str]) -> None:
    queue: FairQueue[int] = FairQueue()
    for number, project in enumerate(projects):
        queue.enter(project, number)
    served: dict[str, list[int]] = {}
    while len(queue):
        waiter = next(iter(queue))
        queue.serve(waiter)
        served.setdefault(waiter.project, []).append(waiter.what)
    assert served == {name: [number for number, project in enumerate(projects) if project == name] for name in set(projects)}


@settings(max_examples=300)
@given(st.lists(st.sampled_from("ab") | st.just("."), min_size=1, max_size=120))
def test_projects_that_wait_are_served_alike(script: list[str]) -> None:
    """While both wait without a break, neither gets more than two ahead of the other: the bound of start-time fair queueing."""
    queue: FairQueue[None] = FairQueue()
    ahead = {"a": 0, "b": 0}
    for step in script:
        if step != ".":
            queue.enter(step, None)
        elif len(queue):
            waiter = next(iter(queue))
            waiting = {other.project for other in queue}
            queue.serve(waiter)
            ahead[waiter.project] += 1
            if waiting != {"a", "b"} or {other.project for other in queue} != {"a", "b"}:
                ahead = {"a": 0, "b": 0}
            assert abs(ahead["a"] - ahead["b"]) <= 2


@given(st.integers(1, 500))
def test_one_is_not_starved_by_many(many: int) -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(many):
        queue.enter("greedy", "one of many")
    queue.enter("modest", "the only one")
    served = []
    for waiter in queue:
        queue.serve(waiter)
        served.append(waiter.what)
    assert served.index("the only one") <= 1


@given(st.integers(1, 100))
def test_who_gave_up_costs_his_project_no_turn(impatient: int) -> None:
    queue: FairQueue[str] = FairQueue()
    for waiter in [queue.enter("a", "gives up") for _ in range(impatient)]:
        queue.leave(waiter)
        queue.leave(waiter)
    queue.enter("b", "b")
    last = queue.enter("a", "a")
    queue.enter("b", "b again")
    assert [waiter.what for waiter in queue] == ["b", "a", "b again"]
    assert last in list(queue)
