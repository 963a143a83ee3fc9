"""TLS between a head and its nodes: certificates of an authority of one's own, and nobody else's."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trustme
from node_process import NODES, SANDMILL, Head, NodeProcess, eventually
from server_process import BASE, Answer, serving
from test_server_images import make, said

from sandmill.sandboxes.backends.native.state import sweep


class Authority(NamedTuple):
    """A certificate authority, and a certificate for this machine by it."""

    trusted: Path
    options: tuple[str, ...]


def authority(folder: Path) -> Authority:
    folder.mkdir()
    made = trustme.CA()
    made.cert_pem.write_to_path(folder / "ca.pem")
    certificate = made.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    for part in certificate.cert_chain_pems:
        part.write_to_path(folder / "cert.pem", append=True)
    return Authority(folder / "ca.pem", ("--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem")))


class SecureHead(Head):
    """A head that speaks https only, and trusts one authority."""

    trusted: Path

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, *, timeout: float = 60) -> Any:
        url = self.url + (path if path.startswith("/") else f"{BASE}/{path}")
        sent = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"} | (headers or {})
        request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), sent, method=method)
        context = ssl.create_default_context(cafile=str(self.trusted))
        try:
            with urllib.request.urlopen(request, timeout=timeout, context=context) as answer:
                return Answer(answer.status, dict(answer.headers), answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, dict(error.headers), error.read())


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("good") / "ca")


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("evil") / "ca")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, good: Authority) -> Iterator[SecureHead]:
    folder = tmp_path_factory.mktemp("head")
    SecureHead.trusted = good.trusted
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(good.trusted))
        head = SecureHead(folder, "--no-local", "--room-wait", "2s", *good.options)
        assert head.url.startswith("https://")
        try:
            yield head
        finally:
            assert head.stop() == 0
            for node in head.nodes:
                if node.process.poll() is None:
                    node.kill()
                sweep(node.folder / "sandboxes")
    assert not [text for text in (head.errors, *(node.errors for node in head.nodes)) if "Traceback" in text]


def refused(head: Head, name: str, *options: str, url: str | None = None, **environment: str) -> str:
    """Joins in vain; what it says."""
    command = [*SANDMILL, "node", "join", url or head.url, "--name", name, "--state", str(head.folder / name), *options]
    variables = {**os.environ, "SANDMILL_API_KEY": head.node_key, "SANDMILL_STATE": str(head.folder / f"{name}-sandboxes"), **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr.strip()


def test_sandboxes_and_images_cross_it_both_ways(head: SecureHead, good: Authority) -> None:
    node: NodeProcess = head.join("a", *good.options)
    assert node.url.startswith("https://")
    head.up("origin")
    said(head, "origin", "head -c 3000000 /dev/urandom > f; sha256sum f > s")
    assert make(head, "snap", {"fromSandbox": {"name": "origin"}})["status"]["phase"] == "Ready"
    assert node.stop() == 0
    other = head.join("b", *good.options)
    head.up("copy", image="snap")
    assert head.place("copy") == "b"
    assert said(head, "copy", "sha256sum -c s") == "f: OK\n"
    assert head.ask("DELETE", "sandboxes").status == 200
    assert other.stop() == 0


def test_a_node_does_not_believe_a_head_of_another_authority(head: SecureHead, evil: Authority) -> None:
    said_so = refused(head, "wary", SSL_CERT_FILE=str(evil.trusted))
    assert len(said_so.splitlines()) == 1, said_so
    assert f"the certificate of {head.url} is not trusted" in said_so
    assert "SSL_CERT_FILE" in said_so
    assert head.ask("GET", f"{NODES}/wary").status == 404


def test_a_head_does_not_take_in_a_node_of_another_authority(head: SecureHead, evil: Authority) -> None:
    said_so = refused(head, "posing", *evil.options)
    assert len(said_so.splitlines()) == 1, said_so
    assert "does not take this machine in: it will not speak with the node: the certificate of https://127.0.0.1:" in said_so
    eventually(lambda: head.ask("GET", f"{NODES}/posing").status == 404)


def test_a_secure_word_to_a_plain_head_is_no_riddle(tmp_path: Path, head: SecureHead) -> None:
    with serving(tmp_path) as plain:
        said_so = refused(head, "riddle", url=plain.url.replace("http:", "https:"))
    assert len(said_so.splitlines()) == 1, said_so
    assert "does not speak TLS" in said_so
