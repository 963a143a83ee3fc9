"""Host names as people write them in; plain lower-case patterns out, or a ConfigError of one sentence with the nearest valid value.

A pattern is a host name ("pypi.org") or "*." and one ("*.example.org": every name below it, at any depth, not the name itself).
Presets are short lists of patterns with a name.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Final, NoReturn

from sandmill.errors import ConfigError

PRESETS: Final[Mapping[str, tuple[str, ...]]] = {
    "pypi": ("pypi.org", "files.pythonhosted.org"),
    "npm": ("registry.npmjs.org",),
    "debian": ("deb.debian.org", "security.debian.org"),
    "huggingface": ("huggingface.co", "*.huggingface.co", "*.hf.co"),
    "github": ("github.com", "api.github.com", "codeload.github.com", "*.githubusercontent.com"),
}
"""What each needs to fetch packages, models or code by its ordinary client. Whoever may publish there can be sent data by its name."""
MOST_HOSTS: Final = 256
_LONGEST_NAME: Final = 253
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_DIFFERS = re.compile("[ßς\u200c\u200d]")
"""Letters that the two versions of IDNA write differently: which name is meant cannot be told."""


def host_name(text: str) -> str | None:
    """A host name as it came over the wire, in the form in which names are compared; None when it is none.

    Case and one trailing dot do not count. At least two labels of ASCII letters, digits, '-' and '_', no address.
    """
    if not text.isascii():
        return None
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > _LONGEST_NAME or len(labels) < 2 or labels[-1].isdigit() or labels[-1].startswith("0x"):
        return None
    return name if all(map(_LABEL.fullmatch, labels)) else None


def parse_host(text: str, *, field: str | None = None) -> str:
    """The pattern that `text` means. Raises ConfigError."""
    if not isinstance(text, str) or not text:
        _refuse(f'expected a host name such as "pypi.org", found {_shown(text)}', field)
    if text == "*":
        _refuse('"*" would allow every host: that is the policy Open (in Python: Egress.open())', field)
    star, rest = ("*.", text[2:]) if text.startswith("*.") else ("", text)
    if _is_address(rest):
        _refuse(f"{_shown(text)} is an address; egress is allowed by host name only", field)
    if _DIFFERS.search(rest):
        _refuse(f'{_shown(text)} is written differently in the two versions of IDNA; write its ASCII form ("xn--...")', field)
    name = host_name(_ascii(rest))
    if name is None:
        _refuse(f"{_shown(text)} is not a host name{_hint(text)}", field)
    if star and name.count(".") < 1:
        _refuse(f"{_shown(text)} covers too much; name a domain below it", field)
    return star + name


def parse_hosts(hosts: Iterable[str], presets: Iterable[str], *, field: str | None = None) -> tuple[str, ...]:
    """All patterns of both, each once, in order. Raises ConfigError naming the one that is wrong."""
    if isinstance(hosts, str) or isinstance(presets, str):
        _refuse("expected a list of names, found one text", field)
    patterns = [parse_host(host, field=field) for host in hosts]
    for preset in presets:
        if preset not in PRESETS:
            near = difflib.get_close_matches(str(preset), PRESETS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(PRESETS)}"
            _refuse(f"no preset is named {_shown(preset)}; {hint}", field)
        patterns.extend(PRESETS[preset])
    if len(patterns) > MOST_HOSTS:
        _refuse(f"at most {MOST_HOSTS} hosts can be allowed, not {len(patterns)}", field)
    return tuple(dict.fromkeys(patterns))


def _ascii(name: str) -> str:
    if name.isascii():
        return name
    try:
        return name.encode("idna").decode("ascii")
    except UnicodeError:
        return ""


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def _hint(text: str) -> str:
    """The host inside what is a URL, has a port, or is only a part of a name."""
    inner = re.sub(r"^[a-z]+://", "", text.strip().lower()).split("/")[0].rpartition("@")[2].split(":")[0].lstrip(".")
    return f'; write "{inner}"' if inner != text and host_name(inner) else ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refuse(sentence: str, field: str | None) -> NoReturn:
    raise ConfigError(sentence, field=field)
