"""reasoning-gym 0.1.25 from its index, unchanged: every dataset that has answers gives them the full reward, and its splits share nothing.

Installs reasoning-gym with its dependencies (30 wheels, three of them built from source in a sandbox; 260 MB).
"""

import asyncio

import pytest
from playing import environment, graded

from sandmill.environments.check import Status, all_tasks, check, failing
from sandmill.environments.task import Graded, NoAnswer

VERSION = "0.1.25"
WITH_ANSWERS = [
    "ab",
    "acre",
    "advanced_geometry",
    "aiw",
    "arc_1d",
    "arc_agi",
    "base_conversion",
    "basic_arithmetic",
    "bf",
    "binary_alternation",
    "binary_matrix",
    "bitwise_arithmetic",
    "caesar_cipher",
    "calendar_arithmetic",
    "chain_sum",
    "circuit_logic",
    "codeio",
    "coin_flip",
    "color_cube_rotation",
    "complex_arithmetic",
    "count_bits",
    "count_primes",
    "countdown",
    "course_schedule",
    "cryptarithm",
    "decimal_arithmetic",
    "decimal_chain_sum",
    "dice",
    "emoji_mystery",
    "family_relationships",
    "figlet_font",
    "fraction_simplification",
    "futoshiki",
    "game_of_life",
    "game_of_life_halting",
    "gcd",
    "group_anagrams",
    "gsm_symbolic",
    "intermediate_integration",
    "isomorphic_strings",
    "jugs",
    "kakurasu",
    "knight_swap",
    "knights_knaves",
    "largest_island",
    "lcm",
    "leg_counting",
    "letter_counting",
    "letter_jumble",
    "list_functions",
    "mahjong_puzzle",
    "manipulate_matrix",
    "maze",
    "mini_sudoku",
    "modulo_grid",
    "n_queens",
    "needle_haystack",
    "number_filtering",
    "number_format",
    "number_sequence",
    "number_sorting",
    "palindrome_generation",
    "palindrome_partitioning",
    "path_star",
    "polynomial_equations",
    "polynomial_multiplication",
    "pool_matrix",
    "power_function",
    "prime_factorization",
    "products",
    "puzzle24",
    "quantum_lock",
    "ransom_note",
    "rearc",
    "rectangle_count",
    "rotate_matrix",
    "rotten_oranges",
    "self_reference",
    "sentence_reordering",
    "shortest_path",
    "simple_equations",
    "simple_geometry",
    "simple_integration",
    "sokoban",
    "spell_backward",
    "spiral_matrix",
    "string_insertion",
    "string_manipulation",
    "string_splitting",
    "string_synthesis",
    "sudoku",
    "survo",
    "syllogism",
    "time_intervals",
    "tower_of_hanoi",
    "tsumego",
    "word_ladder",
    "word_sequence_reversal",
    "word_sorting",
    "zebra_puzzles",
]
WITHOUT = ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"]


@pytest.mark.parametrize("name", WITH_ANSWERS)
def test_its_own_answers_get_the_full_reward(name):
    tasks = environment(f"reasoning-gym/{name}@{VERSION}", 2, 1)
    verdicts = graded(tasks, [(task, tasks.expected_answer(task)) for split in tasks.splits.values() for task in split])
    assert verdicts == [Graded(reward=1.0, passed=True)] * 3


@pytest.mark.parametrize("name", WITHOUT)
def test_a_dataset_without_answers_still_grades(name):
    tasks = environment(f"reasoning-gym/{name}@{VERSION}", 1, 1)
    (task,) = tasks.splits["train"]
    assert tasks.expected_answer(task) is None
    (silent,) = graded(tasks, [(task, None)])
    assert isinstance(silent, NoAnswer)


def test_the_same_seed_gives_the_same_tasks_and_the_held_out_ones_are_others():
    first, again, other = (environment(f"reasoning-gym/chain_sum@{VERSION}", 40, 20, seed=seed) for seed in (3, 3, 4))
    assert first.digest == again.digest != other.digest
    assert first.splits == again.splits
    identities = [{task.identity for task in first.splits[name]} for name in ("train", "heldout")]
    assert not identities[0] & identities[1]
    for one in (first, again, other):
        graded(one, [])


def test_a_tag_or_the_whole_answer_is_taken():
    tasks = environment(f"reasoning-gym/chain_sum@{VERSION}", 1, 1, min_terms=2, max_terms=2)
    (task,) = tasks.splits["train"]
    right = tasks.expected_answer(task).removeprefix("<answer>").removesuffix("</answer>")
    answers = [right, f"I think <answer>0</answer>, no: <answer> {right}\n</answer>", f"<answer>{right}</answer> or <answer>x</answer>"]
    assert [verdict.reward for verdict in graded(tasks, [(task, answer) for answer in answers])] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "status"), [("gcd", Status.SOUND), ("graph_color", Status.UNKNOWN), ("game_of_life_halting", Status.FORGEABLE)]
)
def test_a_check_tells_what_can_be_trusted(name, status, tmp_path, monkeypatch):
    monkeypatch.setattr("sandmill.environments.check.state_root", lambda: tmp_path)

    async def checked():
        made = environment(f"reasoning-gym/{name}@{VERSION}", 4, 2)
        try:
            found = await check(made, all_tasks(made), times=3)
            return {one.status for one in found.values()}, failing(made, all_tasks(made))
        finally:
            await made.close()

    found, failed = asyncio.run(checked())
    assert found == {status}
    assert len(failed) == (6 if status is Status.FORGEABLE else 0)
