"""Sources of small packages and adapters, and wheels made of them on the spot."""

import zipfile

HEAD = """
import asyncio, os, signal, subprocess, sys, threading, time

class Adapter:
    def describe(self):
        return {"name": "small", "version": "1", "splits": {"train": 6, "heldout": 3}}

    def tasks(self, split, start, stop):
        return [{"prompt": f"{split} {n}?", "answer": str(n), "row": {"n": n}} for n in range(start, stop)]

    def grade(self, row, answer, context):
"""


def adapter(grade, more=""):
    """An adapter whose `grade` runs the given statements; they see row, answer and context."""
    body = "\n".join(f"        {line}" for line in grade.strip("\n").splitlines())
    return f"{HEAD}{body}\n{more}\n\ndef load(options):\n    return Adapter()\n"


def wheel(folder, name, files, version="1.0", requires=(), more=()):
    """A wheel with these files (text by path); `more`: further names and bytes as they are. Returns its path."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    metadata = "".join([f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", *(f"Requires-Dist: {one}\n" for one in requires)])
    with zipfile.ZipFile(path, "w") as archive:
        for place, text in files.items():
            archive.writestr(place, text)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        for member, data in more:
            archive.writestr(member, data)
        archive.writestr(f"{info}/RECORD", "")
    return path
