"""Copies and still sandboxes on nodes: they are where the original is, and outlive the head as it does."""

from __future__ import annotations

import time
from pathlib import Path

from node_process import heading

EPHEMERAL = {"mode": "Ephemeral"}


def test_forks_stay_on_their_node_and_outlive_the_head(tmp_path: Path) -> None:
    with heading(tmp_path, "--no-local", "--node-lease", "30s") as head:
        head.join("a")
        head.up("origin", continuity=EPHEMERAL)
        head.run("origin", "sh", "-c", "echo prepared > f")
        made = head.ask("POST", "sandboxes/origin/fork", {"count": 3})
        assert made.status == 201, made.body
        names = [item["metadata"]["name"] for item in made.json["items"]]
        assert head.ask("POST", f"sandboxes/{names[0]}/freeze", {}).status == 200
        time.sleep(3)  # some beats: what the head knew nothing of would be ended by now
        head.kill()
        head.start()
        for name in names[1:]:
            look = head.run(name, "cat", "f")
            assert head.output(look["metadata"]["name"]) == b"prepared\n"
            assert head.place(name) == "a"
        still = head.until(f"sandboxes/{names[0]}", phase="Running")["status"]
        assert still["frozen"] is True
        assert head.ask("POST", f"sandboxes/{names[0]}/thaw", {}).status == 200
        assert head.run(names[0], "true")["status"]["exitCode"] == 0
