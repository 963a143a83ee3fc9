"""Field cases D: rewards and graders, on real sandboxes and real grading processes."""

import asyncio
import os
import textwrap
import threading

import pytest

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments import registry
from sandmill.environments.builtin.shell import ShellEnvironment
from sandmill.environments.grading import grade_episode
from sandmill.environments.health import ALL_ZERO_AFTER, NEVER_CALLED_AFTER, GraderHealth
from sandmill.environments.splits import check_splits
from sandmill.environments.task import (
    AgentLimited,
    Boundary,
    Command,
    Graded,
    InfrastructureFailure,
    Limit,
    NoAnswer,
    Submission,
    Task,
    reward_of,
)
from sandmill.errors import ConfigError
from sandmill.sandboxes import Sandbox, loop

WORKED = Command(script="true", exit_code=0, output="")


def on_loop(work):
    """Where episodes live: the sandbox event loop, which is not on the main thread."""
    return asyncio.run_coroutine_threadsafe(work, loop()).result(120)


def shell(family):
    return ShellEnvironment(EnvironmentSection(name="shell@1.0.0", train_tasks=8, held_out_tasks=8, options={"families": [family]}))


def play(environment, task, scripts, *, answer=None, limit=None, timeout_s=30.0):
    """An episode that runs the scripts in a real sandbox, then is graded; the verdict."""

    async def main():
        sandbox = await Sandbox.create.aio(memory="128Mi", disk="16Mi")
        try:
            for name, content in environment.files(task).items():
                await sandbox.write.aio(name, content)
            commands = []
            for script in scripts:
                done = await sandbox.run.aio("bash", "-c", script, timeout=10.0, max_output=4000, merge_stderr=True)
                commands.append(Command(script=script, exit_code=done.exit_code, output=done.stdout.decode("utf-8", "replace")))
            submission = Submission(answer=answer, commands=tuple(commands), limit=limit)
            return await grade_episode(environment, task, submission, sandbox, timeout_s=timeout_s)
        finally:
            await sandbox.terminate.aio()

    return on_loop(main())


def own(folder, grade):
    """A user's environment in a file; `grade` sees `task`, `submission`, `artifacts`."""
    path = folder / "own.py"
    path.write_text(
        textwrap.dedent(
            """
            import asyncio, os, signal, time
            from sandmill.environments.task import *
            from sandmill.sandboxes import SandboxSpec

            class Own:
                name, version, digest = "own", "0.1.0", "d1"
                sandbox = SandboxSpec()
                splits = {
                    "train": [Task(id="a", prompt="2+2?", identity="a")],
                    "heldout": [Task(id="b", prompt="3+3?", identity="b")],
                }

                def files(self, task):
                    return {"answer.txt": b"none yet"}

                async def prepare(self, task, sandbox):
                    pass

                async def collect(self, task, sandbox):
                    return {"answer.txt": await sandbox.read.aio("answer.txt")}

                async def grade(self, task, submission, artifacts):
            """
        )
        + textwrap.indent(textwrap.dedent(grade).strip(), "        ")
        + "\n\nenvironment = Own()\n"
    )
    return registry.get(f"{path}:environment")


def grade_alone(environment, answers, timeout_s=2.0):
    async def main():
        task = environment.splits["train"][0]
        try:
            return [await grade_episode(environment, task, Submission(answer=answer), None, timeout_s=timeout_s) for answer in answers]
        finally:
            await environment.close()

    return on_loop(main())


@pytest.mark.case(40)
def test_stella_3264_a_grader_that_runs_out_of_time_is_ungraded_and_not_zero(tmp_path):
    (verdict,) = grade_alone(own(tmp_path, "await asyncio.sleep(3600)"), ["4"], timeout_s=0.5)
    assert isinstance(verdict, InfrastructureFailure)
    assert verdict.boundary is Boundary.GRADER
    assert reward_of(verdict) is None


@pytest.mark.case(40)
@pytest.mark.parametrize("limit", list(Limit))
def test_marin_8947_an_agent_that_ran_out_is_graded_on_what_it_left(limit):
    environment = shell("write")
    task = environment.splits["train"][0]
    verdict = play(environment, task, environment.solution(task), limit=limit)
    assert verdict == AgentLimited(limit=limit, reward=1.1, passed=True, parts={"solved": 1.0, "worked": 0.1})


@pytest.mark.case(41)
def test_verl_5635_a_grader_with_a_signal_timeout_works_although_episodes_run_off_the_main_thread(tmp_path):
    environment = own(
        tmp_path,
        """
        def late(*_):
            raise TimeoutError("too slow to parse")
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            if submission.answer == "slow":
                time.sleep(3600)
        except TimeoutError:
            return Graded(reward=0.0, passed=False)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return Graded(reward=1.0, passed=True)
        """,
    )

    async def which_thread():
        return threading.current_thread()

    assert on_loop(which_thread()) is not threading.main_thread()
    assert grade_alone(environment, ["slow", "4"], timeout_s=10.0) == [Graded(reward=0.0, passed=False), Graded(reward=1.0, passed=True)]


@pytest.mark.case(41)
def test_trl_5281_every_answer_scored_zero_raises_an_alarm():
    health = GraderHealth()
    for _ in range(ALL_ZERO_AFTER):
        health.record(Graded(reward=0.0, passed=False), called=True)
    assert "rewards so far are exactly 0" in health.alarm()


@pytest.mark.case(42)
def test_areal_1426_pathological_answers_do_not_pin_the_graders(tmp_path):
    """More hanging answers than there are graders, then sound ones: all of those are graded, and the processes are gone."""
    environment = own(
        tmp_path,
        """
        while submission.answer == "9**9**9":
            pass
        return Graded(reward=1.0, passed=True, parts={"pid": float(os.getpid())})
        """,
    )

    async def main():
        task = environment.splits["train"][0]
        try:
            answers = ["9**9**9"] * 3 + ["4"] * 3
            calls = [grade_episode(environment, task, Submission(answer=answer), None, timeout_s=1.0) for answer in answers]
            return await asyncio.gather(*calls)
        finally:
            await environment.close()

    verdicts = on_loop(main())
    assert [type(verdict) for verdict in verdicts] == [InfrastructureFailure] * 3 + [Graded] * 3
    assert not any(os.path.exists(f"/proc/{int(verdict.parts['pid'])}") for verdict in verdicts[3:])


@pytest.mark.case(43)
def test_pier_51_a_score_file_that_the_agent_writes_is_not_believed():
    environment = shell("write")
    task = environment.splits["train"][0]
    places = "/tmp/logs/verifier/reward.txt logs/verifier/reward.txt reward.txt reward.json"
    forgery = f"mkdir -p /tmp/logs/verifier logs/verifier; echo 1 | tee {places}"
    verdict = play(environment, task, [forgery])
    assert not verdict.passed


@pytest.mark.case(43)
def test_verifiers_2152_a_background_writer_is_dead_before_the_files_are_read(tmp_path):
    """The agent leaves a process that would put the right thing into the file while its turn is long over."""
    environment = own(
        tmp_path,
        """
        return Graded(reward=float(artifacts["answer.txt"] == b"good"), passed=False)
        """,
    )
    collect = environment._inner.collect

    async def late(task, sandbox):
        await asyncio.sleep(1.0)
        return await collect(task, sandbox)

    environment._inner.collect = late
    writer = "nohup setsid bash -c 'sleep 0.5; printf good > answer.txt' > /dev/null 2>&1 & printf bad > answer.txt"

    async def closed():
        await environment.close()

    try:
        assert play(environment, environment.splits["train"][0], [writer]) == Graded(reward=0.0, passed=False)
    finally:
        on_loop(closed())


CHEATS = {
    "exit 0": "exit 0\n",
    "killed parent": "kill -9 $PPID\n",
    "success on standard error": "echo 1 passed >&2; exit 0\n",
    "an answer seen before": "echo {answer}\n",
    "search for the answers": "grep -rhs . / --include='*expected*' --include='*answer*' 2>/dev/null | head -n 1\n",
    "hang": "sleep 3600\n",
    "flood": "yes\n",
}


@pytest.mark.case(44)
@pytest.mark.parametrize("cheat", CHEATS)
def test_codewars_321_a_script_that_ends_well_without_doing_the_work_does_not_pass(cheat):
    environment = shell("fix")
    task = environment.splits["train"][0]
    answer = environment.expected_answer(task)
    script = next(name for name in environment.files(task) if name.endswith(".sh"))
    body = CHEATS[cheat].replace("{answer}", answer)
    verdict = play(environment, task, [f"cat > {script} <<'END'\n{body}END"], answer=answer)
    assert verdict == Graded(reward=0.1, passed=False, parts={"solved": 0.0, "worked": 0.1})


@pytest.mark.case(44)
def test_codewars_321_the_mended_script_does_pass():
    environment = shell("fix")
    for task in environment.splits["train"][:3]:
        verdict = play(environment, task, environment.solution(task), answer=environment.expected_answer(task))
        assert verdict == Graded(reward=1.1, passed=True, parts={"solved": 1.0, "worked": 0.1})


@pytest.mark.case(47)
@pytest.mark.parametrize(
    "content", [b"a\r\nb\r\n", b"no newline at the end", b"\xff\xfe\x00\x80", b"\n\n", b"--- a\r\n+++ b\n\\ No newline"]
)
def test_mini_swe_agent_410_resulting_files_are_the_same_bytes_end_to_end(tmp_path, content):
    environment = own(tmp_path, f"return Graded(reward=float(artifacts['answer.txt'] == {content!r}), passed=True)")
    octal = "".join(f"\\{byte:03o}" for byte in content)

    async def closed():
        await environment.close()

    try:
        assert play(environment, environment.splits["train"][0], [f"printf '{octal}' > answer.txt"]) == Graded(reward=1.0, passed=True)
    finally:
        on_loop(closed())


@pytest.mark.case(48)
def test_mini_swe_agent_938_noise_around_a_submission_does_not_lose_it():
    """The submission is a file or the final answer, never a line of output: printing before and after changes nothing."""
    environment = shell("write")
    task = environment.splits["train"][0]
    noisy = [f"echo 'bash: warning: setlocale'; {script}; echo COMPLETE_TASK; echo more" for script in environment.solution(task)]
    assert play(environment, task, noisy) == Graded(reward=1.1, passed=True, parts={"solved": 1.0, "worked": 0.1})


@pytest.mark.case(49)
def test_tinker_cookbook_688_a_grader_that_is_never_called_is_an_error():
    health = GraderHealth()
    for _ in range(NEVER_CALLED_AFTER):
        health.record(InfrastructureFailure(boundary=Boundary.EXEC, reason="x", retryable=True), called=False)
    assert health.calls == 0
    assert "the grader was never called" in health.broken()


@pytest.mark.case(49)
def test_tinker_cookbook_688_an_episode_without_an_answer_reaches_the_grader():
    environment = shell("read")
    health = GraderHealth()

    async def main():
        return await grade_episode(environment, environment.splits["train"][0], Submission(answer=None), None, health=health)

    assert on_loop(main()) == NoAnswer(reward=0.0)
    assert health.calls == 1


@pytest.mark.case(51)
@pytest.mark.parametrize("field", ["prompt", "id", "identity"])
def test_rllm_2_a_missing_field_of_any_split_is_named_at_load(field):
    good = Task(id="a", prompt="?", identity="a")
    bad = Task(**{"id": "b", "prompt": "?", "identity": "b"} | {field: None})
    with pytest.raises(
        ConfigError, match=rf"environment e@1\.0\.0, split validation, task 1: {field} must be a non-empty string, found None"
    ):
        check_splits({"train": [good], "heldout": [], "validation": [Task(id="c", prompt="?", identity="c"), bad]}, "e@1.0.0")


@pytest.mark.case(51)
def test_verl_758_a_row_that_is_no_task_is_named_at_load():
    with pytest.raises(ConfigError, match="split heldout, task 0: expected a Task, found dict"):
        check_splits({"train": [], "heldout": [{"question": "?"}]}, "e@1.0.0")
