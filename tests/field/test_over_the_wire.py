"""Field cases between a client and a server: real servers, and a proxy between them that loses what it was told to lose."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from server_process import KEY, Server, serving

from sandmill.sandboxes import Sandbox

SMALL = {"memory": "64Mi", "disk": "8Mi"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@contextmanager
def losing(server: Server, kind: str, how: str) -> Iterator[tuple[str, list[str]]]:
    """A proxy's URL, and the requests whose answer it kept: the first POST that ends with `kind`, which the server has carried out."""
    kept: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def relay(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            if self.command == "POST" and self.path.endswith(kind) and not kept:
                kept.append(self.path)
                assert answer.status == 201
                if how == "closed":
                    self.close_connection = True
                    return
                data = b"<html>bad gateway</html>"
                self.send_response(502)
            else:
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = relay

        def log_message(self, format: str, *args: object) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}", kept
    finally:
        proxy.shutdown()
        proxy.server_close()


@pytest.mark.case(19)
@pytest.mark.parametrize("how", ["closed", "502"])
def test_agent_sandbox_1352_a_command_whose_answer_was_lost_runs_once(server: Server, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("SANDMILL_API_KEY", KEY)
    with losing(server, "/processes", how) as (url, kept), Sandbox.create(**SMALL, server=url) as box:
        done = box.run("sh", "-c", "echo x >> log; cat log")
        assert (len(kept), done.exit_code, done.stdout) == (1, 0, b"x\n")
        assert box.read("log") == b"x\n"


@pytest.mark.case(20)
@pytest.mark.parametrize("how", ["closed", "502"])
def test_verifiers_1720_a_creation_whose_answer_was_lost_makes_one_sandbox(
    server: Server, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("SANDMILL_API_KEY", KEY)
    before = len(server.ask("GET", "sandboxes").json["items"])
    with losing(server, "/sandboxes", how) as (url, kept), Sandbox.create(**SMALL, server=url) as box:
        assert box.run("echo", "up").stdout == b"up\n"
        assert len(kept) == 1
        assert len(server.ask("GET", "sandboxes").json["items"]) == before + 1


@pytest.mark.case(21)
def test_skyrl_1302_servers_that_start_together_hold_the_port_that_they_report(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(folder)) for folder in folders]
        assert len({one.port for one in servers}) == 3
        assert [one.ask("GET", "sandboxes").status for one in servers] == [200] * 3
