"""The machine of four SWE-bench Verified instances, made of published packages: astropy 5.0.1 as a git repository, with its tests, under
Python 3.9. The wheel has no history, so the rows' base commit becomes the repository's only one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from sandmill.sandboxes import Image, Sandbox

INSTANCES = tuple(f"astropy__astropy-{number}" for number in (12907, 13033, 13398, 13453))
PACKAGES = ("astropy==5.0.1", "numpy<1.23", "pytest<7", "pytest-astropy==0.9.0", "setuptools<60")
DOCKERFILE = """FROM host
USER root
COPY python /opt/python
COPY site /opt/site
COPY --chmod=755 bin /opt/bin
COPY activate /opt/miniconda3/bin/activate
ENV PATH=/opt/bin:/opt/python/bin:/usr/local/bin:/usr/bin:/bin LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/opt/site
ENV GIT_AUTHOR_DATE=2022-03-03T00:00:00Z GIT_COMMITTER_DATE=2022-03-03T00:00:00Z
COPY testbed /testbed
WORKDIR /testbed
RUN git init -q . && git add -A -f . && git -c user.name=a -c user.email=a@b.c commit -q -m base
"""
_HAVE_39 = "import sys; assert sys.version_info[:2] == (3, 9); print(sys.prefix)"


def python_39() -> Path | None:
    """The prefix of a Python 3.9, which astropy 5.0.1's wheel is for."""
    beside = Path(sys.base_prefix).parent  # where whoever keeps several Pythons keeps them
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    roots = [beside, pyenv, Path("/usr"), Path("/usr/local"), Path("/opt")]
    programs = [path for root in roots for path in (*sorted(root.glob("3.9*/bin/python3.9")), root / "bin" / "python3.9")]
    for program in programs:
        if program.is_file():
            asked = subprocess.run([program, "-c", _HAVE_39], capture_output=True, text=True, timeout=60)
            if asked.returncode == 0:
                return Path(asked.stdout.strip())
    return None


def install(cache: Path, prefix: Path) -> None:
    """Downloads everything, once."""
    if (cache / "whole").exists():
        return
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    old = [prefix / "bin" / "python3.9", "-m", "pip", "-q", "--disable-pip-version-check"]
    _run([*old, "install", "--only-binary", ":all:", "--target", cache / "site39", *PACKAGES])
    _run([*pip, "download", "--no-deps", "--ignore-requires-python", "-d", cache / "wheel", "nemo-gym==0.7.0"])
    with zipfile.ZipFile(next((cache / "wheel").glob("*.whl"))) as wheel:
        rows = wheel.read("resources_servers/swebench/data/example.jsonl")
    (cache / "rows.jsonl").write_bytes(rows)
    (cache / "whole").touch()


def build(cache: Path, prefix: Path) -> tuple[Image, str]:
    """The image, and the commit that its repository begins with."""
    context = cache / "context"
    if not context.exists():
        fresh = cache / "context.new"
        shutil.rmtree(fresh, ignore_errors=True)
        unused = shutil.ignore_patterns("test", "idlelib", "__pycache__", "lib2to3", "tkinter", "share", "config-*", "site-packages", "*.a")
        shutil.copytree(prefix, fresh / "python", ignore=unused, symlinks=True)
        shutil.copytree(cache / "site39", fresh / "site", ignore=shutil.ignore_patterns("astropy", "__pycache__", "*.pth"))
        shutil.copytree(cache / "site39" / "astropy", fresh / "testbed" / "astropy", ignore=shutil.ignore_patterns("__pycache__"))
        (fresh / "bin").mkdir()
        (fresh / "bin" / "pytest").write_text('#!/bin/sh\nexec python3.9 -m pytest "$@"\n')
        (fresh / "bin" / "python").write_text('#!/bin/sh\nexec python3.9 "$@"\n')
        (fresh / "activate").write_text("conda() { :; }\n")
        fresh.rename(context)
    image = Image.build(DOCKERFILE, context, name="peers/astropy", disk="3Gi", memory="4Gi")
    with Sandbox.create(image=image, memory="1Gi", server="") as sandbox:
        commit = sandbox.run("git", "rev-parse", "HEAD", timeout=60).stdout.decode().strip()
    return image, commit


def rows(cache: Path, image: Image, commit: str) -> Path:
    """The instances' rows, as they are but for where they start."""
    kept = []
    for line in (cache / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["instance_id"] in INSTANCES:
            kept.append(row | {"base_commit": commit, "image": image.digest})
    path = cache / "astropy.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    return path


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-2000:]}")
