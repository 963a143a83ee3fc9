"""Kubernetes: what a cluster is asked for, and what its faults become. A pod ends with its owner, and is swept."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import TOKEN, Cluster
from places import SMALL

from sandmill.errors import IsolationUnavailable, SandboxCreateFailed, SandboxGone, Unsupported
from sandmill.sandboxes import Egress, Sandbox, block_on
from sandmill.sandboxes.backends.choice import load
from sandmill.sandboxes.backends.kubernetes.backend import Kubernetes
from sandmill.sandboxes.backends.seam import BackendName, Usable

OWNER = """
import sys
from sandmill import Sandbox
box = Sandbox.create(backend="kubernetes", memory="256Mi", disk="32Mi")
box.exec("sh", "-c", "trap '' TERM; sleep 1000")
print("ready", flush=True)
sys.stdin.readline()
"""


def create(**options: object) -> Sandbox:
    return Sandbox.create(**SMALL | {"backend": "kubernetes"} | options)  # type: ignore[arg-type]


def usable() -> Usable:
    async def ask() -> Usable:
        return await load(BackendName.KUBERNETES).usable()

    return block_on(ask())


def test_a_pod_is_bounded_and_may_do_little(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDMILL_KUBERNETES_RUNTIME_CLASS", "gvisor")
    monkeypatch.setenv("SANDMILL_KUBERNETES_NAMESPACE", "agents")
    create(cpu=0.5, timeout="1h", image="python:3.12").terminate()
    (body,) = cluster.asked
    spec, (container,) = body["spec"], body["spec"]["containers"]
    assert (spec["runtimeClassName"], spec["restartPolicy"], spec["activeDeadlineSeconds"]) == ("gvisor", "Never", 3630)
    assert not spec["automountServiceAccountToken"]
    assert container["image"] == "python:3.12"
    assert container["resources"]["limits"] == {"cpu": "500m", "memory": str(256 << 20), "ephemeral-storage": str(32 << 20)}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert (cluster.pods, cluster.boxes) == ({}, {})


def test_the_network_is_closed_before_the_pod_is_there(cluster: Cluster) -> None:
    create().terminate()
    create(network=Egress.open()).terminate()
    denied, opened = cluster.policies["sandmill-deny"]["spec"], cluster.policies["sandmill-open"]["spec"]
    assert denied["podSelector"]["matchLabels"]["sandmill.dev/network"] == "deny"
    assert (denied["policyTypes"], denied["egress"]) == (["Ingress", "Egress"], [])
    private = opened["egress"][0]["to"][0]["ipBlock"]["except"]
    assert {"10.0.0.0/8", "169.254.0.0/16", "192.168.0.0/16"} <= set(private)
    with pytest.raises(Unsupported, match="backend kubernetes cannot allow hosts by name"):
        create(network=Egress.allow("pypi.org"))


def test_a_connection_that_breaks_ends_the_sandbox_and_its_pod(cluster: Cluster) -> None:
    with create() as box:
        process = box.exec("sleep", "60")
        (name,) = cluster.pods
        block_on(_cut(cluster, name))
        with pytest.raises(SandboxGone, match="cluster"):
            process.wait(timeout=30)
    assert (cluster.pods, cluster.boxes) == ({}, {})


async def _cut(cluster: Cluster, name: str) -> None:
    assert cluster.loop is not None
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(cluster.cut(name), cluster.loop))


def test_a_pod_ends_with_its_owner_and_is_swept_by_the_next(cluster: Cluster, tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
    finally:
        owner.kill()
        owner.communicate()
    deadline = time.monotonic() + 20
    while [pod["status"]["phase"] for pod in cluster.pods.values()] != ["Succeeded"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    create().terminate()
    assert (cluster.pods, cluster.boxes) == ({}, {})


def test_a_cluster_that_is_busy_is_asked_again(cluster: Cluster) -> None:
    cluster.busy = 2
    with create() as box:
        assert box.run("echo", "hi").stdout == b"hi\n"
    assert cluster.protocols == ["v5.channel.k8s.io"]


def test_a_pod_that_cannot_start_says_why_and_goes(cluster: Cluster) -> None:
    cluster.image_missing = True
    with pytest.raises(SandboxCreateFailed, match="ErrImagePull: no such image"):
        create()
    assert cluster.pods == {}


def test_a_cluster_that_does_not_answer_is_one_sentence(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable().ok
    config = tmp_path / "other"
    config.write_text(Path(os.environ["KUBECONFIG"]).read_text().replace(TOKEN, "wrong"))
    monkeypatch.setenv("KUBECONFIG", str(config))
    assert "401" in usable().says
    with pytest.raises(SandboxCreateFailed, match="401"):
        create()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    assert usable().fix.startswith("set KUBECONFIG")
    with pytest.raises(IsolationUnavailable, match="knows no cluster"):
        create()


def test_settings_are_read_when_they_change(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> Kubernetes:
        found = load(BackendName.KUBERNETES)
        assert isinstance(found, Kubernetes)
        return found

    before = block_on(ask())
    monkeypatch.setenv("SANDMILL_KUBERNETES_IMAGE", "other")
    after = block_on(ask())
    assert (before._settings.image, after._settings.image) == ("debian:stable-slim", "other")
