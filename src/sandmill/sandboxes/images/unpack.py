"""From an archive's bytes to a layer. In: a stream, compressed or not, and the digests it must have. Out: a written layer.

Everything in the stream is hostile: headers that claim gigabytes, archives that end early, bombs. Digests are checked over every byte,
those after the archive's end included, before anyone uses the layer.
"""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

import zstandard

from sandmill.errors import ImageError
from sandmill.sandboxes.images.layers import OPAQUE_MARK, WHITEOUT, Attributes, LayerWriter

_LONGEST_HEADER: Final = 1 << 18
_CHUNK: Final = 1 << 18
_LARGEST_WINDOW: Final = 1 << 27
_DAMAGES: Final = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError, ValueError, OverflowError, RecursionError)
_HEADERS: Final = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


class Readable(Protocol):
    """Anything that gives bytes."""

    def read(self, size: int, /) -> bytes: ...


class Bounded(tarfile.TarInfo):
    """Refuses what would be read into memory whole without a bound: long header extensions, and maps of sparse files."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _HEADERS and not 0 <= self.size <= _LONGEST_HEADER:
            raise ImageError(f"an archive's header is {self.size} bytes long; the archive is damaged or hostile")
        if self.size < 0:
            raise ImageError("an archive has an entry of a negative size; the archive is damaged or hostile")
        if self.type == tarfile.GNUTYPE_SPARSE:
            return self._proc_gnusparse_10(self, {}, archive)
        return cast("tarfile.TarInfo", super()._proc_member(archive))  # type: ignore[misc]

    def _proc_gnusparse_10(self, member: tarfile.TarInfo, headers: dict[str, str], archive: tarfile.TarFile) -> tarfile.TarInfo:
        raise ImageError(f"{self.name[:200]!r} is stored as a sparse file, which image layers are not; build the layer without")


class Hashed:
    """Passes bytes on and hashes them; `limit`: more is refused."""

    def __init__(self, source: Readable, limit: int) -> None:
        self._source = source
        self._hash = hashlib.sha256()
        self._left = limit

    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes; a chunk when it is negative."""
        data = self._source.read(_CHUNK if size < 0 else size)
        self._hash.update(data)
        self._left -= len(data)
        if self._left < 0:
            raise ImageError("a layer is longer than the whole image may be; if you trust it, raise SANDMILL_IMAGES_BYTES")
        return data

    def drain(self) -> str:
        """Reads the rest; the digest of everything."""
        while self.read(_CHUNK):
            pass
        return "sha256:" + self._hash.hexdigest()


def unpack(source: Readable, writer: LayerWriter, *, digest: str | None, diff_id: str | None, max_bytes: int) -> str:
    """Writes the layer in `source`; returns the digest of the plain archive. Raises ImageError."""
    try:
        return _unpack(source, writer, digest, diff_id, max_bytes)
    except ImageError:
        raise
    except _DAMAGES as error:
        raise ImageError(f"a layer of the image cannot be read ({error}); fetch it again") from error


def _unpack(source: Readable, writer: LayerWriter, digest: str | None, diff_id: str | None, max_bytes: int) -> str:
    packed = Hashed(source, max_bytes)
    plain = Hashed(_plain(packed), 2 * max_bytes)
    with tarfile.open(fileobj=cast("Any", plain), mode="r|", tarinfo=Bounded, encoding="utf-8", errors="surrogateescape") as archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined] # it would keep every header of a million
            _enter(archive, member, writer)
    found, whole = plain.drain(), packed.drain()
    if digest is not None and whole != digest:
        raise ImageError(f"a layer's digest is {whole} and should be {digest}; fetch the image again")
    if diff_id is not None and found != diff_id:
        raise ImageError(f"a layer unpacks to digest {found} and should to {diff_id}; fetch the image again")
    writer.finish()
    return found


class _Again:
    """A stream whose first bytes were looked at."""

    def __init__(self, first: bytes, rest: Readable) -> None:
        self._first = first
        self._rest = rest

    def read(self, size: int = -1, /) -> bytes:
        if self._first:
            taken, self._first = (self._first, b"") if size < 0 else (self._first[:size], self._first[size:])
            return taken
        return self._rest.read(_CHUNK if size < 0 else size)


def _plain(packed: Readable) -> Readable:
    """Decompressed, by the first bytes: what a media type claims is not asked."""
    first = packed.read(4)
    stream = _Again(first, packed)
    if first[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=cast("Any", stream))
    if first == b"\x28\xb5\x2f\xfd":
        reader = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).stream_reader(cast("Any", stream), read_across_frames=True)
        return cast("Readable", reader)
    if first[:3] in (b"BZh", b"\xfd7z"):
        raise ImageError("a layer is compressed with bzip2 or xz; images are plain, gzip or zstd")
    return stream


def _enter(archive: tarfile.TarFile, member: tarfile.TarInfo, writer: LayerWriter) -> None:
    name = member.name
    above, _, last = name.rstrip("/").rpartition("/")
    attributes = Attributes(member.mode, member.uid, member.gid, int(member.mtime * 1_000_000_000))
    if last == OPAQUE_MARK:
        writer.opaque(above)
    elif last.startswith(WHITEOUT + WHITEOUT):
        return  # notes of a layer format of the past
    elif last.startswith(WHITEOUT):
        hidden = last.removeprefix(WHITEOUT)
        if hidden in ("", ".", ".."):
            raise ImageError(f"whiteout {name[:200]!r} names nothing; the archive is damaged or hostile")
        writer.whiteout(f"{above}/{hidden}")
    elif member.isdir():
        writer.folder(name, attributes)
    elif member.issym():
        writer.symlink(name, member.linkname, attributes)
    elif member.islnk():
        writer.hard_link(name, member.linkname)
    elif member.isfifo():
        writer.fifo(name, attributes)
    elif member.isreg():
        writer.file(name, attributes, member.size, _reader(archive, member))


def _reader(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Callable[[int], bytes]:
    contents = archive.extractfile(member)
    assert contents is not None
    return contents.read
