"""What this server trains with. In: nothing. Out: TrainingRuntime objects of the project `nodus`, with the schema of their parameters."""

from __future__ import annotations

from typing import Any, Final

from sandmill.server.environments import CATALOG
from sandmill.server.records import Records, fresh
from sandmill.server.specs_training import EVALUATE, GRPO, MODE_OF, PARAMETERS

_OUTPUTS: Final = {GRPO: ("adapter", "report.html", "results.json"), EVALUATE: ("report.html", "results.json")}


def publish_runtimes(records: Records) -> None:
    """Stores them as this program has them."""
    for runtime, mode in MODE_OF.items():
        name = runtime.removeprefix(f"{CATALOG}/")
        before = records.get("TrainingRuntime", CATALOG, name)
        spec: dict[str, Any] = {
            "task": "GRPO" if runtime == GRPO else "Evaluate",
            "modes": [mode],
            "launcher": "Plain",
            "parameters": PARAMETERS.document(),
            "outputs": [{"name": output} for output in _OUTPUTS[runtime]],
        }
        value = fresh("TrainingRuntime", name, CATALOG, spec) if before is None else {**before, "spec": spec}
        value["status"] = {"phase": "Ready"}
        if before != value:
            records.put("TrainingRuntime", CATALOG, value)
