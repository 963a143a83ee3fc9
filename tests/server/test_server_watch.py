"""Watches: nothing missed, nothing twice, and the truth about what is not known any more."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from server_process import BASE, Server, serving

MERGE = {"Content-Type": "application/merge-patch+json"}


@contextmanager
def watching(server: Server, query: str) -> Iterator[Iterator[dict[str, Any]]]:
    """Events of a watch on sandboxes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("GET", f"{BASE}/sandboxes?watch=true&{query}", headers={"Authorization": f"Bearer {server.key}"})
    answer = connection.getresponse()
    try:
        assert answer.status == 200, answer.read()
        yield map(json.loads, iter(answer.readline, b""))
    finally:
        answer.close()
        connection.close()


def version(server: Server) -> str:
    return str(server.ask("GET", "sandboxes").json["metadata"]["resourceVersion"])


def test_a_watch_from_a_list_sees_everything_after_it(clean: Server) -> None:
    since = version(clean)
    clean.box("w1")
    with watching(clean, f"resourceVersion={since}") as events:
        clean.until("sandboxes/w1", phase="Running")
        clean.ask("DELETE", "sandboxes/w1")
        seen = []
        for event in events:
            seen.append((event["type"], event["object"]["status"]["phase"]))
            if event["type"] == "DELETED":
                break
    assert seen[0] == ("ADDED", "Pending")
    assert ("MODIFIED", "Running") in seen
    assert [kind for kind, _ in seen].count("DELETED") == 1


def test_versions_grow_and_objects_carry_them(clean: Server) -> None:
    with watching(clean, f"resourceVersion={version(clean)}") as events:
        made = [threading.Thread(target=clean.box, args=(f"many{number}",), kwargs={"state": "Stopped"}) for number in range(8)]
        for one in made:
            one.start()
        versions = [int(next(events)["object"]["metadata"]["resourceVersion"]) for _ in range(8)]
        for one in made:
            one.join()
    assert versions == sorted(set(versions))


def test_without_a_version_what_is_there_comes_first(clean: Server) -> None:
    clean.box("there", state="Stopped")
    with watching(clean, "") as events:
        first = next(events)
    assert (first["type"], first["object"]["metadata"]["name"]) == ("ADDED", "there")


def test_a_selection_is_entered_and_left(clean: Server) -> None:
    clean.box("sel", state="Stopped")
    with watching(clean, f"resourceVersion={version(clean)}&labelSelector=on%3Dyes") as events:
        for labels in ({"on": "yes"}, {"on": "yes", "x": "1"}, {"on": "no"}):
            clean.ask("PATCH", "sandboxes/sel", {"metadata": {"labels": labels}}, MERGE)
        assert [next(events)["type"] for _ in range(3)] == ["ADDED", "MODIFIED", "DELETED"]


def test_a_watch_ends_at_its_time(clean: Server) -> None:
    with watching(clean, f"resourceVersion={version(clean)}&timeoutSeconds=1&allowWatchBookmarks=true") as events:
        assert all(event["type"] == "BOOKMARK" for event in events)


@pytest.mark.parametrize("bad", ["resourceVersion=x", "resourceVersion=-1", "timeoutSeconds=x", "labelSelector=a%20b"])
def test_malformed(server: Server, bad: str) -> None:
    assert server.ask("GET", f"sandboxes?watch=true&{bad}").status == 400


def test_expired_and_restarts(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        for number in range(20):
            server.box(f"old{number}", state="Stopped")
        known = version(server)
        server.box("last", state="Stopped")
        server.stop()
        server.start()
        with watching(server, f"resourceVersion={known}") as events:  # the history outlives the server
            assert next(events)["object"]["metadata"]["name"] == "last"
        unknown = server.ask("GET", f"sandboxes?watch=true&resourceVersion={int(known) + 1000}")
        assert (unknown.status, unknown.json["reason"]) == (410, "Expired")
        future = server.ask("GET", f"sandboxes?watch=true&resourceVersion={int(version(server)) + 1}")
        assert (future.status, future.json["reason"]) == (410, "Expired")
