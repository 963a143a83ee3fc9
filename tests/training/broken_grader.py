"""An environment whose grader raises, for tests that load it by path."""

from __future__ import annotations

from typing import Any

from sandmill.config.manifest import EnvironmentSection
from sandmill.environments.builtin.shell import ShellEnvironment


class Broken(ShellEnvironment):
    """The shell family with a grader that lost its answers."""

    async def grade(self, *_: Any) -> Any:
        raise KeyError("answers")


def environment(section: EnvironmentSection) -> Broken:
    return Broken(section)
