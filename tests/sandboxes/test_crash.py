"""Nothing stays behind, whoever dies and however: processes, mounts, control groups, folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from sandmill.errors import SandboxGone
from sandmill.sandboxes.backends.native import state

OWNER = """
import asyncio, json, os, sys, time
from sandmill.sandboxes import Sandbox, SandboxSpec, block_on
from sandmill.sandboxes.backends.native import node

count = int(sys.argv[1])
spec = SandboxSpec.of(memory="64Mi", disk="4Mi", idle_timeout="1h")
restless = "trap '' TERM INT HUP; (setsid sh -c 'sleep 1000 & sleep 1000' &) ; nohup sleep 1000 & while :; do sleep 1000; done"

async def start():
    boxes = await asyncio.gather(*(Sandbox.from_spec.aio(spec, files={"f": b"x" * 1000}) for _ in range(count)))
    for box in boxes[:: max(1, count // 20)]:
        await box.exec.aio("bash", "-c", restless)
    return boxes

boxes = block_on(start())
pids = [box._birth.pid for box in boxes]
groups = [str(group) for group in node._node.claim.cgroups]
print(json.dumps({"warden": node._node._process.pid, "inits": pids, "cgroups": groups}), flush=True)
while True:
    for line in sys.stdin:
        if line == "fork\\n":
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            print(child, flush=True)
            continue
        try:
            boxes[0].run(*line.split(), timeout=10)
            print("fine", flush=True)
        except Exception as error:
            print(type(error).__name__, flush=True)
    break
"""


class Owner:
    """A process with sandboxes of its own, in a state folder of its own."""

    def __init__(self, root: Path, count: int) -> None:
        self.root = root
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"SANDMILL_STATE": str(root)},
            text=True,
        )
        assert self.process.stdout is not None
        facts = json.loads(self.process.stdout.readline())
        self.warden: int = facts["warden"]
        self.inits: list[int] = facts["inits"]
        self.cgroups = [Path(group) for group in facts["cgroups"]]

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def namespaces(self) -> set[str]:
        return {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in self.inits for kind in ("pid", "mnt", "net")}

    def remains(self, namespaces: set[str]) -> list[str]:
        """Everything that is still there."""
        groups = [str(group) for group in self.cgroups if group.exists()]
        return (
            running(self.warden) + processes_in(namespaces) + groups + [str(folder) for folder in self.root.glob("owners/*")] + own_mounts()
        )

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def running(pid: int) -> list[str]:
    """The process, unless it is gone or waits only to be reaped."""
    try:
        return [str(pid)] if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z" else []
    except FileNotFoundError:
        return []


def processes_in(namespaces: set[str]) -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if {os.readlink(place / "ns" / kind) for kind in ("pid", "mnt", "net")} & namespaces:
                found.append(place.name)
        except OSError:
            continue
    return found


def own_mounts() -> list[str]:
    """Mounts that this process can see and that a warden could have made."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "/skeleton" in line or "/programs" in line]


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 5
    while running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def until_gone(owner: Owner, namespaces: set[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := owner.remains(namespaces):
        assert time.monotonic() < deadline, f"{len(left)} things are left, among them {left[:5]}"
        time.sleep(0.05)


def test_600_sandboxes_leave_nothing_within_5_s_of_kill_9_with_no_new_owner(tmp_path: Path) -> None:
    owner = Owner(tmp_path, 600)
    try:
        namespaces = owner.namespaces()
        assert len(processes_in(namespaces)) >= 600
        assert len(namespaces) == 1800
        assert all(len(list(group.glob("[0-9]*"))) == 600 for group in owner.cgroups)
        os.kill(owner.process.pid, signal.SIGKILL)
        until_gone(owner, namespaces, 5)
    finally:
        owner.close()


def test_a_killed_warden_takes_its_sandboxes_along_and_the_owner_says_so(tmp_path: Path) -> None:
    owner = Owner(tmp_path, 5)
    try:
        namespaces = owner.namespaces()
        assert owner.ask("true") == "fine"
        os.kill(owner.warden, signal.SIGKILL)
        until_gone(owner, namespaces, 5)
        assert owner.ask("true") == SandboxGone.__name__
    finally:
        owner.close()


def test_a_killed_init_ends_its_sandbox_alone(tmp_path: Path) -> None:
    owner = Owner(tmp_path, 2)
    try:
        os.kill(owner.inits[1], signal.SIGKILL)
        assert owner.ask("true") == "fine"
        os.kill(owner.inits[0], signal.SIGKILL)
        wait_for_end(owner.inits[0])
        assert owner.ask("true") == SandboxGone.__name__
        deadline = time.monotonic() + 5  # an empty group waits a moment for the next sandbox
        while any((group / number).exists() for group in owner.cgroups for number in ("0", "1")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        owner.close()


def test_owner_and_warden_killed_together_are_swept_by_the_next_owner(tmp_path: Path) -> None:
    owner = Owner(tmp_path, 5)
    try:
        namespaces = owner.namespaces()
        for pid in (owner.warden, owner.process.pid):
            os.kill(pid, signal.SIGKILL)
        owner.process.wait()
        deadline = time.monotonic() + 5
        while processes_in(namespaces) or state.live_owners(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert state.sweep(tmp_path) == 1
        assert owner.remains(namespaces) == []
    finally:
        owner.close()


def test_a_live_owner_is_never_swept(tmp_path: Path) -> None:
    owner = Owner(tmp_path, 1)
    try:
        assert len(state.live_owners(tmp_path)) == 1
        assert state.sweep(tmp_path) == 0
        assert owner.ask("true") == "fine"
    finally:
        owner.close()


def test_a_forked_child_of_the_owner_does_not_keep_its_sandboxes_alive(tmp_path: Path) -> None:
    """The child inherits every descriptor, the warden's socket among them; the warden watches the owner itself."""
    owner = Owner(tmp_path, 1)
    child = int(owner.ask("fork"))
    try:
        namespaces = owner.namespaces()
        os.kill(owner.process.pid, signal.SIGKILL)
        until_gone(owner, namespaces, 5)
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        owner.close()


def test_a_forked_child_makes_sandboxes_of_its_own_and_leaves_its_parents_alone(tmp_path: Path) -> None:
    code = (
        "import os, time; from sandmill.sandboxes import Sandbox, list_sandboxes\n"
        "box = Sandbox.create(memory='64Mi', disk='4Mi')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    own = Sandbox.create(memory='64Mi', disk='4Mi', timeout=0.3)\n"
        "    print(own.run('echo', 'child').stdout, len(list_sandboxes()), flush=True)\n"
        "    time.sleep(0.6)\n"
        "    print(own.gone_reason, flush=True)\n"
        "    raise SystemExit\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), box.run('echo', 'parent').stdout, len(list_sandboxes()), flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"SANDMILL_STATE": str(tmp_path)}, timeout=60, capture_output=True)
    assert done.stdout == b"b'child\\n' 2\nits lifetime of 0.3 s is over\n0 b'parent\\n' 1\n", done.stderr
    assert list(tmp_path.glob("owners/*")) == []


def test_an_ordinary_exit_leaves_nothing_at_once(tmp_path: Path) -> None:
    code = "from sandmill.sandboxes import Sandbox\nboxes = [Sandbox.create(memory='64Mi', disk='4Mi') for _ in range(5)]"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"SANDMILL_STATE": str(tmp_path)}, timeout=60)
    assert list(tmp_path.glob("owners/*")) == []
