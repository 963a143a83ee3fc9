"""The kinds this server knows: names, verbs, columns. In: nothing. Out: what discovery, tables and routes are made from."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from sandmill.server import specs, specs_environments, specs_training
from sandmill.server.schema import Record

GROUP: Final = "nodus.dev"
VERSION: Final = "v1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
BETA: Final = "v1beta1"
VERSIONS: Final = (VERSION, BETA)


class Column(msgspec.Struct, frozen=True):
    """A column of a table; `path` leads into the object, `wide` ones are shown on request."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of object."""

    kind: str
    plural: str
    spec: Record
    verbs: tuple[str, ...]
    version: str = VERSION
    columns: tuple[Column, ...] = ()
    short: tuple[str, ...] = ()
    namespaced: bool = True
    subresources: tuple[tuple[str, tuple[str, ...]], ...] = ()
    mutable: tuple[str, ...] = ()
    """Paths below `spec` that may change after creation; metadata's labels and annotations always may."""

    @property
    def api_version(self) -> str:
        """What its objects carry."""
        return f"{GROUP}/{self.version}"

    @property
    def singular(self) -> str:
        """The kind in lower case."""
        return self.kind.lower()


_ALL: Final = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
_READ: Final = ("get", "list", "watch")
_AGE: Final = Column("Age", "metadata.creationTimestamp", "date")

KINDS: Final[tuple[Kind, ...]] = (
    Kind(
        kind="Sandbox",
        plural="sandboxes",
        short=("sb",),
        spec=specs.SANDBOX,
        verbs=_ALL,
        mutable=("state", "maxCostUSD", "lifecycle"),
        subresources=(
            ("processes", ("create",)),
            ("files", ("get", "update", "delete")),
            ("log", ("get",)),
            ("fork", ("create",)),
            ("freeze", ("create",)),
            ("thaw", ("create",)),
            ("blocked", ("get",)),
        ),
        columns=(
            Column("Phase", "status.phase"),
            Column("Activity", "status.activity"),
            Column("Image", "spec.image"),
            Column("Cost", "status.cost.totalUSD"),
            Column("Reason", "status.stopReason", wide=True),
            Column("Node", "status.node.name", wide=True),
            Column("CPU", "spec.resources.cpu", wide=True),
            Column("Memory", "spec.resources.memory", wide=True),
            _AGE,
        ),
    ),
    Kind(
        kind="Process",
        plural="processes",
        short=("proc",),
        spec=specs.PROCESS,
        verbs=("get", "list", "patch", "watch"),
        mutable=("state",),
        subresources=(("output", ("get",)), ("stdin", ("create",)), ("signals", ("create",)), ("attach", ("get",)), ("log", ("get",))),
        columns=(
            Column("Sandbox", "spec.sandbox"),
            Column("Number", "spec.sequence", "integer"),
            Column("Phase", "status.phase"),
            Column("Exit", "status.exitCode", "integer"),
            Column("Command", "spec.command", wide=True),
            _AGE,
        ),
    ),
    Kind(
        kind="Image",
        plural="images",
        short=("img",),
        spec=specs.IMAGE,
        verbs=_ALL,
        subresources=(("log", ("get",)),),
        columns=(Column("Phase", "status.phase"), Column("Digest", "status.digest"), Column("Size", "status.size", "integer"), _AGE),
    ),
    Kind(
        kind="Environment",
        plural="environments",
        short=("env",),
        spec=specs_environments.ENVIRONMENT,
        verbs=_ALL,
        mutable=specs_environments.DESCRIPTIVE,
        columns=(
            Column("Version", "spec.version"),
            Column("Phase", "status.phase"),
            Column("Train", "status.splits.train", "integer"),
            Column("Test", "status.splits.test", "integer"),
            Column("Reason", "status.reason", wide=True),
            Column("Digest", "status.digest", wide=True),
            _AGE,
        ),
    ),
    Kind(
        kind="TrainingJob",
        plural="trainingjobs",
        version=BETA,
        short=("tj",),
        spec=specs_training.TRAINING_JOB,
        verbs=_ALL,
        mutable=("state",),
        subresources=(("taskevents", ("get",)), ("outputs", ("get",))),
        columns=(
            Column("Phase", "status.phase"),
            Column("Stage", "status.progress.stage"),
            Column("Step", "status.metrics.step", "integer"),
            Column("Steps", "status.metrics.totalSteps", "integer"),
            Column("Environment", "spec.environment.name"),
            Column("Cost", "status.cost.totalUSD"),
            Column("Model", "spec.model.uri", wide=True),
            Column("Reason", "status.reason", wide=True),
            _AGE,
        ),
    ),
    Kind(
        kind="TrainingRuntime",
        plural="trainingruntimes",
        version=BETA,
        short=("tr",),
        spec=specs.OPEN,
        verbs=_READ,
        columns=(Column("Task", "spec.task"), Column("Modes", "spec.modes"), Column("Phase", "status.phase"), _AGE),
    ),
    Kind(
        kind="Secret",
        plural="secrets",
        spec=specs.SECRET,
        verbs=_ALL,
        mutable=("data", "stringData"),
        columns=(Column("Type", "spec.type"), Column("Version", "status.version", "integer"), Column("Keys", "status.keys"), _AGE),
    ),
    Kind(
        kind="Offering",
        plural="offerings",
        namespaced=False,
        spec=specs.OPEN,
        verbs=_READ,
        columns=(
            Column("Category", "spec.category"),
            Column("CPU", "spec.host.cpu"),
            Column("Memory", "spec.host.memory"),
            Column("USD/hour", "status.priceUSDPerHour.from"),
            Column("Availability", "status.availability"),
        ),
    ),
    Kind(
        kind="Node",
        plural="nodes",
        short=("no",),
        namespaced=False,
        spec=specs.NODE,
        verbs=("delete", "get", "list", "patch", "watch"),
        mutable=("state", "drainTimeout"),
        columns=(
            Column("Phase", "status.phase"),
            Column("Sandboxes", "status.sandboxes", "integer"),
            Column("Load", "status.load"),
            Column("CPU", "status.capacity.cpu"),
            Column("Memory free", "status.free.memory"),
            Column("Disk free", "status.free.disk", wide=True),
            Column("Architecture", "status.architecture", wide=True),
            Column("URL", "status.url", wide=True),
            Column("Version", "status.version", wide=True),
            Column("Seen", "status.lastHeartbeatTime", "date"),
            _AGE,
        ),
    ),
    Kind(
        kind="Event",
        plural="events",
        short=("ev",),
        namespaced=False,
        spec=specs.OPEN,
        verbs=_READ,
        columns=(
            Column("Time", "lastTime", "date"),
            Column("Type", "type"),
            Column("Reason", "reason"),
            Column("Object", "involvedObject.name"),
            Column("Message", "message"),
        ),
    ),
    Kind(
        kind="UsageRecord",
        plural="usagerecords",
        namespaced=False,
        spec=specs.OPEN,
        verbs=_READ,
        columns=(
            Column("Object", "object.name"),
            Column("Meter", "meter"),
            Column("Seconds", "quantity"),
            Column("USD", "amountUSD"),
            Column("Start", "startTime", "date"),
            Column("End", "endTime", "date"),
        ),
    ),
)
BY_PLURAL: Final = {kind.plural: kind for kind in KINDS}
BY_KIND: Final = {kind.kind: kind for kind in KINDS}


def at_path(value: Any, path: str) -> Any:
    """What lies at a dotted path of a JSON value, None where nothing does."""
    for word in path.split("."):
        value = value.get(word) if isinstance(value, dict) else None
    return value
