"""The SDK as people use it: mission.md's calls, files, users, environment, both faces of every method."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from collections.abc import Callable

import pytest

from sandmill import Egress, Sandbox
from sandmill.errors import ConfigError, ExecFailed, ExecTimeout, SandboxFileError, SandboxGone
from sandmill.sandboxes import PIPE, SandboxSpec, block_on, list_sandboxes, loop, stop_sandbox

Maker = Callable[..., Sandbox]


def test_the_calls_of_the_guide_work_as_printed() -> None:
    sb = Sandbox.create(cpu=1, memory="2Gi", idle_timeout="5m", max_cost=1)
    with sb.open("script.sh", "w") as file:
        file.write("echo from a file\n")
    process = sb.exec("bash", "-c", "sh script.sh")
    assert process.stdout.read() == "from a file\n"
    assert process.wait() == 0
    sb.terminate()
    with Sandbox.create(network=Egress.deny()) as sb:
        assert sb.run("true").exit_code == 0


def test_the_same_calls_can_be_awaited_from_any_loop() -> None:
    async def scenario() -> bytes:
        async with await Sandbox.create.aio(memory="64Mi", disk="8Mi", files={"in": b"data"}) as box:
            process = await box.exec.aio("cat", "in")
            assert await process.stdout.read.aio() == "data"
            assert await process.wait.aio() == 0
            pieces = [piece async for piece in (await box.exec.aio("echo", "x")).stdout]
            assert pieces == ["x\n"]
            return (await box.run.aio("cat", "in")).stdout

    assert asyncio.run(scenario()) == b"data"  # a loop of the caller's own
    assert block_on(scenario()) == b"data"  # the sandbox loop


def test_blocking_on_the_sandbox_loop_is_refused_instead_of_hanging(box: Sandbox) -> None:
    async def mistake() -> None:
        box.run("true")

    with pytest.raises(RuntimeError, match=r"use its \.aio form"):
        asyncio.run_coroutine_threadsafe(mistake(), loop()).result(10)


def test_exit_codes_signals_and_usage(box: Sandbox) -> None:
    done = box.run("sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.exit_code, done.signal, done.stdout, done.stderr) == (7, None, b"out\n", b"err\n")
    killed = box.run("sh", "-c", "kill -TERM $$")
    assert (killed.exit_code, killed.signal) == (None, 15)
    process = box.exec("sh", "-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; exit 3")
    assert process.returncode is None
    assert process.wait() == 3
    assert process.usage is not None
    assert process.usage.user_s > 0
    assert process.usage.max_rss_bytes > 1 << 19
    assert 0 < process.usage.duration_s < 60
    assert box.run("sh", "-c", "echo a; echo b >&2", merge_stderr=True).stdout == b"a\nb\n"


def test_a_command_that_cannot_start_says_why_and_nothing_ran(box: Sandbox) -> None:
    for start in (box.run, box.exec):
        with pytest.raises(ExecFailed) as missing:
            start("no-such-program")
        assert missing.value.errno == errno.ENOENT
        with pytest.raises(ExecFailed) as forbidden:
            start("/etc/passwd")
        assert forbidden.value.errno == errno.EACCES
        with pytest.raises(ExecFailed) as nowhere:
            start("true", workdir="/nowhere")
        assert nowhere.value.errno == errno.ENOENT
        with pytest.raises(ExecFailed) as long:
            start("echo", "x" * 200_000)
        assert long.value.errno == errno.E2BIG
        with pytest.raises(ExecFailed):
            start("echo", "nul\0")
        with pytest.raises(ExecFailed):
            start()
    assert box.run("echo", "x" * 100_000).stdout == b"x" * 100_000 + b"\n"


def test_environment_workdir_and_user(make: Maker) -> None:
    box = make(env={"MINE": "from the spec", "BOTH": "spec"}, workdir="/home/user/project/deep")
    script = "echo $MINE,$BOTH,$EXTRA; pwd; id -un; echo $HOME"
    assert box.run("sh", "-c", script, env={"BOTH": "call", "EXTRA": "ä"}).stdout.decode().splitlines() == [
        "from the spec,call,ä",
        "/home/user/project/deep",
        "user",
        "/home/user",
    ]
    assert box.run("sh", "-c", script, user="root", workdir="/").stdout.decode().splitlines()[1:] == ["/", "root", "/root"]
    assert box.run("env").stdout.count(b"\n") == 8  # nothing of the host's environment
    assert b"SECRET" not in box.run("env").stdout
    with pytest.raises(ConfigError, match="user must be"):
        box.run("id", user="nobody")
    with pytest.raises(ConfigError, match="environment variable"):
        box.run("env", env={"A=B": "x"})


def test_a_deleted_workdir_does_not_strand_the_agent(box: Sandbox) -> None:
    box.run("rmdir", "/workspace", user="root")
    assert box.run("pwd").stdout == b"/\n"


def test_stdin_as_bytes_as_a_pipe_and_closed(box: Sandbox) -> None:
    big = os.urandom(500_000)
    assert box.run("cat", stdin=big).stdout == big
    assert box.exec("cat", stdin=big, text=False).stdout.read() == big
    assert box.exec("cat", stdin="pipe").stdout.read() == "pipe"
    assert box.run("head", "-c", "3", stdin=big).stdout == big[:3]  # a command may stop reading
    assert box.run("cat").stdout == b""
    process = box.exec("sort", stdin=PIPE)
    process.stdin.write("b\n")
    process.stdin.write(b"a\n")
    process.stdin.close()
    assert process.stdout.read() == "a\nb\n"
    with pytest.raises(BrokenPipeError):
        process.stdin.write("late")


def test_signals_kill_and_wait_with_a_deadline(box: Sandbox) -> None:
    process = box.exec("bash", "-c", "trap 'echo caught; exit 4' INT; echo ready; while :; do sleep 0.01; done")
    assert next(iter(process.stdout)) == "ready\n"
    with pytest.raises(ExecTimeout, match="still runs"):
        process.wait(timeout=0.05)
    process.send_signal(2)
    assert process.wait(timeout=5) == 4
    assert process.stdout.read() == "caught\n"
    sleeper = box.exec("sleep", "60")
    sleeper.kill()
    sleeper.kill()
    assert (sleeper.returncode, sleeper.signal) == (-9, 9)


def test_a_terminal_is_a_terminal(box: Sandbox) -> None:
    process = box.exec("bash", "-c", "test -t 0 && test -t 1 && tty; stty -echo; read x; echo got $x", tty=True)
    process.stdin.write("line\n")
    assert process.wait(timeout=5) == 0
    text = process.stdout.read()
    assert isinstance(text, str)
    assert "/dev/pts/" in text
    assert "got line" in text


def test_files_in_every_mode(box: Sandbox) -> None:
    with box.open("deep/er/text", "w") as file:
        file.write("zeile ä\n")
    with box.open("deep/er/text", "a") as file:
        file.write("more\n")
    with box.open("deep/er/text") as file:
        assert file.read() == "zeile ä\nmore\n"
    with box.open("deep/er/text", "rb") as file:
        assert file.readline() == "zeile ä\n".encode()
    with box.open("deep/er/text", "r+") as file:
        file.write("ZEILE")
    assert box.read("/workspace/deep/er/text").startswith(b"ZEILE")
    with pytest.raises(SandboxFileError) as exists:
        box.open("deep/er/text", "x")
    assert exists.value.errno == errno.EEXIST
    with pytest.raises(ValueError, match="no such file mode"):
        box.open("f", "rw")
    with pytest.raises(SandboxFileError) as missing:
        box.read("absent")
    assert missing.value.errno == errno.ENOENT
    assert "absent" in str(missing.value)
    with pytest.raises(SandboxFileError) as long:
        box.read("deep/er/text", max_bytes=4)
    assert long.value.errno == errno.EFBIG
    box.write("odd", b"\xff")
    with box.open("odd") as file:
        assert file.read() == "\ufffd"


def test_many_files_travel_in_one_message(box: Sandbox) -> None:
    files = {f"d{number % 7}/f{number}": os.urandom(number * 37 % 5000) for number in range(300)}
    box.write_files(files)
    assert {name: box.read(name) for name in list(files)[::29]} == {name: files[name] for name in list(files)[::29]}
    assert box.run("sh", "-c", "find . -type f | wc -l").stdout == b"300\n"
    with pytest.raises(SandboxFileError) as refused:
        box.write_files({"ok": b"1", "/etc/passwd": b"2", "never": b"3"})
    assert refused.value.errno == errno.EACCES
    assert "/etc/passwd" in str(refused.value)


def test_files_given_at_creation_belong_to_the_user(make: Maker) -> None:
    box = make(files={"a": b"1", "b/c": b"22", "/home/user/.rc": b"3", "big": b"x" * 200_000})
    entries = {(entry.name, entry.kind, entry.size_bytes) for entry in box.list()}
    assert {("a", "file", 1), ("big", "file", 200_000)} < entries
    assert {entry.kind for entry in box.list() if entry.name == "b"} == {"folder"}
    assert box.run("sh", "-c", "echo more >> a && stat -c %U:%a a b b/c").stdout == b"user:644\nuser:755\nuser:644\n"
    assert box.read("/home/user/.rc") == b"3"


def test_listing_making_and_removing(box: Sandbox) -> None:
    box.mkdir("x/y")
    box.write("x/f", b"1")
    box.run("ln", "-s", "nowhere", "x/l")
    assert [(entry.name, entry.kind) for entry in box.list("x")] == [("f", "file"), ("l", "link"), ("y", "folder")]
    with pytest.raises(SandboxFileError):
        box.mkdir("x/y")
    with pytest.raises(SandboxFileError) as full:
        box.remove("x")
    assert full.value.errno == errno.ENOTEMPTY
    box.remove("x/l")
    box.remove("x/y")
    box.remove("x", recursive=True)
    assert box.list() == []
    with pytest.raises(SandboxFileError):
        box.remove("x")
    with pytest.raises(SandboxFileError):
        box.read("nul\0")


def test_kill_processes_leaves_files_and_the_sandbox(box: Sandbox) -> None:
    box.run("bash", "-c", "(setsid bash -c 'while :; do date +%N > beat; sleep 0.01; done' &) ; sleep 0.1")
    running = box.exec("sleep", "60")
    box.kill_processes()
    assert running.wait(timeout=5) == -9
    first = box.read("beat")
    time.sleep(0.1)
    assert box.read("beat") == first
    count = "import os; print(sorted(int(name) for name in os.listdir('/proc') if name.isdigit()) == [1, os.getpid()])"
    assert box.run("python3", "-c", count).stdout == b"True\n"


def test_a_sandbox_ends_when_idle_but_not_under_a_command(make: Maker) -> None:
    box = make(idle_timeout=0.3)
    assert box.run("sleep", "0.7").exit_code == 0
    time.sleep(0.8)
    with pytest.raises(SandboxGone, match=r"it was idle for 0\.3 s"):
        box.run("true")
    assert not box.alive


def test_the_dollar_cap_ends_it_and_the_output_is_kept(make: Maker) -> None:
    box = make(max_cost="0.000400", price_per_hour="3.6")  # 400 micro-dollars at 1000 a second
    process = box.exec("bash", "-c", "echo so far; sleep 60")
    done = box.run("bash", "-c", "echo kept; sleep 60")
    assert (done.stdout, done.gone) == (b"kept\n", "its cost reached the cap of $0.0004")
    with pytest.raises(SandboxGone, match="cost reached the cap"):
        box.run("true")
    assert process.stdout.read() == "so far\n"


def test_termination_is_idempotent_and_survives_cancellation() -> None:
    async def scenario() -> tuple[bool, int]:
        box = await Sandbox.create.aio(memory="64Mi", disk="8Mi")
        ending = asyncio.ensure_future(box.terminate.aio())
        await asyncio.sleep(0)
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        await box.terminate.aio()
        await box.terminate.aio()
        return box.alive, len([record for record in await asyncio.to_thread(list_sandboxes) if record.id == box.id])

    assert asyncio.run(scenario()) == (False, 0)


def test_a_cancelled_run_kills_its_command(box: Sandbox) -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await box.run.aio("sleep", "61")

    block_on(scenario())
    deadline = time.monotonic() + 5
    while b"sleep 61" in box.run("ps", "-eo", "args=").stdout:
        assert time.monotonic() < deadline


def test_a_cancelled_creation_leaves_nothing() -> None:
    async def scenario() -> None:
        for delay in (step * 0.0001 for step in range(60)):
            creating = asyncio.ensure_future(Sandbox.create.aio(memory="64Mi", disk="8Mi", name="half-born"))
            await asyncio.sleep(delay)
            creating.cancel()
            result = (await asyncio.gather(creating, return_exceptions=True))[0]
            if isinstance(result, Sandbox):
                await result.terminate.aio()

    block_on(scenario())
    assert not [record for record in list_sandboxes() if record.name == "half-born"]


def test_concurrent_commands_in_one_sandbox_do_not_mix(box: Sandbox) -> None:
    async def scenario() -> list[bytes]:
        runs = (
            box.run.aio("bash", "-c", f"sleep 0.0{number % 7}; head -c 70000 /dev/zero | tr '\\0' {number % 10}") for number in range(30)
        )
        return [done.stdout for done in await asyncio.gather(*runs)]

    assert block_on(scenario()) == [str(number % 10).encode() * 70_000 for number in range(30)]


def test_listing_and_stopping_by_name_and_id(make: Maker) -> None:
    one, two = make(name="pair", labels={"n": "1"}), make(name="pair")
    records = [record for record in list_sandboxes() if record.name == "pair"]
    assert [record.id for record in records] == [one.id, two.id]
    assert (records[0].owner_pid, records[0].labels, records[0].memory_bytes) == (os.getpid(), {"n": "1"}, 256 << 20)
    assert [record.id for record in stop_sandbox(two.id)] == [two.id]
    with pytest.raises(SandboxGone, match="stopped by another process"):
        two.ping()
    one.ping()
    with pytest.raises(SandboxGone, match="no live sandbox has this name or id"):
        stop_sandbox("nobody")


def test_limits_are_checked_before_anything_starts() -> None:
    for options, sentence in (
        ({"memory": "lots"}, "is not a size"),
        ({"memory": "1Mi"}, "memory must be at least"),
        ({"cpu": 0}, "cpu"),
        ({"timeout": "soon"}, "is not a duration"),
        ({"idle_timeout": 0}, "idle_timeout must be longer"),
        ({"max_cost": "-1"}, "max_cost"),
        ({"workdir": "relative"}, "workdir must be an absolute path"),
        ({"workdir": "/a/../etc"}, "workdir must be an absolute path"),
        ({"workdir": "/usr/x"}, "outside the system folders"),
        ({"env": {"": "x"}}, "environment variable"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            Sandbox.create(**options)  # type: ignore[arg-type]


def test_a_spec_is_a_value() -> None:
    spec = SandboxSpec.of(cpu="500m", memory="512Mi", disk="64Mi", timeout="1h30m", max_cost="0.25")
    assert (spec.cpu, spec.memory_bytes, spec.disk_bytes, spec.timeout_s, spec.max_cost_microusd) == (
        0.5,
        512 << 20,
        64 << 20,
        5400,
        250_000,
    )
    assert spec.microusd_per_hour == 8950
    assert SandboxSpec().microusd_per_hour == 17_900
    assert SandboxSpec.of(max_cost=1, price_per_hour=4).life_s == 900
    with Sandbox.from_spec(spec) as box:
        assert box.spec is spec


def test_the_file_type_of_a_handed_out_descriptor_is_regular(box: Sandbox) -> None:
    with box.open("f", "wb") as file:
        assert stat.S_ISREG(os.fstat(file.fileno()).st_mode)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"network": "open"}, r"network: expected Egress.deny\(\), Egress.allow\(\"pypi.org\"\) or Egress.open\(\), found 'open'"),
        ({"env": {"A": 1}}, "env: an environment variable and its value are text, not 'A' and 1"),
        ({"files": {"x": 3}}, "files: the contents of 'x' must be bytes or text, not int"),
        ({"name": 5}, "name: a sandbox's name is text, not 5"),
        ({"labels": {"run": 5}}, "labels: labels and their values are text"),
    ],
)
def test_what_a_sandbox_cannot_be_made_of_is_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Sandbox.create(**options)  # type: ignore[arg-type]
