"""`sandmill serve`: where it listens, whom it lets in, whose state it takes; SQLite and PostgreSQL alike."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_process import Postgres
from server_process import KEY, Server, serving

COMMAND = [sys.executable, "-c", "from sandmill.cli import main; main()"]
MERGE = {"Content-Type": "application/merge-patch+json"}


def sandmill(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "SANDMILL_API_KEY"}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=30, env=clean | environment)


def key_for(server: Server, name: str, *projects: str) -> str:
    chosen = [word for project in projects for word in ("--project", project)]
    made = sandmill("key", "new", name, "--state", str(server.folder / "state"), *chosen)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def test_other_addresses_need_a_key(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        refused = sandmill("serve", "--host", host, "--port", "0", "--state", str(tmp_path))
        assert refused.returncode == 2
        assert "has no key yet" in refused.stderr
    assert "is no address" in sandmill("serve", "--host", "example.org", "--state", str(tmp_path)).stderr
    short = sandmill("serve", "--port", "0", "--state", str(tmp_path), SANDMILL_API_KEY="short")
    assert (short.returncode, "from 16 to 512" in short.stderr) == (2, True)


def test_with_a_key_it_listens_elsewhere(tmp_path: Path) -> None:
    with serving(tmp_path, "--host", "0.0.0.0") as server:
        assert server.ask("GET", "sandboxes").status == 200


def test_the_first_start_makes_a_key_and_shows_it_once(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "SANDMILL_API_KEY"}
    environment["SANDMILL_STATE"] = str(tmp_path / "sandboxes")
    for expected in (True, False):
        process = subprocess.Popen(
            [*COMMAND, "serve", "--port", "0", "--state", str(tmp_path / "state")], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        process.terminate()
        assert process.wait(30) == 0
        process.stdout.close()
        assert lines[1].startswith("export NODUS_API_URL=http://127.0.0.1:")
        assert lines[2].startswith("export NODUS_API_KEY=sandmill_") is expected
    stored = (tmp_path / "state" / "keys.json").read_text()
    assert "sandmill_" not in stored
    assert oct((tmp_path / "state").stat().st_mode)[-3:] == "700"


def test_a_start_that_fails_makes_no_key_that_nobody_sees(tmp_path: Path) -> None:
    failed = sandmill("serve", "--port", "0", "--state", str(tmp_path / "state"), "--database", "postgresql://nobody@127.0.0.1:1/x")
    assert (failed.returncode, failed.stdout) == (7, "")
    listed = sandmill("key", "ls", "--state", str(tmp_path / "state"), "--json")
    assert json.loads(listed.stdout) == []


def test_keys_take_effect_and_end_at_once(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        key = key_for(server, "guest")
        header = {"Authorization": f"Bearer {key}"}
        assert server.ask("GET", "sandboxes", headers=header).status == 200
        listed = sandmill("key", "ls", "--state", str(server.folder / "state"), "--json")
        assert json.loads(listed.stdout) == [{"name": "guest", "projects": [], "role": "user"}]
        assert sandmill("key", "rm", "guest", "--state", str(server.folder / "state")).returncode == 0
        assert server.ask("GET", "sandboxes", headers=header).status == 401


def test_a_state_folder_in_use_or_of_another_version(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        second = sandmill("serve", "--port", "0", "--state", str(server.folder / "state"), SANDMILL_STATE=str(tmp_path / "b"))
        assert (second.returncode, "another server uses the state folder" in second.stderr) == (7, True)
        assert server.ask("GET", "sandboxes").status == 200
    with sqlite3.connect(tmp_path / "state" / "server.db") as database:
        database.execute("update notes set value = '99' where key = 'schema'")
    database.close()
    newer = sandmill("serve", "--port", "0", "--state", str(tmp_path / "state"), SANDMILL_STATE=str(tmp_path / "b"))
    assert (newer.returncode, "has version 99, this program reads 1" in newer.stderr) == (7, True)
    (tmp_path / "state" / "server.db").write_bytes(b"not a database" * 100)
    broken = sandmill("serve", "--port", "0", "--state", str(tmp_path / "state"), SANDMILL_STATE=str(tmp_path / "b"))
    assert (broken.returncode, "cannot be used" in broken.stderr) == (7, True)


def test_wrong_options(tmp_path: Path) -> None:
    for options, said in (
        (["--database", "mysql://x"], "postgresql://"),
        (["--database", "postgresql://nobody@127.0.0.1:1/x"], "cannot be used"),
        (["--prices", "/nonexistent"], "price book cannot be read"),
        (["--tls-cert", "/nonexistent"], "both a certificate and its key"),
        (["--port", "99999"], "65535"),
    ):
        refused = sandmill("serve", "--state", str(tmp_path / "state"), *(options if "--port" in options else ["--port", "0", *options]))
        assert refused.returncode in (2, 7)
        assert said in refused.stderr, refused.stderr


@pytest.fixture(params=["sqlite", "postgres"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    options = () if request.param == "sqlite" else ("--database", request.getfixturevalue("postgres"))
    with serving(tmp_path, *options) as server:
        yield server
        server.ask("DELETE", "sandboxes")


def test_everything_is_there_after_a_restart_and_after_a_kill(stored: Server) -> None:
    stored.box("kept", maxCostUSD="3.00")
    name = stored.run("kept", "sh", "-c", "echo out; echo err >&2; printf '\\377'; exit 5")["metadata"]["name"]
    stored.ask("PATCH", "sandboxes/kept", {"metadata": {"labels": {"a": "b"}}}, MERGE)
    before = stored.ask("GET", f"processes/{name}").json
    for end in (stored.stop, stored.kill):
        end()
        stored.start()
        assert stored.ask("GET", f"processes/{name}").json == before
        assert (stored.output(name), stored.output(name, "stderr")) == (b"out\n\xff", b"err\n")
        value = stored.ask("GET", "sandboxes/kept").json
        assert (value["metadata"]["labels"], value["spec"]["maxCostUSD"], value["status"]["phase"]) == ({"a": "b"}, "3.00", "Stopped")
        if end == stored.stop:
            assert stored.run("kept", "true")["status"]["exitCode"] == 0
    reasons = [event["reason"] for event in stored.ask("GET", "/apis/nodus.dev/v1/events").json["items"]]
    assert reasons == ["Stopped", "Started", "NodeLost"]


def test_one_server_a_database(postgres: str, tmp_path: Path) -> None:
    with serving(tmp_path, "--database", postgres):
        second = sandmill(
            "serve", "--port", "0", "--state", str(tmp_path / "c"), "--database", postgres, SANDMILL_STATE=str(tmp_path / "b")
        )
        assert (second.returncode, "another server uses this database" in second.stderr) == (7, True)


def test_a_database_that_goes_away_and_comes_back(own_postgres: Postgres, tmp_path: Path) -> None:
    with serving(tmp_path, "--database", own_postgres.url) as server:
        server.box("before")
        assert server.run("before", "true")["status"]["exitCode"] == 0
        own_postgres.stop()
        answers = [
            server.ask("POST", "secrets", {"metadata": {"name": f"s{number}"}, "spec": {"stringData": {"k": "v"}}}) for number in range(2)
        ]
        assert [(answer.status, answer.json["reason"]) for answer in answers] == [(503, "Unavailable")] * 2
        assert server.ask("GET", "sandboxes/before").json["status"]["phase"] == "Running"
        own_postgres.start()
        deadline = time.monotonic() + 15
        while server.ask("GET", "/readyz").status != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert server.run("before", "true")["status"]["exitCode"] == 0
        second = sandmill(
            "serve", "--port", "0", "--state", str(tmp_path / "c"), "--database", own_postgres.url, SANDMILL_STATE=str(tmp_path / "b")
        )
        assert (second.returncode, "another server uses this database" in second.stderr) == (7, True)


@contextlib.contextmanager
def full(server: Server) -> Iterator[None]:
    """Nothing more can be written to its disk, for a block. Without root, that is a limit of the process."""
    state = server.folder / "state"
    if os.geteuid():
        limits = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        yield
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, limits)
        return
    with (state / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))
    yield
    (state / "filler").unlink()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A disk of one megabyte at `folder`, where root may mount one."""
    folder.mkdir()
    if os.geteuid() == 0:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_said_and_survived(tmp_path: Path) -> None:
    with small_disk(tmp_path / "state"), serving(tmp_path) as server:
        server.box("early", state="Stopped")
        with full(server):
            bodies = [{"metadata": {"name": f"s{number}"}, "spec": {"stringData": {"k": "v" * 5000}}} for number in range(3)]
            refused = [server.ask("POST", "secrets", body) for body in bodies][-1]
            assert (refused.status, refused.json["reason"]) == (503, "Unavailable")
            assert "cannot write its state" in refused.json["message"]
            assert server.ask("GET", "/readyz").status == 503
            assert server.ask("GET", "sandboxes/early").status == 200
        deadline = time.monotonic() + 10
        while server.ask("GET", "/readyz").status != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert server.ask("POST", "secrets", {"metadata": {"name": "later"}, "spec": {"stringData": {"k": "v"}}}).status == 201
        server.stop()
        server.start()
        assert server.ask("GET", "secrets/later").status == 200


def test_kubectl_is_a_client_too(tmp_path: Path) -> None:
    """Over TLS: it sends no key in the clear."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=local",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True,
    )  # fmt: skip
    with serving(tmp_path, "--tls-cert", str(certificate), "--tls-key", str(key)) as server:
        assert server.url.startswith("https://")
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "s",
            "contexts": [{"name": "s", "context": {"cluster": "s", "user": "u", "namespace": "default"}}],
            "clusters": [{"name": "s", "cluster": {"server": server.url, "certificate-authority": str(certificate)}}],
            "users": [{"name": "u", "user": {"token": KEY}}],
        }
        (tmp_path / "config").write_text(json.dumps(config))
        manifest = {"apiVersion": "nodus.dev/v1", "kind": "Sandbox", "metadata": {"name": "k"}, "spec": {"resources": {"memory": "256Mi"}}}
        (tmp_path / "k.json").write_text(json.dumps(manifest))

        def kubectl(*arguments: str) -> str:
            done = subprocess.run(
                ["kubectl", "--kubeconfig", str(tmp_path / "config"), *arguments],
                capture_output=True, text=True, timeout=30, env=os.environ | {"HOME": str(tmp_path)},
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            return done.stdout

        assert "sandboxes" in kubectl("api-resources")
        assert "created" in kubectl("apply", "-f", str(tmp_path / "k.json"))
        assert "condition met" in kubectl("wait", "sandbox/k", "--for=condition=Ready", "--timeout=10s")
        assert "Running" in kubectl("get", "sb")
        assert kubectl("get", "sb", "k", "-o", "jsonpath={.spec.resources.memory}") == "256Mi"
        assert "labeled" in kubectl("label", "sb", "k", "a=b")
        assert "k" in kubectl("get", "sb", "-l", "a=b", "-o", "name")
        assert "idleTimeout" in kubectl("explain", "sandbox.spec.lifecycle")
        assert "unchanged" in kubectl("apply", "-f", str(tmp_path / "k.json"))
        assert "deleted" in kubectl("delete", "sb", "k", "--wait=true", "--timeout=10s")
