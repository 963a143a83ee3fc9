"""The layer of tools that lies on top of every grading sandbox. In: this interpreter's own pytest. Out: a layer of the image store.

/.sandmill/bin/     pytest, uv, uvx, pip, apt-get, curl ...: stand-ins for what needs a network, first on a verifier's PATH
/.sandmill/inside/  the programs of this package's `inside`
/.sandmill/site/    pytest and what it needs
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sandmill.errors import GraderFailed
from sandmill.sandboxes.images.layers import Attributes, Budget, LayerWriter, walk_bytes
from sandmill.sandboxes.images.store import LayerRecord, Store

HOME: Final = "/.sandmill"
RUN: Final = "/.sandmill-run"
BIN: Final = f"{HOME}/bin"
PROGRAMS: Final = f"{HOME}/inside"
PLUGIN: Final = f"{HOME}/plugin"
"""On a PYTHONPATH, it has pytest's `-p sandmill_record` found, and nothing else."""
RECORDS: Final = f"{RUN}/records"
MISSING: Final = f"{RUN}/missing"
_PACKAGES: Final = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
_OLDER_PYTHONS: Final = ("exceptiongroup", "tomli", "typing_extensions")
_LARGEST_BYTES: Final = 1 << 30

_REAL: Final = f"""#!/bin/sh
# The program of this name that is not a stand-in.
IFS=:
for folder in $PATH; do
    if [ "$folder" != "{BIN}" ] && [ -f "$folder/$1" ] && [ -x "$folder/$1" ]; then
        echo "$folder/$1"
        exit 0
    fi
done
exit 1
"""
_NOTE: Final = f'echo "$name" 2>/dev/null >> {MISSING}; echo "$name is not there and cannot be installed without a network" >&2'
_PYTHON_TOOL: Final = f"""#!/bin/sh
python=$({BIN}/.real python3) || {{ name=python3; {_NOTE}; exit 127; }}
exec "$python" -I {PROGRAMS}/PROGRAM "$@"
"""
_PYTHON: Final = f"""#!/bin/sh
python=$({BIN}/.real NAME) || {{ echo "NAME: not found" >&2; exit 127; }}
if [ "$1" = -m ]; then
    case "$2" in
    pytest | py.test) shift 2; exec "$python" -I {PROGRAMS}/run_pytest.py --as-module "$@" ;;
    pip) shift 2; exec "$python" -I {PROGRAMS}/tools.py pip "$@" ;;
    uv) shift 2; exec "$python" -I {PROGRAMS}/tools.py uv "$@" ;;
    esac
fi
exec "$python" "$@"
"""
_FETCH: Final = f"""#!/bin/sh
# Nothing outside can be fetched; this machine itself can be asked.
case "$*" in
*localhost* | *127.0.0.1* | *\\[::1\\]* | *0.0.0.0*)
    program=$({BIN}/.real NAME) || {{ name=NAME; {_NOTE}; exit 127; }}
    exec "$program" "$@" ;;
esac
echo "NAME: not fetched: there is no network here" >&2
exit 0
"""
_APT: Final = f"""#!/bin/sh
# Packages that are there count as installed; any other is noted.
verb= code=0 skip=
for word in "$@"; do
    if [ -n "$skip" ]; then skip=; continue; fi
    case "$word" in
    -o | -t | -c) skip=1 ;;
    -*) ;;
    *) if [ -z "$verb" ]; then verb=$word; elif [ "$verb" = install ]; then
        name=${{word%%=*}}; name=${{name%%/*}}
        case "$name" in
        curl | wget | ca-certificates | git | python3-pip | python3-venv | python3-pytest | build-essential) ;;
        *) {BIN}/.real "$name" > /dev/null || [ -e "/var/lib/dpkg/info/$name.list" ] || {{ {_NOTE}; code=100; }} ;;
        esac
    fi ;;
    esac
done
exit $code
"""
_building = threading.Lock()
_built: dict[tuple[Path, str], str] = {}


def toolbox(store: Store, extra: str = "") -> str:
    """The layer's digest; it stays while this process lives. `extra`: a folder of further Python packages, as `pip install --target` makes
    one. Blocking. Raises GraderFailed when pytest is not installed, ImageError."""
    with _building:
        key = (store.root, extra)
        if key not in _built or store.record(_built[key]) is None:
            _built[key] = _build(store, extra)
        return _built[key]


def _build(store: Store, extra: str) -> str:
    files = dict(_files()) | dict(_further(Path(extra)) if extra else ())
    whole = hashlib.sha256(b"sandmill toolbox 1\0")
    for name, (mode, mtime_ns, data) in sorted(files.items()):
        whole.update(f"{name}\0{mode:o}\0{mtime_ns}\0{len(data)}\0".encode() + data)
    digest = f"sha256:{whole.hexdigest()}"
    if store.record(digest) is not None:
        store.pin(digest)
        return digest
    with store.draft() as draft:
        writer = LayerWriter(draft, Budget(max_bytes=_LARGEST_BYTES))
        for folder in sorted({parent for name in files for parent in _parents(name)}):
            writer.folder(folder, Attributes(0o755))
        for name, (mode, mtime_ns, data) in files.items():
            writer.file(name, Attributes(mode, mtime_ns=mtime_ns), len(data), io.BytesIO(data).read)
        writer.finish()
        store.keep(draft, LayerRecord(digest=digest, bytes=sum(walk_bytes(draft))))
    return digest


def _parents(name: str) -> Iterator[str]:
    parts = name.split("/")[:-1]
    yield from ("/".join(parts[: depth + 1]) for depth in range(len(parts)))


def _files() -> Iterator[tuple[str, tuple[int, int, bytes]]]:
    """Path in the image -> permissions, time, contents."""
    for name, text in _programs().items():
        yield f"{BIN[1:]}/{name}", (0o755, 0, text.encode())
    inside = Path(__file__).parent / "inside"
    for path in sorted(inside.glob("*.py")):
        yield f"{PROGRAMS[1:]}/{path.name}", (0o644, 0, path.read_bytes())
        if path.name == "sandmill_record.py":
            yield f"{PLUGIN[1:]}/{path.name}", (0o644, 0, path.read_bytes())
    for package in (*_PACKAGES, *_OLDER_PYTHONS):
        try:
            found = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            if package in _OLDER_PYTHONS:
                continue
            raise GraderFailed(f"{package} is not installed, and verifiers need it: pip install 'sandmill[environments]'") from None
        yield from _package(found)


def _further(folder: Path) -> Iterator[tuple[str, tuple[int, int, bytes]]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield f"{HOME[1:]}/site/{path.relative_to(folder)}", (0o755, path.stat().st_mtime_ns, path.read_bytes())


def _package(found: importlib.metadata.Distribution) -> Iterator[tuple[str, tuple[int, int, bytes]]]:
    """Pure Python and what says which version it is; compiled files too, which spare a verifier half a second."""
    for path in found.files or ():
        place = Path(os.fspath(path.locate()))
        if ".." in path.parts or path.is_absolute() or not place.is_file():
            continue
        if path.suffix in (".py", ".pyc", ".typed") or path.name in ("METADATA", "entry_points.txt"):
            yield f"{HOME[1:]}/site/{path}", (0o644, place.stat().st_mtime_ns, place.read_bytes())


def _programs() -> dict[str, str]:
    programs = {".real": _REAL, "pytest": _PYTHON_TOOL.replace("PROGRAM", "run_pytest.py")}
    programs["py.test"] = programs["pytest"]
    for name in ("uv", "uvx", "pip", "pip3"):
        programs[name] = _PYTHON_TOOL.replace("PROGRAM", f"tools.py {name}")
    for name in ("python", "python3"):
        programs[name] = _PYTHON.replace("NAME", name)
    for name in ("curl", "wget"):
        programs[name] = _FETCH.replace("NAME", name)
    programs["apt-get"] = programs["apt"] = _APT
    return programs
