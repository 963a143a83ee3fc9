"""Every backend that can run here, as a place to make sandboxes at. In: a backend's name. Out: its options, and what is left there."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster import Cluster
from e2b_fleet import KEY, Fleet
from loopback import serving

from sandmill.sandboxes import Sandbox
from sandmill.sandboxes.backends.native.state import state_root

sys.path.insert(0, str(Path(__file__).parents[2] / "server"))
from node_process import heading
from server_process import Server
from server_process import serving as server_process

GUESTS = (*(("gvisor",) if shutil.which("runsc") else ()), "e2b", "kubernetes")
BACKENDS = ("native", "server", "node", *GUESTS)
"""node: on a node of a server, which the server's backend cannot tell."""
Maker = Callable[..., Sandbox]
SMALL = {"memory": "256Mi", "disk": "32Mi"}


@dataclass(frozen=True)
class Place:
    """Where sandboxes of one backend are made."""

    backend: str
    left: Callable[[], list[str]]
    """What is there now."""

    def create(self, **options: object) -> Sandbox:
        return Sandbox.create(**SMALL | {"backend": self.backend} | options)  # type: ignore[arg-type]


@contextlib.contextmanager
def place(backend: str, folder: Path) -> Iterator[Place]:
    """One of BACKENDS, with the environment variables that lead to it."""
    with contextlib.ExitStack() as stack:
        variables, left = _OPENERS.get(backend, _open_nothing)(folder, stack)
        stack.enter_context(environment(variables))
        yield Place("server" if backend == "node" else backend, left)


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """These set, for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _open_nothing(folder: Path, stack: contextlib.ExitStack) -> tuple[dict[str, str], Callable[[], list[str]]]:
    return {}, list


def _open_gvisor(folder: Path, stack: contextlib.ExitStack) -> tuple[dict[str, str], Callable[[], list[str]]]:
    return {}, gvisor_left


def gvisor_left() -> list[str]:
    """Bundles, control groups and processes of gVisor sandboxes of this process."""
    mine = f"{os.getpid()}-"
    bundles = [str(path) for path in (state_root() / "gvisor").glob(f"{mine}*/sandmill-*")]
    groups = [
        folder
        for folder, _, _ in os.walk("/sys/fs/cgroup")
        if f"sandmill-gvisor-{mine}" in folder and "/sandmill-gvisor" not in folder[-40:]
    ]
    return bundles + groups


def _open_server(folder: Path, stack: contextlib.ExitStack) -> tuple[dict[str, str], Callable[[], list[str]]]:
    running = stack.enter_context(server_process(folder))
    return _served_by(running)


def _served_by(running: Server) -> tuple[dict[str, str], Callable[[], list[str]]]:
    variables = {"SANDMILL_API_URL": running.url, "SANDMILL_API_KEY": running.key}
    return variables, lambda: [item["metadata"]["name"] for item in running.ask("GET", "sandboxes").json["items"]]


def _open_node(folder: Path, stack: contextlib.ExitStack) -> tuple[dict[str, str], Callable[[], list[str]]]:
    head = stack.enter_context(heading(folder, "--no-local"))
    head.join("a")
    return _served_by(head)


def _open_e2b(folder: Path, stack: contextlib.ExitStack) -> tuple[dict[str, str], Callable[[], list[str]]]:
    fleet = Fleet()
    url = stack.enter_context(serving(fleet.app()))
    return {"E2B_API_KEY": KEY, "E2B_API_URL": url, "E2B_SANDBOX_URL": url}, lambda: list(fleet.boxes)


def _open_kubernetes(folder: Path, stack: contextlib.ExitStack) -> tuple[dict[str, str], Callable[[], list[str]]]:
    cluster = Cluster()
    url = stack.enter_context(serving(cluster.app()))
    return {"KUBECONFIG": str(cluster.config(folder, url))}, lambda: [*cluster.pods, *cluster.boxes]


_OPENERS = {"gvisor": _open_gvisor, "server": _open_server, "node": _open_node, "e2b": _open_e2b, "kubernetes": _open_kubernetes}
