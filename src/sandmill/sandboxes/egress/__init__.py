"""Network egress. In: a sandbox's listening sockets and its policy. Out: connections to what it names, and a list of what it refused."""

from __future__ import annotations

from sandmill.sandboxes.egress.blocked import Blocked
from sandmill.sandboxes.egress.outside import HostNetwork, Outside
from sandmill.sandboxes.egress.proxy import EgressProxy

__all__ = ["Blocked", "EgressProxy", "HostNetwork", "Outside"]
