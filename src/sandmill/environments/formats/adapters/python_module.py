"""Runs a user's own module in its sandbox: `tasks(split)` gives rows, `reward(completion, answer)` grades."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import os
import sys
import tarfile
import tempfile
from typing import Any

SPLITS = ("train", "heldout", "test", "validation", "eval")
MOST_ROWS = 200_001
FIELDS = ("prompt", "answer", "metadata", "id", "identity")


class Module:
    """The module, its rows read."""

    def __init__(self, module: Any, arguments: dict[str, Any]) -> None:
        self.module = module
        self.arguments = arguments
        self.rows: dict[str, list[dict[str, Any]]] = {}
        for name in getattr(module, "SPLITS", SPLITS):
            rows = self._read(name)
            if rows:
                self.rows[name] = rows
        reward = module.reward
        names = inspect.signature(reward).parameters
        self.takes = [name for name in ("prompt", "metadata") if name in names]

    def _read(self, split: str) -> list[dict[str, Any]]:
        try:
            found = self.module.tasks(split, **self.arguments)
        except (LookupError, ValueError, FileNotFoundError):
            if split in getattr(self.module, "SPLITS", ("train",)):
                raise
            return []  # a split that it does not have
        return [self._checked(split, number, row) for number, row in enumerate(itertools.islice(found, MOST_ROWS))]

    def _checked(self, split: str, number: int, row: Any) -> dict[str, Any]:
        place = f"{os.path.basename(str(self.module.__file__))}, tasks({split!r}), row {number}"
        if not isinstance(row, dict):
            raise TypeError(f"{place} is a {type(row).__name__}, not a mapping with prompt and answer")
        for field in ("prompt", "answer"):
            if field not in row:
                raise LookupError(f"{place}: field {field!r} is missing; it has {', '.join(sorted(map(str, row)))}")
        for field in row:
            if field not in FIELDS:
                raise LookupError(f"{place}: there is no field {field!r}; fields are {', '.join(FIELDS)}")
        if not isinstance(row["prompt"], (str, list)):
            raise TypeError(f"{place}: field 'prompt' is a {type(row['prompt']).__name__}, not a text or a list of messages")
        if not isinstance(row.get("metadata", {}), dict):
            raise TypeError(f"{place}: field 'metadata' is a {type(row['metadata']).__name__}, not a mapping")
        return row

    def describe(self) -> dict[str, Any]:
        """See protocol.Description."""
        return {
            "name": self.module.__name__,
            "version": str(getattr(self.module, "__version__", "0")),
            "licence": str(getattr(self.module, "__license__", "")),
            "splits": {name: len(rows) for name, rows in self.rows.items()},
            "uses": list(getattr(self.module, "USES", ())),
        }

    def tasks(self, split: str, start: int, stop: int) -> list[dict[str, Any]]:
        """See protocol.Row."""
        return [self._row(row) for row in self.rows[split][start:stop]]

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        answer = row["answer"]
        return {
            "prompt": row["prompt"],
            "answer": answer if isinstance(answer, str) else None,
            "id": None if row.get("id") is None else str(row["id"]),
            "identity": None if row.get("identity") is None else str(row["identity"]),
            "metadata": {str(key): str(value) for key, value in row.get("metadata", {}).items()},
            "row": row,
        }

    async def grade(self, row: dict[str, Any], answer: str | None, context: dict[str, Any]) -> Any:
        """The module's reward; None from it means that there was no answer."""
        more = {name: row.get(name) for name in self.takes}
        found = self.module.reward("" if answer is None else answer, row["answer"], **more)
        if inspect.isawaitable(found):
            found = await found
        return {"reward": 0.0, "answered": False} if found is None else found


def unpacked(bundle: str) -> str:
    """A folder with what is in a bundle, which calls may read and not change."""
    folder = tempfile.mkdtemp(prefix=".bundle-", dir="/var/tmp")
    with tarfile.open(bundle) as archive:
        archive.extractall(folder)
    for place, names, files in os.walk(folder):
        for name in (".", *names, *files):
            path = os.path.join(place, name)
            if not os.path.islink(path):
                os.chmod(path, 0o755 if os.path.isdir(path) else 0o644)
                if os.geteuid() == 0:
                    os.chown(path, 0, 0)
    return folder


def load(options: dict[str, Any]) -> Module:
    """The module at a path, its folder importable; or the one in a bundle, with the bundle's packages behind this environment's."""
    if "bundle" in options:
        folder = unpacked(options["bundle"])
        sys.path.append(os.path.join(folder, "site"))
        path = os.path.join(folder, f"{options['module']}.py")
        if not os.path.isfile(path):
            found = [name for name in sorted(os.listdir(folder)) if name.endswith(".py")]
            raise LookupError(f"the bundle has no module {options['module']!a} at its top; it has {', '.join(found)[:200] or 'none'}")
    else:
        path = options["module"]
    sys.path.insert(0, os.path.dirname(path))
    name = os.path.basename(path).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    for needed in ("tasks", "reward"):
        if not callable(getattr(module, needed, None)):
            raise AttributeError(f"{os.path.basename(path)} has no function {needed}()")
    return Module(module, options["arguments"])
