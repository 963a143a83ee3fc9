"""The modules that a package imports, compiled once. In: an installed image and their paths. Out: the image with their bytecode on top.

Compiling runs nothing of a module, and happens in a sandbox all the same. Without it, each start of a worker compiles everything anew:
layers belong to nobody who could write there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from sandmill.environments.packages.wheels import PYTHON, ROOT
from sandmill.errors import EnvironmentFailed
from sandmill.sandboxes import Image, Sandbox, SandboxSpec

_COMPILE_S: Final = 900.0
_MOST_FILES: Final = 50_000


async def compiled(image: Image, modules: Sequence[str]) -> Image:
    """`image` with bytecode of `modules`, paths inside it, as far as they can be compiled. Raises EnvironmentFailed, SandboxError."""
    wanted = [path for path in modules if path.startswith(f"/{ROOT}/") and path.endswith(".py") and path.isprintable()][:_MOST_FILES]
    spec = SandboxSpec.of(
        memory="2Gi", disk="1Gi", image=image.digest, workdir="/work", timeout=_COMPILE_S + 300, idle_timeout=_COMPILE_S + 300
    )
    async with await Sandbox.from_spec.aio(spec, server="") as sandbox:
        done = await sandbox.run.aio(
            PYTHON,
            "-I",
            "-m",
            "compileall",
            "-q",
            "--invalidation-mode",
            "unchecked-hash",
            "-i",
            "-",
            user="user" if os.geteuid() else "root",
            stdin="\n".join(wanted).encode("utf-8", "surrogateescape"),
            timeout=_COMPILE_S,
        )
        if done.exit_code not in (0, 1):  # 1: some file is no Python of this version
            raise EnvironmentFailed(
                "a package's modules could not be compiled; it starts slowly, and needs more memory than its sandbox has"
            )
        return await sandbox.snapshot_filesystem.aio()
