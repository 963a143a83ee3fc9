"""The same code against this machine and against a server: one setting tells them apart."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from server_process import KEY, Server, serving

import sandmill
from sandmill.errors import ConfigError, ExecFailed, ExecTimeout, ImageError, SandboxFileError, SandboxGone
from sandmill.sandboxes import PIPE, Egress, Pool, SandboxSpec

SMALL = {"memory": "256Mi", "disk": "32Mi"}


@pytest.fixture
def box(where: str) -> sandmill.Sandbox:
    with sandmill.Sandbox.create(
        **SMALL, env={"GREETING": "hello"}, files={"given/a": b"a\n"}, max_cost=1, labels={"any": "Thing!"}, name="a name/with é"
    ) as box:
        yield box  # type: ignore[misc]


def test_the_example(box: sandmill.Sandbox) -> None:
    with box.open("main.py", "w") as file:
        file.write("print('6 * 7 =', 6 * 7)\n")
    process = box.exec("bash", "-c", "python3 main.py; cat given/a; echo $GREETING >&2; exit 3")
    assert (process.stdout.read(), process.stderr.read(), process.wait(), process.returncode) == ("6 * 7 = 42\na\n", "hello\n", 3, 3)
    with box.open("main.py") as file:
        assert file.read().startswith("print")


def test_run(box: sandmill.Sandbox) -> None:
    done = box.run("sh", "-c", "printf '\\377'; echo e >&2; exit 9", env={"A": "1"}, workdir="given")
    assert (done.exit_code, done.signal, done.stdout, done.stderr, done.timed_out, done.truncated) == (
        9,
        None,
        b"\xff",
        b"e\n",
        False,
        False,
    )
    assert done.duration_s > 0
    assert box.run("cat", stdin=b"in").stdout == b"in"
    assert box.run("sh", "-c", "echo a; echo b >&2", merge_stderr=True).stdout == b"a\nb\n"
    killed = box.run("sh", "-c", "kill -9 $$")
    assert (killed.exit_code, killed.signal) == (None, 9)
    late = box.run("sh", "-c", "echo part; sleep 60", timeout=0.3)
    assert (late.exit_code, late.timed_out, late.stdout) == (None, True, b"part\n")
    cut = box.run("sh", "-c", "head -c 5000 /dev/zero", max_output=1000)
    assert (len(cut.stdout), cut.truncated) == (1000, True)
    assert box.run("id", "-un", user="root").stdout == b"root\n"
    with pytest.raises(ExecFailed) as failure:
        box.run("no-such-program")
    assert failure.value.errno == 2
    for words, number in ((("echo", "x" * 200_000), 7), (("echo", "nul\0"), 22), ((), 22)):
        with pytest.raises(ExecFailed) as failure:
            box.exec(*words)
        assert failure.value.errno == number
    for wrong in ({"user": "nobody"}, {"env": {"A=B": "x"}}):
        with pytest.raises(ConfigError):
            box.run("true", **wrong)  # type: ignore[arg-type]


def test_processes(box: sandmill.Sandbox) -> None:
    process = box.exec("cat", stdin=PIPE)
    process.stdin.write("one ")
    process.stdin.write(b"two")
    process.stdin.close()
    assert (process.stdout.read(), process.wait()) == ("one two", 0)
    process = box.exec("sleep", "60")
    with pytest.raises(ExecTimeout):
        process.wait(timeout=0.2)
    process.send_signal(signal.SIGTERM)
    assert (process.wait(timeout=10), process.signal) == (-15, 15)
    process = box.exec("sh", "-c", "sleep 60 & sleep 60")
    process.kill()
    assert process.wait(timeout=10) == -9
    pieces = list(box.exec("sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.1; done").stdout)
    assert "".join(map(str, pieces)) == "1\n2\n3\n"
    terminal = box.exec("bash", "--norc", tty=True, stdin=PIPE)
    terminal.resize(31, 99)
    terminal.stdin.write("stty size; exit 4\n")
    assert "31 99" in terminal.stdout.read()
    assert terminal.wait() == 4
    fed = box.exec("wc", "-c", stdin=b"x" * 100_000)
    assert fed.stdout.read().split() == ["100000"]


def test_files(box: sandmill.Sandbox) -> None:
    data = bytes(range(256)) * 1000
    box.write("deep/er/x", data)
    assert box.read("deep/er/x") == data
    box.write_files({"m/1": b"1", "m/2": b"2", "/home/user/3": b"3"})
    assert [(entry.name, entry.kind, entry.size_bytes) for entry in box.list("m")] == [("1", "file", 1), ("2", "file", 1)]
    box.mkdir("new/folder")
    assert [entry.kind for entry in box.list("new")] == ["folder"]
    box.run("sh", "-c", "touch m/$(printf '\\377')")
    assert box.list("m")[-1].name == "\udcff"
    with box.open("m/1", "ab") as file:
        file.write(b"+")
    assert box.read("m/1") == b"1+"
    box.remove("m", recursive=True)
    refused = [
        (lambda: box.read("m/1"), (2,)),
        (lambda: box.read("deep"), (21,)),
        (lambda: box.write("/usr/x", b""), (13, 30)),
        (lambda: box.mkdir("new"), (17,)),
        (lambda: box.remove("deep"), (39,)),
        (lambda: box.read("deep/er/x", max_bytes=5), (27,)),
        (lambda: box.open("deep/er/x", "x"), (17,)),
        (lambda: box.read("nul\0"), (22,)),
    ]
    for attempt, numbers in refused:
        with pytest.raises(SandboxFileError) as failure:
            attempt()
        assert failure.value.errno in numbers


def test_the_end(where: str) -> None:
    box = sandmill.Sandbox.create(**SMALL)
    box.ping()
    box.exec("sleep", "60")
    box.kill_processes()
    assert box.run("true").exit_code == 0
    process = box.exec("sh", "-c", "echo before; sleep 60")
    time.sleep(0.3)
    box.terminate()
    box.terminate()
    assert (box.alive, box.gone_reason) == (False, "terminated")
    for attempt in (lambda: box.run("true"), lambda: box.read("x"), box.ping, lambda: process.wait(timeout=10)):
        with pytest.raises(SandboxGone):
            attempt()
    assert process.stdout.read() == "before\n"


def test_what_is_refused(where: str) -> None:
    with pytest.raises(ConfigError):
        sandmill.Sandbox.create(cpu=0)
    with pytest.raises(ImageError):
        sandmill.Sandbox.create(image="no/such")
    with pytest.raises(ConfigError):
        sandmill.Sandbox.create(**SMALL, workdir="/usr/x")


def test_with_a_network(where: str) -> None:
    """The policy travels: on either side, an allowed name is answered and another one is not."""
    names = "import socket\nfor name in ('a.example.org', 'pypi.org'): print(socket.gethostbyname(name))\nsocket.gethostbyname('b.org')"
    with sandmill.Sandbox.create(**SMALL, network=Egress.allow("*.example.org", presets=["pypi"])) as box:
        done = box.run("python3", "-c", names)
        assert done.stdout == b"198.18.0.1\n198.18.0.2\n"
        assert b"gaierror" in done.stderr
    with sandmill.Sandbox.create(**SMALL, network=Egress.open()) as box:
        assert b"Connection re" in box.run("python3", "-c", "import socket; socket.create_connection(('10.0.0.1', 9)).recv(1)").stderr


def test_asynchronously_and_from_a_pool(where: str) -> None:
    async def one(number: int, pool: Pool) -> bytes:
        box = await pool.take.aio({"n": str(number).encode()})
        try:
            return (await box.run.aio("cat", "n")).stdout
        finally:
            await box.terminate.aio()

    async def many() -> list[bytes]:
        async with Pool(SandboxSpec.of(**SMALL), 2) as pool:
            return await asyncio.gather(*(one(number, pool) for number in range(12)))

    assert asyncio.run(many()) == [str(number).encode() for number in range(12)]


def test_prices_are_the_servers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDMILL_API_KEY", KEY)
    with pytest.raises(ConfigError, match="price_per_hour"):
        sandmill.Sandbox.create(**SMALL, price_per_hour="3.6", max_cost=1, server=server.url)


def test_they_are_listed_and_stopped_where_they_are(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDMILL_API_KEY", KEY)
    box = sandmill.Sandbox.create(**SMALL, server=server.url, name="a name/with é")
    other = sandmill.Sandbox.create(**SMALL, server=server.url)
    listed = {record.id: record for record in sandmill.list_sandboxes(server.url)}
    assert {box.id, other.id} <= set(listed)
    record = listed[box.id]
    assert (record.name, record.memory_bytes, record.disk_bytes, record.owner_pid) == ("a name/with \\xe9", 256 << 20, 32 << 20, 0)
    assert 0 <= record.age_s < 60
    environment = {**os.environ, "SANDMILL_API_URL": server.url}
    command = [sys.executable, "-m", "sandmill.cli", "sandbox"]
    done = subprocess.run([*command, "stop", record.name], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"stopped {record.name}\n")
    done = subprocess.run([*command, "ls", "--json"], env=environment, capture_output=True, text=True, timeout=60)
    assert other.id in done.stdout
    assert box.id not in done.stdout
    other.terminate()
    with pytest.raises(SandboxGone, match="no live sandbox has this name"):
        sandmill.stop_sandbox("nothing", server.url)


def test_a_server_without_a_key_or_that_is_not_there(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDMILL_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="SANDMILL_API_KEY"):
        sandmill.Sandbox.create(server=server.url)
    monkeypatch.setenv("SANDMILL_API_KEY", "sandmill_wrong_0123456789")
    with pytest.raises(ConfigError, match="refused the key"):
        sandmill.Sandbox.create(server=server.url)
    for url in ("nonsense", "ftp://x"):
        with pytest.raises(ConfigError, match="no server's URL"):
            sandmill.Sandbox.create(server=url)


def test_a_full_server_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("SANDMILL_API_KEY", KEY)
    with serving(tmp_path_factory.mktemp("full"), "--max-running", "1") as small:
        first = sandmill.Sandbox.create(**SMALL, server=small.url)
        threading.Timer(1.0, first.terminate).start()
        second = sandmill.Sandbox.create(**SMALL, server=small.url)
        assert not first.alive
        second.terminate()


def test_the_import_stays_light() -> None:
    heavy = ("httpx", "starlette", "sqlalchemy", "uvicorn")
    script = f"import sys, sandmill; sandmill.Sandbox; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30).stdout == "[]\n"


def test_killed_server_is_a_lost_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("SANDMILL_API_KEY", KEY)
    with serving(tmp_path_factory.mktemp("killed")) as server:
        box = sandmill.Sandbox.create(**SMALL, server=server.url)
        process = box.exec("sleep", "60")
        port = server.port
        server.kill()
        server._options = (*server._options, "--port", str(port))
        server.start()
        with pytest.raises(SandboxGone):
            process.wait(timeout=40)
        with pytest.raises(SandboxGone, match="server ended"):
            box.run("true")
