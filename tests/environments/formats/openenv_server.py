"""A server that speaks OpenEnv's wire: guess a word. `make` gives one with other schemas, a task API, or a fault."""

import contextlib
import json
import threading
import time

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute

WORDS = ("sun", "moon", "star")
TEXT = {"properties": {"metadata": {"type": "object"}, "word": {"type": "string"}}, "required": ["word"], "type": "object"}
TWO = {
    "properties": {"metadata": {"type": "object"}, "word": {"type": "string"}, "sure": {"type": "boolean"}},
    "required": ["word", "sure"],
    "type": "object",
    "description": "Guess a word.",
}
MCP = {"properties": {"type": {"const": "call_tool"}, "tool_name": {"type": "string"}, "arguments": {"type": "object"}}}
TOOL = {"name": "guess", "description": "Guess.", "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}}}

FAULTS = {"raise": "EXECUTION_ERROR", "crash": "SESSION_ERROR", "factory": "FACTORY_ERROR"}
"""What the server answers to these words."""


class Broken(Exception):
    """An error of the wire: its code."""


def make(schema=TEXT, tasks=None, capacity=64, final=1.0, resets=True):
    """`tasks`: by split, where the server has a task API. `final`: what the right word is worth. `resets`: whether a reset works."""
    playing = set()

    def step(game, action):
        if action.get("type") == "list_tools":
            return {"observation": {"tools": [TOOL]}, "reward": None, "done": False}
        if action.get("type") == "call_tool":
            if action["arguments"].get("word") in ("transport_error", "execution_error", "timeout"):
                error = {"error_type": action["arguments"]["word"], "message": "gone"}
                return {"observation": {"tool_name": "guess", "result": None, "error": error}, "reward": None, "done": False}
            result = {"content": [{"type": "text", "text": "right" if action["arguments"].get("word") == game["word"] else "wrong"}]}
            return {"observation": {"tool_name": "guess", "result": result}, "reward": 0.5, "done": False}
        if set(action) - set(schema["properties"]) or not isinstance(action.get("word"), str):
            raise Broken("VALIDATION_ERROR")
        if action["word"] in FAULTS:
            raise Broken(FAULTS[action["word"]])
        right = action["word"] == game["word"]
        seen = {"said": "right" if right else "wrong", "metadata": {"word": game["word"]}}
        return {"observation": seen, "reward": final if right else None, "done": right}

    async def play(socket):
        await socket.accept()
        if len(playing) >= capacity:
            await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            await socket.close()
            return
        playing.add(socket)
        game = {"word": WORDS[0]}
        with contextlib.suppress(Exception):
            while True:
                message = json.loads(await socket.receive_text())
                try:
                    if message["type"] == "reset" and not resets:
                        raise Broken("EXECUTION_ERROR")
                    if message["type"] == "reset":
                        game["word"] = WORDS[message["data"].get("index", message["data"].get("seed", 0)) % len(WORDS)]
                        data = {
                            "observation": {"said": f"a word of {len(game['word'])} letters", "metadata": {}},
                            "reward": 9,
                            "done": False,
                        }
                    else:
                        data = step(game, message["data"])
                    await socket.send_json({"type": "observation", "data": data})
                except Broken as error:
                    errors = [{"loc": ["word"], "msg": "Field required"}]
                    await socket.send_json({"type": "error", "data": {"message": "no", "code": str(error), "errors": errors}})
        playing.discard(socket)

    async def num_tasks(request):
        return JSONResponse({"num_tasks": tasks[(await request.json())["split"]]})

    def found(value):
        async def answer(request):
            return JSONResponse(value)

        return answer

    routes = [
        Route("/metadata", found({"name": "Words", "version": "3", "description": "Guess."})),
        Route("/schema", found({"action": schema})),
        WebSocketRoute("/ws", play),
    ]
    if tasks is not None:
        routes.append(Route("/list_environments", found(["words"])))
        routes.append(Route("/words/splits", found([{"name": name} for name in tasks])))
        routes.append(Route("/words/num_tasks", num_tasks, methods=["POST"]))
    return Starlette(routes=routes)


@contextlib.contextmanager
def serving(app):
    """The URL of a running one."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", ws="websockets-sansio"))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.005)
    try:
        yield f"ws://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


app = make()
