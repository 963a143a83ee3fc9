"""Images of tasks. In: a Dockerfile and its folder, or an image's name. Out: the image, built once and held as long as its environment."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path
from typing import Final

import msgspec

from sandmill.environments.formats.harbor.dockerfile import adapted
from sandmill.environments.formats.harbor.folder import Folder
from sandmill.environments.formats.harbor.options import Options
from sandmill.environments.verifying.verify import root
from sandmill.errors import ConfigError, ImageError
from sandmill.sandboxes import Egress, Image
from sandmill.sandboxes.dual import in_thread
from sandmill.sandboxes.images import Use, store
from sandmill.sandboxes.images.image import HOST, Account
from sandmill.sandboxes.images.importing import account, obtain

_ROOT: Final = Account(name="root", uid=0, gid=0, home="/root")
_DISK: Final = "4Gi"


class Images:
    """One task set's images. On the sandbox loop."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._made: dict[str, Image] = {}
        self._held: list[Use] = []
        self._turns: dict[str, asyncio.Lock] = {}
        weakref.finalize(self, _let_go, self._held)

    async def of(self, task: Folder) -> Image:
        """The task's own. Raises ImageError, with the file and line at fault where there is one."""
        return await self._once(f"task {task.id}", task, task.dockerfile, task.context, task.box.docker_image)

    async def of_verifier(self, task: Folder) -> Image:
        """What a verifier in a sandbox of its own starts from."""
        box = task.stages[0].verifier.environment
        context = str(Path(task.path) / "tests")
        return await self._once(f"verifier {task.id}", task, task.separate_dockerfile, context, "" if box is None else box.docker_image)

    async def user(self, name: str, image: Image) -> str:
        """Who a task means by a user's name, as a sandbox takes it. Raises ImageError for one that the image does not have."""
        if name in ("", "root"):
            return name
        return str((await in_thread(lambda: account(name, image, store()))).uid)

    async def _once(self, key: str, task: Folder, dockerfile: str | None, context: str, named: str) -> Image:
        async with self._turns.setdefault(key, asyncio.Lock()):
            if key not in self._made:
                image = await self._image(task, dockerfile, context, named)
                self._held.append(await in_thread(lambda: store().use(image)))
                self._made[key] = image
            return self._made[key]

    async def _image(self, task: Folder, dockerfile: str | None, context: str, named: str) -> Image:
        there = bool(named) and await in_thread(lambda: _has(named))
        if there or (named and dockerfile is None):
            image = await Image.load.aio(named)
        elif dockerfile is None:
            raise ImageError(f"task {task.id} has neither a Dockerfile nor an image's name for its verifier")
        else:
            image = await self._built(task, dockerfile, context)
        if task.agent_user:
            user = task.agent_user
            image = msgspec.structs.replace(image, account=await in_thread(lambda: account(user, image, store())))
        await in_thread(lambda: store().save(image))
        return image

    async def _built(self, task: Folder, dockerfile: str, context: str) -> Image:
        options = self._options
        base = await in_thread(lambda: _base(options.base)) if options.base else ""
        text = await in_thread(lambda: adapted(dockerfile, base=base, has=_has, skip_run=options.run == "skip"))
        hosts = options.build_hosts
        network = Egress.allow(*hosts) if hosts else Egress.deny()
        try:
            return await Image.build.aio(text + "\n", context, network=network, disk=_DISK, timeout=task.box.build_timeout_sec)
        except ConfigError as error:
            raise ImageError(f"task {task.id}: {_explained(error, base=bool(base), network=bool(hosts))}") from error


def _let_go(held: list[Use]) -> None:
    for use in held:
        use.release()


def _explained(error: ConfigError, *, base: bool, network: bool) -> str:
    """What failed, and what can be done about it."""
    place = f"line {error.line} of its Dockerfile, {error.field}: {error.message}"
    if error.field == "RUN" and not network:
        return (
            f"{place}. No network is given to RUN: name hosts in option build_hosts, build the image elsewhere and name it in "
            "docker_image, or pass RUN over with option run: skip"
        )
    if error.field == "FROM" and not base:
        return f"{place}. Import the image (`sandmill image import`), or name what to start from instead in option base, as in base: host"
    return place


def _has(name: str) -> bool:
    try:
        obtain(name, store())[1].release()
    except ImageError:
        return False
    return name != "host"


def _base(name: str) -> str:
    """The digest of what stands for a foreign image: this machine's own programs with root as their user, as foreign images have it."""
    if name != "host":
        return name
    place = store()
    image = msgspec.structs.replace(HOST, account=_ROOT) if root() == "root" else HOST
    return place.save(image)
