"""One sandbox's policy, ready to be asked. In: a host name as it came over the wire. Out: the name to use, or a refusal."""

from __future__ import annotations

from sandmill.config.hosts import host_name
from sandmill.sandboxes.egress.addresses import METADATA_NAMES
from sandmill.sandboxes.egress.blocked import Refused
from sandmill.sandboxes.spec import Egress, EgressMode


class Policy:
    """Host names are compared label by label, in lower case, without a trailing dot."""

    def __init__(self, egress: Egress) -> None:
        self.open = egress.mode is EgressMode.OPEN
        patterns = egress.patterns if egress.mode is EgressMode.ALLOW else ()
        self._exact = frozenset(pattern for pattern in patterns if not pattern.startswith("*."))
        self._below = frozenset(pattern[2:] for pattern in patterns if pattern.startswith("*."))

    def check(self, text: str, port: int) -> str:
        """The name in plain form. Raises Refused."""
        name = host_name(text)
        if name is None:
            raise Refused(text, port, "not a host name")
        if name in METADATA_NAMES:
            raise Refused(name, port, "a cloud's metadata service")
        if not self.open and name not in self._exact and not self._is_below(name):
            raise Refused(name, port, "not on the list of allowed hosts")
        return name

    def _is_below(self, name: str) -> bool:
        labels = name.split(".")
        return any(".".join(labels[start:]) in self._below for start in range(1, len(labels)))
