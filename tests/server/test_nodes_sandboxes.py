"""Sandboxes on nodes are sandboxes: commands, files, terminals, stops and starts, as on the server's own machine."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from collections.abc import Iterator

import pytest
from node_process import Head, heading
from server_process import NODUS
from test_server_commands import MERGE, started

import sandmill


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A head without sandboxes of its own, and one node."""
    with heading(tmp_path_factory.mktemp("head"), "--no-local") as head:
        head.join("a")
        yield head


def test_the_same_code_runs_there(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDMILL_API_KEY", head.key)
    with sandmill.Sandbox.create(memory="256Mi", disk="32Mi", files={"given/a": b"a\n"}, env={"B": "c"}, server=head.url) as box:
        assert head.place(box.id) == "a"
        done = box.run("sh", "-c", "cat given/a; echo $B >&2; exit 3")
        assert (done.exit_code, done.stdout, done.stderr) == (3, b"a\n", b"c\n")
        data = bytes(range(256)) * 4000
        box.write("deep/er/x", data)
        assert box.read("deep/er/x") == data
        assert box.run("wc", "-c", stdin=b"x" * 100_000).stdout == b"100000\n"
        assert len(box.run("head", "-c", "3000000", "/dev/zero", max_output=4 << 20).stdout) == 3_000_000


def test_a_workspace_larger_than_an_answer_survives_a_stop(head: Head) -> None:
    head.up("kept", resources={"memory": "256Mi", "disk": "64Mi"})
    head.run("kept", "sh", "-c", "head -c 20000000 /dev/urandom > f; sha256sum f > sum; ln f g")
    head.ask("PATCH", "sandboxes/kept", {"spec": {"state": "Stopped"}}, MERGE)
    stopped = head.until("sandboxes/kept", phase="Stopped")["status"]
    assert [one["status"] for one in stopped["conditions"] if one["type"] == "StateSaved"] == ["True"], stopped
    look = head.run("kept", "sh", "-c", "sha256sum -c sum && stat -c %h g")
    assert head.output(look["metadata"]["name"]) == b"f: OK\n2\n"


def test_a_terminal_there(head: Head) -> None:
    head.up("tty")
    name = started(head, "tty", "bash", "--norc", tty=True)
    assert head.ask("POST", f"processes/{name}/signals", {"resize": {"rows": 31, "cols": 99}}).status == 200
    for number, text in enumerate(("stty size; sleep 60\n", "\x03", "echo alive-$((40+2)); exit 5\n"), 1):
        data = base64.b64encode(text.encode()).decode()
        assert head.ask("POST", f"processes/{name}/stdin", {"seq": number, "data": data}).status == 200
        time.sleep(0.7)
    ended = head.ask("GET", f"processes/{name}?wait=20s").json["status"]
    assert ended["exitCode"] == 5
    assert b"31 99" in head.output(name)
    assert b"alive-42" in head.output(name)


def test_the_published_command_line(head: Head) -> None:
    head.up("dev")
    done = subprocess.run(
        [NODUS, "exec", "sb/dev", "--", "sh", "-c", "echo out; exit 7"], capture_output=True, text=True, timeout=60, env=head.environment
    )
    assert (done.returncode, done.stdout) == (7, "out\n"), done
    listed = subprocess.run([NODUS, "get", "nodes"], capture_output=True, text=True, timeout=60, env=head.environment)
    assert [line.split()[:2] for line in listed.stdout.splitlines()[1:]] == [["a", "Ready"]], listed


def test_ends_there_are_ends_here(head: Head) -> None:
    head.up("ends")
    cancelled = started(head, "ends", "sleep", "99")
    head.ask("PATCH", f"processes/{cancelled}", {"spec": {"state": "Cancelled"}}, MERGE)
    assert head.until(f"processes/{cancelled}", phase="Cancelled")["status"]["exitCode"] == 137
    late = head.run("ends", "sh", "-c", "echo before; sleep 99", timeout="400ms")
    assert (late["status"]["reason"], late["status"]["exitCode"]) == ("DeadlineExceeded", 124)
    assert head.run("ends", "no-such-program")["status"]["reason"] == "CommandNotFound"
    running = started(head, "ends", "sh", "-c", "echo there; sleep 99")
    head.ask("GET", f"processes/{running}/output?wait=10s")
    assert head.ask("DELETE", "sandboxes/ends").status == 200
    assert head.ask("GET", "sandboxes/ends").status == 404
    assert json.loads(head.cli("ls", "--json"))[0]["metadata"]["name"] == "a"


def test_secrets_reach_it(head: Head) -> None:
    head.ask("POST", "secrets", {"metadata": {"name": "token"}, "spec": {"stringData": {"K": "v123"}}})
    head.up("with-secret", secrets=["token"])
    look = head.run("with-secret", "sh", "-c", "cat /run/secrets/token/K; echo $K; stat -c %a /run/secrets/token/K")
    assert head.output(look["metadata"]["name"]) == b"v123v123\n400\n"


def test_usage_is_billed_by_the_head(head: Head) -> None:
    head.up("paid")
    assert head.ask("DELETE", "sandboxes/paid").status == 200
    records = head.ask("GET", "/apis/nodus.dev/v1/usagerecords?fieldSelector=object.name%3Dpaid").json["items"]
    assert len(records) == 1
    assert "amountUSD" in records[0]
