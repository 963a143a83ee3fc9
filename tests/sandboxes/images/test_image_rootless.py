"""Without root: images, forks and builds work, everything in them belonging to the one user there is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_archives import Member, docker_save, folder, layer, programs

CODE = """
import concurrent.futures.thread, json, os, sys
from pathlib import Path
import zstandard
from sandmill.errors import ImageError
from sandmill.sandboxes import Image, Sandbox
from sandmill.sandboxes.images import build, importing, store
os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
place = Path(os.environ["SANDMILL_STATE"])
with Sandbox.create(image=f"docker-archive:{place}/image.tar", memory="128Mi") as box:
    facts = [box.run("sh", "-c", "ls /d; touch /new && id -u; ls /gone 2>/dev/null | cat").stdout.decode().split()]
    box.write("f", b"x")
    copies = box.fork(2)
    facts.append([copy.read("f").decode() for copy in copies])
    for copy in copies:
        copy.terminate()
with Sandbox.create() as box:
    box.run("sh", "-c", "rm /etc/profile; mkdir closed; chmod 0 closed")
    try:
        box.snapshot_filesystem()
    except ImageError as error:
        facts.append(str(error))
image = Image.build("FROM host\\nCOPY a /opt/a\\nRUN cat /opt/a > /opt/b\\n", place)
with Sandbox.create(image=image) as box:
    facts.append(box.read("/opt/b").decode())
print(json.dumps(facts))
"""


@pytest.fixture
def state() -> Iterator[Path]:
    """A state folder that the unprivileged user owns, and can reach."""
    place = Path("/var/tmp") / f"sandmill-rootless-images-{os.getpid()}"
    place.mkdir()
    (place / "a").write_bytes(b"copied")
    base = layer(
        *programs("sh", "cat", "ls", "id", "touch"), folder("d", uid=33, mode=0o700), Member("d/old", b"x", uid=33), Member("gone")
    )
    docker_save(place / "image.tar", [base, layer(Member(".wh.gone"), Member("d/.wh..wh..opq"), Member("d/new", b"x"))])
    for path in (place, *place.iterdir()):
        os.chown(path, 54321, 54321)
    yield place
    shutil.rmtree(place)


def test_images_without_root(state: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=os.environ | {"SANDMILL_STATE": str(state)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["new", "0"],
        ["x", "x"],
        "the sandbox's files could not be copied into the image store: Permission denied",
        "copied",
    ]
