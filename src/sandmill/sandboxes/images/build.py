"""Building an image. In: a Dockerfile and a folder of files. Out: an image in the store, every step in a sandbox of its own.

A step that was done before, on the same image with the same words and the same files, is taken from the store. No step sees a network
unless the caller gives one, and none sees a file of this machine that the context does not hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import posixpath
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from sandmill.errors import ConfigError, ExecFailed, ImageError, SandboxFileError, plainly
from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.dual import in_thread
from sandmill.sandboxes.images.context import Context, Entry
from sandmill.sandboxes.images.dockerfile import Instruction, json_words, parse, words
from sandmill.sandboxes.images.image import Image, architecture
from sandmill.sandboxes.images.importing import account, obtain
from sandmill.sandboxes.images.store import Use, store
from sandmill.sandboxes.sandbox import Sandbox
from sandmill.sandboxes.spec import DEFAULT_WORKDIR, Egress, SandboxSpec, check_env

_BATCH_BYTES: Final = 16 << 20
_SHOWN: Final = 800
Report = Callable[[str], None]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What each step may use."""

    cpu: float | str = 1
    memory: int | str = "2Gi"
    disk: int | str = "2Gi"
    timeout_s: float = 1800.0
    network: Egress = Egress()


class Scope(NamedTuple):
    """For whom a build is. `find`: the image that a FROM means, held. Steps are taken from the store within one `name` only: what they came
    to is nobody else's to see."""

    find: Callable[[str], Awaitable[tuple[Image, Use]]]
    name: str = ""


async def _anything(wanted: str) -> tuple[Image, Use]:
    return await in_thread(lambda: obtain(wanted, store()), lambda pair: pair[1].release())


HERE: Final = Scope(_anything)
"""Whoever owns this machine: everything in the store, and archives."""


async def build(
    dockerfile: str | Path,
    context: Path,
    *,
    name: str | None,
    build_args: Mapping[str, str],
    limits: Limits,
    report: Report,
    scope: Scope = HERE,
) -> Image:
    """The image; `name` then means it. On the sandbox loop. Raises ConfigError with file and line, ImageError, SandboxError."""
    text, file = _text(dockerfile)
    instructions = parse(text, file)
    work = _Build(Context(context), dict(build_args), limits, scope)
    try:
        for number, instruction in enumerate(instructions, 1):
            cached = await work.step(instruction)
            report(f"[{number}/{len(instructions)}] {instruction.name} {instruction.text[:120]}{'  (from the store)' if cached else ''}")
        if unknown := set(build_args) - work.declared:
            raise ConfigError(f"no ARG declares {sorted(unknown)[0]!r}", file=file, field="build_args")
        await in_thread(lambda: store().save(work.image, name))
        return work.image
    finally:
        work.release()


def _text(dockerfile: str | Path) -> tuple[str, str]:
    if isinstance(dockerfile, str) and "\n" in dockerfile:
        return dockerfile, "Dockerfile"
    try:
        return Path(dockerfile).read_text("utf-8"), str(dockerfile)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the Dockerfile cannot be read: {plainly(error)}", file=str(dockerfile)) from error


class _Build:
    """One pass over a Dockerfile. `image` is what it has come to."""

    def __init__(self, context: Context, given: dict[str, str], limits: Limits, scope: Scope) -> None:
        self.image = Image(architecture=architecture())
        self.declared: set[str] = set()
        self._context = context
        self._given = given
        self._limits = limits
        self._scope = scope
        self._args: dict[str, str] = {}
        self._uses: list[Use] = []

    def release(self) -> None:
        """Its images may go, as far as this build is concerned."""
        for use in self._uses:
            use.release()
        self._uses = []

    async def step(self, instruction: Instruction) -> bool:
        """Does one instruction; True when the store had its result."""
        steps = {"FROM": self._from, "ARG": self._arg, "ENV": self._env, "WORKDIR": self._workdir, "USER": self._user}
        if instruction.name == "RUN":
            return await self._run(instruction)
        if instruction.name == "COPY":
            return await self._copy(instruction)
        await steps[instruction.name](instruction)
        return False

    def _words(self, instruction: Instruction, text: str | None = None) -> list[str]:
        return words(instruction.text if text is None else text, self._value, instruction)

    def _value(self, name: str) -> str | None:
        return self.image.env.get(name, self._args.get(name))

    async def _from(self, instruction: Instruction) -> None:
        named = self._words(instruction)
        wanted = instruction.flags.get("platform", f"linux/{architecture()}")
        if not wanted.startswith(f"linux/{architecture()}"):
            raise instruction.refuse(f"platform {wanted[:80]!r} cannot be built here: this machine is linux/{architecture()}")
        if len(named) != 1:
            raise instruction.refuse("it takes one image: host, a name or digest in the store, oci:PATH or docker-archive:PATH")
        self._args = {}
        if named[0] == "scratch":
            raise instruction.refuse("an empty image has nothing to run; the nearest base is host")
        try:
            self.image, use = await self._scope.find(named[0])
        except ImageError as error:
            raise instruction.refuse(str(error)) from error
        self._uses.append(use)

    async def _arg(self, instruction: Instruction) -> None:
        for word in self._words(instruction):
            name, _, default = word.partition("=")
            self._check(instruction, name, default)
            self.declared.add(name)
            self._args[name] = self._given.get(name, default)

    async def _env(self, instruction: Instruction) -> None:
        found = self._words(instruction)
        pairs = [word.partition("=")[::2] for word in found]
        if "=" not in found[0]:  # the older form: one name and the rest of the line
            if len(found) < 2:
                raise instruction.refuse("it takes NAME=VALUE, or a name and a value")
            pairs = [(found[0], " ".join(found[1:]))]
        for name, value in pairs:
            self._check(instruction, name, value)
            self.image = msgspec.structs.replace(self.image, env={**self.image.env, name: value})

    async def _workdir(self, instruction: Instruction) -> None:
        path = self._path(" ".join(self._words(instruction)))
        try:
            SandboxSpec(image="", workdir=path)
        except ConfigError as error:
            raise instruction.refuse(error.message) from error
        self.image = msgspec.structs.replace(self.image, workdir=path)

    async def _user(self, instruction: Instruction) -> None:
        named = " ".join(self._words(instruction))
        try:
            who = await in_thread(lambda: account(named, self.image, store()))
        except ImageError as error:
            raise instruction.refuse(str(error)) from error
        self.image = msgspec.structs.replace(self.image, account=who)

    def _check(self, instruction: Instruction, name: str, value: str) -> None:
        try:
            check_env(name, value)
        except ConfigError as error:
            raise instruction.refuse(error.message) from error

    def _key(self, step: Sequence[object]) -> str:
        return json.dumps([*step, self._scope.name] if self._scope.name else step)

    def _path(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.image.workdir or DEFAULT_WORKDIR, path))

    async def _run(self, instruction: Instruction) -> bool:
        argv = json_words(instruction.text) or ["/bin/sh", "-c", instruction.text]
        network = msgspec.to_builtins(self._limits.network)
        variables = {name: value for name, value in self._args.items() if name not in self.image.env}
        key = self._key(["run", self.image.digest, argv, sorted(variables.items()), network])

        async def work(sandbox: Sandbox) -> None:
            limits = self._limits
            try:
                done = await sandbox.run.aio(*argv, env=variables, timeout=limits.timeout_s, merge_stderr=True)
            except ExecFailed as error:
                raise instruction.refuse(f"{argv[0][:200]!r} cannot be started: {os.strerror(error.errno or 0)}") from error
            if done.timed_out:
                raise instruction.refuse(f"it did not end within {limits.timeout_s:g} s")
            if done.exit_code != 0:
                ended = f"exit code {done.exit_code}" if done.signal is None else f"signal {done.signal}"
                raise instruction.refuse(f"it ended with {ended}: {_inert(done.stdout)}")
            await sandbox.kill_processes.aio()

        return await self._layer(key, work)

    async def _copy(self, instruction: Instruction) -> bool:
        named = json_words(instruction.text) or self._words(instruction)
        if len(named) < 2:
            raise instruction.refuse("it takes one or more sources and a destination")
        *sources, target = named
        entries = await in_thread(lambda: self._context.find(sources, instruction))
        several = len(sources) > 1 or len([one for one in entries if not one.inside]) > 1
        owner = words(instruction.flags.get("chown", ""), self._value, instruction)
        mode = instruction.flags.get("chmod")
        if mode is not None and not (mode.isdecimal() and len(mode) <= 4 and all(digit < "8" for digit in mode)):
            raise instruction.refuse(f"--chmod takes an octal number such as 755, not {mode[:40]!r}")
        digest = await in_thread(lambda: self._context.digest(entries, instruction))
        key = self._key(["copy", self.image.digest, digest, self._path(target), target.endswith("/"), several, owner, mode])

        async def work(sandbox: Sandbox) -> None:
            place = self._path(target)
            into = several or target.endswith("/") or target in (".", "..") or await _is_folder(sandbox, place)
            placed = [(_below(place, entry, into), entry) for entry in entries]
            await self._write(sandbox, placed, None if mode is None else int(mode, 8), instruction)
            if owner:
                await _chown(sandbox, owner[0], [path for path, _ in placed], instruction)

        return await self._layer(key, work)

    async def _write(self, sandbox: Sandbox, placed: Sequence[tuple[str, Entry]], mode: int | None, instruction: Instruction) -> None:
        """As root of the sandbox, in its own view: links of the image lead where they lead there."""
        batch, size = list[bytes](), 0
        for path, entry in placed:
            is_folder = stat.S_ISDIR(entry.mode)
            if not is_folder:
                with contextlib.suppress(SandboxFileError):
                    await sandbox.remove.aio(path, user=_copier())
            data = b"" if is_folder else await in_thread(lambda entry=entry: self._context.data(entry, instruction))  # type: ignore[misc]
            permissions = entry.mode & 0o777 if mode is None or is_folder else mode & 0o777
            batch.append(wire.entry(path, stat.S_IFMT(entry.mode) | permissions, data))
            size += len(data)
            if size > _BATCH_BYTES:
                await _send(sandbox, batch, instruction)
                batch, size = [], 0
        await _send(sandbox, batch, instruction)

    async def _layer(self, key: str, work: Callable[[Sandbox], object]) -> bool:
        """The image after a step: from the store, or by `work` in a sandbox that starts from the image before it."""
        place = store()
        known = await in_thread(lambda: place.step(key))
        if known is not None:
            self._uses.append(await in_thread(lambda: place.use(known)))
            self.image = known
            return True
        before = self.image
        await in_thread(lambda: place.save(before))
        limits = self._limits
        spec = SandboxSpec.of(
            cpu=limits.cpu,
            memory=limits.memory,
            disk=limits.disk,
            network=limits.network,
            image=before.digest,
            backend="native",
            timeout=limits.timeout_s + 600,
            idle_timeout=limits.timeout_s + 600,
        )
        async with await Sandbox.from_spec.aio(spec, server="") as sandbox:
            outcome = work(sandbox)
            assert asyncio.iscoroutine(outcome)
            await outcome
            sealed = await sandbox.snapshot_filesystem.aio()
            use = await in_thread(lambda: place.use(sealed))
        self._uses.append(use)
        self.image = msgspec.structs.replace(before, layers=sealed.layers)
        await in_thread(lambda: place.save(self.image))
        await in_thread(lambda: place.remember_step(key, self.image.digest))
        return False


def _copier() -> str:
    """Who copies files: without root there is one user in a sandbox."""
    return "user" if os.geteuid() else "root"


def _below(place: str, entry: Entry, into: bool) -> str:
    if entry.inside:
        return posixpath.join(place, entry.inside)
    return posixpath.join(place, posixpath.basename(entry.path)) if into and not entry.folder_named else place


async def _send(sandbox: Sandbox, batch: Sequence[bytes], instruction: Instruction) -> None:
    if not batch:
        return
    try:
        await sandbox.write_batch(b"".join(batch), _copier())
    except SandboxFileError as error:
        raise instruction.refuse(f"it cannot write into the image: {error}") from error


async def _is_folder(sandbox: Sandbox, path: str) -> bool:
    try:
        await sandbox.list.aio(path, user=_copier())
    except SandboxFileError:
        return False
    return True


async def _chown(sandbox: Sandbox, owner: str, paths: Sequence[str], instruction: Instruction) -> None:
    for start in range(0, len(paths), 500):
        try:
            done = await sandbox.run.aio(
                "chown", "-h", "--", owner, *paths[start : start + 500], user=_copier(), timeout=60, merge_stderr=True
            )
        except ExecFailed as error:
            raise instruction.refuse("--chown needs the image to have chown, which it has not") from error
        if done.exit_code != 0:
            raise instruction.refuse(f"--chown failed: {_inert(done.stdout)}")


def _inert(output: bytes) -> str:
    """The end of what a step wrote, as one harmless line."""
    text = output[-_SHOWN:].decode("utf-8", "replace")
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split()) or "it wrote nothing"
