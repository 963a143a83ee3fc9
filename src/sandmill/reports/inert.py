"""Text that an agent, a task or a file name controls in; text that cannot act on a terminal, a page or a spreadsheet out.

Nothing is dropped silently: what could act is written so that a person sees it was there (␛ for ESC, ⟨U+202E⟩ for a bidi
override). Ordinary text of every language passes unchanged.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from typing import Any

MAX_COMBINING = 4
"""Combining marks in a row; more of them would paint over neighbouring lines."""

_ACTIVE_CATEGORIES = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
_HARMLESS = re.compile(r"[\x20-\x7e\n]*\Z")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def inert(text: str, *, limit: int | None = None) -> str:
    """One line, safe on any terminal: control codes, bidi and invisible characters, lone surrogates and line breaks made visible.

    `limit` cuts to so many characters and says how many are missing.
    """
    return inert_block(text, limit=limit).replace("\n", "␊").replace("\t", "␉")


def inert_block(text: str, *, limit: int | None = None) -> str:
    """As `inert`, but line feeds and tabs stay (CR LF counts as one line feed)."""
    cut = text if limit is None or len(text) <= limit else text[:limit]
    rest = f"… ({len(text) - len(cut):,} more characters)" if len(cut) < len(text) else ""
    if _HARMLESS.match(cut):
        return cut + rest
    written: list[str] = []
    combining = 0
    for character in cut.replace("\r\n", "\n"):
        category = unicodedata.category(character)
        combining = combining + 1 if category in ("Mn", "Me") else 0
        active = category in _ACTIVE_CATEGORIES and character not in "\n\t"
        written.append(_visible(character) if active or combining > MAX_COMBINING else character)
    return "".join(written) + rest


def inert_html(text: str, *, limit: int | None = None) -> str:
    """Safe between tags and inside quoted attributes of a page."""
    return html.escape(inert_block(text, limit=limit), quote=True)


def inert_cell(text: str) -> str:
    """Safe as a cell of a CSV file: a leading apostrophe keeps a spreadsheet from running it as a formula."""
    plain = inert_block(text)
    return f"'{plain}" if plain.lstrip(" ").startswith(_FORMULA) else plain


def script_json(value: Any) -> str:
    """JSON that stays data inside `<script type="application/json">`: pure ASCII without `<`, `>` or `&`."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _visible(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"
