"""What a command has done. In: a sentence for people, and the same as values. Out: one line on stdout, whichever was asked for."""

from __future__ import annotations

import json
import sys


def tell(sentence: str, *, as_json: bool, **values: object) -> None:
    """Writes the sentence, or the values as one JSON object."""
    sys.stdout.write((json.dumps(values, ensure_ascii=True) if as_json else sentence) + "\n")
    sys.stdout.flush()
