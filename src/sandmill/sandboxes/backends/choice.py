"""Which backend a sandbox is made by. In: what its creator, the manifest or the environment said. Out: one backend, or one sentence.

`backend=` says it, else SANDMILL_BACKEND; a server's URL (`server=`, else SANDMILL_API_URL) says "server" by itself. Without any, it is
`native`. A backend is imported when it is first used.
"""

from __future__ import annotations

import asyncio
import difflib
import os
from typing import Final

from sandmill.errors import ConfigError, IsolationUnavailable
from sandmill.sandboxes.backends.seam import Backend, BackendName

_EXTRAS: Final = {BackendName.E2B: "e2b", BackendName.KUBERNETES: "kubernetes"}
_VARIABLES: Final = {
    BackendName.GVISOR: ("SANDMILL_RUNSC", "SANDMILL_STATE"),
    BackendName.KUBERNETES: ("KUBECONFIG", *(f"SANDMILL_KUBERNETES_{name}" for name in ("NAMESPACE", "RUNTIME_CLASS", "IMAGE"))),
}
"""What of the environment a backend reads only once."""
_backends: dict[tuple[object, ...], Backend] = {}


def choose(backend: str | None, server: str | None) -> tuple[BackendName, str]:
    """The backend, and a server's URL. `server` "" means none, whatever the environment says. Raises ConfigError."""
    url = (os.environ.get("SANDMILL_API_URL", "") if backend in (None, BackendName.SERVER) else "") if server is None else server
    said = backend if backend is not None else os.environ.get("SANDMILL_BACKEND") or None
    if said is None:
        return (BackendName.SERVER, url) if url else (BackendName.NATIVE, "")
    name = named(said)
    if name is BackendName.SERVER and not url:
        raise ConfigError("backend server needs its URL; set SANDMILL_API_URL, or server=", field="backend")
    if name is not BackendName.SERVER and url:
        where = "server=" if server else "SANDMILL_API_URL"
        raise ConfigError(f"backend {name} and a server ({where}) were both asked for; leave one out", field="backend")
    return name, url


def named(text: str) -> BackendName:
    """Raises ConfigError with the nearest name."""
    try:
        return BackendName(text)
    except ValueError:
        near = difflib.get_close_matches(text, [str(name) for name in BackendName], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"backend must be one of {', '.join(BackendName)}, not {text!a}{hint}", field="backend") from None


def load(name: BackendName) -> Backend:
    """One of those whose sandboxes are guests. On the sandbox loop. Raises IsolationUnavailable when its package is missing."""
    place = (asyncio.get_running_loop(), name, *map(os.environ.get, _VARIABLES.get(name, ())))
    if place not in _backends:
        _backends[place] = _load(name)
    return _backends[place]


def _load(name: BackendName) -> Backend:
    try:
        if name is BackendName.GVISOR:
            from sandmill.sandboxes.backends.gvisor.backend import Gvisor

            return Gvisor()
        if name is BackendName.E2B:
            from sandmill.sandboxes.backends.e2b.backend import E2B

            return E2B()
        from sandmill.sandboxes.backends.kubernetes.backend import Kubernetes

        return Kubernetes()
    except ModuleNotFoundError as error:
        raise IsolationUnavailable(f"backend {name} needs the package {error.name}; pip install 'sandmill[{_EXTRAS[name]}]'") from error


os.register_at_fork(after_in_child=_backends.clear)
