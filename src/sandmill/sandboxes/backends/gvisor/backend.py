"""gVisor sandboxes on this machine. In: specs. Out: machines; one folder on disk holds all of this process's (place.py)."""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from typing import Final

from sandmill.errors import IsolationUnavailable, SandboxCreateFailed, Unsupported
from sandmill.sandboxes.backends.gvisor.bundle import write_bundle
from sandmill.sandboxes.backends.gvisor.machine import PLATFORMS, GvisorMachine
from sandmill.sandboxes.backends.gvisor.place import Place, sweep
from sandmill.sandboxes.backends.seam import BackendName, Hearing, Usable
from sandmill.sandboxes.dual import in_thread
from sandmill.sandboxes.spec import EgressMode, SandboxSpec

_LOOK_S: Final = 10.0
_MISSING: Final = "runsc is not installed"
_FIX: Final = "install it (Debian 13: apt-get install runsc) or set SANDMILL_RUNSC to its path"


def find_runsc() -> str | None:
    """The program's path."""
    return shutil.which(os.environ.get("SANDMILL_RUNSC") or "runsc")


def platform_of(runsc: str) -> str:
    """The fastest of gVisor's platforms that this version has and every kernel lets run. Raises IsolationUnavailable."""
    try:
        done = subprocess.run([runsc, "flags"], capture_output=True, timeout=_LOOK_S, check=False, text=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise IsolationUnavailable(f"{runsc} cannot be run: {error}") from error
    text = done.stdout + done.stderr
    found = next((name for name in PLATFORMS if name in text), None)
    if found is None:
        raise IsolationUnavailable(f"{runsc} offers neither of the platforms {' and '.join(PLATFORMS)}")
    return found


class Gvisor:
    """`runsc` of this machine."""

    name = BackendName.GVISOR
    text = False
    start_s = 30.0

    def __init__(self) -> None:
        self._place: Place | None = None
        self._platform = ""
        self._starting = asyncio.Lock()

    def lacks(self, spec: SandboxSpec) -> str | None:
        """What it is not held to here."""
        if self._place is not None and not self._place.plan.version:
            return f"gVisor sandboxes have no cpu and memory limit, because {self._place.plan.lack}"
        return None

    def check(self, spec: SandboxSpec) -> None:
        """Raises Unsupported."""
        if spec.network.mode is not EgressMode.DENY:
            raise Unsupported(self.name, "give a sandbox a network", "use backend native for named hosts")
        if spec.image is not None:
            raise Unsupported(self.name, "start from an image", "use backend native, or leave out image=")

    async def create(self, spec: SandboxSpec, guest: Sequence[str], hearing: Hearing) -> GvisorMachine:
        """A sandbox of its own `runsc run`."""
        place = await self._ready()
        machine = GvisorMachine(f"sandmill-{secrets.token_hex(8)}", place, hearing)
        try:
            machine.bundle.mkdir(mode=0o711)
            write_bundle(machine.bundle, place.root, spec, guest)
            await machine.start(spec, self._platform)
        except BaseException as error:
            await machine.destroy()
            if isinstance(error, OSError) and not isinstance(error, SandboxCreateFailed):
                raise SandboxCreateFailed(error.errno, f"could not create a gVisor sandbox: {error.strerror}") from error
            raise
        return machine

    async def usable(self) -> Usable:
        """Looks for the program, and whether this user may use it."""
        runsc = find_runsc()
        if runsc is None:
            return Usable(ok=False, says=_MISSING, fix=_FIX)
        if os.geteuid() != 0:
            return Usable(ok=False, says="runsc needs root here", fix="run as root, or use backend native")
        try:
            platform = await in_thread(lambda: platform_of(runsc))
        except IsolationUnavailable as error:
            return Usable(ok=False, says=str(error), fix=_FIX)
        return Usable(ok=True, says=f"{runsc}, platform {platform}")

    async def _ready(self) -> Place:
        async with self._starting:
            if self._place is None:
                runsc = find_runsc()
                if runsc is None:
                    raise IsolationUnavailable(f"backend gvisor: {_MISSING}; {_FIX}")
                if os.geteuid() != 0:
                    raise IsolationUnavailable("backend gvisor needs root; run as root, or use backend native")
                self._platform = await in_thread(lambda: platform_of(runsc))
                await in_thread(lambda: sweep(runsc))
                try:
                    self._place = place = await in_thread(lambda: Place(runsc))
                except OSError as error:
                    raise IsolationUnavailable(f"backend gvisor has no place for its state: {error}") from error
                owner = os.getpid()
                atexit.register(lambda: place.leave() if os.getpid() == owner else None)
            return self._place
