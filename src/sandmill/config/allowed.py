"""What a manifest lets graders use, in words for a person. In: its specification. Out: phrases, none where they may use nothing."""

from __future__ import annotations

from urllib.parse import urlsplit

from sandmill.config.manifest import EgressPolicy, JudgeSection, Spec


def allowed(spec: Spec) -> tuple[str, ...]:
    """One phrase for each thing: `ask judge NAME at HOST`. Text of the manifest: make it inert before it is shown."""
    grading, found = spec.grading, []
    if grading.network is not None:
        egress = grading.network.egress
        if egress.policy is EgressPolicy.OPEN:
            found.append("reach every public address")
        if egress.policy is EgressPolicy.ALLOW_LIST:
            found.append(f"reach {', '.join((*egress.allow, *(f'the hosts of {preset}' for preset in egress.presets)))}")
    found += [f"ask judge {_judge(judge)}" for judge in grading.judge]
    return (*found, *(f"call the tool server {name}" for name in grading.mcp))


def _judge(judge: JudgeSection) -> str:
    if judge.url is None:
        return f"{judge.name} ({judge.uri}, served here)"
    known_as = f" as {judge.model}" if judge.model is not None else ""
    return f"{judge.name} at {urlsplit(judge.url).netloc.rpartition('@')[2]}{known_as}"
