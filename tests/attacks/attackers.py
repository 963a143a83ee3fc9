"""How the attacks run."""

from __future__ import annotations

from collections.abc import Callable

from sandmill.sandboxes import Sandbox

Maker = Callable[..., Sandbox]


def python(box: Sandbox, script: str, *, user: str = "user", timeout: float = 30) -> str:
    done = box.run("python3", "-c", script, user=user, timeout=timeout, merge_stderr=True)
    return done.stdout.decode()
