"""A run's folder: the resolved manifest, append-only streams of records and whole files, each either written entirely or not at all.

    format             which layout this is
    lock               held (flock) by the process that writes the run; holds its pid
    manifest.json      the resolved manifest
    metrics.jsonl  trajectories.jsonl  evaluations.jsonl  ledger.jsonl
    checkpoints/       see training.checkpoint

A stream's record is one `write` of one line: after a kill at any point only the last line can be torn, readers pass over it and
`resume` cuts it off. One process writes, any number read.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from sandmill.config.manifest import Manifest
from sandmill.errors import CheckpointCorrupt, DiskFull, NonFinite, RunBusy, RunError, RunIncompatible

FORMAT = "sandmill-run 1"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CHUNK = 1 << 16

T = TypeVar("T")


class Stream(enum.StrEnum):
    """The append-only files of a run, one JSON record a line."""

    METRICS = "metrics.jsonl"
    TRAJECTORIES = "trajectories.jsonl"
    EVALUATIONS = "evaluations.jsonl"
    LEDGER = "ledger.jsonl"
    """What was spent. A resume keeps the rows of steps it repeats: they were paid for."""


class RunFolder:
    """A run folder open for writing (`create`, `resume`) or for reading (`open`). Not for concurrent use."""

    def __init__(self, path: Path, manifest: Manifest, lock: int | None) -> None:
        self.path = path
        self.manifest = manifest
        self._lock = lock
        self._files: dict[Stream, int] = {}

    @classmethod
    def create(cls, path: Path, manifest: Manifest) -> Self:
        """Makes a new run in an absent or empty folder, and locks it. Raises RunIncompatible, RunBusy, DiskFull."""
        with disk_full_named(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(path)
        try:
            _refuse_used(path)
            write_atomically(path / "manifest.json", msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
            write_atomically(path / "format", f"{FORMAT}\n".encode())
        except BaseException:
            os.close(lock)
            raise
        return cls(path, manifest, lock)

    @classmethod
    def resume(cls, path: Path, manifest: Manifest) -> Self:
        """Locks an existing run of the same manifest and cuts torn last lines off. Raises RunIncompatible, RunBusy."""
        _require_format(path)
        lock = _take_lock(path)
        try:
            _require_same_manifest(path, manifest)
            for stream in Stream:
                _cut_torn_line(path / stream)
        except BaseException:
            os.close(lock)
            raise
        return cls(path, manifest, lock)

    @classmethod
    def open(cls, path: Path) -> Self:
        """A run to read from, whether it is being written or not; takes no lock and writes nothing. Raises RunIncompatible."""
        _require_format(path)
        return cls(path, _read_manifest(path), None)

    def append(self, stream: Stream, record: msgspec.Struct) -> None:
        """Adds one record. Raises DiskFull (then nothing of it is in the file) and NonFinite, naming the field."""
        line = encode(record, str(stream)) + b"\n"
        target = self.path / stream
        with disk_full_named(target, "every record before this one is intact"):
            file = self._file(stream)
            before = os.fstat(file).st_size
            try:
                if os.write(file, line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(file, before)
                raise

    def rows(self, stream: Stream, kind: type[T]) -> Iterator[T]:
        """The records of a stream in order, one in memory at a time. An unfinished last line is passed over.

        Raises RunError naming file and line for a whole line that is not a record of this kind.
        """
        decoder = msgspec.json.Decoder(kind)
        path = self.path / stream
        if not path.exists():
            return
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield decoder.decode(line)
                except (msgspec.DecodeError, RecursionError) as error:
                    raise RunError(f"{path}:{number} is not a {kind.__name__} record: {error}") from None

    def offsets(self) -> dict[str, int]:
        """Length in bytes of every stream, after making sure that a power cut cannot shorten it."""
        with disk_full_named(self.path):
            for file in self._files.values():
                os.fsync(file)
        return {str(stream): _size(self.path / stream) for stream in Stream}

    def truncate(self, offsets: Mapping[str, int]) -> None:
        """Takes every stream but the ledger back to the recorded length (absent: 0).

        Raises CheckpointCorrupt, with nothing changed, when a stream is shorter than that.
        """
        kept = [stream for stream in Stream if stream is not Stream.LEDGER]
        for stream in kept:
            size, wanted = _size(self.path / stream), offsets.get(str(stream), 0)
            if size < wanted:
                raise CheckpointCorrupt(f"{self.path / stream} holds {size} bytes, but the checkpoint was made when it held {wanted}")
        self._require_writable()
        for stream in kept:
            if _size(self.path / stream) > offsets.get(str(stream), 0):
                file = self._file(stream)
                os.ftruncate(file, offsets.get(str(stream), 0))
                os.fsync(file)

    def write(self, name: str, content: bytes) -> None:
        """Writes or replaces a whole file of the run, such as summary.json. Raises DiskFull; then the old content stands."""
        self._require_writable()
        write_atomically(self.path / name, content)

    def close(self) -> None:
        """Closes the streams and gives the lock back. Idempotent."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _file(self, stream: Stream) -> int:
        self._require_writable()
        if stream not in self._files:
            self._files[stream] = os.open(self.path / stream, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return self._files[stream]

    def _require_writable(self) -> None:
        if self._lock is None:
            raise RunError(f"{self.path} is open for reading only")


def encode(record: msgspec.Struct, name: str) -> bytes:
    """One line of JSON without its end. A lone surrogate becomes the six characters of its escape, so that every reader can read it.

    Raises NonFinite naming `name` and the field: JSON has no NaN, and a null in its place would be a lie.
    """
    _require_finite(record, name)
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        return msgspec.json.encode(_without_surrogates(msgspec.to_builtins(record)))


def write_atomically(path: Path, content: bytes) -> None:
    """Writes `path` so that at any moment, through a kill or a power cut, it has its old content or all of the new.

    Raises DiskFull; then the old content stands and no temporary file remains.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_full_named(path, "its former content is intact"):
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def sync_folder(path: Path) -> None:
    """Makes the entries of a folder survive a power cut."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def disk_full_named(path: Path, intact: str = "what was written before is intact") -> Iterator[None]:
    """Turns an out-of-space error inside the block into DiskFull with the path, what is intact, and the way out."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or isinstance(error, DiskFull):
            raise
        full = DiskFull(f"no space left to write {path} ({os.strerror(error.errno)}); {intact}; free some space and go on with --resume")
        full.errno = error.errno
        raise full from error


def differing_keys(first: Manifest, second: Manifest) -> list[str]:
    """Dotted names of the keys in which two manifests differ, with both values."""
    ours, theirs = _flat(msgspec.to_builtins(first), ""), _flat(msgspec.to_builtins(second), "")
    keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    return [f"{key} ({_shown(ours, key)} in the run, {_shown(theirs, key)} now)" for key in keys]


def _flat(value: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    return {key: leaf for name, inner in value.items() for key, leaf in _flat(inner, f"{prefix}.{name}" if prefix else str(name)).items()}


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return msgspec.json.encode(flat[key]).decode() if key in flat else "absent"


def _take_lock(path: Path) -> int:
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
        os.close(lock)
        who = f"process {holder}" if holder.isdigit() else "another process"
        raise RunBusy(f"{path} is being written by {who}; wait for it, stop it, or choose another folder") from None
    except BaseException:
        os.close(lock)
        raise
    return lock


def _refuse_used(path: Path) -> None:
    """A creation that was killed before its `format` file leaves nothing worth keeping and may be done again."""
    if (path / "format").exists():
        raise RunIncompatible(f"{path} already holds a run; go on with it by --resume or choose another folder")
    names = {name for name in os.listdir(path) if not name.startswith(".")}
    if odd := sorted(names - {"lock", "manifest.json"}):
        raise RunIncompatible(f"{path} is not empty and no run folder (it holds {odd[0]!r}); choose another folder")


def _require_format(path: Path) -> None:
    try:
        found = (path / "format").read_text(errors="replace").strip()[:80]
    except (FileNotFoundError, NotADirectoryError):
        raise RunIncompatible(f"{path} is not a run folder: it has no file named format; start the run without --resume") from None
    if found != FORMAT:
        raise RunIncompatible(f"{path} was written in format {found!r}, this is format {FORMAT!r}; use the Sandmill that wrote it")


def _read_manifest(path: Path) -> Manifest:
    try:
        return msgspec.json.decode((path / "manifest.json").read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise RunIncompatible(f"{path / 'manifest.json'} cannot be read as a manifest: {error}") from None


def _require_same_manifest(path: Path, manifest: Manifest) -> None:
    if different := differing_keys(_read_manifest(path), manifest):
        raise RunIncompatible(f"{path} was started with another manifest: {'; '.join(different)}; use the same one or another folder")


def _cut_torn_line(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _CHUNK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _require_finite(value: object, place: str) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NonFinite(place)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _require_finite(getattr(value, name), f"{place}: {name}")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _require_finite(inner, f"{place}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, inner in enumerate(value):
            kind = type(inner)
            if not (kind is int or kind is str or (kind is float and math.isfinite(inner))):
                _require_finite(inner, f"{place}[{index}]")


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_surrogates(inner) for inner in value]
    return value
