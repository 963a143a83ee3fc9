"""Reading images that other tools wrote. In: an OCI image layout (folder or archive) or a `docker save` archive. Out: the configuration
and the layers that fit this machine, each with the digests that its bytes must have.

Nothing in an archive is believed: names are looked up as given, never joined to a path of this machine; every document is bounded,
typed and checked against its digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Protocol, TypeVar, cast

import msgspec

from sandmill.errors import ImageError
from sandmill.sandboxes.images.image import architecture
from sandmill.sandboxes.images.unpack import Bounded

_LARGEST_DOCUMENT: Final = 4 << 20
_MOST_MEMBERS: Final = 20_000
_MOST_HOPS: Final = 8
_DEEPEST_INDEX: Final = 3
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
_REF_NAME: Final = "org.opencontainers.image.ref.name"


class Platform(msgspec.Struct, frozen=True):
    """For which machines a variant is."""

    os: str = ""
    architecture: str = ""


class Descriptor(msgspec.Struct, frozen=True):
    """A pointer to bytes by digest."""

    digest: str
    size: int
    media_type: str = msgspec.field(default="", name="mediaType")
    platform: Platform | None = None
    annotations: dict[str, str] | None = None


class _Index(msgspec.Struct, frozen=True):
    manifests: list[Descriptor]


class _Manifest(msgspec.Struct, frozen=True):
    config: Descriptor
    layers: list[Descriptor]


class _Process(msgspec.Struct, frozen=True):
    env: list[str] | None = msgspec.field(default=None, name="Env")
    workdir: str | None = msgspec.field(default=None, name="WorkingDir")
    user: str | None = msgspec.field(default=None, name="User")


class _RootFs(msgspec.Struct, frozen=True):
    diff_ids: list[str]


class _Config(msgspec.Struct, frozen=True):
    rootfs: _RootFs
    architecture: str = ""
    os: str = ""
    config: _Process | None = None


class _Saved(msgspec.Struct, frozen=True):
    """One entry of a `docker save` archive's manifest.json."""

    config: str = msgspec.field(name="Config")
    layers: list[str] = msgspec.field(name="Layers")
    tags: list[str] | None = msgspec.field(default=None, name="RepoTags")


class Packed(NamedTuple):
    """One layer as it lies in the archive."""

    diff_id: str
    digest: str | None
    open: Callable[[], BinaryIO]


class Found(NamedTuple):
    """An image as its archive describes it; `env` as NAME=VALUE."""

    layers: tuple[Packed, ...]
    env: tuple[str, ...]
    workdir: str
    user: str
    architecture: str


class Source(Protocol):
    """Where an image's files are."""

    def has(self, name: str) -> bool: ...

    def open(self, name: str) -> BinaryIO: ...

    def close(self) -> None: ...


class FolderSource:
    """An image layout's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self._folder / name).is_file()

    def open(self, name: str) -> BinaryIO:
        """A regular file, never waiting for anything else."""
        try:
            descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ImageError(f"{self._folder} has no usable {name} ({error.strerror}); it is no whole OCI image layout") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ImageError(f"{name} in {self._folder} is no regular file")
        return os.fdopen(descriptor, "rb")

    def close(self) -> None:
        """Nothing is open."""


class ArchiveSource:
    """A tar archive, read in place. Links in it lead to other members only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._members: dict[str, tarfile.TarInfo] = {}
        with contextlib.ExitStack() as stack:
            try:
                self._archive = tarfile.open(path, tarinfo=Bounded, encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
                stack.callback(self._archive.close)
                for count, member in enumerate(self._archive):
                    if count >= _MOST_MEMBERS:
                        raise ImageError(f"{path} has more than {_MOST_MEMBERS} members; it is no archive of an image")
                    self._members[_plain(member.name)] = member
            except ImageError:
                raise
            except (OSError, tarfile.TarError, EOFError, zlib.error, ValueError, RecursionError) as error:
                raise ImageError(f"{path} cannot be read as an archive of an image: {error}") from error
            stack.pop_all()

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return name in self._members

    def open(self, name: str) -> BinaryIO:
        """A member that is a regular file."""
        for _ in range(_MOST_HOPS):
            member = self._members.get(name)
            if member is None:
                break
            if member.isreg():
                return cast("BinaryIO", self._archive.extractfile(member))
            if not (member.issym() or member.islnk()):
                break
            above = os.path.dirname(name) if member.issym() else ""
            name = _plain(os.path.normpath(os.path.join(above, member.linkname)))
        raise ImageError(f"{self._path} has no file {name[:200]!r}; it is damaged or no archive of an image")

    def close(self) -> None:
        """Closes the archive."""
        self._archive.close()


def open_source(path: Path) -> Source:
    """A folder or an archive. Raises ImageError."""
    if path.is_dir():
        return FolderSource(path)
    if not path.is_file():
        raise ImageError(f"no such image folder or archive: {path}")
    return ArchiveSource(path)


def read_layout(source: Source, tag: str | None) -> Found:
    """An OCI image layout. Raises ImageError."""
    index = _parse(_bounded(source, "index.json"), _Index, "index.json")
    chosen = index.manifests
    if tag is not None:
        chosen = [one for one in chosen if (one.annotations or {}).get(_REF_NAME) == tag]
        if not chosen:
            tags = sorted({(one.annotations or {}).get(_REF_NAME, "") for one in index.manifests} - {""})
            raise ImageError(f"the image layout has no tag {tag!r}; it has {', '.join(map(repr, tags[:20])) or 'none'}")
    seen: list[str] = []
    for manifest, config in _manifests(source, chosen, seen, _DEEPEST_INDEX):
        if len(config.rootfs.diff_ids) != len(manifest.layers):
            raise ImageError("the image's configuration and its manifest disagree about the number of layers")
        pairs = zip(config.rootfs.diff_ids, manifest.layers, strict=True)
        layers = tuple(Packed(_checked(diff_id), layer.digest, _opener(source, _blob(layer.digest))) for diff_id, layer in pairs)
        return _found(config, layers)
    raise ImageError(f"the image has no variant for linux/{architecture()}; it has {', '.join(sorted(set(seen))[:20]) or 'none at all'}")


def read_saved(source: Source, tag: str | None) -> Found:
    """A `docker save` archive. Raises ImageError."""
    saved = _parse(_bounded(source, "manifest.json"), list[_Saved], "manifest.json")
    if tag is not None:
        tags = [name for one in saved for name in one.tags or ()]
        saved = [one for one in saved if tag in (one.tags or ())]
        if not saved:
            raise ImageError(f"the archive has no image {tag!r}; it has {', '.join(map(repr, tags[:20])) or 'none'}")
    if not saved:
        raise ImageError("the archive holds no image")
    data = _bounded(source, saved[0].config)
    digest = re.search(r"([0-9a-f]{64})(?:\.json)?$", saved[0].config)
    if digest and _digest(data) != f"sha256:{digest[1]}":
        raise ImageError("the archive's image configuration does not have the digest that it is named by; fetch it again")
    config = _parse(data, _Config, "the image's configuration")
    if config.architecture not in ("", architecture()) or config.os not in ("", "linux"):
        raise ImageError(f"the image is for {config.os}/{config.architecture} and this machine is linux/{architecture()}")
    if len(config.rootfs.diff_ids) != len(saved[0].layers):
        raise ImageError("the image's configuration and its manifest disagree about the number of layers")
    pairs = zip(config.rootfs.diff_ids, saved[0].layers, strict=True)
    return _found(config, tuple(Packed(_checked(diff_id), None, _opener(source, _plain(name))) for diff_id, name in pairs))


def _manifests(source: Source, descriptors: list[Descriptor], seen: list[str], depth: int) -> Iterator[tuple[_Manifest, _Config]]:
    """Those for this machine, indexes inside indexes included; `seen` collects the others' platforms."""
    for descriptor in descriptors:
        platform = descriptor.platform
        if platform is not None and (platform.os, platform.architecture) != ("linux", architecture()):
            seen.append(f"{platform.os}/{platform.architecture}"[:80])
            continue
        data = _blob_document(source, descriptor)
        if b'"manifests"' in data and "manifest.v" not in descriptor.media_type.replace("manifest.list", ""):
            if depth == 0:
                raise ImageError("the image's indexes are nested too deeply")
            yield from _manifests(source, _parse(data, _Index, "an index").manifests, seen, depth - 1)
            continue
        manifest = _parse(data, _Manifest, "a manifest")
        config = _parse(_blob_document(source, manifest.config), _Config, "the image's configuration")
        if config.architecture in ("", architecture()) and config.os in ("", "linux"):
            yield manifest, config
        else:
            seen.append(f"{config.os}/{config.architecture}"[:80])


def _found(config: _Config, layers: tuple[Packed, ...]) -> Found:
    process = config.config or _Process()
    return Found(layers, tuple(process.env or ()), process.workdir or "", process.user or "", config.architecture or architecture())


def _opener(source: Source, name: str) -> Callable[[], BinaryIO]:
    return lambda: source.open(name)


def _blob_document(source: Source, descriptor: Descriptor) -> bytes:
    data = _bounded(source, _blob(descriptor.digest))
    if len(data) != descriptor.size or _digest(data) != descriptor.digest:
        raise ImageError(f"blob {descriptor.digest} does not have the size or the digest that the image says; fetch it again")
    return data


def _bounded(source: Source, name: str) -> bytes:
    with source.open(_plain(name)) as file:
        data = file.read(_LARGEST_DOCUMENT + 1)
    if len(data) > _LARGEST_DOCUMENT:
        raise ImageError(f"{name[:200]!r} of the image is longer than {_LARGEST_DOCUMENT} bytes")
    return data


_Document = TypeVar("_Document")


def _parse(data: bytes, kind: type[_Document], what: str) -> _Document:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ImageError(f"{what} of the image is not what such a document is: {error}") from error


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _checked(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise ImageError(f"{digest[:100]!r} is no sha256 digest; other kinds are not supported")
    return digest


def _blob(digest: str) -> str:
    return f"blobs/sha256/{_checked(digest).removeprefix('sha256:')}"


def _plain(name: str) -> str:
    return name.removeprefix("./").lstrip("/")
