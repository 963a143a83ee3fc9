"""The fields of a TrainingJob. In: nothing. Out: the shape that checks what callers write and describes itself (`schema.py`)."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from sandmill.server.schema import JSON, Causes, Choice, Flag, Many, Real, Record, Text, Whole, duration, money
from sandmill.server.specs import NAME
from sandmill.server.specs_environments import MODES, MOST_TASKS, SEMVER

GRPO: Final = "nodus/grpo-lora"
EVALUATE: Final = "nodus/evaluate"
MODE_OF: Final = {GRPO: "Train", EVALUATE: "Evaluate"}
FEWEST_COMPARED: Final = 16
ALL_LINEAR: Final = "all-linear"
_HERE: Final = "the job runs on this server's own machine; leave it out"
_MODULE: Final = Text(
    about="A module of the model.", pattern=r"[A-Za-z_][A-Za-z0-9_.]*|all-linear", expect="a module such as q_proj", longest=200
)


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """Names of modules, or one of them as it is."""

    names: Many

    def check(self, value: JSON, at: str, causes: Causes) -> JSON:
        return self.names.check([value] if isinstance(value, str) else value, at, causes)

    def document(self) -> dict[str, Any]:
        return {"oneOf": [self.names.of.document(), self.names.document()]}


PARAMETERS: Final = Record(
    about="Of the runtime. A step has batchSize x gradientAccumulation replies: numGenerations to each of its tasks.",
    defaults={
        "steps": 50,
        "numGenerations": 8,
        "batchSize": 8,
        "gradientAccumulation": 4,
        "learningRate": 4e-5,
        "maxCompletionLength": 256,
        "maxTurns": 3,
        "sampling": {},
        "method": "LoRA",
        "lora": {},
        "seed": 0,
    },
    fields={
        "steps": Whole(about="Optimizer steps.", least=1, most=1_000_000),
        "numGenerations": Whole(about="Replies to one task: a group.", least=2, most=1024),
        "batchSize": Whole(about="Replies of a micro-batch.", least=1, most=65_536),
        "gradientAccumulation": Whole(about="Micro-batches of a step.", least=1, most=65_536),
        "learningRate": Real(about="Of the adapter.", least=0, most=1, above=True),
        "maxCompletionLength": Whole(about="Tokens of a reply at most.", least=1, most=1_000_000),
        "maxTurns": Whole(about="Turns of an episode at most.", least=1, most=1000),
        "sampling": Record(
            about="How replies are sampled.",
            defaults={"temperature": 1.0},
            fields={"temperature": Real(about="Above 0.", least=0, most=10, above=True)},
        ),
        "method": Choice(words=("LoRA",), about="What is trained.", default="LoRA"),
        "lora": Record(
            about="The adapter.",
            defaults={"r": 16, "alpha": 32, "dropout": 0.0, "targetModules": [ALL_LINEAR]},
            fields={
                "r": Whole(about="Its rank.", least=1, most=1024),
                "alpha": Real(about="Its scale.", least=0, most=1e6, above=True),
                "dropout": Real(about="Of its input.", least=0, most=0.99),
                "targetModules": Targets(names=Many(of=_MODULE, shortest=1, longest=64, about="Modules it is put on.")),
            },
        ),
        "seed": Whole(about="What sampling and order derive from.", least=0, most=2**31),
        "warmStart": Record(
            about="Supervised steps before, on dialogues of which one in ten is right: for models that know none.",
            required=("steps",),
            defaults={"batchSize": 64, "learningRate": 2e-3},
            fields={
                "steps": Whole(about="How many.", least=0, most=100_000),
                "batchSize": Whole(about="Dialogues of a step.", least=1, most=4096),
                "learningRate": Real(about="Of the model.", least=0, most=1, above=True),
            },
        ),
    },
    unsupported={
        "taskFilter": "tasks are drawn by environment.seed alone; make an environment of the tasks that are wanted",
        "tasks": "benchmarks by name are not installed here; evaluate on an environment",
        "distributed": _HERE,
    },
)
TRAINING_JOB: Final = Record(
    about="Trains or evaluates a model on an Environment, on this server's machine.",
    required=("runtime", "model", "environment"),
    defaults={"parameters": {}, "evaluation": {}, "grading": {}, "state": "Running"},
    fields={
        "runtime": Choice(words=(GRPO, EVALUATE), about="What is done: GRPO with a LoRA adapter, or an evaluation."),
        "mode": Choice(words=MODES, about="The runtime's."),
        "model": Record(
            about="The base model.",
            required=("uri",),
            fields={
                "uri": Text(
                    about="hf://REPO[@REVISION], hf://sandmill/NAME for one that is bundled, or the absolute path of a folder here.",
                    pattern=r"(hf://[A-Za-z0-9][A-Za-z0-9._/-]*(@[A-Za-z0-9._/-]+)?|/[^\x00-\x1f\x7f]*)",
                    expect="hf://REPO[@REVISION], hf://sandmill/tiny-text, or an absolute path",
                    longest=1024,
                )
            },
            unsupported={
                "volume": "this server has no volumes; name a folder of its machine in model.uri",
                "secret": "the server's machine logs in to model hubs, not the job",
            },
        ),
        "environment": Record(
            about="The tasks.",
            required=("name",),
            defaults={"seed": 0},
            fields={
                "name": Text(
                    about="NAME@VERSION of the project, or nodus/NAME@VERSION.",
                    pattern=rf"(nodus/)?{NAME}@{SEMVER}",
                    expect="an environment such as sums@1.0.0",
                    longest=160,
                ),
                "trainTasks": Whole(about="Tasks to train on; without it, 256 or as many as there are.", least=0, most=MOST_TASKS),
                "heldOutTasks": Whole(about="Tasks to evaluate on; without it, 64 or as many as there are.", least=1, most=MOST_TASKS),
                "seed": Whole(about="What the choice of tasks derives from.", least=0, most=2**31),
            },
        ),
        "parameters": PARAMETERS,
        "evaluation": Record(
            about="The comparison on held-out tasks.",
            defaults={"baseline": True, "final": True, "minComparisonTasks": FEWEST_COMPARED},
            fields={
                "baseline": Flag(about="Before training."),
                "final": Flag(about="After training."),
                "minComparisonTasks": Whole(about="The fewest that are compared.", least=FEWEST_COMPARED, most=MOST_TASKS),
            },
        ),
        "grading": Record(
            about="How replies are graded.",
            defaults={"maxParallel": 4},
            fields={"maxParallel": Whole(about="Gradings at once.", least=1, most=32)},
        ),
        "maxCostUSD": money("What it may cost, its grading included."),
        "expectedDuration": duration("Nothing is estimated from it.", least="1s", most="8760h"),
        "state": Choice(
            words=("Running", "Suspended", "Cancelled"), about="Suspended saves and stops; Cancelled ends it for good.", default="Running"
        ),
    },
    unsupported={
        "resources": _HERE,
        "placement": _HERE,
        "distributed": _HERE,
        "data": "tasks come from an environment; name one in spec.environment",
        "teacher": "nothing is distilled here; leave it out",
        "task": "the runtime says what is trained; leave it out",
        "exportTo": "this server has no volumes; download the outputs",
        "tracking": "figures stay on this server; read its taskevents and outputs",
    },
)
