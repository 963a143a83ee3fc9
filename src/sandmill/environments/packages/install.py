"""A package in; an image that has it out, made once and shared by every sandbox and process that uses it. Nothing of it runs here.

    <state>/envs/<key>.json     what was installed, and the image it is in; the image is `env/<key>` in the image store, and bounded with it
                 <key>.lock     held while it is installed: others wait and find it done
                 <key>.wheels/  what is being fetched; swept when its lock is free

A key stands for what was asked; the digest of what came of it is in the record.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from sandmill.environments.packages.building import build_wheel
from sandmill.environments.packages.bytecode import compiled
from sandmill.environments.packages.download import NoWheel, download
from sandmill.environments.packages.interpreter import Interpreter, bring, interpreter
from sandmill.environments.packages.package import FILES, Copied, Package, digest_of_files, walk
from sandmill.environments.packages.sources import fetch_source
from sandmill.environments.packages.wheels import MTIME_NS, Wheel, unpack_wheels, wheel_of
from sandmill.errors import EnvironmentFailed, ImageError
from sandmill.sandboxes.backends.native import state
from sandmill.sandboxes.dual import hop, in_thread
from sandmill.sandboxes.images import HOST, Image, Store, Use, store
from sandmill.sandboxes.images.layers import Attributes, Budget, LayerWriter, walk_bytes
from sandmill.sandboxes.images.store import LayerRecord

NAMES: Final = "env/"
_LAYOUT: Final = "sandmill env 4"
"""Changes when the same wheels would come to other files."""
_KEY_DIGITS: Final = 32
_WAIT_S: Final = 3600.0
_MOST_BUILDS: Final = 40
_MOST_REFERENCES: Final = 1000
_PATH: Final = "/opt/env/bin:/usr/local/bin:/usr/bin:/bin"

Report = Callable[[str], None]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """envs/<key>.json."""

    package: Package
    python: str
    digest: str
    """sha256 of everything that is installed, whatever was asked."""
    image: str
    wheels: tuple[Wheel, ...] = ()
    bytes: int = 0
    references: tuple[str, ...] = ()
    """The environments that were loaded from it."""
    compiled: bool = False
    """The modules that loading it imports have their bytecode."""
    created_s: float = 0.0
    """Seconds since 1970."""
    version: int = 1


class Installed(NamedTuple):
    """An installed package. `use` keeps its image until it is released."""

    key: str
    record: Record
    interpreter: Interpreter
    use: Use


async def install(package: Package, report: Report = lambda line: None) -> Installed:
    """Installs a package, or finds it installed. Raises EnvironmentFailed, ConfigError, ImageError; then nothing of it is left."""
    return await hop(_install(package, report))


def key_of(package: Package) -> str:
    """What a package is asked for by: requirements, own files by content, and the Python. Raises ConfigError, EnvironmentFailed."""
    local = digest_of_files(Copied(source=path, place=str(index)) for index, path in enumerate(package.local))
    plain = msgspec.structs.replace(package, local=(), files=())
    asked = [msgspec.json.encode(plain, order="deterministic"), local.encode(), digest_of_files(package.files).encode()]
    asked += [interpreter(package.python).identity.encode(), _LAYOUT.encode()]
    return hashlib.sha256(b"\0".join(asked)).hexdigest()[:_KEY_DIGITS]


def records() -> dict[str, Record]:
    """What is installed, by key; without those whose image was evicted."""
    named = store().names()
    found = {path.stem: _read(path) for path in _folder().glob("[0-9a-f]*.json")}
    return {key: record for key, record in found.items() if record is not None and f"{NAMES}{key}" in named}


def remove(key: str) -> None:
    """Forgets an installed package and its image. Raises ImageError while it is used."""
    with contextlib.suppress(ImageError):
        store().find(f"{NAMES}{key}")
        store().remove(f"{NAMES}{key}")
    if f"{NAMES}{key}" in store().names():
        raise ImageError(f"{NAMES}{key} is used by a live sandbox; stop it first")
    (_folder() / f"{key}.json").unlink(missing_ok=True)


async def remember(installed: Installed, reference: str) -> None:
    """Notes which environment a package is installed for."""
    if reference not in installed.record.references:
        await hop(_remember(installed.key, reference))


async def _remember(key: str, reference: str) -> None:
    async with _alone(key):
        record = _read(_folder() / f"{key}.json")
        if record is not None and reference not in record.references and len(record.references) < _MOST_REFERENCES:
            record = msgspec.structs.replace(record, references=tuple(sorted({*record.references, reference})))
            _write(_folder() / f"{key}.json", msgspec.json.encode(record))


async def add_bytecode(installed: Installed, modules: Sequence[str]) -> Installed:
    """Compiles what loading a package imported, once for all who use it. Returns it anew; the old one is released."""
    return await hop(_add_bytecode(installed, modules))


async def _add_bytecode(installed: Installed, modules: Sequence[str]) -> Installed:
    async with _alone(installed.key):
        found = await in_thread(lambda: _find(installed.key), _let_go)
        if found is None or not found[0].compiled:
            if found is not None:
                found[1].release()
            place = store()
            image = await compiled(await in_thread(lambda: place.find(installed.record.image)), modules)
            found = await in_thread(lambda: _keep_compiled(installed, image, place), _let_go)
    installed.use.release()
    return installed._replace(record=found[0], use=found[1])


def _keep_compiled(installed: Installed, image: Image, place: Store) -> tuple[Record, Use]:
    use = place.use(image)
    place.save(image, f"{NAMES}{installed.key}")
    size = sum(layer.bytes for name in image.layers if (layer := place.record(name)) is not None)
    known = _read(_folder() / f"{installed.key}.json") or installed.record
    record = msgspec.structs.replace(known, image=image.digest, compiled=True, bytes=size)
    _write(_folder() / f"{installed.key}.json", msgspec.json.encode(record))
    return record, use


async def _install(package: Package, report: Report) -> Installed:
    key = await in_thread(lambda: key_of(package))
    python = interpreter(package.python)
    found = await in_thread(lambda: _find(key), _let_go)
    if found is None:
        async with _alone(key):
            found = await in_thread(lambda: _find(key), _let_go)
            found = found or await _make(key, package, python, report)
    return Installed(key, found[0], python, found[1])


def _let_go(found: tuple[Record, Use] | None) -> None:
    if found is not None:
        found[1].release()


def _find(key: str) -> tuple[Record, Use] | None:
    record = _read(_folder() / f"{key}.json")
    if record is None:
        return None
    try:
        place = store()
        return record, place.use(place.find(f"{NAMES}{key}"))
    except ImageError:
        return None


async def _make(key: str, package: Package, python: Interpreter, report: Report) -> tuple[Record, Use]:
    place = store()
    folder = _folder() / f"{key}.wheels"
    await in_thread(lambda: _sweep(folder))
    folder.mkdir(mode=0o700)
    try:
        wheels = await _fetch(package, folder, python, report)
        return await in_thread(lambda: _seal(key, package, python, wheels, place), _let_go)
    finally:
        await in_thread(lambda: shutil.rmtree(folder, ignore_errors=True))


async def _fetch(package: Package, folder: Path, python: Interpreter, report: Report) -> list[Path]:
    """Everything that is to be installed, as wheels."""
    own: list[str] = []
    for path in package.local:
        if path.endswith(".whl"):
            shutil.copyfile(path, folder / Path(path).name)
            own.append(str(folder / Path(path).name))
        else:
            report(f"building {path}")
            own.append(str(await _build(Path(path), folder, package.python)))
    await _download([*own, *package.requirements], folder, python, package, report, dependencies=True)
    await _download(list(package.bare), folder, python, package, report, dependencies=False)
    return sorted(folder.glob("*.whl"))


async def _download(
    wanted: Sequence[str], folder: Path, python: Interpreter, package: Package, report: Report, *, dependencies: bool
) -> None:
    """pip's choice, with a wheel built for everything that has none."""
    if wanted:
        report(f"fetching {', '.join(Path(one).name for one in wanted)}")
    built: set[str] = set()
    while True:
        try:
            return await download(wanted, folder, python.path, dependencies=dependencies)
        except NoWheel as error:
            if error.requirement in built or len(built) >= _MOST_BUILDS:
                raise
            built.add(error.requirement)
            missing, others = error.requirement, error.versions
            source = await in_thread(lambda missing=missing, others=others: fetch_source(missing, folder, others))  # type: ignore[misc]
            report(f"building {source.name}")
            await _build(source, folder, package.python)


async def _build(source: Path, folder: Path, python: str) -> Path:
    """A wheel of a source, built in a sandbox; what it was built with is forgotten."""
    used: list[Installed] = []

    async def provide(tools: Package) -> Image:
        used.append(await _install(tools, lambda line: None))
        return store().find(used[-1].record.image)

    try:
        return await build_wheel(source, folder, python, provide)
    finally:
        for installed in used:
            installed.use.release()
            with contextlib.suppress(ImageError):  # somebody else builds the same
                await in_thread(lambda key=installed.key: remove(key))  # type: ignore[misc]


def _seal(key: str, package: Package, python: Interpreter, paths: Sequence[Path], place: Store) -> tuple[Record, Use]:
    wheels = tuple(wheel_of(path) for path in paths)
    image, size, parts = HOST, 0, [python.identity]
    held: list[str] = []
    try:
        if python.prefix:
            layer = _digest("python", python.digest)
            size += _layer(place, layer, lambda draft: bring(python, draft, place.limit_bytes))
            held.append(layer)
        layer = _digest("wheels", python.path, python.identity, *(wheel.sha256 for wheel in wheels))
        size += _layer(place, layer, lambda draft: unpack_wheels(paths, draft, python, place.limit_bytes))
        held.append(layer)
        if package.files:
            layer = _digest("files", digest_of_files(package.files))
            size += _layer(place, layer, lambda draft: _copy(package.files, draft, place.limit_bytes))
            held.append(layer)
        for layer in held:
            image = image.above(layer)
        image = msgspec.structs.replace(image, env={"PATH": _PATH})
        parts += held
        record = Record(
            package=package,
            python=python.version,
            digest=_digest(*parts),
            image=image.digest,
            wheels=wheels,
            bytes=size,
            created_s=time.time(),
        )
        use = place.use(image)
        place.save(image, f"{NAMES}{key}")
        _write(_folder() / f"{key}.json", msgspec.json.encode(record))
        return record, use
    finally:
        for layer in held:
            place.unpin(layer)


def _layer(place: Store, digest: str, write: Callable[[Path], None]) -> int:
    """A pinned layer, written unless it is there; its size."""
    known = place.record(digest)
    if known is not None:
        place.pin(digest)
        return known.bytes
    with place.draft() as draft:
        write(draft)
        size = sum(walk_bytes(draft))
        place.keep(draft, LayerRecord(digest=digest, bytes=size))
    return size


def _copy(copied: Sequence[Copied], draft: Path, max_bytes: int) -> None:
    writer = LayerWriter(draft, Budget(max_bytes=max_bytes))
    for where, path, mode in walk(copied):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            writer.file(f"{FILES}/{where}", Attributes(mode, mtime_ns=MTIME_NS), size, file.read)
    writer.finish()


@contextlib.asynccontextmanager
async def _alone(key: str) -> AsyncIterator[None]:
    """Nobody else installs the same meanwhile, in whatever process."""
    place = _folder() / f"{key}.lock"
    deadline = time.monotonic() + _WAIT_S
    while (descriptor := _locked(place)) is None:
        if time.monotonic() > deadline:
            raise EnvironmentFailed(f"another process has been installing {NAMES}{key} for {_WAIT_S:g} s; stop it")
        await asyncio.sleep(0.05)
    try:
        yield
    finally:
        place.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(place: Path) -> int | None:
    """The descriptor that holds a lock; None while another does, or when it was removed just before it was had."""
    descriptor = os.open(place, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def _sweep(own: Path) -> None:
    """Removes what killed installers were fetching; `own`, whose lock is held here, is one of theirs too."""
    shutil.rmtree(own, ignore_errors=True)
    for left in _folder().glob("*.wheels"):
        lock = left.with_suffix(".lock")
        descriptor = _locked(lock)
        if descriptor is not None:
            shutil.rmtree(left, ignore_errors=True)
            lock.unlink(missing_ok=True)
            os.close(descriptor)


def _folder() -> Path:
    folder = state.state_root() / "envs"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _read(path: Path) -> Record | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError):
        return None


def _write(path: Path, data: bytes) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    fresh.rename(path)


def _digest(*parts: str) -> str:
    return "sha256:" + hashlib.sha256("\0".join((_LAYOUT, *parts)).encode()).hexdigest()


__all__ = ["Image", "Installed", "Record", "add_bytecode", "install", "key_of", "records", "remember", "remove"]
