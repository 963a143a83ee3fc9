"""An MCP server of the standard library alone, for sandboxes: adds, keeps a total, and misbehaves on request."""

import json
import os
import sys
import time

MISBEHAVES = sys.argv[1:2]
NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
TOOLS = [
    {"name": "add", "description": "Adds.", "inputSchema": {"type": "object", "properties": NUMBERS}},
    {"name": "total", "description": "All sums so far.", "inputSchema": {"type": "object"}},
    {"name": "misbehave", "description": "As told.", "inputSchema": {"type": "object", "properties": {"how": {"type": "string"}}}},
]
total = 0


def answer(id, **result):
    print(json.dumps({"jsonrpc": "2.0", "id": id, **result}), flush=True)


def call(id, name, arguments):
    global total
    if name == "add":
        total += arguments["a"] + arguments["b"]
        return answer(id, result={"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]})
    if name == "total":
        return answer(id, result={"content": [{"type": "text", "text": str(total)}]})
    how = arguments["how"]
    if how == "die":
        os._exit(3)
    if how == "hang":
        time.sleep(60)
    if how == "error":
        return answer(id, result={"content": [{"type": "text", "text": "no such file"}], "isError": True})
    if how == "refuse":
        return answer(id, error={"code": -32000, "message": "not \x1b[31mtoday"})
    print("{ not json", flush=True)
    return answer(id, result={"content": "nonsense"})


if MISBEHAVES == ["dies"]:
    sys.exit("cannot find my settings")
if MISBEHAVES == ["hangs"]:
    time.sleep(60)
print("abacus 1.0 ready")
for line in sys.stdin:
    message = json.loads(line)
    if message["method"] == "initialize":
        info = {"name": "abacus", "version": "1"}
        answer(
            message["id"],
            result={"protocolVersion": message["params"]["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info},
        )
    elif message["method"] == "tools/list" and MISBEHAVES == ["mute"]:
        continue
    elif message["method"] == "tools/list":
        answer(message["id"], result={"tools": TOOLS})
    elif message["method"] == "tools/call":
        call(message["id"], message["params"]["name"], message["params"].get("arguments") or {})
    elif "id" in message:
        answer(message["id"], error={"code": -32601, "message": "unknown method"})
