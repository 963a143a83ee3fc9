"""The published command line's words, in an order in which one leads to the next."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from fcntl import ioctl

from client_calls import CALLS, NODUS, Call, Refused, Work, until


def cli(title: str, *words: str, code: int = 0, out: str = "", err: str = "", stdin: str = "", refused: str = "", why: str = "") -> None:
    """A command line; `out` and `err` are patterns that must be found."""

    def run(work: Work) -> None:
        done = subprocess.run([NODUS, *words], input=stdin, capture_output=True, text=True, timeout=90, cwd=work["folder"])
        said = done.stdout + done.stderr
        if refused:
            assert refused in said, said
            raise Refused(refused)
        assert done.returncode == code, f"exit {done.returncode}: {said}"
        assert re.search(out, done.stdout), f"{out!r} not in {done.stdout!r}"
        assert re.search(err, done.stderr), f"{err!r} not in {done.stderr!r}"

    CALLS.append(Call("Command line", title, run, refused, why))


MANIFEST = """
apiVersion: nodus.dev/v1
kind: Sandbox
metadata: {name: dev, labels: {app: demo}}
spec:
  image: nodus/agent-tools
  resources: {cpu: "1", memory: 256Mi}
  maxCostUSD: "1.00"
"""
IMAGE = """
apiVersion: nodus.dev/v1
kind: Image
metadata: {name: snap}
spec: {fromSandbox: {name: dev}}
"""
BROKEN = """
apiVersion: nodus.dev/v1
kind: Image
metadata: {name: broken}
spec: {dockerfile: {inline: "FROM nodus/agent-tools\\nRUN exit 3"}}
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
cli("nodus exec of a folder's making", "exec", "sb/dev", "--", "mkdir", "-p", "tree/empty/too")
cli("nodus cp from a sandbox, a folder", "cp", "sb/dev:/workspace/tree", "back", err="2 files")
cli("nodus cp from a sandbox, a file", "cp", "sb/dev:/workspace/tree/a", "a", err="1 files")
cli("nodus cp from a sandbox, a folder with empty ones in it", "cp", "sb/dev:/workspace/tree", "again", err="2 files")
cli("nodus apply -f FILE of an Image", "apply", "-f", "image.yaml", out="image/snap created")
cli("nodus wait image/NAME", "wait", "image/snap", "--for=condition=Ready", "--timeout", "20s", out="condition met")
cli("nodus get images", "get", "images", out=r"snap +Ready +sha256:")
cli("nodus describe image/NAME", "describe", "image/snap", out="Ready")
cli("nodus create sandbox --image NAME", "create", "sandbox", "copy", "--image", "snap", "--memory", "256Mi", out="created")
cli("nodus exec in a sandbox from an Image", "exec", "sb/copy", "--", "cat", "tree/sub/b", out="^b\n$")
cli("nodus apply -f FILE of an Image that cannot be built", "apply", "-f", "broken.yaml", out="image/broken created")
cli("nodus wait for its failure", "wait", "image/broken", "--for=jsonpath={.status.phase}=Failed", "--timeout", "20s", out="condition met")
cli("nodus logs image/NAME", "logs", "image/broken", out="exit code 3")
cli("nodus delete image/NAME", "delete", "image/snap", "image/broken", out="deleted")
cli("nodus exec in a sandbox whose Image is gone", "exec", "sb/copy", "--", "cat", "tree/sub/b", out="^b\n$")
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
