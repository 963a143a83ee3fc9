"""The API against its own description: nothing that is sent makes the server fail, and what it answers is what it says it answers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance
from server_process import KEY, Server, serving

HEADERS = {"Authorization": f"Bearer {KEY}"}
EXAMPLES = 12


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own, with few sandboxes allowed: a fuzzer makes many."""
    with serving(tmp_path_factory.mktemp("fuzz"), "--max-running", "20") as server:
        yield server


def described(server: Server) -> schemathesis.BaseSchema:
    document = server.ask("GET", "/openapi/v3/apis/nodus.dev/v1").json
    for path in document["paths"].values():  # one project and few names, so that objects are met again
        for parameter in path.get("parameters", ()):
            parameter["schema"] = {"type": "string", "enum": ["default"] if parameter["name"] == "namespace" else ["a", "b", "a-1", "b-1"]}
    return schemathesis.openapi.from_dict(document)


def test_no_input_makes_it_fail(fuzzed: Server) -> None:
    schema = described(fuzzed)
    schema.config.update(base_url=fuzzed.url)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 30
    calm = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example]
    tried = []

    for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
        for operation in operations:
            strategy = operation.as_strategy(generation_mode=mode)

            @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=calm, phases=[Phase.generate], derandomize=True)
            @given(case=strategy)
            def attempt(case: schemathesis.Case) -> None:
                tried.append(case.operation.label)
                answer = case.call(headers=HEADERS, timeout=30)
                case.validate_response(answer, checks=[not_a_server_error, response_schema_conformance, content_type_conformance])

            attempt()
    assert len(tried) > 300
    assert fuzzed.ask("GET", "/readyz").status == 200


def test_what_is_described_is_what_is_served(server: Server) -> None:
    document = server.ask("GET", "/openapi/v3/apis/nodus.dev/v1").json
    listed = {resource["name"] for resource in server.ask("GET", "/apis/nodus.dev/v1").json["resources"]}
    assert {path.rstrip("/").split("/")[-1] for path in document["paths"]} >= {name for name in listed if "/" not in name}
    golden = json.dumps(document["components"]["schemas"]["dev.nodus.v1.Sandbox"])
    assert "idleTimeout" in golden
