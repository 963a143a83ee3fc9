"""Starting commands: who runs them, in which environment, over which descriptors. In: a caller's words. Out: messages for the agent."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Mapping
from typing import Final

from sandmill.errors import ConfigError, ExecFailed
from sandmill.sandboxes.backends.native import wire
from sandmill.sandboxes.files import absolute
from sandmill.sandboxes.images import HOST, Image
from sandmill.sandboxes.spec import SandboxSpec, check_env

_LARGEST_MAX_OUTPUT: Final = 64 << 20
_TIOCSPTLCK: Final = 0x40045431
_TIOCGPTPEER: Final = 0x5441
_BASE_ENV: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    # UTF-8 text; every other category of C.UTF-8 is that of C, and LANG would have each program open twelve files to learn so.
    "LC_CTYPE": "C.UTF-8",
    # Without it bash asks the user database at every start.
    "SHELL": "/bin/bash",
    "TERM": "dumb",
}
_MOST_IDS: Final = 65536

Three = tuple[int, int, int]
"""Descriptors of standard input, output and error."""


def checked(argv: tuple[str | bytes, ...]) -> tuple[str | bytes, ...]:
    """A command's words as they came. Raises ConfigError for what is no text, such as a whole list of them."""
    for word in argv:
        if not isinstance(word, str | bytes):
            raise ConfigError(f'every word of a command is text of its own, as in exec("ls", "-l"), not {word!r:.100}', field="argv")
    return argv


class Commands:
    """One sandbox's commands, with everything that does not change between them worked out once."""

    def __init__(self, spec: SandboxSpec, *, rootless: bool, image: Image = HOST) -> None:
        self._spec = spec
        self._rootless = rootless
        # A foreign image need not have bash, and then naming it would mislead.
        self._base = _BASE_ENV if image.on_host else {name: value for name, value in _BASE_ENV.items() if name != "SHELL"}
        own = image.account
        self._users = {
            "root": (0, {"HOME": "/root", "USER": "root"}),
            "user": (wire.identity(own.uid, own.gid), {"HOME": own.home, "USER": own.name}),
        }
        self._users.setdefault(own.name, self._users["user"])
        self._env: dict[str, tuple[bytes, int]] = {}
        self._workdir = wire.encode(spec.workdir)

    def who(self, user: str) -> int:
        """`user`, `root`, the image's own user or a number (its group's too), as wire.identity. Raises ConfigError, ExecFailed."""
        who = self._user(user)[0]
        if who != self._users["user"][0] and self._rootless:
            raise ExecFailed(errno.EPERM, "there is no in-sandbox root when Sandmill itself runs without root")
        return who

    def _user(self, user: str) -> tuple[int, Mapping[str, str]]:
        if user not in self._users and user.isascii() and user.isdecimal() and int(user) < _MOST_IDS:
            return wire.identity(int(user), int(user)), {"HOME": "/", "USER": user}
        if user not in self._users:
            raise ConfigError(f"user must be 'user' or 'root' (inside the sandbox) or a number, not {user!r}", field="user")
        return self._users[user]

    def message(
        self,
        flags: int,
        id: int,
        argv: tuple[str | bytes, ...],
        env: Mapping[str, str] | None,
        workdir: str | None,
        user: str,
        *,
        stdin: bytes = b"",
        max_output: int = 0,
        fds: tuple[int, ...] = (),
    ) -> wire.Message:
        """The message that starts it under `id`. Raises ExecFailed for what execve could not carry, ConfigError for a wrong option."""
        who = self.who(user)
        words = [wire.encode(word) for word in checked(argv)]
        if not words or any(b"\0" in word for word in words):
            raise ExecFailed(errno.EINVAL, "a command needs a program, and no argument may contain NUL")
        block, count = self._environment(user, env)
        if workdir is None:
            cwd, flags = self._workdir, flags | wire.EXEC_HOME
        else:
            cwd = absolute(workdir, self._spec.workdir)
        payload = wire.command_payload(cwd, words, block, stdin)
        return wire.agent_request(
            wire.EXEC,
            id,
            payload,
            flags=flags,
            who=who,
            first=len(words),
            second=count,
            stdin_bytes=len(stdin),
            max_output=max(1, min(max_output, _LARGEST_MAX_OUTPUT)),
            fds=fds,
        )

    def _environment(self, user: str, env: Mapping[str, str] | None) -> tuple[bytes, int]:
        if not env and user in self._env:
            return self._env[user]
        for name, value in (env or {}).items():
            check_env(name, value)
        made = _block(self._base | dict(self._user(user)[1]) | dict(self._spec.env) | dict(env or {}))
        if not env:
            self._env[user] = made
        return made


def pipes(*, with_stdin: bool) -> tuple[Three, Three]:
    """Descriptors for (stdin, stdout, stderr): ours, and the command's."""
    out, err = os.pipe(), os.pipe()
    if not with_stdin:
        return (-1, out[0], err[0]), (os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), out[1], err[1])
    into = os.pipe()
    return (into[1], out[0], err[0]), (into[0], out[1], err[1])


def other_end(master: int) -> int:
    """The end of a pseudo-terminal that a command gets, without looking up any path."""
    fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
    return fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY)


def _block(variables: Mapping[str, str]) -> tuple[bytes, int]:
    return b"".join(wire.encode(f"{name}={value}") + b"\0" for name, value in variables.items()), len(variables)
