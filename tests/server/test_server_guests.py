"""A server whose own backend makes guests: what its clients may ask for is the same, or refused in one sentence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_process import Server, serving

import sandmill
from sandmill.errors import SandboxError
from sandmill.sandboxes import PIPE


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SANDMILL_BACKEND", "gvisor")
        with serving(tmp_path_factory.mktemp("guests")) as server:
            yield server


@pytest.fixture
def box(served: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[sandmill.Sandbox]:
    monkeypatch.setenv("SANDMILL_BACKEND", "server")
    monkeypatch.setenv("SANDMILL_API_URL", served.url)
    monkeypatch.setenv("SANDMILL_API_KEY", served.key)
    with sandmill.Sandbox.create(memory="256Mi", disk="32Mi") as made:
        yield made


def test_terminals(box: sandmill.Sandbox) -> None:
    terminal = box.exec("bash", "--norc", "--noediting", tty=True, stdin=PIPE)
    terminal.resize(31, 99)
    terminal.stdin.write("stty size; exit 4\n")
    assert "31 99" in terminal.stdout.read()
    assert terminal.wait() == 4


def test_forks_and_standing_still(box: sandmill.Sandbox) -> None:
    box.write("w", b"w\n")
    box.freeze()
    box.thaw()
    forks = box.fork(2)
    assert [fork.run("cat", "w").stdout for fork in forks] == [b"w\n"] * 2
    for fork in forks:
        fork.terminate()


def test_what_guests_cannot_do_is_refused_at_once(box: sandmill.Sandbox) -> None:
    with pytest.raises(SandboxError, match="backend gvisor cannot make an image"):
        box.snapshot_filesystem()
    assert box.run("echo", "lives").stdout == b"lives\n"
