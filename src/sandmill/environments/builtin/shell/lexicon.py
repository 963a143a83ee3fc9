"""Every word that a word-level tokenizer needs for the shell family's dialogues, special tokens excluded."""

from __future__ import annotations

from sandmill.environments.builtin.shell.families import COMMANDS
from sandmill.environments.builtin.shell.options import DEMO_FAMILIES
from sandmill.environments.builtin.shell.phrasings import PHRASINGS
from sandmill.environments.builtin.shell.words import WORDS
from sandmill.environments.observe import FAILED, NOTHING

DIALOGUE = ("Q:", "$", "=", ";", NOTHING, FAILED)
ERRORS = (
    "wc:", "cat:", "grep:", "tail:", "awk:", "ls:", "bash:", "line", "1:", "command", "not", "found", "cannot", "open", "for", "reading:",
    "No", "such", "file", "or", "directory", "(No", "directory)", "Is", "a",
)  # fmt: skip
"""Words of the tools' own messages; a file name inside one (`x.txt:`) stays unknown."""
NUMBERS = tuple(str(number) for number in range(130))


def vocabulary() -> tuple[str, ...]:
    """Distinct words in a fixed order: dialogue marks, phrasings and commands, messages, numbers below 130, words, file names.

    Covers every prompt, command, output and answer of the demonstration families at difficulty `easy`.
    """
    phrases = {word for family in DEMO_FAMILIES for templates in PHRASINGS[family].values() for text in templates for word in text.split()}
    commands = {word for template in COMMANDS.values() for word in template.format(f="{f}", k="{k}").split()}
    fixed = sorted(word for word in phrases | commands if word not in {"{f}", "{k}"} and not word.isdecimal())
    names = tuple(f"{word}.txt" for word in WORDS)
    return tuple(dict.fromkeys((*DIALOGUE, *fixed, *ERRORS, *NUMBERS, *WORDS, *names)))
