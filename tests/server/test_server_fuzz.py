"""The API against its own description: nothing that is sent makes the server fail, and what it answers is what it says it answers."""

from __future__ import annotations

import collections
import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from bundles import ready, spec_of
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance
from server_process import KEY, Server, serving

HEADERS = {"Authorization": f"Bearer {KEY}"}
EXAMPLES = 12
BASE = "/apis/nodus.dev/v1/namespaces/{{namespace}}/{}"
BETA = BASE.replace("v1", "v1beta1")
CLOSED = {"additionalProperties": False}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own, with few sandboxes allowed: a fuzzer makes many."""
    with serving(tmp_path_factory.mktemp("fuzz"), "--max-running", "20") as server:
        yield server


def described(server: Server) -> schemathesis.BaseSchema:
    """The document, with what is asked for narrowed to what this machine can have; what is refused for that is tested elsewhere."""
    document = server.ask("GET", "/openapi/v3/apis/nodus.dev/v1").json
    beta = server.ask("GET", "/openapi/v3/apis/nodus.dev/v1beta1").json
    document["paths"] |= beta["paths"]
    document["components"]["schemas"] |= beta["components"]["schemas"]
    schemas = copy.deepcopy(document["components"]["schemas"])
    spec = schemas["dev.nodus.v1.Sandbox"]["properties"]["spec"]["properties"]
    spec["image"] = {"type": "string", "enum": ["nodus/agent-tools"]}
    spec["workingDir"] = {"type": "string", "enum": ["/workspace", "/home/user/x"]}
    spec["network"]["properties"]["egress"]["properties"]["policy"]["enum"] = ["Deny"]
    spec["secrets"]["maxItems"] = 0
    image = schemas["dev.nodus.v1.Image"]["properties"]
    parts = image["spec"]["properties"]
    parts["base"]["enum"] = ["nodus/agent-tools"]
    parts["fromSandbox"]["properties"]["name"]["enum"] = ["a", "b"]
    parts["dockerfile"] = {
        "type": "object",
        "properties": {"inline": {"enum": ["FROM nodus/agent-tools", "FROM a"]}},
        "required": ["inline"],
    }
    parts["network"]["properties"]["egress"]["properties"]["policy"]["enum"] = ["Deny"]
    parts["steps"] = {"type": "array", "maxItems": 1, "items": {"type": "object", "properties": {"run": {"enum": [["true"], ["false"]]}}}}
    parts["platform"]["enum"] = ["linux/amd64"]
    ways = ("base", "fromSandbox", "dockerfile")
    image["spec"] = {"anyOf": [{"type": "object", "required": [way], "properties": {way: parts[way]}, **CLOSED} for way in ways]}
    for resources, words in (("memory", ["64Mi", "128Mi"]), ("disk", ["16Mi", "1Gi"]), ("cpu", ["1", "500m"])):
        spec["resources"]["properties"][resources] = {"type": "string", "enum": words}
    for name, words in (("idleTimeout", ["0s", "5m"]), ("maxLifetime", ["1h", "24h"])):
        spec["lifecycle"]["properties"][name] = {"type": "string", "enum": words}
    for variables in (spec["env"], schemas["dev.nodus.v1.Process"]["properties"]["spec"]["properties"]["env"]):
        del variables["items"]["properties"]["valueFrom"]
    command = schemas["dev.nodus.v1.Process"]["properties"]["spec"]["properties"]
    command["command"] = {"type": "array", "minItems": 1, "items": {"type": "string", "enum": ["true", "echo", "cat", "-x", "\u00e9"]}}
    for values in ("data", "stringData"):
        schemas["dev.nodus.v1.Secret"]["properties"]["spec"]["properties"][values]["additionalProperties"] = {
            "type": "string",
            "enum": ["", "aGk=", "*"],
        }
    narrow_training(server, schemas)
    box = "/apis/nodus.dev/v1/namespaces/{namespace}/sandboxes/{name}"
    document["paths"][f"{box}/fork"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]["count"]["maximum"] = 2
    for kind in ("v1.Sandbox", "v1.Secret", "v1.Image", "v1.Process", "v1.Environment", "v1beta1.TrainingJob"):
        meta = schemas[f"dev.nodus.{kind}"]["properties"]["metadata"]["properties"]
        meta["name"] = meta["generateName"] = {"type": "string", "enum": ["a", "b", "fz"]}
        meta["namespace"] = {"type": "string", "enum": ["default"]}
        del meta["resourceVersion"]
    named = {"type": "object", "properties": {"name": {"enum": ["a", "b", "fz"]}}, "required": ["name"], **CLOSED}
    schemas["dev.nodus.v1.Image"] = {
        "type": "object",
        "properties": {"metadata": named, "spec": image["spec"]},
        "required": ["metadata", "spec"],
        **CLOSED,
    }
    document["components"]["schemas"] |= {f"{name}.Asked": schema for name, schema in schemas.items()}
    for path in document["paths"].values():
        for operation in path.values():
            for content in operation.get("requestBody", {}).get("content", {}).values() if isinstance(operation, dict) else ():
                if "$ref" in content["schema"]:
                    content["schema"] = {"$ref": content["schema"]["$ref"] + ".Asked"}
    for path in document["paths"].values():  # one project and few names, so that objects are met again
        for parameter in path.get("parameters", ()):
            parameter["schema"] = {
                "type": "string",
                "enum": ["default"] if parameter["name"] == "namespace" else ["a", "b", "sb-a-1", "sb-b-1"],
            }
    return schemathesis.openapi.from_dict(document)


def narrow_training(server: Server, schemas: dict[str, Any]) -> None:
    """Environments of one bundle, and jobs that nobody starts."""
    spec = schemas["dev.nodus.v1.Environment"]["properties"]["spec"]
    spec["properties"]["package"] = {"enum": [spec_of(server)["package"]]}
    del spec["properties"]["splits"], spec["properties"]["graders"]
    job = schemas["dev.nodus.v1beta1.TrainingJob"]["properties"]["spec"]
    job["properties"]["state"]["enum"] = ["Suspended", "Cancelled"]
    job["required"] = [*job["required"], "state"]
    job["properties"]["model"] = {"enum": [{"uri": "hf://sandmill/tiny-text"}]}
    job["properties"]["environment"] = {"enum": [{"name": "fuzzed@1.0.0"}, {"name": "fuzzed@1.0.0", "heldOutTasks": 16}]}
    del job["properties"]["maxCostUSD"], job["properties"]["mode"]
    for kind in ("v1.Environment", "v1beta1.TrainingJob"):
        schemas[f"dev.nodus.{kind}"]["required"] = ["spec", "metadata"]
        schemas[f"dev.nodus.{kind}"]["properties"]["metadata"]["required"] = ["name"]


def furnish(server: Server) -> None:
    """Objects of the names that requests use."""
    for name in ("a", "b"):
        if server.ask("GET", f"sandboxes/{name}").status == 404:
            server.ask("POST", "sandboxes", {"metadata": {"name": name}, "spec": {"resources": {"memory": "64Mi", "disk": "16Mi"}}})
            server.ask("POST", f"sandboxes/{name}/processes", {"spec": {"command": ["cat"], "stdin": True}})
            server.ask("PUT", f"sandboxes/{name}/files?path=0", b"0")
        server.ask("POST", "secrets", {"metadata": {"name": name}, "spec": {"stringData": {"k": "v"}}})
    if server.ask("GET", "environments/fuzzed").status == 404:
        ready(server, "fuzzed")
    job = {"runtime": "nodus/evaluate", "model": {"uri": "hf://sandmill/tiny-text"}, "environment": {"name": "fuzzed@1.0.0"}}
    server.ask(
        "POST", BETA.format("trainingjobs").format(namespace="default"), {"metadata": {"name": "a"}, "spec": job | {"state": "Suspended"}}
    )


def test_no_input_makes_it_fail(fuzzed: Server) -> None:
    schema = described(fuzzed)
    schema.config.update(base_url=fuzzed.url)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 30
    calm = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example]
    box = "/apis/nodus.dev/v1/namespaces/{namespace}/sandboxes/{name}"
    tried: collections.Counter[tuple[str, int]] = collections.Counter()

    for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
        for operation in operations:
            strategy = operation.as_strategy(generation_mode=mode)

            @settings(
                max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=calm, phases=[Phase.generate], derandomize=True
            )
            @given(case=strategy)
            def attempt(case: schemathesis.Case) -> None:
                furnish(fuzzed)
                answer = case.call(headers=HEADERS, timeout=30)
                tried[(case.operation.label, answer.status_code)] += 1
                case.validate_response(answer, checks=[not_a_server_error, response_schema_conformance, content_type_conformance])

            attempt()
    assert tried.total() > 300
    succeeded = {label for label, status in tried if status < 300}
    assert len(succeeded) > 0.6 * len(operations), sorted({label for label, _ in tried} - succeeded)
    assert {f"POST {base.format(kind)}" for base, kind in ((BASE, "environments"), (BETA, "trainingjobs"))} <= succeeded
    assert {f"POST {box}/{sub}" for sub in ("fork", "freeze", "thaw")} | {f"POST {box.replace('sandboxes/{name}', 'images')}"} <= succeeded
    assert fuzzed.ask("GET", "/readyz").status == 200


def test_what_is_described_is_what_is_served(server: Server) -> None:
    document = server.ask("GET", "/openapi/v3/apis/nodus.dev/v1").json
    listed = {resource["name"] for resource in server.ask("GET", "/apis/nodus.dev/v1").json["resources"]}
    assert {path.rstrip("/").split("/")[-1] for path in document["paths"]} >= {name for name in listed if "/" not in name}
    golden = json.dumps(document["components"]["schemas"]["dev.nodus.v1.Sandbox"])
    assert "idleTimeout" in golden
