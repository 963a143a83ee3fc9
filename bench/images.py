"""Images: starting from one, snapshots, forks into 8 and 100, freezing, unpacking; beside fresh sandboxes and plain tar in the same rounds.

Medians, minima and 99th percentiles in milliseconds. `scripts/bench images [--rounds N] [--json FILE]`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import json
import os
import statistics
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from sandmill.sandboxes import Image, Sandbox, SandboxSpec, block_on
from sandmill.sandboxes.images import store
from sandmill.sandboxes.images.image import architecture

SPEC = SandboxSpec.of(cpu=1, memory="512Mi", disk="128Mi", idle_timeout="1h")
FILES, FILE_BYTES = 1000, 20_000
LAYER_FILES = 5000


class Timing(msgspec.Struct, frozen=True):
    """Milliseconds of one operation over all rounds."""

    name: str
    minimum: float
    median: float
    p99: float
    rounds: int


def timing(name: str, seconds: list[float]) -> Timing:
    ordered = sorted(value * 1e3 for value in seconds)
    return Timing(name, ordered[0], statistics.median(ordered), ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))], len(ordered))


def clock(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


async def together(spec: SandboxSpec, count: int) -> list[Sandbox]:
    return list(await asyncio.gather(*(Sandbox.from_spec.aio(spec) for _ in range(count))))


async def end(boxes: list[Sandbox]) -> None:
    await asyncio.gather(*(box.terminate.aio() for box in boxes))


def first_result(spec: SandboxSpec) -> float:
    began = time.perf_counter()
    with Sandbox.from_spec(spec) as box:
        box.run("/bin/echo", "hi")
        return time.perf_counter() - began


def prepared() -> Sandbox:
    """A sandbox that wrote a thousand files of 20 kB."""
    box = Sandbox.from_spec(SPEC)
    box.write_files({f"d{number % 40}/f{number}": os.urandom(FILE_BYTES // 2) * 2 for number in range(FILES)})
    return box


def measure(rounds: int, folder: Path) -> list[Timing]:
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    small = Sandbox.from_spec(SPEC)
    small.write("answer.txt", b"42")
    image = small.snapshot_filesystem()
    on_image = msgspec.structs.replace(SPEC, image=image.digest)
    large = prepared()
    for _ in range(rounds):
        for _ in range(10):
            note("first result, no image", first_result(SPEC))
            note("first result, from an image", first_result(on_image))
        note("snapshot, one file", clock(small.snapshot_filesystem))
        note("snapshot, 1000 files, as before", clock(large.snapshot_filesystem))
        large.write("changed", os.urandom(8))
        note("snapshot, 1000 files, one changed", clock(large.snapshot_filesystem))
        note("freeze and thaw", clock(lambda: (small.freeze(), small.thaw())))
        for count in (8, 100):
            began = time.perf_counter()
            boxes = block_on(together(SPEC, count))
            note(f"{count} fresh sandboxes at once", time.perf_counter() - began)
            block_on(end(boxes))
            for name, source in (("one file", small), ("1000 files", large)):
                began = time.perf_counter()
                boxes = source.fork(count)
                note(f"fork into {count}, {name}", time.perf_counter() - began)
                block_on(end(boxes))
    small.terminate()
    large.terminate()
    for number in range(max(1, rounds // 4)):
        archive = write_archive(folder, number)
        note("import of 5000 files 50 MB", clock(lambda archive=archive: Image.load(f"docker-archive:{archive}")))  # type: ignore[misc]
        target = folder / f"tree{number}"
        target.mkdir()
        note("tar -x of the same layer", clock(lambda target=target: unpack_by_tar(folder, target)))  # type: ignore[misc]
    return [timing(name, seconds) for name, seconds in found.items()]


def write_archive(folder: Path, number: int) -> Path:
    """A `docker save` archive with one layer, which is also left in `layer.tar`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for file in range(LAYER_FILES):
            info = tarfile.TarInfo(f"usr/share/d{file % 50}/f{number}-{file}")
            info.size = 10_000
            layer.addfile(info, io.BytesIO(os.urandom(10_000)))
    data = buffer.getvalue()
    (folder / "layer.tar").write_bytes(data)
    diff_id = f"sha256:{hashlib.sha256(data).hexdigest()}"
    config = json.dumps({"architecture": architecture(), "os": "linux", "rootfs": {"diff_ids": [diff_id]}}).encode()
    path = folder / f"image{number}.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in (
            ("config", config),
            ("layer.tar", data),
            ("manifest.json", json.dumps([{"Config": "config", "Layers": ["layer.tar"]}]).encode()),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def unpack_by_tar(folder: Path, target: Path) -> None:
    subprocess.run(["tar", "-xf", str(folder / "layer.tar"), "-C", str(target)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SANDMILL_STATE"] = f"{folder}/state"
        rows = measure(options.rounds, Path(folder))
        store().prune()
    print(f"{'':34}{'min':>9}{'median':>9}{'p99':>9}  rounds")
    for row in rows:
        print(f"{row.name:34}{row.minimum:9.2f}{row.median:9.2f}{row.p99:9.2f}  {row.rounds}")
    if options.json:
        options.json.write_bytes(msgspec.json.encode(rows))


if __name__ == "__main__":
    main()
