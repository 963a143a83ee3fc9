"""A command's output in; the one line that a line dialogue shows out. Output is hostile: nothing in it may start a new line."""

from __future__ import annotations

SEPARATOR = " ; "
NOTHING, FAILED = "none", "error"


def observation_line(output: str, *, ok: bool = True) -> str:
    """`output` on one line: line ends become ` ; `, runs of blanks one blank, control characters U+FFFD.

    Where nothing was printed the line says `none`, or `error` for a command that failed.
    Example: `"a.txt\\nb.txt\\n"` becomes `"a.txt ; b.txt"`.
    """
    lines = (" ".join(_inert(line).split()) for line in output.splitlines())
    return SEPARATOR.join(line for line in lines if line) or (NOTHING if ok else FAILED)


def _inert(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() or char == "\t" else "\ufffd" for char in line)
