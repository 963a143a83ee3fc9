"""An ASGI application as a real server on loopback. In: an application. Out: its URL, until the block ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

STARTS_S = 20.0


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=2)
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    deadline = threading.Event()
    for _ in range(int(STARTS_S / 0.02)):
        if server.started:
            break
        deadline.wait(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(STARTS_S)
        assert not thread.is_alive()
