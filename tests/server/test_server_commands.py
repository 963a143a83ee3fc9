"""Commands over the wire: output from any offset, input once, signals, ends; files; lifecycles; money."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest
from server_process import Server, serving

MERGE = {"Content-Type": "application/merge-patch+json"}


def started(server: Server, box: str, *command: str, **spec: object) -> str:
    answer = server.ask("POST", f"sandboxes/{box}/processes", {"spec": {"command": list(command), **spec}})
    assert answer.status == 201, answer.body
    return str(answer.json["metadata"]["name"])


@pytest.fixture
def box(clean: Server) -> str:
    clean.box("b")
    return "b"


def test_how_commands_end(clean: Server, box: str) -> None:
    ends = {
        ("true",): ("Succeeded", 0, None),
        ("sh", "-c", "exit 3"): ("Failed", 3, None),
        ("sh", "-c", "kill -9 $$"): ("Failed", 137, None),
        ("no-such-program",): ("Failed", 127, "CommandNotFound"),
        ("/etc/passwd",): ("Failed", 126, "StartFailed"),
    }
    for command, (phase, code, reason) in ends.items():
        status = clean.run(box, *command)["status"]
        assert (status["phase"], status["exitCode"], status.get("reason")) == (phase, code, reason), command


def test_a_timeout_kills_the_whole_tree_and_keeps_the_output(clean: Server, box: str) -> None:
    ended = clean.run(box, "sh", "-c", "echo before; (setsid sleep 77 &) ; sleep 77", timeout="400ms")
    assert (ended["status"]["phase"], ended["status"]["reason"], ended["status"]["exitCode"]) == ("Failed", "DeadlineExceeded", 124)
    assert clean.output(ended["metadata"]["name"]) == b"before\n"
    left = clean.run(box, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 7[7]'")
    assert clean.output(left["metadata"]["name"]) == b"0\n"


def test_output_from_any_offset(clean: Server, box: str) -> None:
    name = started(clean, box, "sh", "-c", "printf abc; printf XYZ >&2; sleep 0.3; printf def")
    clean.ask("GET", f"processes/{name}?wait=10s")
    for after, expected in ((0, b"abcdef"), (2, b"cdef"), (6, b""), (999, b"")):
        lines = [json.loads(line) for line in clean.ask("GET", f"processes/{name}/output?stream=stdout&after={after}").body.splitlines()]
        frames = [line for line in lines if "data" in line]
        assert b"".join(base64.b64decode(frame["data"]) for frame in frames) == expected
        assert all(frame["offset"] >= after for frame in frames)
        assert (lines[-1]["done"], lines[-1]["phase"], lines[-1]["exitCode"]) == (True, "Succeeded", 0)
    both = [json.loads(line) for line in clean.ask("GET", f"processes/{name}/output").body.splitlines()][:-1]
    assert sorted(frame["stream"] for frame in both)[0] == "stderr"
    assert sum(len(base64.b64decode(frame["data"])) for frame in both) == 9


def test_a_long_poll_answers_when_output_comes(clean: Server, box: str) -> None:
    name = started(clean, box, "sh", "-c", "sleep 0.4; echo late; sleep 30")
    began = time.monotonic()
    line = json.loads(clean.ask("GET", f"processes/{name}/output?stream=stdout&wait=20s").body.splitlines()[0])
    assert base64.b64decode(line["data"]) == b"late\n"
    assert 0.2 < time.monotonic() - began < 5
    clean.ask("PATCH", f"processes/{name}", {"spec": {"state": "Cancelled"}}, MERGE)
    assert clean.until(f"processes/{name}", phase="Cancelled")["status"]["exitCode"] == 137


def test_input_is_taken_once(clean: Server, box: str) -> None:
    name = started(clean, box, "cat", stdin=True)
    one = {"seq": 1, "data": base64.b64encode(b"one ").decode()}
    for piece in (one, one, {"seq": 2, "data": base64.b64encode(b"two").decode()}, one, {"seq": 3, "eof": True}):
        assert clean.ask("POST", f"processes/{name}/stdin", piece).status == 200
    assert clean.ask("GET", f"processes/{name}?wait=10s").json["status"]["exitCode"] == 0
    assert clean.output(name) == b"one two"
    late = clean.ask("POST", f"processes/{name}/stdin", {"seq": 9, "data": ""})
    assert (late.status, late.json["reason"]) == (409, "Conflict")
    assert clean.ask("POST", f"processes/{started(clean, box, 'true')}/stdin", one).status == 409


def test_input_that_nobody_reads_is_refused_in_time(clean: Server, box: str) -> None:
    name = started(clean, box, "sleep", "30", stdin=True)
    piece = base64.b64encode(bytes(700_000)).decode()
    answers = [clean.ask("POST", f"processes/{name}/stdin", {"seq": number, "data": piece}) for number in range(1, 6)]
    assert answers[0].status == 200
    refused = answers[-1]
    assert (refused.status, refused.json["reason"], refused.headers["retry-after"]) == (429, "StdinBackpressure", "1")


def test_signals_and_flood(clean: Server, box: str) -> None:
    name = started(clean, box, "sh", "-c", "trap 'echo got; exit 9' TERM; echo ready; while :; do sleep 0.05; done")
    clean.ask("GET", f"processes/{name}/output?wait=10s")
    assert clean.ask("POST", f"processes/{name}/signals", {"signal": "SIGTERM"}).status == 200
    assert clean.ask("GET", f"processes/{name}?wait=10s").json["status"]["exitCode"] == 9
    flood = clean.run(box, "sh", "-c", "yes 0123456789012345678901234567890123456789")["status"]
    assert (flood["phase"], flood["reason"], flood["outputTruncated"]) == ("Failed", "OutputFlood", True)


def test_odd_bytes_stay_bytes(clean: Server, box: str) -> None:
    ended = clean.run(box, "printf", "\\360\\377\\000x")
    assert clean.output(ended["metadata"]["name"]) == b"\xf0\xff\x00x"


def test_files(clean: Server, box: str) -> None:
    files = f"sandboxes/{box}/files"
    data = bytes(range(256)) * 3000
    assert clean.ask("PUT", f"{files}?path=deep/er/x", data).json["sha256"] == hashlib.sha256(data).hexdigest()
    read = clean.ask("GET", f"{files}?path=/workspace/deep/er/x", headers={"Accept": "*/*"})
    assert (read.body == data, read.headers["x-nodus-sha256"]) == (True, hashlib.sha256(data).hexdigest())
    listed = clean.ask("GET", f"{files}?path=deep/er", headers={"Accept": "application/json"}).json["items"]
    assert [(item["name"], item["type"], item["size"]) for item in listed] == [("x", "File", len(data))]
    wrong = clean.ask("PUT", f"{files}?path=deep/er/x&expectedSHA256={'0' * 64}", b"no")
    assert (wrong.status, wrong.json["reason"]) == (412, "SHA256Mismatch")
    assert clean.ask("PUT", f"{files}?path=deep/er/x&expectedSHA256={hashlib.sha256(data).hexdigest()}", b"yes").status == 200
    assert clean.ask("GET", f"{files}?path=nope").json["reason"] == "NotFound"
    assert clean.ask("GET", f"{files}?path=/etc/shadow").status in (403, 404)
    assert clean.ask("PUT", f"{files}?path=/usr/bin/x", b"").json["reason"] == "Forbidden"
    assert clean.ask("GET", f"{files}?path=/dev/zero").status == 400
    assert clean.ask("DELETE", f"{files}?path=deep").status == 200
    assert clean.ask("GET", f"{files}?path=deep").status == 404


def test_stop_keeps_the_workspace_or_not(clean: Server) -> None:
    for name, mode in (("keeps", "Snapshotted"), ("forgets", "Ephemeral")):
        clean.box(name, continuity={"mode": mode})
        clean.run(name, "sh", "-c", "mkdir -m 700 d; echo kept > d/f; ln -s f d/l; chmod 640 d/f; touch -- '-odd \\name'")
        clean.ask("PATCH", f"sandboxes/{name}", {"spec": {"state": "Stopped"}}, MERGE)
        stopped = clean.until(f"sandboxes/{name}", phase="Stopped")
        assert stopped["status"]["stopReason"] == "Requested"
    look = clean.run("keeps", "sh", "-c", "stat -c '%a %U' d d/f; cat d/l; ls | cat")  # a command wakes it
    assert clean.output(look["metadata"]["name"]) == b"700 user\n640 user\nkept\n-odd \\name\nd\n"
    assert clean.ask("GET", "sandboxes/keeps").json["spec"]["state"] == "Running"
    look = clean.run("forgets", "ls")
    assert clean.output(look["metadata"]["name"]) == b""


def test_every_kind_of_file_survives_a_stop(clean: Server, box: str) -> None:
    make = """
        echo s > secret; chmod 000 secret; mkfifo p; echo h > h; ln h h2; mkdir -p a/b; chmod 000 a/b; chmod 555 a
        touch $(printf 'n%.0s' $(seq 250)) "$(printf '\\377')"; echo x > sx; chmod 4711 sx; truncate -s 20G sparse; touch -d 2001-02-03 old
    """
    assert clean.run(box, "bash", "-c", make)["status"]["exitCode"] == 0
    clean.run(box, "sh", "-c", "echo r > ofroot; chmod 600 ofroot", user="root")
    look = "stat -c '%n %a %U %F %s %h %y' * a/b; cat h2 | cat"
    before = clean.output(clean.run(box, "sh", "-c", look)["metadata"]["name"])
    clean.ask("PATCH", f"sandboxes/{box}", {"spec": {"state": "Stopped"}}, MERGE)
    assert clean.until(f"sandboxes/{box}", phase="Stopped")["status"]["snapshot"]["reason"] == "Stop"
    assert clean.output(clean.run(box, "sh", "-c", look)["metadata"]["name"]) == before
    assert before.count(b"\n") == 13


def test_a_workspace_that_could_not_be_saved_is_not_silently_the_old_one(clean: Server, box: str) -> None:
    clean.run(box, "sh", "-c", "echo one > f")
    clean.ask("PATCH", f"sandboxes/{box}", {"spec": {"state": "Stopped"}}, MERGE)
    clean.until(f"sandboxes/{box}", phase="Stopped")
    clean.run(box, "sh", "-c", "echo two > f")
    kept = clean.folder / "state" / "kept"
    old = next(kept.iterdir())
    partial = old.with_suffix(".partial")
    partial.mkdir()  # stands in the way of the next save
    clean.ask("PATCH", f"sandboxes/{box}", {"spec": {"state": "Stopped"}}, MERGE)
    stopped = clean.until(f"sandboxes/{box}", phase="Stopped")["status"]
    partial.rmdir()
    assert [one["status"] for one in stopped["conditions"] if one["type"] == "StateSaved"] == ["False"]
    refused = clean.ask("POST", f"sandboxes/{box}/processes", {"spec": {"command": ["true"]}})
    assert (refused.status, refused.json["reason"]) == (409, "SandboxNotRunning")
    assert "could not be saved" in refused.json["message"]
    clean.ask("PATCH", f"sandboxes/{box}", {"metadata": {"annotations": {"nodus.dev/start-requested-at": "now"}}}, MERGE)
    look = clean.run(box, "cat", "f")
    assert clean.output(look["metadata"]["name"]) == b"one\n"


def test_commands_cut_off_by_a_stop_say_so(clean: Server, box: str) -> None:
    name = started(clean, box, "sh", "-c", "echo before; sleep 99")
    clean.ask("GET", f"processes/{name}/output?wait=10s")
    clean.ask("PATCH", f"sandboxes/{box}", {"spec": {"state": "Stopped"}}, MERGE)
    ended = clean.ask("GET", f"processes/{name}?wait=20s").json
    assert (ended["status"]["phase"], ended["status"]["reason"]) == ("Cancelled", "Requested")
    assert clean.output(name) == b"before\n"


@pytest.mark.parametrize("victims", ["its init", "the warden"])
def test_a_sandbox_that_dies_by_itself_is_seen(clean: Server, box: str, victims: str) -> None:
    """Its own root may end its init, the kernel the warden; nobody may take that for a command's result."""
    name = started(clean, box, "sleep", "99")
    wanted = inits_of(clean.process.pid) if victims == "its init" else children_of(clean.process.pid)
    assert wanted
    for pid in wanted:
        os.kill(pid, signal.SIGKILL)
    status = clean.until(f"sandboxes/{box}", stopReason="SandboxLost")["status"]
    assert status["phase"] == "Failed"
    assert clean.ask("GET", f"processes/{name}?wait=10s").json["status"]["phase"] in ("Failed", "Cancelled")
    refused = clean.ask("POST", f"sandboxes/{box}/processes", {"spec": {"command": ["true"]}})
    assert (refused.status, refused.json["reason"]) == (409, "SandboxFailed")
    clean.box("after")
    assert clean.run("after", "true")["status"]["exitCode"] == 0


def children_of(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def inits_of(server: int) -> list[int]:
    """The sandboxes' inits: children of the server's warden."""
    return [box for warden in children_of(server) for box in children_of(warden)]


def test_a_cap_stops_at_its_price_and_not_a_micro_dollar_later(tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text('hours:\n  sandbox: "3600"\n')  # a dollar a second
    with serving(tmp_path, "--prices", str(prices)) as server:
        server.box("dear", maxCostUSD="1.5")
        name = started(server, "dear", "sh", "-c", "echo spent; sleep 60")
        stopped = server.until("sandboxes/dear", phase="Stopped")
        assert (stopped["status"]["stopReason"], stopped["status"]["cost"]["totalUSD"]) == ("MaxCostReached", "1.50")
        assert server.output(name) == b"spent\n"
        assert server.ask("GET", f"processes/{name}").json["status"]["reason"] == "MaxCostReached"
        broke = server.ask("POST", "sandboxes/dear/processes", {"spec": {"command": ["true"]}})
        assert (broke.status, broke.json["reason"]) == (402, "BudgetExceeded")
        assert server.ask("PATCH", "sandboxes/dear", {"spec": {"maxCostUSD": "100"}}, MERGE).status == 200
        assert server.run("dear", "true")["status"]["exitCode"] == 0
        records = server.ask("GET", "/apis/nodus.dev/v1/usagerecords").json["items"]
        assert [record["amountUSD"] for record in records] == ["1.50"]
        summary = server.ask("GET", "/apis/nodus.dev/v1/usagerecords?groupBy=project,kind").json["rows"]
        assert [(row["group"], row["amountUSD"]) for row in summary] == [({"project": "default", "kind": "Sandbox"}, "1.50")]


def test_idle_and_lifetime_end_it(tmp_path: Path) -> None:
    """The shortest times the API takes are a minute; the stored objects are given seconds while the server is down."""
    with serving(tmp_path) as server:
        for name, spec in (("idles", {"onIdle": "Stop"}), ("leaves", {"onIdle": "Delete"}), ("ages", {}), ("works", {})):
            server.box(name, state="Stopped", lifecycle={"idleTimeout": "4m", "maxLifetime": "23h", **spec})
        server.stop()
        with sqlite3.connect(server.folder / "state" / "server.db") as database:
            database.execute(
                """update objects set body = replace(body, '"idleTimeout":"4m"', '"idleTimeout":"1500ms"') where name != 'ages'"""
            )
            database.execute("""update objects set body = replace(body, '"maxLifetime":"23h"', '"maxLifetime":"6s"') where name = 'ages'""")
        database.close()
        server.start()
        busy = started(server, "works", "sleep", "3")
        for name in ("idles", "leaves", "ages"):
            started(server, name, "true")
        assert server.until("sandboxes/idles", phase="Stopped")["status"]["stopReason"] == "IdleTimeout"
        server.gone("sandboxes/leaves")
        assert server.ask("GET", f"processes/{busy}?wait=20s").json["status"]["exitCode"] == 0  # busy is not idle
        assert server.until("sandboxes/works", phase="Stopped")["status"]["stopReason"] == "IdleTimeout"
        server.gone("sandboxes/ages")


def test_quota(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-running", "2") as server:
        for name in ("one", "two"):
            server.box(name)
            server.until(f"sandboxes/{name}", phase="Running")
        full = server.ask("POST", "sandboxes", {"metadata": {"name": "three"}, "spec": {}})
        assert (full.status, full.json["reason"], full.headers["retry-after"]) == (429, "QuotaExceeded", "5")
        assert server.ask("GET", "sandboxes/three").status == 404
        server.ask("DELETE", "sandboxes/one")
        server.box("three")
