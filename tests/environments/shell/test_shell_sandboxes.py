"""The shell family in real sandboxes: reference solutions solve every family, and nothing hidden is ever in the agent's reach."""

import asyncio
import itertools

import pytest

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.builtin.shell import ShellEnvironment
from sandmill.environments.builtin.shell.options import FAMILIES, Difficulty
from sandmill.environments.grading import grade_episode
from sandmill.environments.task import Command, Graded, Submission
from sandmill.sandboxes import Sandbox, loop

SOLVED = Graded(reward=1.1, passed=True, parts={"solved": 1.0, "worked": 0.1})


def environment(**options):
    return ShellEnvironment(EnvironmentSection(name="shell@1.0.0", train_tasks=9, held_out_tasks=9, options=options))


async def episode(shell, task, scripts, answer):
    sandbox = await Sandbox.from_spec.aio(shell.sandbox, files=shell.files(task))
    try:
        await shell.prepare(task, sandbox)
        commands = []
        for script in scripts:
            done = await sandbox.run.aio("bash", "-c", script, timeout=20.0, merge_stderr=True)
            commands.append(Command(script=script, exit_code=done.exit_code, output=done.stdout.decode()))
        verdict = await grade_episode(shell, task, Submission(answer=answer, commands=tuple(commands)), sandbox)
        return verdict, commands
    finally:
        await sandbox.terminate.aio()


def run(work):
    return asyncio.run_coroutine_threadsafe(work, loop()).result(120)


@pytest.mark.parametrize("difficulty", list(Difficulty))
def test_reference_solutions_solve_every_family_and_the_last_command_prints_the_answer(difficulty):
    shell = environment(families=list(FAMILIES), difficulty=str(difficulty))
    tasks = [task for split in shell.splits.values() for task in split]
    assert {task.metadata["family"] for task in tasks} == set(FAMILIES)

    async def all_of_them():
        return [await episode(shell, task, shell.solution(task), shell.expected_answer(task)) for task in tasks]

    for task, (verdict, commands) in zip(tasks, run(all_of_them()), strict=True):
        assert verdict == SOLVED, (task, commands)
        answer = shell.expected_answer(task)
        assert answer is None or answer in commands[-1].output.split()
        assert len(commands) == int(task.metadata["commands"])


def test_the_agent_finds_neither_hidden_inputs_nor_answers():
    """Everything readable under the agent's sandbox, searched for each hidden input and for the expected result of a file."""
    shell = environment(families=["fix", "write"])
    for task in itertools.islice(shell.splits["train"], 4):
        problem = shell._by_id[task.id]
        hidden = [one.input.splitlines()[0] for one in problem.hidden_runs]
        given = problem.files[problem.subject].splitlines()[0]
        searches = [search([task.id, *hidden]), search([given])]
        _, (nothing, control) = run(episode(shell, task, searches, None))
        assert nothing.output == ""
        assert problem.subject in control.output


def search(texts):
    """A search of everything the sandbox can read."""
    patterns = " ".join(f"-e '{text}'" for text in texts)
    return f"grep -rlsF {patterns} / --exclude-dir=proc --exclude-dir=usr --exclude-dir=lib --exclude-dir=dev --exclude-dir=sys"


def test_a_script_that_hides_its_input_from_later_runs_gains_nothing():
    """Each hidden run has a sandbox of its own: what one leaves behind is not there for the next."""
    shell = environment(families=["fix"])
    task = shell.splits["train"][0]
    name = shell._by_id[task.id].result_file
    job = next(line for line in shell.solution(task)[1].splitlines() if '"$input"' in line)
    once = f"cat > {name} <<'END'\ninput=$1\nif [ -e /tmp/again ]; then echo again; else {job}; fi\ntouch /tmp/again\nEND"
    assert run(episode(shell, task, [once], shell.expected_answer(task)))[0] == SOLVED


@pytest.mark.parametrize(
    "result", ["head -c 70000 /dev/zero > {g}", "mkdir {g}", "ln -s /etc/passwd {g}", "mkfifo {g}", "echo > {g}", "echo 1e1 > {g}"]
)
def test_a_wrong_result_file_is_wrong_and_not_broken(result):
    shell = environment(families=["write"])
    task = shell.splits["train"][0]
    script = result.format(g=shell._by_id[task.id].result_file)
    verdict, _ = run(episode(shell, task, [script], "done"))
    assert isinstance(verdict, Graded)
    assert not verdict.passed
    assert verdict.parts["solved"] == 0.0
