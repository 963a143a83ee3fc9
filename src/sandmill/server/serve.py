"""Running a server. In: settings and keys. Out: a listening API, until a signal; then every sandbox is stopped and saved, within a bound.

The API runs on the sandbox loop, in its thread: a request reaches its sandbox without a thread in between. The main thread only
waits for signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import logging
import os
import secrets as random
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

import uvicorn

from sandmill.errors import ConfigError, NodeRefused, SandboxError, StoreUnavailable
from sandmill.sandboxes import loop
from sandmill.sandboxes.backends.native.node import node
from sandmill.sandboxes.backends.remote.client import Client
from sandmill.server.answers import Answers
from sandmill.server.api.context import LARGEST_FILE, Context
from sandmill.server.api.protocol import BoundedProtocol
from sandmill.server.api.routes import application
from sandmill.server.blobs import Blobs
from sandmill.server.boxes import Boxes
from sandmill.server.branches import Branches
from sandmill.server.catalog import Catalog
from sandmill.server.commands import Commands
from sandmill.server.environments import Environments
from sandmill.server.events import Events
from sandmill.server.fetching import Fetching, Origin, Supply, clear
from sandmill.server.images import Images
from sandmill.server.keys import Keys
from sandmill.server.kinds import GROUP, VERSION
from sandmill.server.membership import Joining, Membership
from sandmill.server.nodes import Nodes
from sandmill.server.offerings import publish
from sandmill.server.outputs import Outputs
from sandmill.server.places import Places
from sandmill.server.records import Records
from sandmill.server.runtimes import publish_runtimes
from sandmill.server.secrets import Secrets
from sandmill.server.settings import Settings
from sandmill.server.shipping import Shipping
from sandmill.server.store import Loaded, Store
from sandmill.server.surviving import Survivors
from sandmill.server.tables import Note
from sandmill.server.ticking import tick
from sandmill.server.training import TrainingJobs

_HEARTBEAT_S: Final = 1.0
_CLOSE_S: Final = 30.0
_OWNER: Final = "images"
_BACKLOG: Final = 1024
_LARGEST_FRAME: Final = 1 << 20
_log = logging.getLogger("sandmill.server")


def serve(settings: Settings, keys: Keys, announce: Callable[[str], None], joining: Joining | None = None) -> None:
    """Serves until SIGINT or SIGTERM. `announce` is called with the URL once requests are answered. `joining`: as a node of another server.

    Raises ConfigError, StateBusy, StateIncompatible, StoreUnavailable, IsolationUnavailable.
    """
    if joining is None:
        check_address(settings.host, keys)
    listening = _listen(settings)
    server = uvicorn.Server(_config(settings))
    asked: list[int] = []
    leaving: list[Callable[[], None]] = []
    """How a node takes its leave, once it is one."""

    def stop(number: int, _: Any) -> None:
        asked.append(number)
        if len(asked) == 1 and leaving:
            loop().call_soon_threadsafe(leaving[0])
            return
        server.should_exit = True
        if len(asked) > 1 + len(leaving):
            server.force_exit = True

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        running = asyncio.run_coroutine_threadsafe(_run(settings, keys, listening, server, announce, joining, leaving), loop())
        while True:
            with contextlib.suppress(TimeoutError):
                running.result(0.5)
                return
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def check_address(host: str, keys: Keys) -> None:
    """Refuses to be reachable from elsewhere before somebody has made a key on purpose. Raises ConfigError."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise ConfigError(f"{host!a} is no address to listen at; give an IP address such as 127.0.0.1", field="--host") from None
    if not loopback and not keys:
        raise ConfigError(
            f"{host} can be reached from other machines and this server has no key yet; make one with `sandmill key new NAME`",
            field="--host",
        )


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted ones inherit it; without it an answer may wait 40 ms
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen at {settings.host} port {settings.port}: {error.strerror}", field="--port") from error
    return listening


def _config(settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        _unready,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.certificate_key,
        log_config=None,
        access_log=False,
        lifespan="off",
        http=BoundedProtocol,
        ws="websockets-sansio",
        ws_max_size=_LARGEST_FRAME,
        ws_ping_interval=20,
        ws_ping_timeout=60,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
        server_header=False,
    )


async def _unready(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("the server is not ready")


async def _run(
    settings: Settings,
    keys: Keys,
    listening: socket.socket,
    server: uvicorn.Server,
    announce: Callable[[str], None],
    joining: Joining | None,
    leaving: list[Callable[[], None]],
) -> None:
    home = asyncio.get_running_loop()
    warden = await node()  # sweeps what a killed predecessor left, and says at once when this machine cannot isolate
    store, loaded = Store.open(settings.folder, settings.database, home, empty=joining is not None)
    try:
        clear(settings.folder)
        alive_until_s = float(loaded.notes.get("alive", time.time()))
        records = Records(store, loaded)
        events = Events(records)
        secrets = Secrets(records, settings.folder)
        outputs = Outputs(store, home)
        catalog = Catalog(records, _owner(settings, store, loaded, joining), at_node=joining is not None)
        places = Places(settings)
        nodes = Nodes(records, events, places, settings, alive_until_s)
        boxes = Boxes(records, events, secrets, catalog, settings, places, nodes)
        branches = Branches(records, boxes, secrets, catalog, settings)
        blobs = Blobs(settings.folder)
        images = Images(records, events, catalog, branches, blobs, outputs, settings)
        environments = Environments(records, events, blobs, settings)
        training = TrainingJobs(records, events, environments, settings)
        commands = Commands(records, boxes, outputs, settings)
        answers = Answers(loaded.answers)
        shipping, supply = Shipping(settings.folder), None if joining is None else _supply(joining, settings)
        on = Context(
            *(settings, records, events, secrets, catalog, boxes, branches, images, environments, training),
            *(blobs, commands, outputs, answers, keys, nodes, shipping, supply),
        )
        expected = nodes.expect()
        await Survivors(records, boxes, commands, outputs, secrets).recover(expected)
        images.recover()
        environments.recover()
        training.recover()
        await catalog.recover()
        await boxes.recover(alive_until_s, expected)
        publish(records, settings.prices)
        publish_runtimes(records)
        server.config.app = application(on)
        parts = [tick(boxes, records), nodes.tick(), _beat(store)]
        if joining is None:
            parts.append(_announce(server, settings, listening, announce))
        else:
            member = Membership(
                *(joining, keys, records, boxes, images, settings.folder, _url(settings, listening)), rootless=warden.rootless
            )
            parts += [member.guard(), _belong(member, server, announce, _url(settings, listening), leaving)]
        try:
            await _serving(server, listening, parts)
        finally:
            shipping.close()
            suppliers = () if supply is None else (supply.close,)
            await _close(*suppliers, images.close, environments.close, training.close, boxes.close, commands.settled)
    finally:
        store.close()


async def _serving(server: uvicorn.Server, listening: socket.socket, parts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Answers requests, and runs the server's other parts beside that, until it is told to stop. Raises what broke one of them."""
    tasks = [asyncio.get_running_loop().create_task(part) for part in parts]
    broken: list[BaseException] = []
    for task in tasks:
        task.add_done_callback(lambda done: _watch(done, server, broken))
    try:
        await server.serve(sockets=[listening])
    finally:
        for task in tasks:
            task.cancel()
    if broken:
        raise broken[0]


async def _close(*parts: Callable[[], Awaitable[None]]) -> None:
    """Ends parts of the server one after the other, within a bound."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_S):
            for part in parts:
                await part()


def _supply(joining: Joining, settings: Settings) -> Supply:
    """A node fetches from its head, with its own key."""
    client = Client(joining.head, joining.key, "default")
    origin = Origin(client, f"/apis/{GROUP}/{VERSION}/nodes/{joining.name}/stored/", f"the server {joining.head}", believed=True)
    return Supply(Fetching(origin, settings.folder))


def _owner(settings: Settings, store: Store, loaded: Loaded, joining: Joining | None) -> str:
    """What this server's names in the image store begin with, the same at every start; a node remembers only where it is."""
    if joining is not None:
        return hashlib.sha256(os.fsencode(settings.folder)).hexdigest()[:8]
    owner = loaded.notes.get(_OWNER)
    if owner is None:
        owner = random.token_hex(4)
        store.submit([Note(_OWNER, owner)])
    return owner


def _watch(task: asyncio.Task[None], server: uvicorn.Server, broken: list[BaseException]) -> None:
    """A part of the server that dies ends the server: without its ticker, say, no sandbox would ever be idle again."""
    if not task.cancelled() and (error := task.exception()) is not None:
        if not isinstance(error, NodeRefused | ConfigError):
            _log.error("a part of the server has died; the server ends", exc_info=error)
        broken.append(error)
        server.should_exit = True


async def _beat(store: Store) -> None:
    """Writes down that the server lives: after a crash, costs are counted until the last beat. A power cut loses what came after it."""
    while True:
        with contextlib.suppress(StoreUnavailable, SandboxError, OSError):
            await store.commit([Note("alive", repr(time.time()))])
            await asyncio.to_thread(store.sync)
        await asyncio.sleep(_HEARTBEAT_S)


async def _announce(server: uvicorn.Server, settings: Settings, listening: socket.socket, announce: Callable[[str], None]) -> None:
    await _started(server)
    announce(_url(settings, listening))


async def _belong(
    member: Membership, server: uvicorn.Server, announce: Callable[[str], None], url: str, leaving: list[Callable[[], None]]
) -> None:
    """A node's life: it joins, beats, and at the end takes its leave."""
    await _started(server)
    await member.join()
    leaving.append(member.leave)
    announce(url)
    await member.run()
    server.should_exit = True


async def _started(server: uvicorn.Server) -> None:
    while not server.started:
        await asyncio.sleep(0.005)


def _url(settings: Settings, listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    scheme = "http" if settings.certificate is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


__all__ = ["LARGEST_FILE", "check_address", "serve"]
