"""The in-process evaluator prints what the real tools print."""

import itertools
import random
import subprocess

import pytest

from sandmill.environments.builtin.shell.evaluator import evaluate
from sandmill.environments.builtin.shell.families import COMMANDS, SIZES
from sandmill.environments.builtin.shell.generate import problem_from
from sandmill.environments.builtin.shell.options import DEMO_FAMILIES, Difficulty
from sandmill.environments.builtin.shell.words import WORDS

MARK = "<<ended with"


def real(folder, scripts):
    """Output and exit code of each script, from one real bash."""
    program = "\n".join(f'{script}\necho "{MARK} $?"' for script in scripts)
    done = subprocess.run(
        ["bash", "-c", program], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30
    )
    outcomes, output = [], ""
    for line in done.stdout.decode().splitlines(keepends=True):
        if line.startswith(MARK):
            outcomes.append((output, int(line.removeprefix(MARK))))
            output = ""
        else:
            output += line
    return outcomes


def test_equals_the_real_tools_on_hundreds_of_generated_cases(tmp_path):
    rng = random.Random(11)
    compared = 0
    for number, (family, _) in enumerate(itertools.product(DEMO_FAMILIES, range(6))):
        problem = problem_from(rng, family, WORDS, SIZES[Difficulty.EASY], "train")
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in problem.files.items():
            (folder / name).write_text(text)
        names = [problem.subject, rng.choice(list(problem.files)), "missing.txt"]
        scripts = sorted({template.format(f=name, k=problem.key) for template in COMMANDS.values() for name in names})
        for script, outcome in zip(scripts, real(folder, scripts), strict=True):
            assert tuple(evaluate(script, problem.files)) == outcome, script
            compared += 1
    assert compared > 400


def test_refuses_any_other_script():
    with pytest.raises(ValueError, match="rm -rf"):
        evaluate("rm -rf x", {})
