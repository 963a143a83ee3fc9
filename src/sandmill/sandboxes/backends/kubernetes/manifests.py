"""What a cluster is asked for. In: a spec, and the cluster's settings. Out: a pod, network policies, the command that starts the guest."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from sandmill.sandboxes.spec import EgressMode, SandboxSpec

MANAGED: Final = "app.kubernetes.io/managed-by"
NETWORK: Final = "sandmill.dev/network"
CONTAINER: Final = "sandbox"
_CAPABILITIES: Final = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP")
_SPARE_S: Final = 30
"""A sandbox whose time is over is ended from here, with the reason; the cluster does so a little later."""
_WAITS: Final = 'p=${TMPDIR:-/tmp}/.end; mkfifo -m 600 "$p" && { read _ <"$p"; exit 0; }'
# The guest's bytes come first. When it ends, which it does when its connection does, the pod ends too.
_STARTS: Final = (
    't=${TMPDIR:-/tmp}; p=$t/.guest; head -c "$1" >"$p" && chmod 755 "$p" && shift && "$p" "$@"; c=$?; '
    '[ -p "$t/.end" ] && : >"$t/.end"; exit $c'
)
_PRIVATE: Final = {
    "0.0.0.0/0": ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "127.0.0.0/8"),
    "::/0": ("fc00::/7", "fe80::/10", "::1/128"),
}
Json = dict[str, Any]
"""A manifest as the API takes it."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Where pods are made, and of what."""

    namespace: str = "default"
    runtime_class: str | None = None
    """`gvisor`, `kata`: whatever the cluster calls its stronger wall. None: its default runtime."""
    image: str = "debian:stable-slim"
    """Needs `sh`, `head`, `chmod` and `mkfifo`."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """From SANDMILL_KUBERNETES_NAMESPACE, _RUNTIME_CLASS and _IMAGE."""
        said = {name: environment.get(f"SANDMILL_KUBERNETES_{name.upper()}") for name in ("namespace", "runtime_class", "image")}
        return cls(**{name: value for name, value in said.items() if value})


def pod(name: str, spec: SandboxSpec, settings: Settings) -> Json:
    """A pod that waits for a guest, and for no longer than the sandbox may live."""
    bounds = {"cpu": f"{round(spec.cpu * 1000)}m", "memory": str(spec.memory_bytes), "ephemeral-storage": str(spec.disk_bytes)}
    container: Json = {
        "name": CONTAINER,
        "image": spec.image or settings.image,
        "command": ["sh", "-c", _WAITS],
        "resources": {"limits": bounds, "requests": bounds},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "capabilities": {"drop": ["ALL"], "add": list(_CAPABILITIES)},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    body: Json = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": math.ceil(spec.timeout_s) + _SPARE_S,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": "sandbox",
        "containers": [container],
    }
    if settings.runtime_class is not None:
        body["runtimeClassName"] = settings.runtime_class
    labels = {MANAGED: "sandmill", NETWORK: spec.network.mode.value}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": body}


def network_policy(mode: EgressMode) -> Json:
    """What pods of this mode may reach: nothing, or every public address and the cluster's name service. Nobody reaches them."""
    rules: list[Json] = []
    if mode is EgressMode.OPEN:
        rules = [{"to": [{"ipBlock": {"cidr": cidr, "except": list(inner)}} for cidr, inner in _PRIVATE.items()]}]
        names = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
        rules.append({"to": [names], "ports": [{"protocol": kind, "port": 53} for kind in ("UDP", "TCP")]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"sandmill-{mode.value}", "labels": {MANAGED: "sandmill"}},
        "spec": {
            "podSelector": {"matchLabels": {MANAGED: "sandmill", NETWORK: mode.value}},
            "policyTypes": ["Ingress", "Egress"],
            "egress": rules,
        },
    }


def guest_command(program_bytes: int, guest: Sequence[str]) -> list[str]:
    """What is run in the pod: it reads the guest's executable from its standard input and becomes it."""
    return ["sh", "-c", _STARTS, "sh", str(program_bytes), *guest]
