"""Field cases B: how other people's processes and sandboxes outlived, or failed to outlive, what they should have."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandmill.errors import ImageError, SandboxCreateFailed, SandboxError, SandboxFileError, SandboxGone
from sandmill.sandboxes import Sandbox, list_sandboxes, loop, probe, stop_sandbox


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox.create(memory="256Mi", disk="32Mi") as sandbox:
        yield sandbox


def processes(box: Sandbox) -> list[str]:
    """Commands that run in the sandbox, besides its init and those that list them."""
    lines = box.run("ps", "-eo", "args=", timeout=10).stdout.decode().splitlines()
    return [line for line in lines if line.split()[0] not in ("sandmill", "ps")]


@pytest.mark.case(13)
def test_inspect_ai_1357_openclaw_110735_the_loop_inside_dies_with_its_timeout(box: Sandbox) -> None:
    done = box.run("sh", "-c", "while :; do :; done", timeout=0.3)
    assert done.timed_out
    assert done.exit_code is None
    assert processes(box) == []


ESCAPES = {
    "children": "sleep 61 & sleep 62 & sleep 63",
    "own sessions": "setsid sleep 61 & setsid sleep 62 & sleep 63",
    "double forks": "(setsid sh -c 'sleep 61 & sleep 62 &' &) ; sleep 63",
    "deaf": "trap '' TERM INT HUP QUIT; setsid sh -c \"trap '' TERM INT; while :; do sleep 61; done\" & while :; do sleep 62; done",
    "stopped": "sleep 61 & kill -STOP $!; setsid sleep 62 & kill -STOP $!; sleep 63",
    "odd names": "cp /bin/sleep './a) S 1 (b'; setsid './a) S 1 (b' 61 & sleep 62",
}


@pytest.mark.case(14)
@pytest.mark.parametrize("escape", ESCAPES)
def test_e2b_1031_e2b_500_the_whole_tree_dies_within_100_ms(box: Sandbox, escape: str) -> None:
    began = time.monotonic()
    done = box.run("bash", "-c", ESCAPES[escape], timeout=0.5)
    assert done.timed_out
    assert processes(box) == []
    assert done.duration_s < 0.6 + 0.5 * (os.getloadavg()[0] > 2)  # a busy machine may take longer to schedule the blow
    assert time.monotonic() - began < 5


@pytest.mark.case(14)
def test_e2b_1031_the_port_is_free_again_and_other_commands_live_on(box: Sandbox) -> None:
    server = "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 8099)); s.listen(); print('up', flush=True); time.sleep(60)"
    bystander = box.exec("sleep", "60")
    left_behind = box.run("bash", "-c", "sleep 59 > /dev/null 2>&1 &")
    assert left_behind.exit_code == 0
    done = box.run("bash", "-c", f'setsid python3 -c "{server}" & sleep 60', timeout=1)
    assert done.stdout == b"up\n"
    again = box.run("python3", "-c", server.replace("time.sleep(60)", "0"), timeout=10)
    assert again.stdout == b"up\n"
    assert sorted(processes(box)) == ["sleep 59", "sleep 60"]
    bystander.kill()
    assert bystander.signal == signal.SIGKILL
    assert processes(box) == ["sleep 59"]


@pytest.mark.case(15)
def test_inspect_k8s_sandbox_251_software_agent_sdk_3042_microsandbox_1201_no_zombies_pile_up(box: Sandbox) -> None:
    for _ in range(40):
        box.run("sh", "-c", "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do sh -c 'sleep 0.01 &' > /dev/null 2>&1; done")
    time.sleep(0.2)
    states = box.run("ps", "-eo", "stat=").stdout.decode().split()
    assert not [state for state in states if state.startswith("Z")]
    assert len(states) <= 4  # init, the supervisor of ps, ps


@pytest.mark.case(16)
def test_mini_swe_agent_803_a_dead_sandbox_is_its_own_kind_of_failure() -> None:
    with Sandbox.create(timeout=0.3, memory="64Mi", disk="8Mi") as box:
        done = box.run("bash", "-c", "echo kept; sleep 60")
        assert done.stdout == b"kept\n"
        assert done.gone == "its lifetime of 0.3 s is over"
        with pytest.raises(SandboxGone, match=r"its lifetime of 0\.3 s is over"):
            box.run("true")
        with pytest.raises(SandboxGone):
            box.read("anything")


@pytest.mark.case(17)
def test_mini_swe_agent_797_terminated_means_absent() -> None:
    before = cgroups()
    box = Sandbox.create(name="swept", labels={"run": "r1"}, memory="64Mi", disk="8Mi")
    pid = box.run("sleep", "0").exit_code
    assert pid == 0
    assert [record.labels for record in list_sandboxes() if record.name == "swept"] == [{"run": "r1"}]
    box.terminate()
    box.terminate()
    assert [record for record in list_sandboxes() if record.name == "swept"] == []
    deadline = time.monotonic() + 5  # an empty one waits a moment for the next sandbox
    while not cgroups() <= before | {group for group in cgroups() if not group.name.isdigit()}:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def cgroups() -> set[Path]:
    """This process's control groups and those below."""
    # os.walk passes over what another owner removes meanwhile; Path.glob raises.
    return {Path(folder) for folder, _, _ in os.walk("/sys/fs/cgroup") if f"/sandmill-{os.getpid()}-" in folder}


@pytest.mark.case(18)
def test_trajectoryrl_203_a_full_disk_is_a_failure_of_its_own_and_the_sandbox_lives_on() -> None:
    with Sandbox.create(memory="256Mi", disk="4Mi") as box:
        with pytest.raises(SandboxFileError) as full:
            box.write("big", b"x" * (8 << 20))
        assert full.value.errno == errno.ENOSPC
        box.remove("big")
        box.write("small", b"x")
        assert box.read("small") == b"x"
    with pytest.raises(SandboxFileError):
        Sandbox.create(disk="2Mi", memory="64Mi", files={"too-big": b"x" * (4 << 20)}, name="never-born")
    assert not [record for record in list_sandboxes() if record.name == "never-born"]


@pytest.mark.case(18)
def test_trajectoryrl_203_sigkill_of_the_owner_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import os; from sandmill.sandboxes import Sandbox\n"
        "boxes = [Sandbox.create(memory='64Mi', disk='8Mi') for _ in range(3)]\n"
        "boxes[0].exec('bash', '-c', 'setsid sleep 60 & sleep 60')\n"
        "print(os.getpid(), flush=True); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env=os.environ | {"SANDMILL_STATE": str(tmp_path)})
    owner = int(done.stdout)
    deadline = time.monotonic() + 5
    while left := [*tmp_path.glob("owners/*"), *Path("/sys/fs/cgroup").glob(f"**/sandmill-{owner}-*")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


@pytest.mark.case(19)
def test_agent_sandbox_1352_inspect_ai_1107_a_command_whose_answer_was_lost_ran_once(box: Sandbox) -> None:
    """Its supervisor is killed after the effect and before the answer: the caller hears of a killed command; nobody runs it again."""
    for _ in range(5):
        box.exec("sleep", "60")  # beside another command, each has a supervisor process
        done = box.run("bash", "-c", "echo x >> log; kill -9 $PPID; sleep 60", user="root", timeout=10)
        assert (done.exit_code, done.signal) == (None, signal.SIGKILL)
    assert box.read("log") == b"x\n" * 5
    assert processes(box) == []


@pytest.mark.case(19)
def test_agent_sandbox_1352_no_retry_when_the_sandbox_is_lost_under_a_command() -> None:
    async def scenario() -> int:
        box = await Sandbox.create.aio(memory="64Mi", disk="8Mi")
        running = asyncio.ensure_future(box.run.aio("sleep", "60"))
        await asyncio.sleep(0.1)
        await box.terminate.aio()
        with pytest.raises(SandboxGone, match="terminated"):
            await running
        return len([record for record in list_of_this_process() if record == box.id])

    assert asyncio.run_coroutine_threadsafe(scenario(), loop()).result(30) == 0


def list_of_this_process() -> list[str]:
    from sandmill.sandboxes.backends.native import node

    assert node._node is not None
    return [record.id for record in node._node.registry.records()]


@pytest.mark.case(20)
def test_verifiers_1720_a_failed_creation_is_not_retried_and_leaves_nothing() -> None:
    with pytest.raises(SandboxError):
        Sandbox.create(memory="64Mi", disk="8Mi", files={"/proc/nowhere/x": b""})
    assert [record for record in list_sandboxes() if record.owner_pid == os.getpid()] == []


@pytest.mark.case(21)
@pytest.mark.parametrize("port", [12345])
def test_skyrl_1302_verl_6677_trl_3979_many_servers_on_one_port_at_once(port: int) -> None:
    """Every sandbox has a network of its own: the same fixed port is free in each, and none reaches another's."""
    server = f"import socket, time; s = socket.socket(); s.bind(('127.0.0.1', {port})); s.listen(); print('up', flush=True); time.sleep(60)"
    boxes = [Sandbox.create(memory="128Mi", disk="8Mi") for _ in range(4)]
    try:
        running = [box.exec("python3", "-c", server) for box in boxes]
        assert [next(iter(process.stdout)) for process in running] == ["up\n"] * 4
    finally:
        for box in boxes:
            box.terminate()


@pytest.mark.case(22)
def test_hermes_agent_621_more_blocking_creations_than_threads_or_queue_places() -> None:
    def one(number: int) -> bytes:
        with Sandbox.create(memory="64Mi", disk="8Mi", name=f"n{number}") as box:
            return box.run("echo", str(number), timeout=60).stdout

    with ThreadPoolExecutor(100) as threads:
        outputs = list(threads.map(one, range(100)))
    assert outputs == [f"{number}\n".encode() for number in range(100)]


NAMES = ["../escaped-case", "/etc/x", "suite/row_003", "suite_row_003", "", "a" * 5000, "\x1b[2J", "half \ud835", "nul\0nul", "ÄÖ ü\n"]


@pytest.mark.case(23)
@pytest.mark.parametrize("name", NAMES)
def test_benchflow_361_coder_eval_159_names_are_opaque_and_never_paths(name: str, tmp_path: Path) -> None:
    with Sandbox.create(name=name, labels={name: name}, memory="64Mi", disk="8Mi") as box:
        assert box.run("echo", "ok").stdout == b"ok\n"
        if name:
            stopped = stop_sandbox(name)
            assert [record.id for record in stopped] == [box.id]
    assert not (tmp_path.parent / "escaped-case").exists()
    assert not Path("/etc/x").exists()


@pytest.mark.case(25)
def test_gvisor_8089_cycls_36_watchers_and_new_system_calls_work(box: Sandbox) -> None:
    script = """
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
watch = libc.inotify_init1(0)
assert watch >= 0 and libc.inotify_add_watch(watch, b".", 0x100) >= 0
open("seen", "w").close()
event = os.read(watch, 4096)
assert b"seen" in event
how = struct.pack("QQQ", os.O_RDONLY, 0, 0x10)
assert libc.syscall(437, -100, b"seen", how, len(how)) >= 0, ctypes.get_errno()
print("ok")
"""
    assert box.run("python3", "-c", script).stdout == b"ok\n"


@pytest.mark.case(25)
def test_gvisor_8089_a_set_up_failure_is_an_error_not_command_output() -> None:
    with pytest.raises(SandboxCreateFailed, match="could not create a sandbox: workdir"):
        Sandbox.create(workdir="/var/run/x/" + "y" * 300, memory="64Mi", disk="8Mi")
    with pytest.raises(ImageError, match="no image 'debian:13'"):
        Sandbox.create(image="debian:13")


@pytest.mark.case(25)
def test_cycls_36_capabilities_are_probed_not_assumed() -> None:
    found = probe()
    assert found.ready, found
    assert all(finding.says for finding in found.findings)
    assert all(finding.fix for finding in found.findings if not finding.ok)
