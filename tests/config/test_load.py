"""A manifest loads, or a ConfigError names file, line and field; nothing else ever happens."""

from __future__ import annotations

import os

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandmill.config.load import load_manifest, parse_manifest, with_place
from sandmill.config.manifest import AdvantageScale, EgressPolicy, Manifest
from sandmill.errors import ConfigError
from sandmill.sandboxes.spec import Egress

GOOD = b"""\
# the mission's manifest
spec:
  runtime: nodus/grpo-lora
  model: {uri: sandmill/tiny-shell}
  environment:
    name: shell@1.0.0
    trainTasks: 21
    heldOutTasks: 43
    seed: 42
    options: {families: [count, find], depth: 2, mixed: true, noise: 0.5}
  parameters:
    maxTurns: 3
    maxCompletionLength: 256
    learningRate: 4e-5
    advantage: leave-one-out
    lora: {r: 16, alpha: 32, topLayers: 10}
  sandbox: {memory: 512Mi, commandTimeout: 10s}
  prices: {machinePerHour: 2.6, sandboxPerHour: "0.0179"}
  maxCostUSD: 5
"""


def refused(data: bytes, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(data, overrides, file="m.yaml")
    assert str(caught.value).isprintable(), "the sentence must be one printable line"
    return caught.value


def test_the_mission_manifest_loads_with_defaults_and_aliases_resolved():
    spec = parse_manifest(GOOD).spec
    assert spec.runtime == "sandmill/grpo-lora"
    assert spec.parameters.learning_rate == 4e-5
    assert spec.parameters.advantage is AdvantageScale.LEAVE_ONE_OUT
    assert spec.parameters.lora.alpha == 32.0
    assert spec.environment.options == {"families": ["count", "find"], "depth": 2, "mixed": True, "noise": 0.5}
    assert spec.max_cost_usd == "5"
    assert spec.prices.machine_per_hour == "2.6"
    assert spec.parameters.batch_size == 4


def test_the_resolved_manifest_loads_again_as_itself():
    manifest = parse_manifest(GOOD)
    assert parse_manifest(msgspec.json.encode(manifest)) == manifest


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "words"),
    [
        (b"trainTasks", b"trainTask", 7, "spec.environment.trainTask", "did you mean 'trainTasks'"),
        (b"heldOutTasks", b"held_out_tasks", 8, "spec.environment.held_out_tasks", "did you mean 'heldOutTasks'"),
        (b"maxTurns: 3", b"maxTurns: three", 12, "spec.parameters.maxTurns", "a whole number of at least 1, found 'three'"),
        (b"maxTurns: 3", b"maxTurns: 3.0", 12, "spec.parameters.maxTurns", "write 3"),
        (b"maxTurns: 3", b"maxTurns: 0", 12, "spec.parameters.maxTurns", "found 0"),
        (b"maxTurns: 3", b"maxTurns:", 12, "spec.parameters.maxTurns", "found nothing"),
        (b"maxTurns: 3", b"maxTurns: 1" + b"0" * 30, 12, "spec.parameters.maxTurns", "whole number"),
        (b"4e-5", b".nan", 14, "spec.parameters.learningRate", "a finite number above 0"),
        (b"4e-5", b"-.inf", 14, "spec.parameters.learningRate", "a finite number above 0"),
        (b"leave-one-out", b"leave_one_out", 15, "spec.parameters.advantage", "did you mean 'leave-one-out'"),
        (b"512Mi", b"512MB", 17, "spec.sandbox.memory", '"512M"'),
        (b"10s", b"10", 17, "spec.sandbox.commandTimeout", '"10s"'),
        (b"maxCostUSD: 5", b"maxCostUSD: $5", 19, "spec.maxCostUSD", '"5"'),
        (b"maxCostUSD: 5", b"maxTurns: 5", 19, "spec.maxTurns", "it belongs to spec.parameters"),
        (b"[count, find]", b"[[count]]", 10, "spec.environment.options.families[0]", "found a list"),
        (b"seed: 42", b"seed: 42\n    seed: 43", 10, None, "appears twice, first on line 9"),
        (b"nodus/grpo-lora", b"nodus/grpo", 3, "spec.runtime", "nodus/grpo-lora"),
        (b"  model: {uri: sandmill/tiny-shell}\n", b"", 3, "spec", "'model' is missing"),
        (b"{uri: sandmill/tiny-shell}", b"tiny", 4, "spec.model", "expected a mapping"),
        (b"sandmill/tiny-shell", b"''", 4, "spec.model.uri", "printable"),
        (b"maxTurns: 3", b"minGroupSize: 9", 12, "spec.parameters.minGroupSize", "numGenerations"),
        (b', sandboxPerHour: "0.0179"', b"", 19, "spec.maxCostUSD", "spec.prices.sandboxPerHour is unknown"),
        (b"spec:", b"kind: Sandbox\nspec:", 2, "kind", "TrainingJob"),
    ],
)
def test_every_mistake_is_named_with_line_and_field(old, new, line, field, words):
    assert old in GOOD
    error = refused(GOOD.replace(old, new, 1))
    assert (error.file, error.line, error.field) == ("m.yaml", line, field)
    assert words in str(error)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"- a\n- b\n", "found a list"),
        (b"just words", "found 'just words'"),
        (b"\tspec: 1", "a tab"),
        (b"spec:\n\tmodel: x", "a tab"),
        (b"spec: \0", "control character U+0000"),
        (b"spec: \x1b[2J", "control character U+001B"),
        (b"spec: \xff", "is not UTF-8"),
        ("spec: \ufffe".encode(), "U+FFFE"),
        (b"a: 1\n---\nb: 2", "more than one YAML document"),
        (b"spec: {a: [1", "is not valid YAML"),
        (b"a: &a [*a]", "contains itself"),
        (b"a: *nope", "no anchor"),
        (b"[" * 5000, "nested more than"),
        (b"a: !!python/object/apply:os.system [id]", "is not allowed"),
        (b"? [a]\n: b", "a key must be a plain word"),
        (b"#" + b"x" * 300_000, "is larger than 256 KiB"),
        (b"spec: [" + b"1," * 40_000 + b"]", "more than 20,000 values"),
    ],
)
def test_what_is_no_manifest_is_one_sentence(data, words):
    error = refused(data)
    assert words in str(error)
    assert error.line is not None


def test_an_anchor_bomb_costs_nothing():
    layers = [b"a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    layers += [b"a%d: &a%d [%s]" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 15)]
    assert "unknown key" in str(refused(b"\n".join(layers)))
    options = b"  environment:\n    options: {%s}\n    name: x\n" % b", ".join(layers)
    assert "found a list" in str(refused(b"spec:\n" + options))


def test_an_option_may_be_a_list_of_numbers():
    data = GOOD.replace(b"depth: 2", b"weights: [1, 0.5, 0]")
    assert parse_manifest(data).spec.environment.options["weights"] == [1, 0.5, 0]


def test_an_anchor_used_plainly_works():
    data = GOOD.replace(b"{families: [count, find], depth: 2, mixed: true, noise: 0.5}", b"{a: &names [x, y], b: *names}")
    assert parse_manifest(data).spec.environment.options == {"a": ["x", "y"], "b": ["x", "y"]}


def test_overrides_replace_add_and_are_checked_like_the_file():
    manifest = parse_manifest(
        GOOD, ["spec.parameters.steps=10", "spec.evaluation.splits=[heldout, unseen]", "spec.environment.options.depth=3"]
    )
    assert manifest.spec.parameters.steps == 10
    assert manifest.spec.evaluation.splits == ("heldout", "unseen")
    assert manifest.spec.environment.options["depth"] == 3
    error = refused(GOOD, "spec.parameters.stepz=10")
    assert (error.file, error.line, error.field) == ("--set spec.parameters.stepz=10", None, "spec.parameters.stepz")
    assert "did you mean 'steps'" in str(error)
    assert "write it as" in str(refused(GOOD, "spec.parameters.steps"))
    assert "found 'ten'" in str(refused(GOOD, "spec.parameters.steps=ten"))
    assert "is not valid YAML" in str(refused(GOOD, "spec.parameters.steps=["))
    assert "it belongs to spec" in str(refused(GOOD, "parameters.steps=1"))
    assert "write it as" in str(refused(GOOD, "\x1b[31m=1"))


def test_a_later_error_about_a_field_gets_its_place_in_the_file(tmp_path):
    (tmp_path / "demo.yaml").write_bytes(GOOD)
    late = ConfigError("there is no such thing", field="spec.environment.options.depth")
    placed = with_place(late, tmp_path / "demo.yaml", [])
    assert str(placed) == f"{tmp_path}/demo.yaml:10: spec.environment.options.depth: there is no such thing"
    overridden = with_place(late, tmp_path / "demo.yaml", ["spec.environment.options.depth=7"])
    assert overridden.file == "--set spec.environment.options.depth=7"
    (tmp_path / "demo.yaml").unlink()
    assert with_place(late, tmp_path / "demo.yaml", []) is late


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "demo.yaml").write_bytes(GOOD)
    assert isinstance(load_manifest(tmp_path / "demo.yaml"), Manifest)
    os.mkfifo(tmp_path / "pipe.yaml")
    wrong = {"demo.yml": "did you mean", ".": "is a folder", "pipe.yaml": "not a regular file", "a" * 300: "cannot be read"}
    for name, words in {**wrong, "x\0y": "cannot be read"}.items():
        with pytest.raises(ConfigError) as caught:
            load_manifest(tmp_path / name)
        assert words in str(caught.value)


MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "delete", "replace", "repeat"]),
        st.integers(0, len(GOOD)),
        st.integers(1, 12),
        st.one_of(
            st.binary(max_size=6), st.text(alphabet="{}[]:,-&*!|>'\"#%@`?\n\t \x00\x85\u2028\ufeff10eE.~", max_size=6).map(str.encode)
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=400, deadline=None)
@given(MUTATIONS)
def test_any_mutation_loads_or_raises_config_error_with_a_line(mutations):
    data = GOOD
    for kind, at, length, filler in mutations:
        if kind == "insert":
            data = data[:at] + filler + data[at:]
        elif kind == "delete":
            data = data[:at] + data[at + length :]
        elif kind == "replace":
            data = data[:at] + filler + data[at + len(filler) :]
        else:
            data = data[:at] + data[at : at + length] * 3 + data[at + length :]
    manifest, error = loaded(data)
    if error is None:
        assert parse_manifest(msgspec.json.encode(manifest)) == manifest
        return
    breaks = sum(data.count(mark.encode()) for mark in ("\n", "\r", "\x85", "\u2028", "\u2029"))
    assert error.line is not None
    assert 1 <= error.line <= breaks + 2
    assert str(error).isprintable()


def loaded(data: bytes) -> tuple[Manifest, None] | tuple[None, ConfigError]:
    try:
        return parse_manifest(data, file="m.yaml"), None
    except ConfigError as error:
        return None, error


NETWORK = GOOD.replace(b"commandTimeout: 10s}", b"commandTimeout: 10s, network: {egress: %b}}")


def test_a_sandbox_network_is_read_with_its_policy():
    assert parse_manifest(GOOD).spec.sandbox.network is None
    network = parse_manifest(NETWORK % b'{policy: AllowList, allow: ["*.example.org"], presets: [pypi]}').spec.sandbox.network
    assert network is not None
    assert (network.egress.policy, network.egress.allow, network.egress.presets) == (EgressPolicy.ALLOW_LIST, ("*.example.org",), ("pypi",))
    assert Egress.of(network.egress).patterns == ("*.example.org", "pypi.org", "files.pythonhosted.org")
    assert Egress.of(parse_manifest(NETWORK % b"{policy: Open}").spec.sandbox.network.egress) == Egress.open()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("egress", "key", "says"),
    [
        (b"{policy: Allowlist}", "policy", "did you mean 'AllowList'?"),
        (b"{policy: AllowList}", "policy", "needs at least one host"),
        (b"{policy: AllowList, allow: pypi.org}", "allow", "expected a list"),
        (b"{policy: AllowList, allow: [http://pypi.org/]}", "allow", 'write "pypi.org"'),
        (b"{policy: AllowList, presets: [pypy]}", "presets", "did you mean 'pypi'?"),
        (b"{policy: Deny, allow: [pypi.org]}", "allow", "policy: AllowList"),
        (b"{policy: Open, presets: [pypi]}", "presets", "policy: AllowList"),
        (b"{policy: Open, outside: x}", "outside", "known keys here are"),
    ],
)
def test_a_network_that_cannot_be_meant_is_refused(egress: bytes, key: str, says: str):
    error = refused(NETWORK % egress)
    assert error.field == f"spec.sandbox.network.egress.{key}"
    assert says in error.message
    assert error.line == 17
