"""Pods as sandboxes. In: specs; the cluster as a kube config (KUBECONFIG, ~/.kube/config) or a pod's own service account names it, and
SANDMILL_KUBERNETES_NAMESPACE, _RUNTIME_CLASS and _IMAGE. Out: machines.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import secrets
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
from kubernetes_asyncio import config
from kubernetes_asyncio.client import ApiClient, ApiException, Configuration, CoreV1Api, NetworkingV1Api
from kubernetes_asyncio.config.config_exception import ConfigException
from kubernetes_asyncio.stream import WsApiClient

from sandmill.errors import IsolationUnavailable, SandboxCreateFailed, Unsupported
from sandmill.sandboxes import dual
from sandmill.sandboxes.backends.guest.program import guest_program
from sandmill.sandboxes.backends.kubernetes.machine import FAILURES, REQUEST_S, Pod, said
from sandmill.sandboxes.backends.kubernetes.manifests import CONTAINER, MANAGED, NETWORK, Settings, guest_command, network_policy, pod
from sandmill.sandboxes.backends.seam import BackendName, Hearing, Usable
from sandmill.sandboxes.spec import EgressMode, SandboxSpec

_PROTOCOLS: Final = "v5.channel.k8s.io, v4.channel.k8s.io"
_HEARTBEAT_S: Final = 30.0
_POLL_S: Final = 0.1
_LONGEST_POLL_S: Final = 1.0
_ROOM_S: Final = 60.0
_LEAVE_S: Final = 5.0
_FIX: Final = "set KUBECONFIG to a cluster in which you may make pods"
_HOPELESS: Final = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
)


class Kubernetes:
    """A cluster."""

    name = BackendName.KUBERNETES
    text = False
    start_s = 300.0

    def __init__(self) -> None:
        self._settings = Settings.of()
        self._connecting = asyncio.Lock()
        self._client: ApiClient | None = None
        self._core: CoreV1Api | None = None
        self._streams: CoreV1Api | None = None
        self._policed: set[EgressMode] = set()

    def lacks(self, spec: SandboxSpec) -> str | None:
        """What is the cluster's to hold."""
        return "a pod's network policy holds only where the cluster's network plugin enforces it"

    def check(self, spec: SandboxSpec) -> None:
        """Raises Unsupported."""
        if spec.network.mode is EgressMode.ALLOW:
            raise Unsupported(self.name, "allow hosts by name", "use Egress.open(), Egress.deny() or backend native")

    async def create(self, spec: SandboxSpec, guest: Sequence[str], hearing: Hearing) -> Pod:
        """A pod of its own."""
        core, settings = await self._connected(), self._settings
        name = f"sandmill-{secrets.token_hex(8)}"
        machine = Pod(name, settings.namespace, core, hearing)
        try:
            await self._police(spec.network.mode)
            await in_full(self._make(core, pod(name, spec, settings)))  # cancelled halfway, it might come to be after its deletion
            await self._await_running(core, name)
            program = guest_program()
            machine.attach(await self._start(name, guest_command(len(program), guest)))
            machine.send(program)
        except BaseException as error:
            with contextlib.suppress(*FAILURES, SandboxCreateFailed):
                await asyncio.shield(machine.destroy())
            if isinstance(error, FAILURES) and not isinstance(error, SandboxCreateFailed):
                raise SandboxCreateFailed(f"the cluster made no pod: {said(error)}") from error
            raise
        return machine

    async def usable(self) -> Usable:
        """Asks the cluster for its pods of ours."""
        try:
            core = await self._connected()
            await core.list_namespaced_pod(self._settings.namespace, label_selector=_ours(), limit=1, _request_timeout=REQUEST_S)
        except IsolationUnavailable as error:
            return Usable(ok=False, says=str(error).removesuffix(f"; {_FIX}"), fix=_FIX)
        except FAILURES as error:
            return Usable(ok=False, says=f"the cluster does not answer as it should: {said(error)}", fix=_FIX)
        wall = f"runtime class {self._settings.runtime_class}" if self._settings.runtime_class else "the cluster's default runtime"
        return Usable(ok=True, says=f"the cluster answers; namespace {self._settings.namespace}, {wall}")

    async def _connected(self) -> CoreV1Api:
        async with self._connecting:
            if self._core is None:
                settings = await _configuration()
                plain = ApiClient(settings)
                streams = WsApiClient(settings, header_name="sec-websocket-protocol", header_value=_PROTOCOLS, heartbeat=_HEARTBEAT_S)
                self._client, self._core, self._streams = plain, CoreV1Api(plain), CoreV1Api(streams)
                atexit.register(_leave, plain, streams)
                with contextlib.suppress(*FAILURES):
                    await self._sweep(self._core)
            return self._core

    async def _sweep(self, core: CoreV1Api) -> None:
        """Deletes pods that have ended and whose owners died before they could."""
        namespace = self._settings.namespace
        found = await core.list_namespaced_pod(namespace, label_selector=_ours(), _request_timeout=REQUEST_S)
        for item in found.items:
            if item.status.phase in ("Succeeded", "Failed"):
                await core.delete_namespaced_pod(item.metadata.name, namespace, grace_period_seconds=0, _request_timeout=REQUEST_S)

    async def _police(self, mode: EgressMode) -> None:
        """The network policy must be there before the first pod that it holds."""
        if mode in self._policed:
            return
        body: Any = network_policy(mode)
        policies, namespace = NetworkingV1Api(self._client), self._settings.namespace
        try:
            await policies.create_namespaced_network_policy(namespace, body, _request_timeout=REQUEST_S)
        except ApiException as error:
            if error.status != 409:
                raise
            await policies.replace_namespaced_network_policy(body["metadata"]["name"], namespace, body, _request_timeout=REQUEST_S)
        self._policed.add(mode)

    async def _make(self, core: CoreV1Api, body: Any) -> None:
        """Waits while the cluster is too busy to take the request."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + _ROOM_S, _POLL_S
        while True:
            try:
                await core.create_namespaced_pod(self._settings.namespace, body, _request_timeout=REQUEST_S)
            except ApiException as error:
                if error.status != 429 or loop.time() > deadline:
                    raise
                await asyncio.sleep(pause)
                pause = min(5.0, 2 * pause)
            else:
                return

    async def _await_running(self, core: CoreV1Api, name: str) -> None:
        pause = _POLL_S
        while True:
            status = (await core.read_namespaced_pod(name, self._settings.namespace, _request_timeout=REQUEST_S)).status
            if status.phase == "Running":
                return
            waits = [state.state.waiting for state in status.container_statuses or () if state.state and state.state.waiting]
            hopeless = [wait for wait in waits if wait.reason in _HOPELESS]
            if hopeless or status.phase in ("Failed", "Succeeded"):
                why = (
                    f"{hopeless[0].reason}: {hopeless[0].message or ''}"
                    if hopeless
                    else f"{status.reason or status.phase}: {status.message or ''}"
                )
                raise SandboxCreateFailed(f"the pod does not start: {ascii(why[:300])[1:-1]}")
            await asyncio.sleep(pause)
            pause = min(_LONGEST_POLL_S, 1.5 * pause)

    async def _start(self, name: str, command: list[str]) -> aiohttp.ClientWebSocketResponse:
        assert self._streams is not None
        options: dict[str, Any] = {"container": CONTAINER, "command": command, "stdin": True, "stdout": True, "stderr": True, "tty": False}
        opening: Any = await self._streams.connect_get_namespaced_pod_exec(
            name, self._settings.namespace, _preload_content=False, **options
        )
        socket: aiohttp.ClientWebSocketResponse = await opening
        return socket


async def in_full(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work` to its end even when cancelled."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _ours() -> str:
    return f"{MANAGED}=sandmill,{NETWORK}"


async def _configuration() -> Configuration:
    """The cluster's address and this user's credentials. Raises IsolationUnavailable."""
    found, path = Configuration(), os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    try:
        if os.environ.get("KUBECONFIG") or Path(path).exists():
            await config.load_kube_config(config_file=path, client_configuration=found)
        else:
            in_cluster: Any = config.load_incluster_config  # untyped
            in_cluster(client_configuration=found)
    except (ConfigException, OSError, ValueError, TypeError) as error:
        raise IsolationUnavailable(f"backend kubernetes knows no cluster: {ascii(str(error)[:200])[1:-1].rstrip('.')}; {_FIX}") from error
    return found


def _leave(*clients: ApiClient) -> None:
    """At exit: connections are closed on the loop that they belong to."""

    async def close() -> None:
        for client in clients:
            await client.close()

    with contextlib.suppress(TimeoutError, RuntimeError):
        asyncio.run_coroutine_threadsafe(close(), dual.loop()).result(_LEAVE_S)
