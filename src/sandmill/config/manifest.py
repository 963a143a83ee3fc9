"""The run manifest as frozen, typed records; defaults live here and nowhere else.

A manifest is YAML with camelCase keys. Every key is checked: an unknown one is an error that names the nearest known one.
The resolved manifest (all defaults filled in) is saved with the run and is what `--resume` compares.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
PositiveReal = Annotated[float, Meta(gt=0)]
NonNegativeReal = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


class Section(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True, omit_defaults=False):
    """Base of every manifest section."""


class ModelSection(Section, frozen=True):
    """Which policy. `uri`: `sandmill/tiny-shell`, `sandmill/tiny-text`, `sandmill/smollm2-135m`, a local Hugging Face folder, or `hf://repo[@revision]`."""

    uri: str
    dialogue: str = "auto"
    """How turns are written as tokens: `line` (`$ command` and `= answer`), `chat` (the model's own template), or `auto`."""


Option = str | int | float | bool | list[str | int | float | bool]
"""What an environment's own option may be."""


class EnvironmentSection(Section, frozen=True):
    """Which tasks. Train and held-out sets are drawn by `seed` and never share an identity."""

    name: str
    train_tasks: Positive = 512
    held_out_tasks: Positive = 96
    seed: int = 42
    options: Mapping[str, Option] = {}
    """The environment's own options, checked by the environment."""
    leave_out: tuple[str, ...] = ()
    """Ids of tasks that are not used."""
    allow_failing: bool = False
    """Trains also on tasks that failed `sandmill env check` on this architecture."""


class WarmStartSection(Section, frozen=True):
    """Supervised steps before reinforcement learning, on the environment's scripted demonstrations. 0 steps: none."""

    steps: NonNegative = 0
    batch_size: Positive = 64
    learning_rate: PositiveReal = 2e-3
    right: Fraction | None = None
    """The share of demonstrations that solve their task; null: one in ten. The others end as another task's would."""
    seed: int = 0


class SamplingSection(Section, frozen=True):
    """How replies are sampled in training."""

    temperature: PositiveReal = 1.0
    top_p: Fraction = 1.0


class Method(enum.StrEnum):
    """What is trained."""

    LORA = "LoRA"


class LoraSection(Section, frozen=True):
    """The adapter. `top_layers` null means every layer; n means the n nearest the output."""

    r: Positive = 16
    alpha: PositiveReal = 32.0
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    top_layers: Positive | None = None


class AdvantageScale(enum.StrEnum):
    """How a group's rewards become advantages."""

    STD = "std"
    """(r - mean) / std of the group (GRPO, arXiv:2402.03300)."""
    MEAN = "mean"
    """r - mean (Dr. GRPO's advantage, arXiv:2503.20783)."""
    LEAVE_ONE_OUT = "leave-one-out"
    """r - mean of the others (RLOO, arXiv:2402.14740)."""


class LossScale(enum.StrEnum):
    """What the summed token losses are divided by."""

    TOKEN = "token"
    """Number of sampled tokens in the whole step (DAPO, arXiv:2503.14476)."""
    SEQUENCE = "sequence"
    """Each episode's mean over its tokens, then the mean over episodes (GRPO as published)."""
    CONSTANT = "constant"
    """Episodes times `maxCompletionLength` times `maxTurns` (Dr. GRPO)."""


class ImportanceLevel(enum.StrEnum):
    """On what the importance ratio is formed."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    """GSPO, arXiv:2507.18071."""


class RateSchedule(enum.StrEnum):
    """How the learning rate goes from the first update to the last."""

    CONSTANT = "constant"
    LINEAR = "linear"
    """Falls in equal parts, so that one further update would have none. Noise adds up as the square root of the sum of squared rates:
    58 % of what a constant rate gathers."""


class RewardControl(enum.StrEnum):
    """Controls that show whether a gain came from the reward."""

    TASK = "task"
    """What the grader said."""
    RANDOM = "random"
    """Rewards are shuffled by coin: learning must stay flat."""
    FLIPPED = "flipped"
    """The sign is flipped: the pass rate must fall."""


class Parameters(Section, frozen=True):
    """The optimisation. One step samples `batch_size` tasks x `num_generations` episodes and applies one update."""

    steps: NonNegative = 40
    batch_size: Positive = 4
    num_generations: Annotated[int, Meta(ge=2)] = 8
    micro_batch_size: Positive = 64
    min_group_size: Annotated[int, Meta(ge=2)] = 2
    learning_rate: PositiveReal = 4e-5
    learning_rate_schedule: RateSchedule = RateSchedule.CONSTANT
    weight_decay: NonNegativeReal = 0.0
    max_grad_norm: PositiveReal = 1.0
    max_completion_length: Positive = 256
    max_turns: Positive = 3
    entropy_bonus: NonNegativeReal = 0.0
    clip_low: NonNegativeReal = 0.2
    clip_high: NonNegativeReal = 0.2
    advantage: AdvantageScale = AdvantageScale.STD
    loss: LossScale = LossScale.TOKEN
    importance: ImportanceLevel = ImportanceLevel.TOKEN
    method: Method = Method.LORA
    lora: LoraSection = LoraSection()
    sampling: SamplingSection = SamplingSection()
    reward: RewardControl = RewardControl.TASK
    seed: int = 0


class EvaluationSection(Section, frozen=True):
    """Held-out evaluation. `splits` are evaluated before and after training, `every` (steps) in between, 0: never."""

    baseline: bool = True
    final: bool = True
    every: NonNegative = 0
    splits: tuple[str, ...] = ("heldout",)
    samples_per_task: Positive = 1
    greedy: bool = True
    min_comparison_tasks: Annotated[int, Meta(ge=16)] = 16


class EgressPolicy(enum.StrEnum):
    """What a sandbox may reach."""

    DENY = "Deny"
    ALLOW_LIST = "AllowList"
    """The host names of `allow` and `presets`, over TLS and plain HTTP."""
    OPEN = "Open"
    """Everything over TCP but private ranges and cloud metadata."""


class EgressSection(Section, frozen=True):
    """Network egress. `allow`: "pypi.org", "*.example.org"; `presets`: names of config/hosts.py."""

    policy: EgressPolicy = EgressPolicy.DENY
    allow: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()


class NetworkSection(Section, frozen=True):
    """The sandbox's network."""

    egress: EgressSection = EgressSection()


class BackendName(enum.StrEnum):
    """Where sandboxes are made."""

    NATIVE = "native"
    """Namespaces of this machine."""
    GVISOR = "gvisor"
    """`runsc` on this machine: a kernel of its own, in user space."""
    E2B = "e2b"
    """MicroVMs of a fleet that speaks the E2B protocol."""
    KUBERNETES = "kubernetes"
    """Pods."""
    SERVER = "server"
    """A Sandmill server."""


class SandboxSection(Section, frozen=True):
    """Limits of each episode's sandbox. Strings are Kubernetes quantities and Go durations."""

    cpu: PositiveReal = 1.0
    memory: str = "512Mi"
    disk: str = "64Mi"
    command_timeout: str = "10s"
    max_observation: Positive = 2000
    """Characters of a command's output shown to the model; the rest is dropped with a flag."""
    backend: BackendName | None = None
    """null: what SANDMILL_BACKEND and SANDMILL_API_URL say, and native without them."""
    network: NetworkSection | None = None
    """null: what the environment asks for, which is no network unless it says so."""


class McpSection(Section, frozen=True):
    """A server of tools that speaks the Model Context Protocol: a command, in a sandbox of its own for each episode, or a URL."""

    name: str
    command: tuple[str, ...] = ()
    url: str | None = None
    """Of a server that runs already (streamable HTTP). It is outside any sandbox, and shared by all episodes."""
    env: Mapping[str, str] = {}
    """The command's environment variables."""
    image: str | None = None
    """What the command's sandbox starts from; null: this machine's own programs."""
    network: NetworkSection | None = None
    """What the command may reach; null: nothing."""
    memory: str = "512Mi"
    tools: tuple[str, ...] | None = None
    """Those offered to the model; null: all."""
    shared: bool = False
    """One server for all episodes, which then see each other's traces in it."""
    timeout: str = "30s"
    """For its start and for each call."""


class ToolsSection(Section, frozen=True):
    """Tools that the model has besides the environment's own."""

    mcp: tuple[McpSection, ...] = ()


class ResourcesSection(Section, frozen=True):
    """What the run may use of this machine."""

    max_in_flight: Positive = 128
    """Episodes (cache rows) alive at once."""
    max_sandboxes: Positive = 64
    """Sandboxes alive at once."""
    context_length: Positive | None = None
    """Tokens of an episode at most; null: the model's own, at most 1024."""
    threads: Positive | None = None
    """Torch threads; null: as many as the machine has cores, at most 2 for models under 10M parameters."""


class TokenPricesSection(Section, frozen=True):
    """Of a judge, in USD per million tokens, as decimal strings; null means unknown, and unknown is never shown as zero."""

    input: str | None = None
    output: str | None = None


class JudgeSection(Section, frozen=True):
    """A model that graders may ask by `name`: an OpenAI-compatible endpoint (`url`), or one that is served here (`uri`).

    The limits hold for all requests of one grading together.
    """

    name: str
    """What graders ask for as `model`."""
    url: str | None = None
    """The endpoint's base: `https://api.example.org/v1`."""
    model: str | None = None
    """What the endpoint knows it as; null: as `name`."""
    key: str | None = None
    """The environment variable, of the process that trains, with the endpoint's key; null: it takes none."""
    uri: str | None = None
    """A model of one's own, written as in `spec.model.uri`, instead of an endpoint."""
    max_requests: Positive = 16
    max_tokens: Positive = 65_536
    """Of prompts and replies."""
    max_cost_usd: str | None = msgspec.field(name="maxCostUSD", default=None)
    timeout: str = "60s"
    """Waiting for replies."""
    retries: NonNegative = 2
    """Further attempts at a request that the endpoint could not answer just then."""
    prices: TokenPricesSection = TokenPricesSection()


class GradingSection(Section, frozen=True):
    """How verdicts are made, and what graders may use besides: nothing, unless it is named here."""

    max_parallel: Positive = 8
    """Requests to a judge at once."""
    timeout: str = "30s"
    retries: NonNegative = 1
    """Further gradings of what an agent left, after one that broke, and further attempts at an episode that broke before."""
    max_consecutive_failures: Positive = 64
    """A run stops when this many episodes in a row end in InfrastructureFailure."""
    network: NetworkSection | None = None
    """What the sandbox that graders run in may reach; null: nothing."""
    judge: tuple[JudgeSection, ...] = ()
    mcp: tuple[str, ...] = ()
    """Names of servers in `spec.tools.mcp`."""


class CheckpointSection(Section, frozen=True):
    """When to save. The last `keep` checkpoints stay."""

    every: Positive = 10
    keep: Positive = 2


class PricesSection(Section, frozen=True):
    """What this machine costs, in USD per hour, as decimal strings; null means unknown, and unknown is never shown as zero."""

    machine_per_hour: str | None = None
    sandbox_per_hour: str | None = None


class Spec(Section, frozen=True):
    """A training run."""

    model: ModelSection
    environment: EnvironmentSection
    tools: ToolsSection = ToolsSection()
    runtime: str = "sandmill/grpo-lora"
    warm_start: WarmStartSection = WarmStartSection()
    parameters: Parameters = Parameters()
    evaluation: EvaluationSection = EvaluationSection()
    sandbox: SandboxSection = SandboxSection()
    resources: ResourcesSection = ResourcesSection()
    grading: GradingSection = GradingSection()
    checkpoint: CheckpointSection = CheckpointSection()
    prices: PricesSection = PricesSection()
    max_cost_usd: str | None = msgspec.field(name="maxCostUSD", default=None)


class Manifest(Section, frozen=True):
    """A manifest file: `spec`, and optionally `apiVersion`, `kind` and `metadata.name`."""

    spec: Spec
    api_version: str = "sandmill.dev/v1"
    kind: str = "TrainingJob"
    metadata: Mapping[str, str] = {}
