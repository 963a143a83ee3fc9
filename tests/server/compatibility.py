"""Every sandbox call of the published SDK and command line, as they stand, against a real server; and docs/compatibility.md from it.

python tests/server/compatibility.py              writes docs/compatibility.md
python tests/server/compatibility.py --results    one JSON object a call on stdout, against the server of NODUS_API_URL
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
NODUS = str(Path(sys.executable).parent / "nodus")
Work = dict[str, Any]


class Call(NamedTuple):
    """One call: how it is written, what runs it, and, where this server refuses it, with which reason and why."""

    part: str
    title: str
    run: Callable[[Work], None]
    refused: str = ""
    why: str = ""


CALLS: list[Call] = []


def sdk(title: str, refused: str = "", why: str = "") -> Callable[[Callable[[Work], None]], Callable[[Work], None]]:
    def keep(run: Callable[[Work], None]) -> Callable[[Work], None]:
        CALLS.append(Call("Python SDK", title, run, refused, why))
        return run

    return keep


def cli(title: str, *words: str, code: int = 0, out: str = "", err: str = "", stdin: str = "", refused: str = "", why: str = "") -> None:
    """A command line; `out` and `err` are patterns that must be found."""

    def run(work: Work) -> None:
        done = subprocess.run([NODUS, *words], input=stdin, capture_output=True, text=True, timeout=30, cwd=work["folder"])
        said = done.stdout + done.stderr
        if refused:
            assert refused in said, said
            raise Refused(refused)
        assert done.returncode == code, f"exit {done.returncode}: {said}"
        assert re.search(out, done.stdout), f"{out!r} not in {done.stdout!r}"
        assert re.search(err, done.stderr), f"{err!r} not in {done.stderr!r}"

    CALLS.append(Call("Command line", title, run, refused, why))


class Refused(Exception):
    """The server said no, with a reason."""


@sdk("Sandbox.create(cpu=1, memory=..., idle_timeout=..., max_cost=..., network=Egress.deny())")
def _(work: Work) -> None:
    import nodus

    work["sb"] = nodus.Sandbox.create(
        cpu=1, memory="512Mi", disk=64, timeout="2h", idle_timeout="5m", on_idle="stop", max_cost=1,
        env={"GREETING": "hello"}, labels={"team": "a"}, network=nodus.Egress.deny(),
    )  # fmt: skip


@sdk('sb.open(path, "w") as a context manager, and "r"')
def _(work: Work) -> None:
    with work["sb"].open("main.py", "w") as file:
        file.write("import os\nprint(os.environ['GREETING'])\n")
    with work["sb"].open("/workspace/main.py") as file:
        assert file.read().startswith("import os")


@sdk('sb.exec("bash", "-c", cmd) with .stdout.read(), .stderr.read(), .wait(), .returncode')
def _(work: Work) -> None:
    process = work["sb"].exec("bash", "-c", "python3 main.py; echo oops >&2; exit 4")
    assert (process.stdout.read(), process.stderr.read(), process.wait(), process.returncode) == ("hello\n", "oops\n", 4, 4)


@sdk('sb.exec("one string with spaces") under a shell')
def _(work: Work) -> None:
    assert work["sb"].exec("echo a | tr a b").stdout.read() == "b\n"


@sdk("sb.exec(..., env=, workdir=)")
def _(work: Work) -> None:
    assert work["sb"].exec("sh", "-c", "echo $A; pwd", env={"A": "1"}, workdir="/tmp").stdout.read() == "1\n/tmp\n"


@sdk("sb.exec(..., timeout=)")
def _(work: Work) -> None:
    process = work["sb"].exec("sh", "-c", "echo part; sleep 99", timeout=0.4)
    assert (process.stdout.read(), process.wait(timeout=5)) == ("part\n", 124)


@sdk("for piece in process.stdout")
def _(work: Work) -> None:
    assert "".join(work["sb"].exec("sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.05; done").stdout) == "1\n2\n3\n"


@sdk("process.stdout.read_bytes() of what is no text")
def _(work: Work) -> None:
    assert work["sb"].exec("printf", "\\377\\360").stdout.read_bytes() == b"\xff\xf0"


@sdk("process.stdin.write, .drain, .write_eof")
def _(work: Work) -> None:
    process = work["sb"].exec("cat", stdin=True)
    process.stdin.write("over ")
    process.stdin.write(b"the wire")
    process.stdin.drain()
    process.stdin.write_eof()
    assert (process.stdout.read(), process.wait()) == ("over the wire", 0)


@sdk("process.signal(...)")
def _(work: Work) -> None:
    process = work["sb"].exec("sleep", "99")
    process.signal("SIGTERM")
    assert process.wait(timeout=5) == 143


@sdk("process.cancel()")
def _(work: Work) -> None:
    process = work["sb"].exec("sleep", "99")
    process.cancel()
    assert process.wait(timeout=5) == 137


@sdk("process.wait(timeout=) raises TimeoutError")
def _(work: Work) -> None:
    process = work["sb"].exec("sleep", "99")
    with contextlib.suppress(TimeoutError):
        process.wait(timeout=0.2)
        raise AssertionError("it did not time out")
    process.cancel()


@sdk("sb.exec(..., pty=True) with attach(tty=True), resize, exit_code")
def _(work: Work) -> None:
    process = work["sb"].exec("bash", "--norc", pty=True)
    with process.attach(tty=True) as session:
        session.resize(31, 101)
        session.write("stty size; tty; exit 7\n")
        said = b"".join(data for _, data in session)
        assert b"31 101" in said
        assert b"/dev/pts/" in said
        assert session.exit_code == 7


@sdk("process.attach(stdin=True) with close_stdin")
def _(work: Work) -> None:
    process = work["sb"].exec("cat", stdin=True)
    with process.attach(stdin=True) as session:
        session.write("through a socket")
        session.close_stdin()
        assert (b"".join(data for _, data in session), session.exit_code) == (b"through a socket", 0)


@sdk("sb.files.write, .read, .list, .remove")
def _(work: Work) -> None:
    files = work["sb"].files
    files.write("/workspace/data", bytes(range(256)))
    assert files.read("/workspace/data") == bytes(range(256))
    assert {entry["name"] for entry in files.list("/workspace")} == {"main.py", "data"}
    files.remove("/workspace/data")
    assert {entry["name"] for entry in files.list("/workspace")} == {"main.py"}


@sdk("sb.files.write(..., expected_sha256=)")
def _(work: Work) -> None:
    from nodus import errors

    files = work["sb"].files
    files.write("/workspace/x", "one")
    files.write("/workspace/x", "two", expected_sha256=hashlib.sha256(b"one").hexdigest())
    try:
        files.write("/workspace/x", "three", expected_sha256=hashlib.sha256(b"one").hexdigest())
    except errors.NodusError as error:
        assert error.reason == "SHA256Mismatch"
    assert files.read("/workspace/x") == b"two"


@sdk("sb.status(), sb.name, sb.object_id")
def _(work: Work) -> None:
    status = work["sb"].status()
    assert (status.phase, status.activity, status.cost.limit_usd) == ("Running", "Idle", "1.00")
    assert work["sb"].object_id


@sdk("sb.stop(), sb.start(): the workspace survives")
def _(work: Work) -> None:
    work["sb"].stop()
    until(lambda: work["sb"].status().phase == "Stopped")
    work["sb"].start()
    assert work["sb"].files.read("/workspace/x") == b"two"
    until(lambda: work["sb"].status().phase == "Running")


@sdk("sb.exec on a stopped sandbox starts it")
def _(work: Work) -> None:
    work["sb"].stop()
    until(lambda: work["sb"].status().phase == "Stopped")
    assert work["sb"].exec("cat", "x").stdout.read() == "two"


@sdk("Sandbox.create(name=) twice reconnects; another spec is AlreadyExists")
def _(work: Work) -> None:
    import nodus

    first = nodus.Sandbox.create(name="named", memory="256Mi")
    assert nodus.Sandbox.create(name="named", memory="256Mi").object_id == first.object_id
    try:
        nodus.Sandbox.create(name="named", memory="512Mi")
    except nodus.errors.AlreadyExists as error:
        assert [cause["field"] for cause in error.causes] == ["spec.resources.memory"]
        return
    raise AssertionError("it was not refused")


@sdk("Sandbox.from_name, Sandbox.from_id, Sandbox.list(labels=)")
def _(work: Work) -> None:
    import nodus

    named = nodus.Sandbox.from_name("named")
    assert nodus.Sandbox.from_id(named.object_id).name == "named"
    assert [sandbox.name for sandbox in nodus.Sandbox.list(labels={"team": "a"})] == [work["sb"].name]


@sdk('Sandbox.create("program", ...) with sb.wait() and sb.logs()')
def _(work: Work) -> None:
    import nodus

    sandbox = nodus.Sandbox.create("sh", "-c", "echo from the main command; exit 3", memory="256Mi")
    assert sandbox.wait() == 3
    assert list(sandbox.logs()) == ["from the main command\n"]
    sandbox.terminate()


@sdk("Secret.create, Secret.from_name, Secret.from_dict; Sandbox.create(secrets=[...])")
def _(work: Work) -> None:
    import nodus

    nodus.Secret.create("tokens", {"TOKEN": "s3cret"})
    nodus.Secret.create("tokens", {"TOKEN": "n3wer"})
    given = [nodus.Secret.from_name("tokens"), nodus.Secret.from_dict({"OTHER": "value"})]
    sandbox = nodus.Sandbox.create(memory="256Mi", secrets=given)
    assert sandbox.exec("sh", "-c", "echo $TOKEN $OTHER; cat /run/secrets/tokens/TOKEN").stdout.read() == "n3wer value\nn3wer"
    sandbox.terminate()


@sdk("asynchronous forms: await Sandbox.create.aio(...), exec.aio, stdout.read.aio")
def _(work: Work) -> None:
    import asyncio

    import nodus

    async def body() -> str:
        sandbox = await nodus.Sandbox.create.aio(memory="256Mi")
        process = await sandbox.exec.aio("echo", "async")
        said: str = await process.stdout.read.aio()
        await sandbox.terminate.aio()
        return said

    assert asyncio.run(body()) == "async\n"


@sdk("errors.NotFound, errors.Invalid with causes")
def _(work: Work) -> None:
    import nodus

    for attempt, kind in (
        (lambda: nodus.Sandbox.from_name("nobody"), nodus.errors.NotFound),
        (lambda: nodus.Sandbox.create(cpu="many"), nodus.errors.Invalid),
    ):
        try:
            attempt()
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


@sdk("nodus.api.estimate, and create with its ETag")
def _(work: Work) -> None:
    import nodus

    body = {"kind": "Sandbox", "metadata": {"name": "estimated"}, "spec": {"image": "nodus/agent-tools"}}
    estimate, tag = nodus.api.estimate(body)
    assert estimate["rateUSDPerHour"] == "0.0179"
    assert nodus.api.create(body, if_match=tag)["metadata"]["name"] == "estimated"


@sdk("nodus.api.apply: create, change, unchanged")
def _(work: Work) -> None:
    import nodus

    body = {"apiVersion": "nodus.dev/v1", "kind": "Sandbox", "metadata": {"name": "applied"}, "spec": {"image": "nodus/agent-tools"}}
    nodus.api.apply(body)
    changed = nodus.api.apply(body | {"spec": {"image": "nodus/agent-tools", "lifecycle": {"idleTimeout": "9m"}}})
    assert changed[0]["spec"]["lifecycle"]["idleTimeout"] == "9m"


@sdk("nodus.api.get, list, patch (merge and json), watch, delete, logs, exec, files")
def _(work: Work) -> None:
    import nodus

    assert nodus.api.get("Sandbox", "applied")["kind"] == "Sandbox"
    nodus.api.patch("Sandbox", "applied", {"metadata": {"labels": {"x": "y"}}})
    nodus.api.patch("Sandbox", "applied", [{"op": "add", "path": "/metadata/labels/z", "value": "1"}], type="json")
    assert nodus.api.list("Sandbox", label_selector={"x": "y", "z": "1"})[0]["metadata"]["name"] == "applied"
    for event in nodus.api.watch("Sandbox", field_selector={"metadata.name": "applied"}):
        assert (event["type"], event["object"]["metadata"]["name"]) == ("ADDED", "applied")
        break
    assert nodus.api.exec("Sandbox", "applied", ["echo", "x"]).stdout.read() == "x\n"
    nodus.api.files("Sandbox", "applied").write("/workspace/f", b"f")
    nodus.api.delete("Sandbox", "applied")
    assert not nodus.api.list("Sandbox", label_selector={"x": "y"})


@sdk("nodus.api.healthz, readyz; api.list of Offering, Event, UsageRecord, Process")
def _(work: Work) -> None:
    import nodus

    assert nodus.api.healthz()
    assert nodus.api.readyz().ready
    assert {"sandbox", "h100-sxm"} <= {offering["metadata"]["name"] for offering in nodus.api.list("Offering")}
    for kind in ("Event", "UsageRecord", "Process"):
        assert nodus.api.list(kind)


@sdk("sb.refresh_secrets()")
def _(work: Work) -> None:
    work["sb"].refresh_secrets()


@sdk("sb.snapshot_filesystem()", refused="Unsupported", why="the sandbox layer makes no images yet")
def _(work: Work) -> None:
    work["sb"].snapshot_filesystem()


@sdk("Sandbox.create(network=Egress.open())", refused="Unsupported", why="sandboxes have no network yet")
def _(work: Work) -> None:
    import nodus

    nodus.Sandbox.create(network=nodus.Egress.open())


@sdk("Sandbox.create(network=Egress.allow(...))", refused="Unsupported", why="the SDK itself refuses it before sending")
def _(work: Work) -> None:
    import nodus

    nodus.Sandbox.create(network=nodus.Egress.allow("pypi.org"))


@sdk('Sandbox.create(image="other")', refused="ImageNotFound", why="the one image is nodus/agent-tools")
def _(work: Work) -> None:
    import nodus

    nodus.Sandbox.create(image="ghcr.io/acme/tools:1.2")


@sdk('Sandbox.create(gpu="H100")', refused="Invalid", why="this server places no accelerators")
def _(work: Work) -> None:
    import nodus

    nodus.Sandbox.create(gpu="H100")


@sdk("sb.terminate()")
def _(work: Work) -> None:
    import nodus

    for sandbox in nodus.Sandbox.list():
        sandbox.terminate()
    assert nodus.Sandbox.list() == []


MANIFEST = """
apiVersion: nodus.dev/v1
kind: Sandbox
metadata: {name: dev, labels: {app: demo}}
spec:
  image: nodus/agent-tools
  resources: {cpu: "1", memory: 256Mi}
  maxCostUSD: "1.00"
"""
SECOND = MANIFEST.replace("name: dev", "name: old")
cli("nodus apply -f FILE", "apply", "-f", "dev.yaml", out="sandbox/dev created")
cli("nodus apply -f FILE, again", "apply", "-f", "dev.yaml", out="sandbox/dev unchanged")
cli("nodus apply -f DIR --prune -l", "apply", "-f", "manifests", "--prune", "-l", "app=demo", out="sandbox/dev")
cli("nodus diff -f FILE", "diff", "-f", "dev.yaml")
cli("nodus wait --for=condition", "wait", "sandbox/dev", "--for=condition=Ready", "--timeout", "20s", out="condition met")
cli("nodus wait --for=jsonpath", "wait", "sandbox/dev", "--for=jsonpath={.status.phase}=Running", "--timeout", "20s", out="condition met")
cli("nodus get sandboxes", "get", "sandboxes", out=r"dev +Running +Idle +nodus/agent-tools")
cli("nodus get sb -o wide", "get", "sb", "-o", "wide", out="256Mi")
cli("nodus get sandbox/NAME -o yaml", "get", "sandbox/dev", "-o", "yaml", out="kind: Sandbox")
cli("nodus get sandbox/NAME -o json", "get", "sandbox/dev", "-o", "json", out='"kind": "Sandbox"')
cli("nodus get -o jsonpath=", "get", "sandbox/dev", "-o", "jsonpath={.spec.maxCostUSD}", out="1.00")
cli("nodus get -o name -l", "get", "sandboxes", "-o", "name", "-l", "app=demo", out="sandbox.*/dev")
cli("nodus get -A", "get", "sandboxes", "-A", out="dev")
cli("nodus describe", "describe", "sandbox/dev", out=r"(?s)Phase: +Running.*rate/h: +\$0.0179")
cli(
    "nodus exec -- COMMAND", "exec", "sandbox/dev", "--", "sh", "-c", "echo out; echo err >&2; exit 3", code=3, out="^out\n$", err="^err\n$"
)
cli("nodus exec -i", "exec", "-i", "sb/dev", "--", "cat", stdin="piped in", out="^piped in$")
cli("nodus exec of what is not there", "exec", "sb/dev", "--", "no-such-program", code=127)
cli("nodus cp to a sandbox", "cp", "tree", "sb/dev:/workspace/tree", err="2 files")
cli("nodus cp from a sandbox, a folder", "cp", "sb/dev:/workspace/tree", "back", err="2 files")
cli("nodus cp from a sandbox, a file", "cp", "sb/dev:/workspace/tree/a", "a", err="1 files")
cli("nodus logs --process", "logs", "sb/dev", "--process", "1", out="out\n")
cli("nodus get processes", "get", "processes", out=r"sb-dev-1 +dev +1 +Failed +3")
cli("nodus cancel process/NAME", "cancel", "process/sb-dev-1", out="cancel")
cli("nodus stop", "stop", "sandbox/dev", out="stopped")
cli("nodus wait for a stop", "wait", "sandbox/dev", "--for=jsonpath={.status.phase}=Stopped", "--timeout", "20s", out="condition met")
cli("nodus start", "start", "sandbox/dev", out="started")
cli("nodus exec after a start finds the workspace", "exec", "sb/dev", "--", "cat", "tree/sub/b", out="^b\n$")
cli("nodus label", "label", "sb/dev", "tier=one", out="labeled")
cli("nodus annotate", "annotate", "sb/dev", "example.org/x=y", out="annotated")
cli("nodus patch --type merge", "patch", "sb/dev", "--patch", '{"spec":{"maxCostUSD":"2.00"}}', out="patched")
cli("nodus patch of what may not change", "patch", "sb/dev", "--patch", '{"spec":{"maxCostUSD":"1.00"}}', code=1, err="may only be raised")
cli("nodus create sandbox NAME", "create", "sandbox", "made", "--cpu", "1", "--memory", "256Mi", "--max-cost", "1", out="created")
cli(
    "nodus create sandbox --dry-run=server -o estimate",
    "create",
    "sandbox",
    "x",
    "--dry-run=server",
    "-o",
    "estimate",
    out=r"hold \$0.4296",
)
cli("nodus create secret", "create", "secret", "s", "--from-literal", "A=b", out="created")
cli("nodus get secrets", "get", "secrets", out=r"s +Opaque +1 +A")
cli("nodus get offerings", "get", "offerings", out=r"sandbox +CPU +1 +2Gi +0.0179")
cli("nodus events --for", "events", "--for", "sandbox/dev", out="Stopped")
cli("nodus get usage", "get", "usage", out=r"sandbox/dev +ComputeSeconds +Running")
cli("nodus get usage --group-by", "get", "usage", "--group-by", "kind", out=r"Sandbox +\$0\.0")
cli("nodus explain", "explain", "sandbox.spec.lifecycle", out="idleTimeout")
cli("nodus api-resources", "api-resources", out="sandboxes +sb")
cli("nodus whoami", "whoami", out="Project: +default")
cli("nodus auth can-i", "auth", "can-i", "create", "sandboxes", out="yes")
cli("nodus get of nothing", "get", "sandbox/nobody", code=1, err="there is no sandboxes 'nobody'")


def terminal(work: Work, words: list[str], script: Callable[[Callable[[bytes], None], Callable[[bytes], None], int, int], None]) -> int:
    """A command line on a terminal; `script` is given ways to wait for text and to type."""
    child, master = pty.fork()
    if child == 0:
        os.execv(NODUS, [NODUS, *words])
    ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
    said = b""

    def wait_for(text: bytes) -> None:
        nonlocal said
        deadline = time.monotonic() + 15
        while text not in said:
            assert time.monotonic() < deadline, said
            if select.select([master], [], [], 0.1)[0]:
                said += os.read(master, 4096)
        said = said.split(text, 1)[1]

    try:
        script(wait_for, lambda text: void(os.write(master, text)), master, child)
        with contextlib.suppress(OSError):
            while os.read(master, 4096):
                continue
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(master)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def void(_: object) -> None:
    return None


def shell(work: Work) -> None:
    def script(wait_for: Callable[[bytes], None], write: Callable[[bytes], None], master: int, child: int) -> None:
        wait_for(b"$ ")
        write(b"stty size\n")
        wait_for(b"33 101")
        ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 50, 0, 0))
        os.kill(child, signal.SIGWINCH)
        time.sleep(0.3)
        write(b"stty size\n")
        wait_for(b"20 50")
        write(b"sleep 99\n")
        time.sleep(0.3)
        write(b"\x03")
        wait_for(b"^C")
        write(b"echo AF''TER\n")
        wait_for(b"AFTER")
        write(b"exit 5\n")

    assert terminal(work, ["shell", "sandbox/dev"], script) == 5


def attach(work: Work) -> None:
    with subprocess.Popen([NODUS, "exec", "-i", "sb/dev", "--", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write(b"first\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == b"first\n"
        listed = json.loads(subprocess.run([NODUS, "get", "processes", "-o", "json"], capture_output=True, timeout=30).stdout)["items"]
        number = max(item["spec"]["sequence"] for item in listed if item["status"]["phase"] == "Running")
        with subprocess.Popen([NODUS, "attach", "sb/dev", "--process", str(number)], stdout=subprocess.PIPE) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"first\n"
            writer.stdin.close()
            assert (reader.wait(15), writer.wait(15)) == (0, 0)


def follow(work: Work) -> None:
    with subprocess.Popen(
        [NODUS, "exec", "sb/dev", "--", "sh", "-c", "echo one; sleep 0.7; echo two"], stdout=subprocess.DEVNULL
    ) as runner:
        listed: list[int] = []
        until(lambda: bool(listed) or void(listed.extend(running(work))) is not None)
        followed = subprocess.run([NODUS, "logs", "-f", "sb/dev", "--process", str(listed[0])], capture_output=True, text=True, timeout=30)
        assert (followed.stdout, runner.wait(15)) == ("one\ntwo\n", 0)


def running(work: Work) -> list[int]:
    items = json.loads(subprocess.run([NODUS, "get", "processes", "-o", "json"], capture_output=True, timeout=30).stdout)["items"]
    return [item["spec"]["sequence"] for item in items if item["status"]["phase"] == "Running"]


def watch(work: Work) -> None:
    with subprocess.Popen([NODUS, "get", "sandboxes", "-w"], stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        lines = iter(watcher.stdout.readline, "")
        assert next(lines).startswith("NAME")
        subprocess.run([NODUS, "create", "sandbox", "seen", "--memory", "256Mi"], stdout=subprocess.DEVNULL, timeout=30, check=True)
        assert any(line.startswith("seen") and "Running" in line for line in lines)
        watcher.terminate()


CALLS += [
    Call("Command line", "nodus shell sandbox/NAME: a terminal, its size, a new size, Ctrl-C, the exit code", shell),
    Call("Command line", "nodus attach --process", attach),
    Call("Command line", "nodus logs -f", follow),
    Call("Command line", "nodus get -w", watch),
]
cli("nodus top sandboxes", "top", "sandboxes", refused="404", why="this server keeps no metrics of the past")
cli("nodus get gpus", "get", "gpus", refused="gpus", why="this server places no accelerators")
cli("nodus delete --wait", "delete", "sandbox/dev", "--wait", out="deleted")
cli("nodus delete --ignore-not-found", "delete", "sandbox/dev", "--ignore-not-found")
cli("nodus delete of several", "delete", "sandbox/made", "sandbox/seen", out="deleted")


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def results() -> Iterator[dict[str, str]]:
    """Runs everything, in order, against the server of the environment."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "dev.yaml").write_text(MANIFEST)
        (root / "manifests").mkdir()
        (root / "manifests" / "dev.yaml").write_text(MANIFEST)
        (root / "tree" / "sub").mkdir(parents=True)
        (root / "tree" / "a").write_text("a\n")
        (root / "tree" / "sub" / "b").write_text("b\n")
        work: Work = {"folder": folder}
        for call in CALLS:
            yield {"part": call.part, "title": call.title, "result": outcome(call, work)}


def outcome(call: Call, work: Work) -> str:
    """`works`, `refused: REASON`, or what went wrong."""
    try:
        call.run(work)
    except Refused as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        reason = getattr(error, "reason", None) or getattr(error, "code", None)
        return f"refused: {reason}" if reason else f"failed: {type(error).__name__}: {str(error)[:500]}"
    return "works"


def document(found: list[dict[str, str]]) -> str:
    """The page."""
    lines = [
        "# What the published client does here",
        "",
        f"Made by `scripts/compatibility`: `nodus-compute` {version('nodus-compute')} from PyPI, its SDK and its command line unchanged, against",
        "`sandmill serve` on loopback with only `NODUS_API_URL` and `NODUS_API_KEY` set. The tests run the same calls.",
        "",
    ]
    for part in dict.fromkeys(row["part"] for row in found):
        rows = [row for row in found if row["part"] == part]
        works = sum(row["result"] == "works" for row in rows)
        lines += [f"## {part}: {works} of {len(rows)} work", "", "| call | result |", "|---|---|"]
        for row in rows:
            call = next(call for call in CALLS if (call.part, call.title) == (row["part"], row["title"]))
            why = f" ({call.why})" if call.why and row["result"] != "works" else ""
            lines.append(f"| `{row['title'].replace('|', '&#124;')}` | {row['result']}{why} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    if "--results" in sys.argv:
        for row in results():
            print(json.dumps(row), flush=True)
        return
    sys.path.insert(0, str(Path(__file__).parent))
    from server_process import serving

    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        done = subprocess.run([sys.executable, __file__, "--results"], env=server.environment, stdout=subprocess.PIPE, check=True)
    DOCUMENT.write_text(document([json.loads(line) for line in done.stdout.splitlines()]))
    print(f"wrote {DOCUMENT}")


if __name__ == "__main__":
    main()
