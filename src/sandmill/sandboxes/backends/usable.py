"""Which backends could make a sandbox now. In: the environment. Out: for each one sentence, and the fix where it could not."""

from __future__ import annotations

import asyncio
import os
from typing import Final

from sandmill.errors import ConfigError, SandboxError
from sandmill.sandboxes.backends.choice import load
from sandmill.sandboxes.backends.seam import BackendName, Usable
from sandmill.sandboxes.dual import block_on

_ANSWER_S: Final = 8.0
_GUESTS: Final = (BackendName.GVISOR, BackendName.E2B, BackendName.KUBERNETES)


def usable_backends() -> dict[BackendName, Usable]:
    """All but `native`, which `probe` tries out. Makes no sandbox; takes 8 s at most."""
    return block_on(_all())


async def _all() -> dict[BackendName, Usable]:
    names = (*_GUESTS, BackendName.SERVER)
    return dict(zip(names, await asyncio.gather(*map(_usable, names)), strict=True))


async def _usable(name: BackendName) -> Usable:
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await (_server() if name is BackendName.SERVER else load(name).usable())
    except TimeoutError:
        return Usable(
            ok=False,
            says=f"no answer within {_ANSWER_S:.0f} s",
            fix="see that its address is right and this machine not overloaded",
        )
    except (SandboxError, ConfigError) as error:
        says, _, fix = str(error).rpartition("; ")
        return Usable(ok=False, says=says or fix, fix=fix)


async def _server() -> Usable:
    from sandmill.sandboxes.backends.remote.client import AnswerError, client_of

    url = os.environ.get("SANDMILL_API_URL", "")
    fix = "start one with `sandmill serve` and set SANDMILL_API_URL and SANDMILL_API_KEY"
    if not url:
        return Usable(ok=False, says="no address", fix=fix)
    try:
        await client_of(url).ask("GET", "sandboxes", query={"limit": "1"})
    except AnswerError as error:
        return Usable(ok=False, says=f"{url!a} refuses: {error.message[:200]!a}", fix=fix)
    except OSError as error:
        return Usable(ok=False, says=f"{url!a} cannot be reached: {str(error)[:200]!a}", fix=fix)
    return Usable(ok=True, says=f"{url!a} answers")
