"""How each family asks its question, by split. `{f}`, `{g}` are file names, `{k}` is a word.

Demonstrations and reinforcement learning share the `train` phrasings. Those of `tuning`, `heldout` and `unseen` occur nowhere else,
are pairwise different, and are made only of words that the `train` phrasings contain, so that a word-level model knows each word.
Punctuation stands apart: one token per blank-separated word.
"""

from __future__ import annotations

from collections.abc import Mapping

PHRASINGS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "lines": {
        "train": ("how many lines in {f} ?", "count the lines of {f}", "number of lines in {f} ?", "how many lines does {f} have ?"),
        "tuning": ("what is the number of lines of {f} ?", "count the number of lines in {f}"),
        "heldout": ("what number of lines does {f} have ?", "how many lines are in {f} ?"),
        "unseen": ("number of lines of {f} ?", "in {f} , what is the number of lines ?"),
    },
    "files": {
        "train": (
            "how many files are here ?",
            "count the files",
            "number of files in this folder ?",
            "how many files does this folder have ?",
        ),
        "tuning": ("count files in this folder", "what is the number of files here ?"),
        "heldout": ("how many files are in this folder ?", "count the files in this folder"),
        "unseen": ("what number of files does this folder have ?", "number of files here ?"),
    },
    "read": {
        "train": ("what is {k} in {f} ?", "read {k} from {f}", "find {k} in {f}", "what does {f} have for {k} ?"),
        "tuning": ("what is in {f} for {k} ?", "read {k} in {f}"),
        "heldout": ("find {k} from {f}", "read what {k} is in {f}"),
        "unseen": ("find what {k} is in {f}", "in {f} , what is {k} ?"),
    },
    "sum": {
        "train": (
            "sum of column 2 in {f} ?",
            "add up column 2 of {f}",
            "total of column 2 in {f} ?",
            "what does column 2 of {f} add up to ?",
        ),
        "tuning": ("what is the total of column 2 of {f} ?", "add up column 2 in {f}"),
        "heldout": ("what is the sum of column 2 of {f} ?", "total of column 2 from {f} ?"),
        "unseen": ("find the sum of column 2 in {f}", "in {f} , what does column 2 add up to ?"),
    },
    "last": {
        "train": ("last line of {f} ?", "what is the last line of {f} ?", "print the final line of {f}", "read the last line in {f}"),
        "tuning": ("what is the final line in {f} ?", "print the last line of {f}"),
        "heldout": ("what is the final line of {f} ?", "print the last line in {f}"),
        "unseen": ("read the final line of {f}", "in {f} , what is the last line ?"),
    },
    "hop": {
        "train": (
            "{f} names a file , what is in it ?",
            "open the file named in {f}",
            "follow {f} and read that file",
            "what is in the file that {f} names ?",
        ),
        "tuning": ("read the file that {f} names", "follow {f} , what is in that file ?"),
        "heldout": ("open the file that {f} names", "read the file named in {f}"),
        "unseen": ("{f} names a file , open it and read it", "what is in the file named in {f} ?"),
    },
    "find": {
        "train": ("which file has the word {k} ?", "find the file that has {k} in it", "name the file with the word {k}"),
        "tuning": ("which file has {k} in it ?",),
        "heldout": ("find the file with the word {k}",),
        "unseen": ("name the file that has the word {k}",),
    },
    "write": {
        "train": (
            "write the number of lines of {f} to {g}",
            "count the lines of {f} and put the number in {g}",
            "put how many lines {f} has into {g}",
        ),
        "tuning": ("put the number of lines of {f} in {g}",),
        "heldout": ("count the lines of {f} and write the number to {g}",),
        "unseen": ("write how many lines {f} has into {g}",),
    },
    "fix": {
        "train": (
            "{s} must {job} of the file it is given , but it is wrong . fix it , run it on {f} and read what it prints",
            "the script {s} should {job} of a given file . it does not : fix it , and name what it prints for {f}",
        ),
        "tuning": ("{s} is wrong : it should {job} of the given file . fix it and name what it prints for {f}",),
        "heldout": ("fix the script {s} : it must {job} of the file it is given . run it on {f} , what is printed ?",),
        "unseen": ("{s} should {job} of the file it is given but does not . fix {s} , run it on {f} and name what it prints",),
    },
}
"""Family -> split -> templates."""


def phrasing_words(split: str, families: tuple[str, ...]) -> frozenset[str]:
    """The fixed words (placeholders excluded) of a split's phrasings."""
    words = (word for family in families for template in PHRASINGS[family][split] for word in template.split())
    return frozenset(word for word in words if "{" not in word)
