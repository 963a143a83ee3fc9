"""The fields of an Environment. In: nothing. Out: the shape that checks what callers write and describes itself (`schema.py`)."""

from __future__ import annotations

from typing import Final

from sandmill.server.schema import Anything, Choice, Many, Real, Record, Text, Whole, cores, duration, size
from sandmill.server.specs import BLOB

SEMVER: Final = (
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(-(0|[1-9]\d*|\d*[A-Za-z-][0-9A-Za-z-]*)(\.(0|[1-9]\d*|\d*[A-Za-z-][0-9A-Za-z-]*))*)?(\+[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?"
)
MODES: Final = ("Train", "Evaluate")
MOST_TASKS: Final = 200_000
_MODULE: Final = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*(:[A-Za-z_][A-Za-z0-9_]*)?"
_LINE: Final = r"[^\x00-\x1f\x7f]*"
_URL: Final = r"https?://[^\s\x00-\x1f\x7f]+"
DESCRIPTIVE: Final = (
    *("category", "summary", "publisher", "readiness", "licenses", "requirements", "sourceURL"),
    *("sampleTask", "examples", "heldOutMeasures"),
)
"""What may change within a version: it decides neither tasks nor grading."""


def _line(about: str, longest: int = 200) -> Text:
    return Text(about=about, pattern=_LINE, expect="one line of text", longest=longest)


_SPLIT = Record(
    about="A split.",
    required=("size",),
    fields={"size": Whole(about="Its tasks; what the package has must agree.", least=0, most=MOST_TASKS)},
)
_SCORE = Record(
    about="A measured score.",
    fields={
        "passed": Whole(least=0, most=2**31, about="Tasks that passed."),
        "tasks": Whole(least=0, most=2**31, about="Tasks that were measured."),
        "passRate": Real(least=0, most=1, about="Passed over measured."),
        "meanReward": Real(least=-1e9, most=1e9, about="The mean reward."),
    },
)
_EXAMPLE = Record(
    about="A training job that somebody ran on it, with what it came to.",
    required=("name", "mode", "runtime"),
    fields={
        "name": Text(
            about="Its name, one in the environment.", pattern=r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?", expect="a name", longest=63
        ),
        "mode": Choice(words=MODES, about="What it did."),
        "runtime": _line("The TrainingRuntime, such as nodus/grpo-lora."),
        "model": _line("The model's URI.", 512),
        "parameters": Anything(about="The runtime's parameters.", longest_bytes=65_536),
        "tasks": Whole(about="Held-out tasks that it measured.", least=0, most=MOST_TASKS),
        "runtimeSeconds": Whole(about="How long it took.", least=0, most=2**40),
        "baseline": _SCORE,
        "trained": _SCORE,
        "changePP": Real(about="The change in percentage points.", least=-100, most=100),
        "measuredOn": Anything(about="Where it was measured.", longest_bytes=4096),
    },
)
PACKAGE: Final = Record(
    about="The task set and its grader; here a source bundle, a tar.gz with a module that has tasks(split) and reward(completion, answer).",
    fields={
        "source": Record(
            about="A bundle: modules at its top, and below site/ the packages that they import.",
            required=("blob", "module"),
            fields={
                "blob": BLOB,
                "module": Text(
                    about="The module at its top.", pattern=_MODULE, expect="the name of a module such as my_tasks", shortest=1, longest=200
                ),
            },
        ),
    },
    unsupported={
        "image": "nothing is pulled from a registry here; upload the module and what it imports as a bundle: spec.package.source",
        "pip": "the server installs nothing from an index; put the package below site/ of a bundle: spec.package.source",
        "loader": "a bundle's module is asked for tasks(split) and reward(completion, answer); leave it out",
    },
)
ENVIRONMENT: Final = Record(
    about="A versioned task set with its grader; name@version means it. What decides tasks and grading cannot change within a version.",
    required=("version", "package"),
    defaults={"category": "Custom", "modes": ["Evaluate"], "rewardType": "Binary", "readiness": "Research", "sandbox": {}},
    fields={
        "version": Text(about="Its version (SemVer).", pattern=SEMVER, expect="a SemVer version such as 1.0.0", longest=64),
        "package": PACKAGE,
        "category": Choice(words=("Reasoning", "Math", "Code", "Games", "Control", "Custom"), about="What it is about.", default="Custom"),
        "modes": Many(of=Choice(words=MODES), shortest=1, longest=2, about="What it may be used for."),
        "summary": _line("One sentence about it."),
        "publisher": _line("Who maintains it."),
        "readiness": Choice(words=("Research", "Stable"), about="How mature it is.", default="Research"),
        "rewardType": Choice(words=("Binary", "Scalar"), about="What its rewards are; an episode passes from 1 on.", default="Binary"),
        "splits": Record(about="How many tasks it has.", required=("train", "test"), fields={"train": _SPLIT, "test": _SPLIT}),
        "graders": Many(
            of=Record(
                about="A grader.",
                required=("name", "kind"),
                fields={
                    "name": _line("Its name in verdicts.", 63),
                    "kind": Choice(words=("Program", "ExactMatch"), about="How it grades."),
                    "description": _line("What it checks.", 1000),
                },
            ),
            longest=16,
            unique="name",
            about="What grades; without it, the module's reward.",
        ),
        "sandbox": Record(
            about="Where the module runs.",
            defaults={"cpu": "1", "memory": "1Gi", "timeout": "60s"},
            unsupported={"image": "the module runs on this machine's own Python and what the bundle brings; leave it out"},
            fields={
                "cpu": cores("Cores.", default="1"),
                "memory": size("Memory.", least="64Mi", most="64Gi", default="1Gi"),
                "timeout": duration("For one grading.", least="1s", most="10m", default="60s"),
            },
        ),
        "licenses": Record(about="Licences.", fields={"code": _line("Of the code."), "data": _line("Of the data.")}),
        "requirements": Record(
            about="What a typical model needs.",
            fields={"gpu": _line("The smallest useful GPU.", 63), "memory": size("GPU memory.", least="1Mi", most="64Ti")},
        ),
        "sourceURL": Text(about="Where its source is.", pattern=_URL, expect="an http(s) URL", longest=2048),
        "sampleTask": Anything(about="One task, to show.", longest_bytes=4096),
        "examples": Many(of=_EXAMPLE, longest=32, unique="name", about="Training jobs to start from."),
        "heldOutMeasures": Many(of=Choice(words=("TrainedTask", "Transfer")), longest=2, about="What its held-out tasks measure."),
    },
)
