"""A worker answers with what the package says, and with a reason for everything that is no answer."""

import asyncio
import errno
import json
import re

import pytest
from package_files import adapter

from sandmill.environments.packages.loaded import Launch, LoadedPackage, Lost
from sandmill.environments.packages.protocol import Opened, Score, Step
from sandmill.errors import GraderFailed

GRADE = """
if answer == "hang":
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    while True:
        time.sleep(60)
if answer == "exit":
    sys.exit(3)
if answer == "die":
    os._exit(0)
if answer == "signal":
    os.kill(os.getpid(), signal.SIGSEGV)
if answer == "raise":
    raise KeyError("gold")
if answer == "print":
    print("x" * 1_000_000, flush=True)
    os.write(1, b"y" * 100_000)
    os.write(2, b"z" * 100_000)
    subprocess.run(["echo", "loud"], check=True)
if answer == "alarm":
    def rung(*args):
        raise TimeoutError("rung")
    signal.signal(signal.SIGALRM, rung)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    time.sleep(60)
if answer == "thread":
    found = []
    thread = threading.Thread(target=lambda: found.append(0.5))
    thread.start()
    thread.join()
    return found[0]
if answer == "loop":
    async def later():
        await asyncio.sleep(0)
        return 0.25
    return asyncio.run(later())
if answer == "coroutine":
    async def later():
        await asyncio.sleep(0)
        return 0.75
    return later()
if answer == "parts":
    return {"reward": 0.5, "parts": {"a": True, "b": 2}, "passed": True}
if answer == "fork":
    if os.fork() == 0:
        while True:
            time.sleep(60)
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    return 1
if answer == "forge":
    sockets = [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")]
    if os.fork() == 0:
        import struct
        for fd in sockets:
            try:
                os.write(fd, struct.pack(">IIBI", 15, 1, 11, 0) + b'{"reward":99.0}')
            except OSError:
                pass
        os._exit(0)
    os.wait()
    return 1
if answer == "remember":
    self.before = getattr(self, "before", 0) + 1
    open("left-behind", "x").close()
    return self.before
if answer == "large":
    return {"reward": 1.0, "parts": {"x" * (70 << 20): 1.0}}
return {"text": "1.0", "nan": float("nan"), "inf": float("inf"), "none": None, "list": [1.0], "empty": {}, "huge": 10**400}.get(answer, 1.0)
"""
SESSION = """
    async def open(self, row):
        self.count, self.lock = row["n"], asyncio.Lock()
        return {"prompt": f"start at {self.count}"}

    async def step(self, action):
        async with self.lock:
            if action == "hang":
                time.sleep(60)
            self.count += int(action)
        return {"observation": str(self.count), "done": self.count > 9, "reward": 1.0 if self.count > 9 else None}
"""


def with_package(work, source=None, **launch):
    """Runs `work(package)` with a loaded package, which is closed after it."""

    async def main():
        package = await LoadedPackage.start(Launch(adapter=source or adapter(GRADE, SESSION), **launch))
        try:
            return await work(package)
        finally:
            await package.close()
            await package.close()

    return asyncio.run(main())


def grade_all(answers, timeout_s=20.0):
    """Scores, or the errors in their place, one after the other."""

    async def work(package):
        (row,) = await package.tasks("train", 0, 1, timeout_s=20)
        found = []
        for answer in answers:
            try:
                found.append(await package.grade(row.row, answer, timeout_s=timeout_s))
            except (GraderFailed, TimeoutError) as error:
                found.append(error)
        return found

    return with_package(work)


def test_it_describes_itself_and_gives_its_tasks():
    async def work(package):
        return package.description, await package.tasks("heldout", 1, 3, timeout_s=20)

    description, rows = with_package(work)
    assert (description.name, description.splits) == ("small", {"train": 6, "heldout": 3})
    assert [(row.prompt, row.answer, json.loads(bytes(row.row))) for row in rows] == [
        ("heldout 1?", "1", {"n": 1}),
        ("heldout 2?", "2", {"n": 2}),
    ]


@pytest.mark.parametrize(("answer", "reward"), [("print", 1.0), ("thread", 0.5), ("loop", 0.25), ("coroutine", 0.75), (None, 1.0)])
def test_a_grader_may_print_and_use_threads_and_event_loops(answer, reward):
    assert grade_all([answer]) == [Score(reward=reward)]


def test_parts_are_numbers_and_truth_values_count_as_such():
    assert grade_all(["parts"]) == [Score(reward=0.5, parts={"a": 1.0, "b": 2.0}, passed=True)]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("exit", r"it called exit\(3\)"),
        ("die", r"its process ended \(exit code 0\) before it answered"),
        ("signal", r"its process ended \(signal 11\) before it answered"),
        ("raise", r"KeyError: 'gold' \(adapter.py, line \d+\)"),
        ("alarm", r"TimeoutError: rung"),
        ("text", r"the reward is '1.0' \(str\), not a finite number"),
        ("nan", r"the reward is nan \(float\), not a finite number"),
        ("inf", r"the reward is inf \(float\)"),
        ("none", r"the reward is None \(NoneType\)"),
        ("list", r"the reward is \[1.0\] \(list\)"),
        ("empty", r"the reward is missing from \{\}"),
        ("huge", r"not a finite number"),
        ("large", r"its answer has \d+ bytes and may have"),
    ],
)
def test_what_is_no_number_is_a_reason_and_the_next_call_is_graded(answer, reason):
    failed, after = grade_all([answer, "ok"])
    assert isinstance(failed, GraderFailed)
    assert re.search(reason, str(failed))
    assert after == Score(reward=1.0)


def test_a_grader_that_hangs_is_killed_at_its_deadline():
    async def work(package):
        (row,) = await package.tasks("train", 0, 1, timeout_s=20)
        with pytest.raises(TimeoutError, match=r"longer than 0.5 s"):
            await package.grade(row.row, "hang", timeout_s=0.5)
        return await package.grade(row.row, "ok", timeout_s=20), package.alive

    assert with_package(work) == (Score(reward=1.0), True)


def test_a_call_that_is_cancelled_is_killed():
    async def work(package):
        (row,) = await package.tasks("train", 0, 1, timeout_s=20)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await package.grade(row.row, "hang", timeout_s=600)
        await package.grade(row.row, "ok", timeout_s=20)
        return await processes(package)

    assert with_package(work) == 1


def test_nothing_that_a_call_did_is_left_for_the_next_one():
    assert grade_all(["remember", "remember"]) == [Score(reward=1.0), Score(reward=1.0)]


def test_what_a_call_started_ends_with_it():
    async def work(package):
        (row,) = await package.tasks("train", 0, 1, timeout_s=20)
        assert await package.grade(row.row, "fork", timeout_s=20) == Score(reward=1.0)
        return await processes(package)

    assert with_package(work) == 1


async def processes(package):
    """Of the user, in the package's sandbox."""
    done = await package._sandbox.run.aio(
        "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -c -e [p]ackages/worker.py -e ^sleep"
    )
    return int(done.stdout)


def test_what_a_grader_forks_cannot_answer_for_it():
    assert grade_all(["forge", "ok"]) == [Score(reward=1.0), Score(reward=1.0)]


def test_calls_run_at_once_and_each_gets_its_own_answer():
    source = adapter("time.sleep(0.2)\nreturn float(answer)")

    async def work(package):
        (row,) = await package.tasks("train", 0, 1, timeout_s=20)
        return await asyncio.gather(*(package.grade(row.row, str(number), timeout_s=60) for number in range(20)))

    assert [score.reward for score in with_package(work, source)] == list(range(20))


def test_a_session_remembers_and_ends_alone():
    async def work(package):
        first, second = package.session(), package.session()
        assert (await first.call("open", {"row": {"n": 4}}, Opened, timeout_s=20)).prompt == "start at 4"
        await second.call("open", {"row": {"n": 7}}, Opened, timeout_s=20)
        steps = [await one.call("step", {"action": "3"}, Step, timeout_s=20) for one in (first, second, first)]
        with pytest.raises(TimeoutError):
            await second.call("step", {"action": "hang"}, Step, timeout_s=0.5)
        steps.append(await first.call("step", {"action": "1"}, Step, timeout_s=20))
        await first.close()
        return steps

    found = with_package(work)
    assert [(step.observation, step.done, step.reward) for step in found] == [
        ("7", False, None),
        ("10", True, 1.0),
        ("10", True, 1.0),
        ("11", True, 1.0),
    ]


def test_a_seed_decides_what_the_process_draws():
    source = adapter("import random\nreturn random.random()")

    async def work(package):
        calls = [await package.once("grade", {"row": {}, "answer": "", "context": {}}, timeout_s=20, seed=seed) for seed in (1, 1, 2)]
        return calls[0] == calls[1], calls[0] == calls[2]

    assert with_package(work, source) == (True, False)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('no such thing')", "ImportError: no such thing"),
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        ("import sys; sys.exit('bye')", r"it called exit\('bye'\)"),
        ("import os; os._exit(5)", "it ended with exit code 5"),
        ("syntax error", "SyntaxError"),
        ("def load(options): return 1", "AttributeError"),
        ("class A:\n    def describe(self): return {'name': 1}\ndef load(options): return A()", "Expected `str`"),
        ("import time; time.sleep(600)", "longer than 2 s"),
    ],
)
def test_a_package_that_does_not_load_says_why(source, reason):
    async def main():
        await LoadedPackage.start(Launch(adapter=source, load_timeout_s=2.0))

    with pytest.raises((GraderFailed, TimeoutError), match=reason):
        asyncio.run(main())


@pytest.mark.parametrize("garbage", ["b'\\xff' * 64", "b''", "struct.pack('>IIBI', 0, 1, 99, 0)"])
def test_a_worker_that_speaks_out_of_turn_is_ended(garbage):
    source = adapter(
        "return 1",
        "import struct\nfor fd in range(3, 64):\n    try:\n        os.write(fd, GARBAGE)\n    except OSError:\n        pass\nos._exit(9)",
    )

    async def main():
        await LoadedPackage.start(Launch(adapter=source.replace("GARBAGE", garbage)))

    with pytest.raises(Lost):
        asyncio.run(main())


NOSY = """
def attempt(work):
    try:
        return f"did it: {work()}"
    except OSError as error:
        return type(error).__name__
if answer == "who":
    return float(os.getuid())
if answer == "kill":
    return 1.0 if attempt(lambda: os.kill(os.getppid(), signal.SIGKILL)) == "PermissionError" else 0.0
if answer == "memory":
    return 1.0 if attempt(lambda: open(f"/proc/{os.getppid()}/mem", "rb").read(1)) == "PermissionError" else 0.0
if answer == "leave":
    for place in ("/tmp/call", "/var/tmp/call", "/dev/shm/call"):
        open(place, "w").close()
    return 1.0
if answer == "find":
    return float(sum(os.path.exists(place) for place in ("/tmp/call", "/var/tmp/call", "/dev/shm/call")))
if answer == "neighbours":
    base = os.path.dirname(os.getcwd())
    return 1.0 if attempt(lambda: os.listdir(base)) == "PermissionError" else 0.0
if answer == "forks":
    made = 0
    try:
        while made < 1000:
            if os.fork() == 0:
                time.sleep(600)
            made += 1
    except OSError:
        pass
    return float(made < 100)
if answer == "close":
    os.closerange(3, 64)
    time.sleep(60)
if answer == "junk":
    import struct
    for fd in os.listdir("/proc/self/fd"):
        try:
            os.write(int(fd), struct.pack(">IIBI", 4, 1, 12, 0) + b"junk")
        except OSError:
            pass
    os._exit(0)
return 1.0
"""


def nosy(answers):
    async def work(package):
        (row,) = await package.tasks("train", 0, 1, timeout_s=20)
        found = []
        for answer in answers:
            try:
                found.append((await package.grade(row.row, answer, timeout_s=30)).reward)
            except GraderFailed as error:
                found.append(str(error))
        return found

    return with_package(work, adapter(NOSY))


def test_each_call_is_another_user_without_a_hold_on_the_worker():
    first, second, *others = nosy(["who", "who", "kill", "memory", "neighbours", "forks", "ok"])
    assert 20_000 <= first < second < 40_000
    assert others == [1.0] * 5


def test_files_that_a_call_left_where_all_may_write_are_removed():
    assert nosy(["leave", "find"]) == [1.0, 0.0]


def test_one_that_closes_its_channel_and_stays_is_a_failure_long_before_its_deadline():
    closed, after = nosy(["close", "ok"])
    assert closed == "its process closed its end before it answered"
    assert after == 1.0


def test_a_reason_that_is_none_is_a_failure_of_that_call_alone():
    failed, after = nosy(["junk", "ok"])
    assert "the reason for a failure is not what it should be" in failed
    assert after == 1.0


GREEDY = """
if answer == "memory":
    held = []
    while True:
        held.append(b"x" * (16 << 20))
if answer == "disk":
    for place in (".", "/tmp"):
        with open(f"{place}/fill", "wb") as file:
            try:
                while True:
                    file.write(b"x" * (1 << 20))
            except OSError as error:
                found = error.errno
    return found
with open("/tmp/some", "wb") as file:
    file.write(b"x" * (8 << 20))
return 1.0
"""


def test_one_that_takes_all_memory_or_disk_leaves_them_to_the_next():
    async def work(package):
        (row,) = await package.tasks("train", 0, 1, timeout_s=20)
        with pytest.raises(GraderFailed, match=r"ended \(signal 9\)"):
            await package.grade(row.row, "memory", timeout_s=60)
        full = await package.grade(row.row, "disk", timeout_s=60)
        return full.reward, (await package.grade(row.row, "ok", timeout_s=60)).reward, package.alive

    assert with_package(work, adapter(GREEDY), memory="512Mi", disk="32Mi") == (float(errno.ENOSPC), 1.0, True)
