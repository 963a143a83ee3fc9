"""The fields of every kind. In: nothing. Out: shapes that check what callers write and describe themselves (`schema.py`).

Bounds are the published API's where it names them. A field of the published API that this server does not serve is refused by name.
"""

from __future__ import annotations

from typing import Final

from sandmill.server.schema import Choice, Either, Flag, Many, Record, Text, Whole, Words, cores, duration, money, size

NAME: Final = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_KEY: Final = r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_ENV: Final = r"[A-Za-z_][A-Za-z0-9_]{0,255}"
DEFAULT_IMAGE: Final = "nodus/agent-tools"
WORKSPACE: Final = "/workspace"

_WORD = Text(about="One word of a command.", expect="a word", longest=131_072)
_COMMAND = Many(of=_WORD, longest=4096, about="The program and its arguments.")
_SECRET_REF = Record(
    about="A key of a Secret.",
    required=("name", "key"),
    fields={
        "name": Text(about="The Secret.", pattern=NAME, expect="the name of a Secret", longest=63),
        "key": Text(about="The key within it.", expect="a key", shortest=1, longest=253),
    },
)
_ENV_VAR = Record(
    about="An environment variable: a value, or where it comes from.",
    required=("name",),
    fields={
        "name": Text(about="Its name.", pattern=_ENV, expect="a variable name such as PATH (letters, digits, _)", longest=256),
        "value": Text(about="Its value.", expect="text", longest=131_072),
        "valueFrom": Record(about="Where the value comes from.", required=("secretKeyRef",), fields={"secretKeyRef": _SECRET_REF}),
    },
)
ENV = Many(of=_ENV_VAR, longest=256, unique="name", about="Environment variables.")
WORKING_DIR = Text(
    about="The absolute folder commands start in.", pattern=r"/[^\x00]*", expect="an absolute path such as /workspace", longest=4096
)
_MOUNT = Either(
    key="name",
    record=Record(
        about="A Secret given to the sandbox as environment variables and as files under /run/secrets/<name>/<key>.",
        required=("name",),
        fields={
            "name": Text(about="The Secret.", pattern=NAME, expect="the name of a Secret", longest=63),
            "version": Whole(about="Pins a version; without it, the newest at each start.", least=1, most=2**31),
        },
    ),
)
_NO_GPU = "this server places no accelerators; leave it out"

SANDBOX = Record(
    about="An isolated place to run commands in.",
    defaults={
        "image": DEFAULT_IMAGE,
        "workingDir": WORKSPACE,
        "resources": {},
        "network": {},
        "lifecycle": {},
        "continuity": {},
        "state": "Running",
    },
    fields={
        "image": Text(
            about="The file system it starts from.",
            pattern=r"[A-Za-z0-9][A-Za-z0-9._:/@-]*",
            expect="an image such as nodus/agent-tools",
            shortest=1,
            longest=512,
            default=DEFAULT_IMAGE,
        ),
        "command": _COMMAND,
        "args": _COMMAND,
        "workingDir": WORKING_DIR,
        "env": ENV,
        "secrets": Many(of=_MOUNT, longest=32, unique="name", about="Secrets it is given at each start."),
        "resources": Record(
            about="What it may use.",
            defaults={"cpu": "1", "memory": "2Gi", "disk": "1Gi"},
            refused={"gpu": _NO_GPU, "nodes": "a sandbox has one node; leave it out"},
            fields={
                "cpu": cores("Cores.", default="1"),
                "memory": size("Memory.", least="16Mi", most="1Ti", default="2Gi"),
                "disk": size("Everything it writes.", least="1Mi", most="1Ti", default="1Gi"),
            },
        ),
        "network": Record(
            about="What it may reach.",
            defaults={"egress": {}},
            refused={"ingress": "sandboxes take no connections from outside; reach a service from inside with a command"},
            fields={
                "egress": Record(
                    about="Outbound connections.",
                    defaults={"policy": "Deny"},
                    fields={
                        "policy": Choice(
                            words=("Deny", "AllowList", "Open"), about="Nothing, a list, or all but private ranges.", default="Deny"
                        ),
                        "allow": Many(
                            of=Text(
                                about="A host name, or *.suffix.",
                                pattern=r"(\*\.)?([A-Za-z0-9_]([-A-Za-z0-9_]{0,61}[A-Za-z0-9_])?\.)*[A-Za-z0-9_]([-A-Za-z0-9_]{0,61}[A-Za-z0-9_])?",
                                expect="a host name such as example.org or *.example.org (no scheme, port or path)",
                                longest=253,
                            ),
                            longest=128,
                            about="Host names, with policy AllowList.",
                        ),
                        "presets": Many(of=Text(about="A named list of hosts.", expect="a name", longest=63), longest=16),
                    },
                )
            },
        ),
        "lifecycle": Record(
            about="When it ends by itself.",
            defaults={"idleTimeout": "5m", "onIdle": "Stop", "maxLifetime": "24h"},
            fields={
                "idleTimeout": duration(
                    "Without a running command, a file request or terminal input; 0s is never.",
                    least="1m",
                    most="24h",
                    zero=True,
                    default="5m",
                ),
                "onIdle": Choice(words=("Stop", "Delete"), about="What happens then.", default="Stop"),
                "maxLifetime": duration("Deleted this long after it was created.", least="1m", most="720h", default="24h"),
            },
        ),
        "continuity": Record(
            about="What survives a stop.",
            defaults={"mode": "Snapshotted"},
            fields={
                "mode": Choice(
                    words=("Snapshotted", "Ephemeral"),
                    about="/workspace is kept across a stop, or every start is empty.",
                    default="Snapshotted",
                )
            },
        ),
        "maxCostUSD": money("What it may cost over all its starts; may only be raised."),
        "state": Choice(words=("Running", "Stopped"), about="Stopping releases the machine and keeps /workspace.", default="Running"),
    },
    refused={
        "volumes": "this server has no volumes; keep files in /workspace, which survives a stop",
        "ports": "sandboxes take no connections from outside",
        "init": "run set-up commands with exec once the sandbox runs",
        "service": "start the service with exec or as spec.command",
    },
)
PROCESS = Record(
    about="One command in a sandbox, recorded with its output.",
    required=("command",),
    fields={
        "command": Many(of=_WORD, longest=4096, shortest=1, about="The program and its arguments."),
        "tty": Flag(about="Runs on a terminal; its one stream is stdout."),
        "stdin": Flag(about="Takes standard input; without it there is none."),
        "env": ENV,
        "workingDir": WORKING_DIR,
        "user": Choice(words=("user", "root"), about="Who runs it inside the sandbox.", default="user"),
        "timeout": duration("Killed with everything it started after this long.", least="1ms", most="720h"),
        "state": Choice(words=("Running", "Cancelled"), about="Cancelled kills it.", default="Running"),
        "sandbox": Text(about="The sandbox it runs in; set by the server.", longest=63),
        "main": Flag(about="It is the sandbox's own command; set by the server."),
        "sequence": Whole(about="Its number in that sandbox; set by the server.", least=1, most=2**53),
    },
)
IMAGE = Record(
    about="A file system that sandboxes can start from.",
    fields={
        "fromSandbox": Record(
            about="A snapshot of a sandbox's file system.",
            required=("name",),
            fields={
                "name": Text(about="The sandbox.", pattern=NAME, expect="the name of a Sandbox", longest=63),
                "includePaths": Many(of=WORKING_DIR, longest=64, about="Only these paths."),
            },
        ),
        "base": Text(about="An image reference that steps build on.", expect="an image reference", longest=512),
        "dockerfile": Record(
            about="A Dockerfile.",
            fields={
                "inline": Text(about="Its text.", longest=262_144),
                "blob": Text(about="Its digest.", pattern=r"sha256:[0-9a-f]{64}", expect="sha256:<hex>", longest=71),
                "context": Text(about="The context's digest.", pattern=r"sha256:[0-9a-f]{64}", expect="sha256:<hex>", longest=71),
                "buildArgs": Words(keys=Text(longest=256), values=Text(longest=4096)),
                "target": Text(about="The stage to build.", longest=128),
            },
        ),
        "platform": Choice(words=("linux/amd64", "linux/arm64"), about="The architecture."),
        "python": Text(about="The interpreter's version.", longest=32),
        "tags": Many(of=Text(longest=128), longest=32, about="Tags."),
    },
)
SECRET = Record(
    about="Values that sandboxes may be given. Values are written, never read back.",
    defaults={"type": "Opaque"},
    fields={
        "type": Choice(words=("Opaque", "Registry"), about="What it is for; immutable.", default="Opaque"),
        "data": Words(
            about="Values in base64.",
            keys=Text(pattern=r"[-._A-Za-z0-9]{1,253}", expect="a key of letters, digits, '-', '_' and '.'", longest=253),
            values=Text(pattern=r"[A-Za-z0-9+/]*={0,2}", expect="base64", longest=1 << 20),
        ),
        "stringData": Words(
            about="Values as text.",
            keys=Text(pattern=r"[-._A-Za-z0-9]{1,253}", expect="a key of letters, digits, '-', '_' and '.'", longest=253),
            values=Text(longest=1 << 20),
        ),
    },
)
NODE = Record(
    about="A machine that sandboxes of this server run on.",
    defaults={"state": "Ready", "drainTimeout": "10m"},
    fields={
        "state": Choice(
            words=("Ready", "Draining"), about="Draining takes no more sandboxes and lets go of those it has.", default="Ready"
        ),
        "drainTimeout": duration("How long sandboxes that cannot be saved may go on.", least="0s", most="720h", default="10m"),
    },
)
OPEN = Record(about="Written by the server.", fields={})

_OWNER = Record(
    about="What this belongs to and goes with.",
    fields={key: Text(about="Of the owner.", longest=253) for key in ("apiVersion", "kind", "name", "uid")}
    | {"controller": Flag(about="It is the one.")},
)
METADATA = Record(
    about="Names and labels.",
    fields={
        "name": Text(about="The name.", pattern=NAME, expect="a name of at most 63 lower-case letters, digits and '-'", longest=63),
        "generateName": Text(
            about="The beginning of a name that the server completes.",
            pattern=r"[a-z0-9][-a-z0-9]{0,56}",
            expect="at most 57 lower-case letters, digits and '-'",
            longest=57,
        ),
        "namespace": Text(about="The project.", pattern=NAME, expect="a project's name", longest=63),
        "labels": Words(
            about="Words to select by.",
            most=64,
            keys=Text(pattern=_KEY, expect="a label's name such as team or example.org/team", longest=317),
            values=Text(
                pattern=r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?",
                expect="at most 63 letters, digits, '-', '_' and '.'",
                longest=63,
            ),
        ),
        "annotations": Words(
            about="Anything else, up to 256 KiB.",
            most=64,
            keys=Text(pattern=_KEY, expect="a name such as example.org/note", longest=317),
            values=Text(longest=262_144),
        ),
        "resourceVersion": Text(about="The version a change is based on.", pattern=r"[0-9]{1,18}", expect="a version", longest=18),
        "uid": Text(about="Set by the server.", longest=64),
        "generation": Whole(about="Set by the server.", least=0, most=2**53),
        "creationTimestamp": Text(about="Set by the server.", longest=64),
        "deletionTimestamp": Text(about="Set by the server.", longest=64),
        "ownerReferences": Many(of=_OWNER, longest=8, about="Set by the server."),
    },
)
