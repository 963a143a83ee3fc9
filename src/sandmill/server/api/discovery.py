"""What this server serves, as Kubernetes clients ask for it. In: the table of kinds. Out: group lists, resource lists, versions, health."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.responses import PlainTextResponse, Response

from sandmill.server.api.context import Asked, answer
from sandmill.server.kinds import GROUP, KINDS, VERSIONS, Kind
from sandmill.server.versions import VERSION_NUMBER

_AGGREGATED: Final = "application/json;g=apidiscovery.k8s.io;v={};as=APIGroupDiscoveryList"


def _wanted(accept: str) -> str | None:
    """The version of the aggregated form that is asked for first, None for the plain form."""
    for part in accept.split(","):
        if "as=APIGroupDiscoveryList" in part:
            for version in ("v2", "v2beta1"):
                if f"v={version}" in [word.strip() for word in part.split(";")]:
                    return version
        elif part.strip().startswith(("application/json", "*/*")):
            return None
    return None


def _aggregated(version: str, items: list[dict[str, Any]]) -> Response:
    body = {"kind": "APIGroupDiscoveryList", "apiVersion": f"apidiscovery.k8s.io/{version}", "metadata": {}, "items": items}
    return Response(msgspec.json.encode(body), media_type=_AGGREGATED.format(version))


async def core(asked: Asked) -> Response:
    """GET /api: no core group is served."""
    if (version := _wanted(asked.request.headers.get("accept", ""))) is not None:
        return _aggregated(version, [])
    return answer({"kind": "APIVersions", "versions": [], "serverAddressByClientCIDRs": []})


async def groups(asked: Asked) -> Response:
    """GET /apis."""
    if (version := _wanted(asked.request.headers.get("accept", ""))) is not None:
        served = [{"version": one, "freshness": "Current", "resources": [_discovered(kind) for kind in _of(one)]} for one in VERSIONS]
        return _aggregated(version, [{"metadata": {"name": GROUP, "creationTimestamp": None}, "versions": served}])
    return answer({"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group()]})


async def group(asked: Asked) -> Response:
    """GET /apis/nodus.dev."""
    return answer({"kind": "APIGroup", "apiVersion": "v1", **_group()})


async def resources(asked: Asked) -> Response:
    """GET /apis/nodus.dev/VERSION."""
    served = asked.request.url.path.rstrip("/").rpartition("/")[2]
    listed: list[dict[str, Any]] = []
    for kind in _of(served):
        listed.append(
            {
                "name": kind.plural,
                "singularName": kind.singular,
                "namespaced": kind.namespaced,
                "kind": kind.kind,
                "verbs": list(kind.verbs),
                "shortNames": list(kind.short),
                "categories": ["all"] if kind.kind in ("Sandbox", "Process") else [],
            }
        )
        for name, verbs in kind.subresources:
            listed.append(
                {
                    "name": f"{kind.plural}/{name}",
                    "singularName": "",
                    "namespaced": kind.namespaced,
                    "kind": "Process" if name == "processes" else kind.kind,
                    "verbs": list(verbs),
                }
            )
    return answer({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/{served}", "resources": listed})


async def whoami(asked: Asked) -> Response:
    """GET /auth/whoami."""
    return answer(
        {
            "kind": "APIKey",
            "user": asked.who.name,
            "email": asked.who.name,
            "org": "local",
            "orgName": "local",
            "role": "admin",
            "project": asked.who.projects[0] if asked.who.projects else "default",
            "projects": list(asked.who.projects) or ["*"],
            "scopes": ["*"],
        }
    )


async def version(asked: Asked) -> Response:
    """GET /version."""
    major, minor = [*VERSION_NUMBER.split("."), "0"][:2]
    return answer({"major": major, "minor": minor, "gitVersion": f"v{VERSION_NUMBER}", "platform": "linux"})


async def ready(asked: Asked) -> Response:
    """GET /readyz: whether state can be written."""
    trouble = asked.on.records.store.trouble
    return PlainTextResponse("ok" if trouble is None else trouble, 200 if trouble is None else 503)


def _of(version: str) -> list[Kind]:
    return [kind for kind in KINDS if kind.version == version]


def _group() -> dict[str, Any]:
    served = [{"groupVersion": f"{GROUP}/{version}", "version": version} for version in VERSIONS]
    return {"name": GROUP, "versions": served, "preferredVersion": served[0]}


def _discovered(kind: Kind) -> dict[str, Any]:
    shown = {"group": GROUP, "version": kind.version, "kind": kind.kind}
    inner = [{"subresource": name, "responseKind": shown, "verbs": list(verbs)} for name, verbs in kind.subresources]
    return {
        "resource": kind.plural,
        "responseKind": shown,
        "scope": "Namespaced" if kind.namespaced else "Cluster",
        "singularResource": kind.singular,
        "verbs": list(kind.verbs),
        **({"shortNames": list(kind.short)} if kind.short else {}),
        **({"subresources": inner} if inner else {}),
    }
