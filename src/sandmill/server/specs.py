"""The fields of every kind. In: nothing. Out: shapes that check what callers write and describe themselves (`schema.py`).

Bounds are the published API's where it names them. A field of the published API that this server does not serve is refused by name.
"""

from __future__ import annotations

from typing import Final

from sandmill.server.schema import Choice, Either, Flag, Many, Record, Text, Whole, Words, cores, duration, money, size

NAME: Final = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_KEY: Final = r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_IMAGE: Final = r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*"
_ENV: Final = r"[A-Za-z_][A-Za-z0-9_]{0,255}"
PUBLIC: Final = "nodus/"
"""What images of everybody are called; all other names belong to a project."""
DEFAULT_IMAGE: Final = f"{PUBLIC}agent-tools"
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
NETWORK: Final = Record(
    about="What may be reached.",
    defaults={"egress": {}},
    refused={"ingress": "sandboxes take no connections from outside; reach a service from inside with a command"},
    fields={
        "egress": Record(
            about="Outbound connections.",
            defaults={"policy": "Deny"},
            fields={
                "policy": Choice(words=("Deny", "AllowList", "Open"), about="Nothing, a list, or all but private ranges.", default="Deny"),
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
)
_NO_GPU = "this server places no accelerators; leave it out"

SANDBOX = Record(
    about="An isolated place to run commands in.",
    defaults={
        "image": DEFAULT_IMAGE,
        "resources": {},
        "network": {},
        "lifecycle": {},
        "continuity": {},
        "state": "Running",
    },
    fields={
        "image": Text(
            about="What it starts from: an Image of the project by name, tag or digest, or an image under nodus/.",
            pattern=_IMAGE,
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
        "network": NETWORK,
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
_LINE: Final = r"[^\r\n]*"
BLOB = Text(about="A blob's digest.", pattern=r"sha256:[0-9a-f]{64}", expect="sha256:<hex>", longest=71)
_NO_INSTALLER = "write it as a run step, such as run: [pip install NAME], and allow its hosts in spec.network"
STEP = Record(
    about="One step of a build: exactly one of these.",
    fields={
        "run": Many(
            of=Text(longest=65_536, shortest=1), longest=128, shortest=1, about="Shell commands, run as one; the first that fails ends it."
        ),
        "env": Words(
            keys=Text(pattern=_ENV, expect="a variable name such as PATH", longest=256),
            values=Text(pattern=_LINE, expect="one line", longest=65_536),
        ),
        "workdir": Text(pattern=f"/{_LINE}", expect="an absolute path such as /workspace", longest=4096),
        "copy": Record(
            about="Files of a blob: one file, or a tar archive.", required=("blob", "dest"), fields={"blob": BLOB, "dest": WORKING_DIR}
        ),
    },
    refused=dict.fromkeys(("aptInstall", "pipInstall", "uvPipInstall"), _NO_INSTALLER)
    | {"uvSync": "copy the project and write a run step, and allow its hosts in spec.network"},
)
IMAGE = Record(
    about="A file system that sandboxes can start from; one of fromSandbox, dockerfile and base says how it is made.",
    defaults={"network": {}},
    fields={
        "fromSandbox": Record(
            about="A snapshot of a sandbox's file system, without its secrets.",
            required=("name",),
            fields={"name": Text(about="The sandbox.", pattern=NAME, expect="the name of a Sandbox", longest=63)},
            refused={"includePaths": "a snapshot has every file; remove the others in the sandbox first"},
        ),
        "base": Text(
            about="The image that steps build on.", pattern=_IMAGE, expect="an image such as nodus/agent-tools", shortest=1, longest=512
        ),
        "steps": Many(of=STEP, longest=128, about="What is done to the base, in order."),
        "dockerfile": Record(
            about="A Dockerfile: FROM, COPY, ENV, WORKDIR, RUN, USER and ARG.",
            fields={
                "inline": Text(about="Its text.", longest=262_144),
                "blob": BLOB,
                "context": BLOB,
                "buildArgs": Words(keys=Text(pattern=_ENV, expect="the name of an ARG", longest=256), values=Text(longest=4096)),
            },
            refused={"target": "a Dockerfile has one stage here; leave it out"},
        ),
        "network": NETWORK,
        "platform": Choice(words=("linux/amd64", "linux/arm64"), about="The architecture: this machine's."),
        "python": Text(about="The interpreter's version, for whoever asks; nothing is checked.", longest=32),
        "tags": Many(
            of=Text(
                pattern=r"(?!nodus/)[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,119}", expect="a name outside nodus/ such as team/tools:1", longest=120
            ),
            longest=32,
            about="More names for it; each means the newest image that has it.",
        ),
    },
    refused={
        "imagePullSecrets": "this server pulls from no registry; its owner can import an image into the store as nodus/NAME",
        "buildSecrets": "a build is given no secrets; give them to the sandbox",
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
