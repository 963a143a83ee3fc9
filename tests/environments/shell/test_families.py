"""What makes the demonstration families learnable and honest, shown on real files with the real tools."""

import itertools
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from sandmill.environments.builtin.shell.families import COMMANDS, SIZES
from sandmill.environments.builtin.shell.generate import problem_from
from sandmill.environments.builtin.shell.options import DEMO_FAMILIES, FAMILIES, Difficulty
from sandmill.environments.builtin.shell.words import WORDS

MARK = "<<end of output>>"


def outputs(folder, problem, scripts):
    """Runs the scripts one after the other in the problem's folder with one real bash; their outputs, as words."""
    folder.mkdir()
    for name, text in problem.files.items():
        (folder / name).write_text(text)
    program = "\n".join(f"{script}\necho '{MARK}'" for script in scripts)
    done = subprocess.run(["bash", "-c", program], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
    return [part.split() for part in done.stdout.decode().split(MARK)[:-1]]


@pytest.mark.parametrize("difficulty", list(Difficulty))
def test_one_right_command_and_no_wrong_one_that_yields_the_answer(tmp_path, difficulty):
    """Only `cat` may show an answer that another command singles out, and then never first and among at least two other words."""
    rng = random.Random(5)
    cases = [
        (family, problem_from(rng, family, WORDS, SIZES[difficulty], "train")) for family, _ in itertools.product(DEMO_FAMILIES, range(24))
    ]

    def run(number):
        _, problem = cases[number]
        name = problem.solution[-1].split()[-1] if problem.family == "hop" else problem.subject
        return outputs(tmp_path / str(number), problem, [template.format(f=name, k=problem.key) for template in COMMANDS.values()])

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, range(len(cases))))
    for (family, problem), printed in zip(cases, results, strict=True):
        for tool, words in zip(COMMANDS, printed, strict=True):
            if tool == family:
                place = -1 if family == "read" else 0
                assert words[place] == problem.answer, (problem.prompt, words)
                assert words.count(problem.answer) == 1
            elif tool == "hop" and family in ("read", "last"):
                assert words[0] != problem.answer
                assert len(words) >= 3
            else:
                assert problem.answer not in words, (family, tool, words)


def test_no_single_command_on_the_named_file_solves_a_hop(tmp_path):
    rng = random.Random(6)
    for number in range(20):
        problem = problem_from(rng, "hop", WORDS, SIZES[Difficulty.EASY], "train")
        printed = outputs(tmp_path / str(number), problem, [t.format(f=problem.subject, k=problem.key) for t in COMMANDS.values()])
        assert all(problem.answer not in words for words in printed)
        assert len(problem.solution) == 2


@pytest.mark.parametrize("difficulty", list(Difficulty))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_solution_prints_the_answer(tmp_path, family, difficulty):
    rng = random.Random(7)
    for number in range(4):
        problem = problem_from(rng, family, WORDS, SIZES[difficulty], "train")
        assert 1 <= len(problem.solution) <= 4
        printed = outputs(tmp_path / str(number), problem, problem.solution)
        wanted = problem.answer if problem.answer is not None else problem.expected_result
        assert wanted in printed[-1]
        if problem.expected_result is not None:
            assert (tmp_path / str(number) / problem.result_file).read_text().strip() == problem.expected_result


@pytest.mark.parametrize("number", range(12))
def test_a_script_to_fix_is_wrong_on_every_hidden_input_and_right_when_mended(tmp_path, number):
    problem = problem_from(random.Random(number), "fix", WORDS, SIZES[Difficulty.EASY], "train")
    script = tmp_path / "script.sh"
    data = tmp_path / "data.txt"
    for solved in (False, True):
        script.write_text(problem.solution[1].split("<<'END'\n")[1].removesuffix("END") if solved else problem.files[problem.result_file])
        for run in problem.hidden_runs:
            data.write_text(run.input)
            done = subprocess.run(["bash", str(script), str(data)], stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
            assert (done.stdout.decode().strip() == run.expected) is solved


def test_a_word_to_find_is_in_one_file_only():
    for number in range(100):
        problem = problem_from(random.Random(number), "find", WORDS, SIZES[Difficulty.EASY], "train")
        assert [name for name, text in problem.files.items() if problem.key in text] == [problem.answer]


def test_easy_folders_have_the_measured_shape():
    rng = random.Random(8)
    for family, _ in itertools.product(DEMO_FAMILIES, range(50)):
        problem = problem_from(rng, family, WORDS, SIZES[Difficulty.EASY], "train")
        assert 6 <= len(problem.files) <= 9
        assert all(name.endswith(".txt") for name in problem.files)
        assert all(2 <= text.count("\n") <= 5 and text.endswith("\n") for text in problem.files.values())
        assert len(problem.prompt.split()) <= 13
