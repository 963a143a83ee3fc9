"""A manifest file and `--set` overrides in; a checked, frozen `Manifest` out, or a ConfigError with file, line and field."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sandmill.config.check import Checker, locate, nearest, printable
from sandmill.config.document import MAX_BYTES, OPTION, Node, parse_document, parse_value, shortened
from sandmill.config.hosts import parse_hosts
from sandmill.config.manifest import EgressPolicy, EgressSection, JudgeSection, Manifest, McpSection, Spec
from sandmill.config.quantities import parse_bytes, parse_duration, parse_usd
from sandmill.errors import ConfigError

RUNTIMES = {"sandmill/grpo-lora": "sandmill/grpo-lora", "nodus/grpo-lora": "sandmill/grpo-lora"}
API_VERSIONS = {"sandmill.dev/v1": "sandmill.dev/v1", "nodus.dev/v1beta1": "sandmill.dev/v1"}
DIALOGUES = ("auto", "line", "chat")

_AMOUNTS: dict[str, Callable[[str], object]] = {
    "spec.sandbox.memory": parse_bytes,
    "spec.sandbox.disk": parse_bytes,
    "spec.sandbox.commandTimeout": parse_duration,
    "spec.grading.timeout": parse_duration,
    "spec.prices.machinePerHour": parse_usd,
    "spec.prices.sandboxPerHour": parse_usd,
    "spec.maxCostUSD": parse_usd,
}
_SERVER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,199}")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,99}")
_PATH_PART = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def load_manifest(path: Path | str, overrides: Sequence[str] = ()) -> Manifest:
    """The manifest in `path` with `overrides` ("spec.parameters.steps=10") applied. Raises ConfigError."""
    return parse_manifest(_read(Path(path)), overrides, file=str(path))


def parse_manifest(data: bytes, overrides: Sequence[str] = (), *, file: str = "<manifest>") -> Manifest:
    """The manifest written in `data`. Raises ConfigError, whose `file`, `line` and `field` say where."""
    root = parse_document(data, file)
    if not isinstance(root.value, dict):
        raise ConfigError(f"expected a mapping that starts with `spec:`, found {root.found}", file=file, line=root.line)
    for override in overrides:
        root = _overridden(root, override)
    plain = Checker(Manifest, frozenset(_AMOUNTS)).check(root)
    try:
        manifest = msgspec.convert(plain, Manifest)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise ConfigError(shortened(str(error), 200), file=file, line=root.line) from None
    return _consistent(manifest, root)


def override_manifest(manifest: Manifest, overrides: Sequence[str]) -> Manifest:
    """`manifest` with "--set" overrides applied and everything checked again. Raises ConfigError."""
    return parse_manifest(msgspec.json.encode(manifest), overrides, file="manifest.json") if overrides else manifest


def with_place(error: ConfigError, path: Path, overrides: Sequence[str]) -> ConfigError:
    """The same error with the file and line of its field, where the manifest in `path` (or an override) has that field."""
    if error.file is not None or error.field is None or not error.field.startswith("spec."):
        return error
    try:
        root = parse_document(_read(path), str(path))
        for override in overrides:
            root = _overridden(root, override)
    except ConfigError:
        return error
    node = locate(root, error.field)
    return ConfigError(error.message, file=node.file, line=node.shown_line, field=error.field)


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=_open_without_waiting) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise ConfigError("is not a regular file", file=path, line=1)
            return stream.read(MAX_BYTES + 1)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(_unreadable(path, error), file=path) from None


def _open_without_waiting(name: str, flags: int) -> int:
    """O_NONBLOCK, or opening a named pipe would wait for a writer that never comes."""
    return os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _unreadable(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, IsADirectoryError):
        return "is a folder; give the manifest file inside it"
    if isinstance(error, FileNotFoundError):
        try:
            siblings = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml", ".json")]
        except OSError:
            return "does not exist"
        near = nearest(path.name, siblings)
        return f"does not exist; did you mean {str(path.parent / near)!r}?" if near else "does not exist"
    if isinstance(error, OSError) and error.errno == errno.EACCES:
        return "may not be read by this user; change its permissions"
    return f"cannot be read: {error.strerror if isinstance(error, OSError) and error.strerror else error}"


def _overridden(root: Node, override: str) -> Node:
    """`root` with one "a.b.c=value" applied; the new nodes name the option as their file."""
    origin = f"{OPTION}{shortened(printable(override))}"
    path, sign, text = override.partition("=")
    parts = path.split(".")
    if not sign or not all(_PATH_PART.fullmatch(part) for part in parts):
        raise ConfigError("write it as key.key=value, such as spec.parameters.steps=10", file=origin)
    try:
        value = parse_value(text, origin)
    except ConfigError as error:
        raise ConfigError(error.message, file=origin) from None
    return _placed(root, parts, value, origin)


def _placed(node: Node | None, parts: list[str], value: Node, origin: str) -> Node:
    if not parts:
        return value
    entries = dict(node.value) if node is not None and isinstance(node.value, dict) else {}
    key_lines = dict(node.key_lines) if node is not None else {}
    entries[parts[0]] = _placed(entries.get(parts[0]), parts[1:], value, origin)
    key_lines.setdefault(parts[0], 1)
    return Node(entries, "", node.file if node is not None else origin, node.line if node is not None else 1, key_lines)


def _consistent(manifest: Manifest, root: Node) -> Manifest:
    """Checks that types cannot express; returns the manifest with aliases resolved."""
    spec = manifest.spec
    for field, parse in _AMOUNTS.items():
        _check_amount(root, field, parse)
    _one_of(root, "kind", manifest.kind, ("TrainingJob",))
    _one_of(root, "apiVersion", manifest.api_version, tuple(API_VERSIONS))
    _one_of(root, "spec.runtime", spec.runtime, tuple(RUNTIMES))
    _one_of(root, "spec.model.dialogue", spec.model.dialogue, DIALOGUES)
    for field, text in (("spec.model.uri", spec.model.uri), ("spec.environment.name", spec.environment.name)):
        if not text.strip() or not text.isprintable():
            raise _refusal(root, field, "expected a name of printable characters, found " + locate(root, field).found)
    prices = {"machinePerHour": spec.prices.machine_per_hour, "sandboxPerHour": spec.prices.sandbox_per_hour}
    if spec.max_cost_usd is not None and (unknown := [name for name, price in prices.items() if price is None]):
        message = f"a cap cannot be held while spec.prices.{unknown[0]} is unknown: set it or drop the cap"
        raise _refusal(root, "spec.maxCostUSD", message)
    if spec.parameters.min_group_size > spec.parameters.num_generations:
        message = (
            f"a group has numGenerations = {spec.parameters.num_generations} episodes, so this cannot be {spec.parameters.min_group_size}"
        )
        raise _refusal(root, "spec.parameters.minGroupSize", message)
    lists = {"spec.evaluation.splits": spec.evaluation.splits, "spec.parameters.lora.targetModules": spec.parameters.lora.target_modules}
    for field, names in lists.items():
        if not names or len(set(names)) != len(names) or not all(name.strip() for name in names):
            raise _refusal(root, field, "expected a list of different names, found " + (", ".join(map(repr, names)) or "an empty list"))
    if spec.sandbox.network is not None:
        _check_egress(root, "spec.sandbox.network.egress", spec.sandbox.network.egress)
    for place, server in enumerate(spec.tools.mcp):
        _check_mcp(root, f"spec.tools.mcp[{place}]", server, [other.name for other in spec.tools.mcp[:place]])
    _check_grading(root, spec)
    return msgspec.structs.replace(
        manifest,
        api_version=API_VERSIONS[manifest.api_version],
        spec=msgspec.structs.replace(spec, runtime=RUNTIMES[spec.runtime]),
    )


def _check_mcp(root: Node, place: str, server: McpSection, others: Sequence[str]) -> None:
    if not _SERVER_NAME.fullmatch(server.name) or server.name in others:
        raise _refusal(root, f"{place}.name", f"expected a name of its own of letters, digits, _ and -, found {server.name!a}")
    if bool(server.command) == (server.url is not None):
        raise _refusal(root, f"{place}.command", "expected either a command or a url")
    if server.url is not None and not server.url.startswith(("http://", "https://")):
        raise _refusal(root, f"{place}.url", f"expected an http:// or https:// URL, found {server.url!a}")
    for key, text, parse in (("timeout", server.timeout, parse_duration), ("memory", server.memory, parse_bytes)):
        _check_text(root, f"{place}.{key}", text, parse)
    if server.network is not None:
        _check_egress(root, f"{place}.network.egress", server.network.egress)


def _check_grading(root: Node, spec: Spec) -> None:
    grading = spec.grading
    if grading.network is not None:
        _check_egress(root, "spec.grading.network.egress", grading.network.egress)
    for place, judge in enumerate(grading.judge):
        _check_judge(root, f"spec.grading.judge[{place}]", judge, [other.name for other in grading.judge[:place]])
        if spec.max_cost_usd is not None and judge.url is not None and None in (judge.prices.input, judge.prices.output):
            message = f"a cap cannot be held while the prices of judge {judge.name} are unknown: set them or drop the cap"
            raise _refusal(root, "spec.maxCostUSD", message)
    servers = tuple(server.name for server in spec.tools.mcp)
    for place, name in enumerate(grading.mcp):
        if not servers:
            raise _refusal(root, f"spec.grading.mcp[{place}]", f"spec.tools.mcp has no server {shortened(repr(name))}; it has none at all")
        _one_of(root, f"spec.grading.mcp[{place}]", name, servers)
        if name in grading.mcp[:place]:
            raise _refusal(root, f"spec.grading.mcp[{place}]", f"{name} is named twice")


def _check_judge(root: Node, place: str, judge: JudgeSection, others: Sequence[str]) -> None:
    if not _MODEL_NAME.fullmatch(judge.name) or judge.name in others:
        raise _refusal(root, f"{place}.name", f"expected a name of its own of letters, digits and . _ : / @ -, found {judge.name!a}")
    if (judge.url is None) == (judge.uri is None):
        raise _refusal(root, f"{place}.url", "expected either a url or a uri")
    if judge.url is not None and not judge.url.startswith(("http://", "https://")):
        raise _refusal(root, f"{place}.url", f"expected an http:// or https:// URL, found {judge.url!a}")
    for key, given in (
        ("model", judge.model),
        ("key", judge.key),
        ("prices.input", judge.prices.input),
        ("prices.output", judge.prices.output),
    ):
        if given is not None and judge.uri is not None:
            raise _refusal(root, f"{place}.{key}", "belongs to an endpoint; a model that is served here has none")
    if judge.key is not None and not _VARIABLE.fullmatch(judge.key):
        raise _refusal(root, f"{place}.key", "expected the name of an environment variable such as JUDGE_API_KEY, never a key itself")
    amounts: tuple[tuple[str, str | None, Callable[[str], object]], ...] = (
        ("timeout", judge.timeout, parse_duration),
        ("maxCostUSD", judge.max_cost_usd, parse_usd),
        ("prices.input", judge.prices.input, parse_usd),
        ("prices.output", judge.prices.output, parse_usd),
    )
    for key, text, parse in amounts:
        if text is not None:
            _check_text(root, f"{place}.{key}", text, parse)
    if judge.max_cost_usd is not None and judge.url is not None and None in (judge.prices.input, judge.prices.output):
        raise _refusal(
            root, f"{place}.maxCostUSD", "cannot be held while a price of this judge is unknown: set prices.input and prices.output"
        )


def _check_text(root: Node, field: str, text: str, parse: Callable[[str], object]) -> None:
    try:
        parse(text)
    except ConfigError as error:
        raise _refusal(root, field, error.message) from None


def _check_egress(root: Node, place: str, egress: EgressSection) -> None:
    for key, hosts, presets in (("allow", egress.allow, ()), ("presets", (), egress.presets)):
        try:
            named = parse_hosts(hosts, presets)
        except ConfigError as error:
            raise _refusal(root, f"{place}.{key}", error.message) from None
        if named and egress.policy is not EgressPolicy.ALLOW_LIST:
            raise _refusal(root, f"{place}.{key}", f"has no effect with policy {egress.policy}; write policy: AllowList or drop it")
    if egress.policy is EgressPolicy.ALLOW_LIST and not (egress.allow or egress.presets):
        raise _refusal(root, f"{place}.policy", "AllowList needs at least one host in allow or one of presets; Deny is no network at all")


def _check_amount(root: Node, field: str, parse: Callable[[str], object]) -> None:
    node = locate(root, field)
    if isinstance(node.value, dict) or node.value is None:
        return
    try:
        amount = parse(node.text)
    except ConfigError as error:
        raise _refusal(root, field, error.message) from None
    if amount == 0 and parse is not parse_usd:
        raise _refusal(root, field, f"expected more than zero, found {node.found}")


def _one_of(root: Node, field: str, found: str, choices: tuple[str, ...]) -> None:
    if found not in choices:
        near = nearest(found, choices)
        hint = f"; did you mean {near!r}?" if near is not None and len(choices) > 1 else ""
        raise _refusal(root, field, f"expected {' or '.join(choices)}, found {shortened(repr(found))}{hint}")


def _refusal(root: Node, field: str, message: str) -> ConfigError:
    node = locate(root, field)
    return ConfigError(message, file=node.file, line=node.shown_line, field=field)
