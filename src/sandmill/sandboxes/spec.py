"""What a sandbox is asked to be: resources, lifetime, money, network, workdir. Values only; nothing here touches the machine.

In: the keyword arguments of `Sandbox.create` or a manifest's sandbox section. Out: a frozen `SandboxSpec` in bytes, seconds and
micro-dollars.
"""

from __future__ import annotations

import enum
import posixpath
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Final

import msgspec

from sandmill.config.hosts import parse_hosts
from sandmill.config.manifest import EgressPolicy, EgressSection
from sandmill.config.quantities import parse_bytes, parse_cpu, parse_duration, parse_usd
from sandmill.errors import ConfigError

LIST_PRICE_MICROUSD_PER_HOUR: Final = 17_900
"""List price of 1 vCPU with 2 GiB for one hour (4 Nov 2026); `max_cost` uses it, scaled, when no price is given."""
_LIST_PRICE_MEMORY_BYTES: Final = 2 << 30
_LEAST_MEMORY_BYTES: Final = 16 << 20
_LEAST_DISK_BYTES: Final = 1 << 20
PROCESS_LIMIT: Final = 256
DEFAULT_WORKDIR: Final = "/workspace"
_KERNEL_FOLDERS: Final = frozenset({"", "proc", "sys", "dev"})
_SYSTEM_FOLDERS: Final = _KERNEL_FOLDERS | {"usr", "bin", "sbin", "lib", "lib64", "etc"}


class EgressMode(enum.StrEnum):
    """How much of the network a sandbox may reach."""

    DENY = "deny"
    OPEN = "open"
    ALLOW = "allow"


class Egress(msgspec.Struct, frozen=True):
    """A network policy. `Egress.deny()` is the default: an empty network namespace with nothing but its own loopback.

    `hosts` and `presets` as they were written; `patterns` is what they come to.
    """

    mode: EgressMode = EgressMode.DENY
    hosts: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode is EgressMode.ALLOW and not self.patterns:
            raise ConfigError("allows no host; name some, or a preset, or use Egress.deny()", field="network")
        if self.mode is not EgressMode.ALLOW and (self.hosts or self.presets):
            raise ConfigError(f"hosts can be named only in a policy that allows some, not in {self.mode.value!r}", field="network")

    @classmethod
    def deny(cls) -> Egress:
        """No network at all."""
        return cls()

    @classmethod
    def open(cls) -> Egress:
        """Everything over TCP but private ranges, this machine itself and cloud metadata addresses."""
        return cls(EgressMode.OPEN)

    @classmethod
    def allow(cls, *hosts: str, presets: Iterable[str] = ()) -> Egress:
        """Only these host names ("pypi.org", "*.example.org") and those of the presets (config/hosts.py), over TLS and HTTP.

        Raises ConfigError naming what is no host name or no preset.
        """
        return cls(EgressMode.ALLOW, tuple(hosts), (presets,) if isinstance(presets, str) else tuple(presets))

    @classmethod
    def of(cls, section: EgressSection) -> Egress:
        """The policy that a manifest asks for. Raises ConfigError."""
        mode = {EgressPolicy.DENY: EgressMode.DENY, EgressPolicy.ALLOW_LIST: EgressMode.ALLOW, EgressPolicy.OPEN: EgressMode.OPEN}
        return cls(mode[section.policy], section.allow, section.presets)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The host names that are allowed, in the form in which they are compared."""
        return parse_hosts(self.hosts, self.presets, field="network")


class Continuity(enum.StrEnum):
    """What a stop leaves of a sandbox."""

    EPHEMERAL = "Ephemeral"
    """Nothing: every start is empty."""
    SNAPSHOTTED = "Snapshotted"
    """Its files, which the next start finds again."""


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox's limits, resolved. Build one with `SandboxSpec.of`, which takes what people write."""

    cpu: float = 1.0
    """Cores, as a quota over 100 ms."""
    memory_bytes: int = 2 << 30
    disk_bytes: int = 1 << 30
    """Everything the sandbox writes. Exceeding it is ENOSPC. The storage is memory, so what a command writes counts as its memory too."""
    timeout_s: float = 86_400.0
    """Lifetime from creation."""
    idle_timeout_s: float = 300.0
    """Time without a running command or a file operation."""
    max_cost_microusd: int | None = None
    price_microusd_per_hour: int | None = None
    """None: the list price scaled to this size, used only when `max_cost_microusd` is set."""
    network: Egress = Egress()
    env: Mapping[str, str] = {}
    workdir: str = DEFAULT_WORKDIR
    """Empty: as the image says."""
    image: str | None = None
    """None: the host's own programs under `/usr`, read-only, and an /etc cut down to what they need. Else a name or digest in the image
    store, `oci:PATH[:TAG]` or `docker-archive:PATH[:NAME]`."""
    continuity: Continuity = Continuity.EPHEMERAL
    backend: str | None = None
    """Who makes it (backends/choice.py)."""

    @classmethod
    def of(
        cls,
        *,
        cpu: float | str = 1,
        memory: int | str = "2Gi",
        disk: int | str = "1Gi",
        timeout: float | str = "24h",
        idle_timeout: float | str = "5m",
        max_cost: int | float | str | Decimal | None = None,
        price_per_hour: int | float | str | Decimal | None = None,
        network: Egress | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        image: str | None = None,
        continuity: str = Continuity.EPHEMERAL,
        backend: str | None = None,
    ) -> SandboxSpec:
        """Resolves quantities, durations and dollars. Raises ConfigError naming the field."""
        return cls(
            cpu=parse_cpu(cpu, field="cpu"),
            memory_bytes=parse_bytes(memory, field="memory"),
            disk_bytes=parse_bytes(disk, field="disk"),
            timeout_s=parse_duration(timeout, field="timeout"),
            idle_timeout_s=parse_duration(idle_timeout, field="idle_timeout"),
            max_cost_microusd=None if max_cost is None else parse_usd(max_cost, field="max_cost"),
            price_microusd_per_hour=None if price_per_hour is None else parse_usd(price_per_hour, field="price_per_hour"),
            network=_policy(network),
            env=dict(env or {}),
            workdir=workdir if workdir is not None else DEFAULT_WORKDIR if image is None else "",
            image=image,
            continuity=_continuity(continuity),
            backend=backend,
        )

    def __post_init__(self) -> None:
        if not 0.01 <= self.cpu <= 1024:
            raise ConfigError(f"cpu must be between 0.01 and 1024 cores, not {self.cpu}", field="cpu")
        if self.memory_bytes < _LEAST_MEMORY_BYTES:
            raise ConfigError(f"memory must be at least 16Mi, not {self.memory_bytes} bytes", field="memory")
        if self.disk_bytes < _LEAST_DISK_BYTES:
            raise ConfigError(f"disk must be at least 1Mi, not {self.disk_bytes} bytes", field="disk")
        for field, seconds in (("timeout", self.timeout_s), ("idle_timeout", self.idle_timeout_s)):
            if not seconds > 0:
                raise ConfigError(f"{field} must be longer than zero, not {seconds}", field=field)
        self._check_workdir()
        for name, value in self.env.items():
            check_env(name, value)

    def _check_workdir(self) -> None:
        if self.image is not None and not self.workdir:
            return
        if not self.workdir.startswith("/") or posixpath.normpath(self.workdir) != self.workdir or "\0" in self.workdir:
            raise ConfigError(f"workdir must be an absolute path without '..', not {self.workdir!r}", field="workdir")
        reserved = _SYSTEM_FOLDERS if self.image is None else _KERNEL_FOLDERS
        if self.workdir.split("/")[1] in reserved:
            raise ConfigError(f"workdir must lie outside the system folders, not {self.workdir!r}", field="workdir")

    @property
    def microusd_per_hour(self) -> int:
        """The price that `max_cost_microusd` is held against."""
        if self.price_microusd_per_hour is not None:
            return self.price_microusd_per_hour
        return round(LIST_PRICE_MICROUSD_PER_HOUR * max(self.cpu, self.memory_bytes / _LIST_PRICE_MEMORY_BYTES))

    @property
    def life_s(self) -> float:
        """Seconds until the lifetime or the dollar cap ends the sandbox, whichever comes first."""
        if self.max_cost_microusd is None or self.microusd_per_hour == 0:
            return self.timeout_s
        return min(self.timeout_s, self.max_cost_microusd / self.microusd_per_hour * 3600)


def _policy(network: object) -> Egress:
    if network is None or isinstance(network, Egress):
        return network or Egress()
    written = 'Egress.deny(), Egress.allow("pypi.org") or Egress.open()'
    raise ConfigError(f"expected {written}, found {network!r:.100}", field="network")


def _continuity(text: str) -> Continuity:
    try:
        return Continuity(text)
    except ValueError:
        raise ConfigError(f"continuity must be Ephemeral or Snapshotted, not {text!r}", field="continuity") from None


def seconds(timeout: float | str | None) -> float | None:
    """A command's deadline: seconds, or a duration such as "5m". Raises ConfigError."""
    return None if timeout is None else parse_duration(timeout, field="timeout")


def check_names(name: str | None, labels: Mapping[str, str] | None) -> None:
    """Raises ConfigError for what is no text; any text will do."""
    if not isinstance(name, str | None):
        raise ConfigError(f"a sandbox's name is text, not {name!r:.100}", field="name")
    if any(not isinstance(word, str) for pair in (labels or {}).items() for word in pair):
        raise ConfigError(f"labels and their values are text, not {dict(labels or {})!r:.100}", field="labels")


def check_env(name: str, value: str) -> None:
    """Raises ConfigError for a variable that execve could not carry."""
    if not isinstance(name, str) or not isinstance(value, str):
        raise ConfigError(f"an environment variable and its value are text, not {name!r:.100} and {value!r:.100}", field="env")
    if not name or "=" in name or "\0" in name or "\0" in value:
        raise ConfigError(f"environment variable {name!r} has an empty name, '=' or NUL in it", field="env")
