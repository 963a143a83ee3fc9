"""Archives of images, made by hand: well-formed ones, and whatever a hostile hand would write."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sandmill.sandboxes.images.image import architecture
from sandmill.sandboxes.images.store import Store


class Member(NamedTuple):
    """One entry: by default a regular file with `data`."""

    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    size: int | None = None


def folder(name: str, mode: int = 0o755, **more: Any) -> Member:
    return Member(name, kind=tarfile.DIRTYPE, mode=mode, **more)


def symlink(name: str, target: str) -> Member:
    return Member(name, kind=tarfile.SYMTYPE, link=target)


def hard_link(name: str, target: str) -> Member:
    return Member(name, kind=tarfile.LNKTYPE, link=target)


def layer(*members: Member) -> bytes:
    """A plain tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.type, info.linkname, info.mode, info.mtime = member.kind, member.link, member.mode, 1_700_000_000
            info.uid, info.gid = member.uid, member.gid
            info.size = len(member.data) if member.size is None else member.size
            archive.addfile(info, io.BytesIO(member.data) if member.size is None and member.data else None)
    return buffer.getvalue()


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def config(layers: Iterable[bytes], **more: Any) -> bytes:
    """An image configuration for plain layers; `config` is its inner part."""
    whole = {"architecture": architecture(), "os": "linux", "rootfs": {"type": "layers", "diff_ids": [digest(one) for one in layers]}}
    return json.dumps(whole | more).encode()


def docker_save(path: Path, layers: list[bytes], *, tags: list[str] | None = None, **more: Any) -> Path:
    """A `docker save` archive."""
    settings = config(layers, **more)
    name = f"{digest(settings).removeprefix('sha256:')}.json"
    manifest = [{"Config": name, "RepoTags": tags or [], "Layers": [f"{number}/layer.tar" for number in range(len(layers))]}]
    write_tar(path, {name: settings, "manifest.json": json.dumps(manifest).encode()} | {f"{n}/layer.tar": d for n, d in enumerate(layers)})
    return path


def write_tar(path: Path, files: Mapping[str, bytes]) -> None:
    path.write_bytes(layer(*(Member(name, data) for name, data in files.items())))


class Layout:
    """An OCI image layout folder being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "blobs" / "sha256").mkdir(parents=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.entries: list[dict[str, Any]] = []

    def blob(self, data: bytes, media_type: str = "application/octet-stream") -> dict[str, Any]:
        """Stores a blob; its descriptor."""
        (self.path / "blobs" / "sha256" / digest(data).removeprefix("sha256:")).write_bytes(data)
        return {"mediaType": media_type, "digest": digest(data), "size": len(data)}

    def image(self, layers: list[bytes], packed: list[bytes] | None = None, **more: Any) -> dict[str, Any]:
        """A whole image; its manifest's descriptor."""
        manifest = {
            "schemaVersion": 2,
            "config": self.blob(config(layers, **more), "application/vnd.oci.image.config.v1+json"),
            "layers": [self.blob(one, "application/vnd.oci.image.layer.v1.tar+gzip") for one in packed or map(gzip.compress, layers)],
        }
        return self.blob(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")

    def index(self, *descriptors: dict[str, Any]) -> str:
        """Writes index.json; the reference to use."""
        (self.path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": list(descriptors)}))
        return f"oci:{self.path}"


def programs(*names: str) -> list[Member]:
    """Programs of this machine with the libraries they need, as they would lie in a small image."""
    files: dict[str, bytes] = {}
    for name in names:
        place = shutil.which(name)
        assert place, name
        files[f"bin/{name}"] = Path(place).resolve().read_bytes()
        for word in subprocess.run(["ldd", place], capture_output=True, text=True, check=True).stdout.split():
            if word.startswith("/"):
                files[word.lstrip("/")] = Path(word).resolve().read_bytes()
    folders = sorted({str(parent) for name in files for parent in Path(name).parents if str(parent) != "."})
    return [*(folder(name) for name in folders), *(Member(name, data, mode=0o755) for name, data in files.items())]


def is_empty(place: Store) -> bool:
    """No layer, no record, no draft: nothing that anyone could use or that takes room."""
    return not any(list((place.root / name).iterdir()) for name in ("layers", "records", "images", "names"))
