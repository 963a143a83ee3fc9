"""Source bundles for tests: packed, uploaded, and named in Environment objects."""

from __future__ import annotations

import gzip
import io
import tarfile
from typing import Any

from server_process import Answer, Server
from test_server_images import upload

SUMS = """
def tasks(split):
    first = {"train": 0, "test": 100}[split]
    return [{"prompt": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(first, first + {"train": 24, "test": 16}[split])]


def reward(completion, answer):
    return 1.0 if completion.strip() == answer else 0.0
"""


def bundle(files: dict[str, str | tarfile.TarInfo]) -> bytes:
    """A tar.gz; a value that is no text is an entry as it stands, without contents."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, entry in files.items():
            if isinstance(entry, str):
                info = tarfile.TarInfo(name)
                info.size = len(entry.encode())
                archive.addfile(info, io.BytesIO(entry.encode()))
            else:
                archive.addfile(entry, io.BytesIO(b"\0" * entry.size))
    return gzip.compress(raw.getvalue(), mtime=0)


def odd(name: str, **fields: Any) -> tarfile.TarInfo:
    """An entry that is no plain file."""
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def spec_of(server: Server, source: str | bytes = SUMS, **spec: Any) -> dict[str, Any]:
    """A spec whose bundle is uploaded."""
    data = bundle({"sums.py": source}) if isinstance(source, str) else source
    given: dict[str, Any] = {"version": "1.0.0", "modes": ["Train", "Evaluate"]}
    return given | {"package": {"source": {"blob": upload(server, data), "module": "sums"}}} | spec


def create(server: Server, name: str, spec: dict[str, Any]) -> Answer:
    return server.ask("POST", "environments", {"metadata": {"name": name}, "spec": spec})


def ready(server: Server, name: str, source: str | bytes = SUMS, **spec: Any) -> dict[str, Any]:
    """An Environment, once it is Ready."""
    answer = create(server, name, spec_of(server, source, **spec))
    assert answer.status == 201, answer.body
    return server.until(f"environments/{name}", phase="Ready")
