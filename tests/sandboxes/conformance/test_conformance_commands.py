"""Commands behave the same at every backend: outcomes, bytes, limits, signals, and what is killed with them."""

from __future__ import annotations

import asyncio
import errno
import threading
import time

import pytest

from sandmill.errors import ConfigError, ExecFailed, ExecTimeout
from sandmill.sandboxes import PIPE, Sandbox, block_on

ALL_BYTES = bytes(range(256))
HOSTILE = ("", " ", "'", '"', "$(id)", "a\nb", "-n", "--", "ü", "\\", "*", "%s", "a\tb")
TREE = (
    "trap '' TERM HUP INT; (setsid sh -c 'trap \"\" TERM; exec sleep {0}' &) ; (sh -c 'sleep {0} & sleep {0}' &) ; echo started; sleep {0}"
)


def running(box: Sandbox, marker: str) -> int:
    """How many processes in it have this argument."""
    script = 'n=0; for f in /proc/[0-9]*/cmdline; do grep -qz "^$1$" "$f" 2>/dev/null && n=$((n+1)); done; echo $n'
    return int(box.run("sh", "-c", script, "sh", marker).stdout) - 1  # the counting shell itself has it too


def test_exit_codes_and_both_streams(box: Sandbox) -> None:
    done = box.run("sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.exit_code, done.signal, done.stdout, done.stderr, done.truncated, done.timed_out) == (
        7,
        None,
        b"out\n",
        b"err\n",
        False,
        False,
    )
    process = box.exec("sh", "-c", "echo out; echo err >&2; exit 8")
    assert (process.stdout.read(), process.stderr.read(), process.wait(), process.returncode) == ("out\n", "err\n", 8, 8)


def test_a_signal_is_no_exit_code(box: Sandbox) -> None:
    killed = box.run("sh", "-c", "kill -TERM $$")
    assert (killed.exit_code, killed.signal) == (None, 15)
    process = box.exec("sh", "-c", "kill -KILL $$")
    assert process.wait() == -9
    assert process.signal == 9


def test_output_and_input_are_bytes(box: Sandbox) -> None:
    data = ALL_BYTES * 2048
    assert box.run("cat", stdin=data).stdout == data
    process = box.exec("cat", stdin=data, text=False)
    assert process.stdout.read() == data
    assert process.wait() == 0


def test_arguments_arrive_as_they_are(box: Sandbox) -> None:
    done = box.run("sh", "-c", 'printf "%s\\0" "$@"', "sh", *HOSTILE)
    assert done.stdout.decode().split("\0")[:-1] == list(HOSTILE)


def test_standard_input_is_closed_unless_asked_for(box: Sandbox) -> None:
    assert box.run("cat", timeout=20).exit_code == 0
    assert box.exec("cat").wait(timeout=20) == 0


def test_standard_input_is_a_pipe_when_asked_for(box: Sandbox) -> None:
    process = box.exec("sh", "-c", "read line; echo got $line; cat", stdin=PIPE)
    process.stdin.write("one\n")
    pieces = iter(process.stdout)
    assert next(pieces) == "got one\n"
    process.stdin.write("two")
    process.stdin.close()
    assert "".join(str(piece) for piece in pieces) == "two"
    assert process.wait() == 0


def test_a_command_need_not_read_its_input(box: Sandbox) -> None:
    assert box.run("true", stdin=b"x" * 300_000, timeout=30).exit_code == 0
    process = box.exec("sh", "-c", "exec <&-; sleep 2", stdin=PIPE)
    with pytest.raises(BrokenPipeError):
        process.stdin.write(b"x" * 10_000_000)
    process.kill()


def test_output_beyond_the_limit_is_dropped_and_said_to_be(box: Sandbox) -> None:
    done = box.run("sh", "-c", "head -c 300000 /dev/zero; echo e >&2", max_output=1000)
    assert (len(done.stdout), done.stderr, done.truncated, done.exit_code) == (1000, b"e\n", True, 0)
    process = box.exec("head", "-c", "300000", "/dev/zero", max_output=1000, text=False)
    assert process.wait() == 0
    assert process.truncated
    assert len(process.stdout.read()) == 1000


def test_merged_streams_keep_their_order(box: Sandbox) -> None:
    assert box.run("sh", "-c", "echo a; echo b >&2; echo c", merge_stderr=True).stdout == b"a\nb\nc\n"


def test_a_timeout_keeps_the_output_and_kills_the_whole_tree(box: Sandbox) -> None:
    other = box.exec("sh", "-c", "sleep 2; echo lives")
    process = box.exec("sh", "-c", TREE.format(4712), timeout=1.5)
    done = box.run("sh", "-c", TREE.format(4711), timeout=1.5)
    assert (done.exit_code, done.signal, done.timed_out, done.stdout) == (None, 9, True, b"started\n")
    assert (process.wait(), process.timed_out, process.stdout.read()) == (-9, True, "started\n")
    assert running(box, "4711") == running(box, "4712") == 0
    assert (other.stdout.read(), other.wait()) == ("lives\n", 0)


def test_a_child_in_the_background_holds_nothing_up(box: Sandbox) -> None:
    began = time.monotonic()
    assert box.run("sh", "-c", "sleep 4713 & echo done").stdout == b"done\n"
    process = box.exec("sh", "-c", "sleep 4713 & echo done")
    assert process.wait() == 0
    assert process.stdout.read() == "done\n"
    assert time.monotonic() - began < 20
    assert running(box, "4713") == 2


def test_killing_signalling_and_waiting(box: Sandbox) -> None:
    process = box.exec("sh", "-c", "trap 'echo caught; exit 5' USR1; echo ready; while :; do sleep 0.1; done")
    assert next(iter(process.stdout)) == "ready\n"
    with pytest.raises(ExecTimeout):
        process.wait(timeout=0.1)
    process.send_signal(10)
    assert process.wait(timeout=20) == 5
    assert process.stdout.read() == "caught\n"
    sleeper = box.exec("sh", "-c", TREE.format(4714))
    sleeper.kill()
    sleeper.kill()
    assert sleeper.returncode == -9
    assert running(box, "4714") == 0


def test_killing_all_processes_leaves_the_files(box: Sandbox) -> None:
    box.run("sh", "-c", "sleep 4715 & echo kept > kept")
    box.kill_processes()
    assert running(box, "4715") == 0
    assert box.read("kept") == b"kept\n"


def test_a_command_that_cannot_start_says_why_and_nothing_ran(box: Sandbox) -> None:
    for start in (box.run, box.exec):
        for number, argv, workdir in (
            (errno.ENOENT, ("no-such-program",), None),
            (errno.EACCES, ("/etc/passwd",), None),
            (errno.ENOENT, ("true",), "/nowhere"),
            (errno.EINVAL, ("echo", "a\0b"), None),
        ):
            with pytest.raises(ExecFailed) as failed:
                start(*argv, workdir=workdir)
            assert failed.value.errno == number


def test_environment_workdir_and_user(box: Sandbox) -> None:
    assert (
        box.run("sh", "-c", "echo $GREETING $OTHER; pwd", env={"OTHER": "x=y"}, workdir="given").stdout == b"hello x=y\n/workspace/given\n"
    )
    assert box.run("sh", "-c", "id -u; echo $HOME", env={"HOME": "/other"}).stdout == b"1000\n/other\n"
    assert box.run("id", "-u", user="root").stdout == b"0\n"
    with pytest.raises(ConfigError, match="user"):
        box.run("true", user="nobody-knows")
    with pytest.raises(ConfigError, match="environment variable"):
        box.exec("true", env={"A=B": "c"})


def test_rights_cannot_be_won(box: Sandbox) -> None:
    status = box.run("cat", "/proc/self/status").stdout.decode()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
    assert box.run("sh", "-c", "cp /bin/sh s && chmod 4755 s", user="root", workdir="/tmp").exit_code == 0
    assert box.run("sh", "-c", "/tmp/s -p -c 'id -u'").stdout == b"1000\n"
    assert box.run("sh", "-c", "kill -9 1 2 3 2>/dev/null; echo still here").stdout == b"still here\n"


def test_many_commands_at_once_do_not_mix(box: Sandbox) -> None:
    async def one(number: int) -> bool:
        done = await box.run.aio("sh", "-c", f"cat; printf {number}", stdin=b"%d " % number * 1000, timeout=60)
        process = await box.exec.aio("sh", "-c", f"printf {number}; exit {number}")
        streamed = await process.stdout.read.aio(), await process.wait.aio()
        return done.stdout == b"%d " % number * 1000 + b"%d" % number and streamed == (str(number), number)

    async def crowd() -> list[bool]:
        return list(await asyncio.gather(*(one(number) for number in range(1, 17))))

    assert all(block_on(crowd()))


def test_cancelling_kills_the_command(box: Sandbox) -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await box.run.aio("sh", "-c", TREE.format(4716))

    block_on(scenario())
    deadline = time.monotonic() + 10
    while running(box, "4716"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_threads_may_share_a_sandbox(box: Sandbox) -> None:
    answers: list[bytes] = []
    threads = [threading.Thread(target=lambda word=str(n): answers.append(box.run("echo", word).stdout)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(answers) == [b"%d\n" % n for n in range(6)]


def test_there_is_no_network(box: Sandbox) -> None:
    script = (
        "import socket\ntry: socket.create_connection(('1.1.1.1', 80), 3)\nexcept OSError as error: print('no', error.errno is not None)"
    )
    assert box.run("python3", "-c", script, timeout=30).stdout == b"no True\n"
