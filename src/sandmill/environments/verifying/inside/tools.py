"""What stands in for installers in a grading sandbox, which has no network: uv, uvx, pip. In: their command lines. Out: the program that
was asked for, run; or the name of what is not there, noted where only root writes, and an exit code of 1.

Command line: NAME ARGS...
"""

from __future__ import annotations

import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
SITE = os.path.join(os.path.dirname(HERE), "site")
MISSING = "/.sandmill-run/missing"
OWN = ("pytest-json-ctrf",)
"""Of these, what is used is done by the `pytest` here."""
WITH_VALUE = (
    *("-p", "--python", "--python-version", "-i", "--index-url", "--extra-index-url", "--index", "--default-index", "-f", "--find-links"),
    *("-t", "--target", "--prefix", "--root", "-c", "--constraint", "--directory", "--project", "--cache-dir", "--env-file", "--group"),
    "--extra",
)
REQUIREMENT = ("-w", "--with", "--with-editable", "--from")
FILES = ("-r", "--requirement", "--requirements", "--with-requirements")


def main(argv: list[str]) -> int:
    """One command line; its exit code."""
    name, args = argv[0], argv[1:]
    if name == "uvx" or (name == "uv" and args[:2] in (["tool", "run"], ["tool", "x"])):
        return uvx(args if name == "uvx" else args[2:])
    if name == "uv":
        return uv(args)
    return pip(args)


def uv(args: list[str]) -> int:
    if not args:
        return 0
    verb, rest = args[0], args[1:]
    if verb == "run":
        wanted, rest = options(rest)
        return check(wanted) or start(rest)
    if verb in ("add", "remove", "sync", "lock"):
        return check(options(rest)[0] + (plain(rest) if verb == "add" else []))
    if verb == "pip":
        return pip(rest)
    if verb == "tool":
        return check(plain(rest[1:]))
    if verb in ("init", "venv", "self", "python", "cache", "version") or verb.startswith("-"):
        return 0
    note("uv " + verb)
    return 1


def uvx(args: list[str]) -> int:
    wanted, rest = options(args)
    if not rest:
        return 0
    tool = re.split(r"[@=<>!~\[]", rest[0])[0]
    return check(wanted) or start([tool, *rest[1:]])


def pip(args: list[str]) -> int:
    if args[:1] == ["install"]:
        return check(options(args[1:])[0] + plain(args[1:]))
    return 0


def options(args: list[str]) -> tuple[list[str], list[str]]:
    """Requirements that options name, and what follows the options."""
    wanted: list[str] = []
    rest = list(args)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if name in REQUIREMENT:
            value = value if equals else (rest.pop(0) if rest else "")
            wanted += [one for one in value.split(",") if one]
        elif name in FILES:
            wanted += listed(value if equals else (rest.pop(0) if rest else ""))
        elif name in WITH_VALUE and not equals and rest:
            rest.pop(0)
    return wanted, rest


def plain(args: list[str]) -> list[str]:
    """Requirements among arguments that are no option's."""
    wanted: list[str] = []
    skip = False
    for index, word in enumerate(args):
        if skip:
            skip = False
        elif word in FILES:
            wanted += listed(args[index + 1] if index + 1 < len(args) else "")
            skip = True
        elif word in WITH_VALUE or word in REQUIREMENT:
            skip = True
        elif not word.startswith("-"):
            wanted.append(word)
    return wanted


def listed(path: str) -> list[str]:
    try:
        with open(path) as file:
            lines = [line.split("#")[0].strip() for line in file]
    except OSError:
        return [path]
    return [line for line in lines if line and not line.startswith("-")]


def check(wanted: list[str]) -> int:
    """0 when everything is there; otherwise it is noted."""
    there = provided()
    lacking = [one for one in wanted if plain_name(one) not in there]
    for one in lacking:
        note(one)
    return 1 if lacking else 0


def plain_name(requirement: str) -> str:
    return re.split(r"[@=<>!~\[; ]", requirement.strip())[0].lower().replace("_", "-")


def provided() -> set[str]:
    names = set(OWN) | {"pip", "setuptools", "wheel", "uv"}
    for folder in [SITE, *sys.path]:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in entries:
            if entry.endswith((".dist-info", ".egg-info")):
                names.add(entry.rsplit(".", 1)[0].split("-")[0].lower().replace("_", "-"))
    return names


def start(command: list[str]) -> int:
    if not command:
        return 0
    name, args = command[0], command[1:]
    base = os.path.basename(name)
    if base in ("pytest", "py.test"):
        os.execv(sys.executable, [sys.executable, "-I", os.path.join(HERE, "run_pytest.py"), *args])
    if name.endswith(".py"):
        name, args = "python3", [name, *args]
    elif re.match(r"python[0-9.]*$", base):
        name = "python3"
    try:
        os.execvp(name, [name, *args])
    except OSError:
        note(name)
        return 127


def note(name: str) -> None:
    sys.stderr.write(f"{name} is not there and cannot be installed without a network\n")
    try:
        with open(MISSING, "a") as file:
            file.write(" ".join(name.split())[:200] + "\n")
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
