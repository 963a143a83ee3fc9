"""Which backend a sandbox comes from: one setting, one sentence when it is wrong, nothing imported before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sandmill import Sandbox
from sandmill.config.load import parse_manifest
from sandmill.errors import ConfigError, IsolationUnavailable
from sandmill.sandboxes import SandboxSpec, block_on
from sandmill.sandboxes.backends.choice import choose
from sandmill.sandboxes.backends.gvisor.backend import Gvisor

URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("backend", "server", "variables", "chosen"),
    [
        (None, None, {}, ("native", "")),
        ("gvisor", None, {}, ("gvisor", "")),
        (None, None, {"SANDMILL_BACKEND": "e2b"}, ("e2b", "")),
        (None, None, {"SANDMILL_BACKEND": ""}, ("native", "")),
        ("native", None, {"SANDMILL_BACKEND": "e2b", "SANDMILL_API_URL": URL}, ("native", "")),
        (None, None, {"SANDMILL_API_URL": URL}, ("server", URL)),
        (None, URL, {}, ("server", URL)),
        ("server", URL, {}, ("server", URL)),
        ("server", None, {"SANDMILL_API_URL": URL}, ("server", URL)),
        (None, None, {"SANDMILL_BACKEND": "server", "SANDMILL_API_URL": URL}, ("server", URL)),
        (None, "", {"SANDMILL_API_URL": URL}, ("native", "")),
        (None, "", {"SANDMILL_API_URL": URL, "SANDMILL_BACKEND": "kubernetes"}, ("kubernetes", "")),
    ],
)
def test_one_setting_decides(
    backend: str | None, server: str | None, variables: dict[str, str], chosen: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert choose(backend, server) == chosen


@pytest.mark.parametrize(
    ("backend", "server", "variables", "says"),
    [
        ("gviser", None, {}, "did you mean gvisor"),
        ("k\x1b[31m", None, {}, r"not 'k\\x1b"),
        ("gvisor", URL, {}, "both asked for"),
        (None, None, {"SANDMILL_BACKEND": "gvisor", "SANDMILL_API_URL": URL}, "SANDMILL_API_URL"),
        ("server", None, {}, "set SANDMILL_API_URL"),
    ],
)
def test_a_wrong_setting_is_one_sentence(
    backend: str | None, server: str | None, variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says) as error:
        Sandbox.create(backend=backend, server=server)
    assert error.value.field == "backend"


def test_a_manifest_names_its_backend() -> None:
    text = b"spec:\n  model: {uri: sandmill/tiny-shell}\n  environment: {name: shell@1.0.0}\n  sandbox: {backend: %s}\n"
    assert parse_manifest(text % b"gvisor").spec.sandbox.backend == "gvisor"
    with pytest.raises(ConfigError, match="gvisor"):
        parse_manifest(text % b"gvisr")


def test_a_spec_carries_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IsolationUnavailable, match="E2B_API_KEY"):
        Sandbox.from_spec(SandboxSpec.of(backend="e2b"))


def test_no_backends_package_is_imported_before_it_is_used() -> None:
    script = "import sys, sandmill.sandboxes; print(sorted({'e2b', 'kubernetes_asyncio', 'aiohttp', 'httpx'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", ["e2b", "kubernetes"])
def test_a_missing_package_is_one_sentence(name: str) -> None:
    package = {"e2b": "e2b", "kubernetes": "kubernetes_asyncio"}[name]
    script = f"import sys; sys.modules[{package!r}] = None\nfrom sandmill import Sandbox\ntry: Sandbox.create(backend={name!r})\n"
    script += "except Exception as error: print(type(error).__name__, error)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"IsolationUnavailable backend {name} needs the package {package}")
    assert f"pip install 'sandmill[{name}]'" in done.stdout


def test_without_runsc_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDMILL_RUNSC", "/nowhere/runsc")
    with pytest.raises(IsolationUnavailable, match="runsc is not installed; install it"):
        Sandbox.create(backend="gvisor")
    assert not block_on(Gvisor().usable()).ok
