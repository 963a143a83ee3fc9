"""A Kubernetes API server for the unmodified `kubernetes_asyncio` package: pods (native sandboxes that run the container's command), their
exec over the remotecommand WebSocket, and network policies. Faults are scripted with `busy`, `image_missing` and `cut`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from sandmill.sandboxes import PIPE, Process, Sandbox

TOKEN = "cluster-token"
_PODS = "/api/v1/namespaces/{namespace}/pods"
_POLICIES = "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"


class Cluster:
    """All pods and policies."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.boxes: dict[str, Sandbox] = {}
        self.policies: dict[str, dict[str, Any]] = {}
        self.sockets: dict[str, WebSocket] = {}
        self.protocols: list[str] = []
        self.asked: list[dict[str, Any]] = []
        """The bodies of all pods that were made."""
        self.busy = 0
        self.image_missing = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self._mains: set[asyncio.Task[None]] = set()

    def app(self) -> Any:
        return Starlette(
            routes=[
                Route(_PODS, self.create, methods=["POST"]),
                Route(_PODS, self.listed),
                Route(f"{_PODS}/{{name}}", self.read),
                Route(f"{_PODS}/{{name}}", self.delete, methods=["DELETE"]),
                WebSocketRoute(f"{_PODS}/{{name}}/exec", self.exec),
                Route(_POLICIES, self.police, methods=["POST"]),
                Route(f"{_POLICIES}/{{name}}", self.police, methods=["PUT"]),
            ]
        )

    async def create(self, request: Request) -> Response:
        if refusal := _refusal(request.headers):
            return refusal
        self.loop = asyncio.get_running_loop()
        if self.busy:
            self.busy -= 1
            return _status(429, "TooManyRequests", "try again later")
        body = await request.json()
        self.asked.append(body)
        name = body["metadata"]["name"]
        if not set(_labels(body).values()) & {
            policy["spec"]["podSelector"]["matchLabels"]["sandmill.dev/network"] for policy in self.policies.values()
        }:
            return _status(403, "Forbidden", "a pod without a network policy")
        body["status"] = {"phase": "Pending"}
        self.pods[name] = body
        main = asyncio.create_task(self.run(name, body))
        self._mains.add(main)
        main.add_done_callback(self._mains.discard)
        return JSONResponse(body, 201)

    async def run(self, name: str, body: dict[str, Any]) -> None:
        """The kubelet's part."""
        container = body["spec"]["containers"][0]
        if self.image_missing:
            waiting = {"reason": "ErrImagePull", "message": "no such image"}
            body["status"]["containerStatuses"] = [_container_status(container, {"waiting": waiting})]
            return
        box = await Sandbox.create.aio(memory="256Mi", disk="64Mi", idle_timeout="1h", workdir="/start", backend="native", server="")
        if name not in self.pods:
            await box.terminate.aio()
            return
        self.boxes[name] = box
        process = await box.exec.aio(*container["command"], user="root", workdir="/")
        body["status"]["phase"] = "Running"
        try:
            async with asyncio.timeout(body["spec"]["activeDeadlineSeconds"]):
                code = await process.wait.aio()
            body["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
        except (ConnectionError, TimeoutError):
            body["status"]["phase"] = "Failed"
        await box.terminate.aio()

    async def listed(self, request: Request) -> Response:
        if refusal := _refusal(request.headers):
            return refusal
        found = [pod for pod in self.pods.values() if _labels(pod).get("app.kubernetes.io/managed-by") == "sandmill"]
        return JSONResponse({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": found})

    async def read(self, request: Request) -> Response:
        pod = self.pods.get(request.path_params["name"])
        return _status(404, "NotFound", "no such pod") if pod is None else JSONResponse(pod)

    async def delete(self, request: Request) -> Response:
        name = request.path_params["name"]
        pod = self.pods.pop(name, None)
        if pod is None:
            return _status(404, "NotFound", "no such pod")
        if name in self.boxes:
            await self.boxes.pop(name).terminate.aio()
        return JSONResponse(pod)

    async def police(self, request: Request) -> Response:
        body = await request.json()
        name = body["metadata"]["name"]
        if request.method == "POST" and name in self.policies:
            return _status(409, "AlreadyExists", name)
        self.policies[name] = body
        return JSONResponse(body, 201)

    async def exec(self, socket: WebSocket) -> None:
        offered = [name.strip() for name in socket.headers.get("sec-websocket-protocol", "").split(",")]
        if _refusal(socket.headers) or "v5.channel.k8s.io" not in offered:
            await socket.close(1002)
            return
        name = socket.path_params["name"]
        await socket.accept(subprotocol="v5.channel.k8s.io")
        self.protocols.append("v5.channel.k8s.io")
        self.sockets[name] = socket
        argv = socket.query_params.getlist("command")
        process = await self.boxes[name].exec.aio(*argv, stdin=PIPE, user="root", workdir="/", text=False, max_output=64 << 20)
        moving = [asyncio.create_task(_move(socket, channel, stream)) for channel, stream in ((1, process.stdout), (2, process.stderr))]
        feeding = asyncio.create_task(_feed(socket, process))
        try:
            code = await process.wait.aio()
            await asyncio.gather(*moving)
            status = {"status": "Success"} if code == 0 else {"status": "Failure", "message": f"exit code {code}"}
            await socket.send_bytes(b"\3" + json.dumps({"metadata": {}, **status}).encode())
            await socket.close()
        except (OSError, RuntimeError, WebSocketDisconnect):
            pass  # the pod, or whoever listened, is gone
        finally:
            feeding.cancel()

    async def cut(self, name: str) -> None:
        """The connection to a pod breaks."""
        await self.sockets[name].close(1011)

    def config(self, folder: Path, url: str) -> Path:
        """A kube config that leads here."""
        path = folder / "kubeconfig"
        parts = {
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        }
        path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "current-context": "x", **parts}))
        return path


async def _move(socket: WebSocket, channel: int, stream: Any) -> None:
    async for piece in stream:
        await socket.send_bytes(bytes((channel,)) + piece)


async def _feed(socket: WebSocket, process: Process) -> None:
    """Until the client is gone; then the command's input ends, as a kubelet has it."""
    try:
        while True:
            data = await socket.receive_bytes()
            if data[0] == 0:
                await process.stdin.write.aio(data[1:])
    except (WebSocketDisconnect, RuntimeError, BrokenPipeError):
        await process.stdin.close.aio()


def _labels(body: dict[str, Any]) -> dict[str, str]:
    return body["metadata"].get("labels", {})


def _container_status(container: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    return {"name": container["name"], "image": container["image"], "imageID": "", "ready": False, "restartCount": 0, "state": state}


def _status(code: int, reason: str, message: str) -> Response:
    return JSONResponse(
        {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message, "code": code}, code
    )


def _refusal(headers: Any) -> Response | None:
    return None if headers.get("authorization") == f"Bearer {TOKEN}" else _status(401, "Unauthorized", "who are you?")
