"""What a manifest lets graders use: read, refused where it cannot be meant, and told to a person."""

from __future__ import annotations

import pytest

from sandmill.config.allowed import allowed
from sandmill.config.load import parse_manifest
from sandmill.config.manifest import Spec
from sandmill.errors import ConfigError

HEAD = """\
spec:
  model: {uri: sandmill/tiny-text}
  environment: {name: reasoning-gym/chain_sum@0.1.25}
  tools: {mcp: [{name: abacus, command: [abacus], tools: []}, {name: search, url: "http://127.0.0.1:9000/mcp"}]}
"""
JUDGE = "judge: [{name: gpt-4.1-nano, url: 'https://u:p@api.example.org/v1'"


def spec(grading: str, more: str = "") -> Spec:
    return parse_manifest(f"{HEAD}  grading: {{{grading}}}\n{more}".encode(), file="m.yaml").spec


def test_without_a_word_graders_may_use_nothing() -> None:
    grading = spec("").grading
    assert (grading.network, grading.judge, grading.mcp, allowed(spec(""))) == (None, (), (), ())


def test_what_is_named_is_read_and_told() -> None:
    network = "network: {egress: {policy: AllowList, allow: ['*.example.org'], presets: [pypi]}}"
    judges = (
        f"{JUDGE}, key: JUDGE_KEY, model: nano, prices: {{input: '0.10', output: '0.40'}}}}, {{name: own, uri: sandmill/smollm2-135m}}]"
    )
    found = spec(f"{network}, {judges}, mcp: [abacus]")
    assert found.grading.judge[0].prices.output == "0.40"
    assert allowed(found) == (
        "reach *.example.org, the hosts of pypi",
        "ask judge gpt-4.1-nano at api.example.org as nano",
        "ask judge own (sandmill/smollm2-135m, served here)",
        "call the tool server abacus",
    )
    assert allowed(spec("network: {egress: {policy: Open}}")) == ("reach every public address",)
    assert allowed(spec("network: {egress: {policy: Deny}}")) == ()


@pytest.mark.parametrize(
    ("grading", "field", "says"),
    [
        ("judges: []", "judges", "did you mean 'judge'?"),
        ("network: {egress: {policy: Allowlist}}", "network.egress.policy", "did you mean 'AllowList'?"),
        ("network: {egress: {policy: AllowList, presets: [pypy]}}", "network.egress.presets", "did you mean 'pypi'?"),
        ("mcp: [abakus]", "mcp[0]", "did you mean 'abacus'?"),
        ("mcp: [abacus, abacus]", "mcp[1]", "named twice"),
        (f"{JUDGE}, modle: x}}]", "judge[0].modle", "did you mean 'model'?"),
        ("judge: [{name: a}]", "judge[0].url", "either a url or a uri"),
        (f"{JUDGE}, uri: sandmill/tiny-text}}]", "judge[0].url", "either a url or a uri"),
        ("judge: [{name: a, uri: sandmill/tiny-text, key: K}]", "judge[0].key", "belongs to an endpoint"),
        ("judge: [{name: a, url: 'file:///etc/passwd'}]", "judge[0].url", "http:// or https://"),
        ("judge: [{name: 'a b', url: 'http://x.org'}]", "judge[0].name", "letters, digits"),
        (f"{JUDGE}}}, {{name: gpt-4.1-nano, url: 'http://x.org'}}]", "judge[1].name", "a name of its own"),
        (f"{JUDGE}, key: sk-1234567890}}]", "judge[0].key", "never a key itself"),
        (f"{JUDGE}, timeout: 60s.}}]", "judge[0].timeout", "60s"),
        (f"{JUDGE}, maxCostUSD: '0.01'}}]", "judge[0].maxCostUSD", "set prices.input and prices.output"),
        (f"{JUDGE}, prices: {{input: cheap}}}}]", "judge[0].prices.input", "cheap"),
        (f"{JUDGE}, maxRequests: 0}}]", "judge[0].maxRequests", "at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_its_place(grading: str, field: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec(grading)
    assert caught.value.field == f"spec.grading.{field}"
    assert says in caught.value.message
    assert caught.value.line == 5
    assert "sk-1234567890" not in str(caught.value)


def test_a_cap_needs_the_prices_of_judges() -> None:
    more = "  prices: {machinePerHour: '1', sandboxPerHour: '1'}\n  maxCostUSD: 5\n"
    with pytest.raises(ConfigError, match=r"spec.maxCostUSD: a cap cannot be held while the prices of judge gpt-4.1-nano are unknown"):
        spec(f"{JUDGE}}}]", more)
    assert spec(f"{JUDGE}, prices: {{input: '1', output: '2'}}}}]", more).max_cost_usd == "5"
