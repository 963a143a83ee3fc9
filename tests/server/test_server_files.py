"""Folders as the published command line reads them: one entry a line, and nothing in them that ends its copy."""

from __future__ import annotations

import json
import subprocess

from server_process import NODUS, Server

MAKE = """
mkdir -p t/empty t/only/empty/folders t/sub && echo x > t/sub/x && printf '#!/bin/sh\\n' > t/run.sh && chmod 750 t/run.sh
ln -s sub/x t/to-file && ln -s sub t/to-folder && ln -s nothing t/dangling && mkfifo t/fifo && ln -s loop t/loop
"""


def test_a_copy_of_a_folder_takes_what_can_be_copied(clean: Server) -> None:
    clean.box("a")
    clean.run("a", "sh", "-c", MAKE)
    done = subprocess.run(
        [NODUS, "cp", "sb/a:/workspace/t", "back"], env=clean.environment, cwd=clean.folder, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, "3 files" in done.stderr) == (0, True), done.stderr
    assert {path.name for path in (clean.folder / "back").rglob("*") if path.is_file()} == {"x", "run.sh", "to-file"}


def test_a_listing_has_everything_with_its_permissions(clean: Server) -> None:
    clean.box("a")
    clean.run("a", "sh", "-c", MAKE)
    listed = clean.ask("GET", "sandboxes/a/files?path=/workspace/t", headers={"Accept": "application/json"}).json["items"]
    assert {item["name"] for item in listed} == {"empty", "only", "sub", "run.sh", "to-file", "to-folder", "dangling", "fifo", "loop"}
    assert {item["name"]: item["mode"] for item in listed}["run.sh"] == 0o750
    lines = clean.ask("GET", "sandboxes/a/files?path=/workspace/t", headers={"Accept": "application/json", "User-Agent": "nodus/1"}).body
    assert {json.loads(line)["name"] for line in lines.splitlines()} == {"sub", "run.sh", "to-file"}
