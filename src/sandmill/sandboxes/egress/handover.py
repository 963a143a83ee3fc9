"""How a sandbox's listening sockets come to this process. In: a policy. Out: a descriptor for the warden, then a running proxy."""

from __future__ import annotations

import errno
import socket
from types import TracebackType
from typing import Final, Self

from sandmill.errors import SandboxCreateFailed
from sandmill.sandboxes.egress.outside import HostNetwork, Outside
from sandmill.sandboxes.egress.proxy import EgressProxy
from sandmill.sandboxes.spec import Egress, EgressMode

_LISTENERS: Final = {EgressMode.ALLOW: 4, EgressMode.OPEN: 2}
_host_network: HostNetwork | None = None


class Handover:
    """One creation's socket pair. With a policy that denies everything there is none."""

    def __init__(self, egress: Egress) -> None:
        self._egress = egress
        self._ours: socket.socket | None = None
        self.theirs: socket.socket | None = None
        """What goes to the warden with the creation request; None when the sandbox gets no network."""
        if egress.mode is not EgressMode.DENY:
            self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._ours.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for end in (self._ours, self.theirs):
            if end is not None:
                end.close()

    async def proxy(self, outside: Outside | None) -> EgressProxy | None:
        """The running proxy, when the sandbox has said that it is ready. Raises SandboxCreateFailed."""
        if self._ours is None:
            return None
        listeners = _receive(self._ours, _LISTENERS[self._egress.mode])
        proxy = EgressProxy(listeners, self._egress, outside or _host())
        await proxy.start()
        return proxy


def _receive(ours: socket.socket, count: int) -> list[socket.socket]:
    try:
        _, descriptors, _, _ = socket.recv_fds(ours, 1, count, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise SandboxCreateFailed(error.errno, "a new sandbox did not hand over its network") from error
    listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    if len(listeners) != count:
        for listener in listeners:
            listener.close()
        raise SandboxCreateFailed(errno.EPROTO, "a new sandbox did not hand over its network")
    return listeners


def _host() -> HostNetwork:
    global _host_network
    if _host_network is None:
        _host_network = HostNetwork()
    return _host_network
