"""Files behave the same at every backend: contents, listings, rights, and names that were chosen to hurt."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from sandmill.errors import SandboxFileError
from sandmill.sandboxes import Sandbox

HOSTILE = ("a b", "-rf", "new\nline", "ü", "$(id)", "'", '"', "\\", "a*", "..x", "%41", "{}", " ", ";")


def refused(number: int, act: Callable[[], object]) -> None:
    with pytest.raises(SandboxFileError) as error:
        act()
    assert error.value.errno == number


def test_contents_come_back_as_they_went(box: Sandbox) -> None:
    data = bytes(range(256)) * 8000
    box.write("deep/er/data", data)
    assert box.read("deep/er/data") == data
    assert box.read("/workspace/deep/er/data", max_bytes=len(data)) == data
    refused(errno.EFBIG, lambda: box.read("deep/er/data", max_bytes=len(data) - 1))
    box.write("deep/er/data", "short")
    assert box.read("deep/er/data") == b"short"
    box.write("empty", b"")
    assert box.read("empty") == b""


def test_files_can_be_there_from_the_beginning(box: Sandbox) -> None:
    assert box.read("given/a") == b"a\n"
    assert box.run("stat", "-c", "%U %a", "given/a").stdout == b"user 644\n"


def test_many_files_at_once(box: Sandbox) -> None:
    box.write_files({f"many/{number}": b"%d" % number for number in range(50)})
    assert [entry.name for entry in box.list("many")] == sorted(str(number) for number in range(50))
    assert box.read("many/49") == b"49"


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_only_names(box: Sandbox, name: str) -> None:
    box.mkdir("names")
    try:
        box.write(f"names/{name}", b"x")
        assert [entry.name for entry in box.list("names")] == [name]
        assert box.read(f"names/{name}") == b"x"
        box.remove(f"names/{name}")
        assert box.list("names") == []
    finally:
        box.remove("names", recursive=True)


def test_names_that_are_no_text_are_listed(box: Sandbox) -> None:
    box.run("sh", "-c", "mkdir -p odd && touch \"odd/$(printf '\\377')\"")
    assert [entry.name.encode("utf-8", "surrogateescape") for entry in box.list("odd")] == [b"\xff"]


def test_a_listing_says_what_things_are(box: Sandbox) -> None:
    box.run("sh", "-c", "mkdir -p kinds/folder && cd kinds && printf 12345 > file && ln -sf /etc/passwd link && mkfifo fifo")
    assert [(entry.name, entry.kind) for entry in box.list("kinds")] == [
        ("fifo", "other"),
        ("file", "file"),
        ("folder", "folder"),
        ("link", "link"),
    ]
    assert next(entry.size_bytes for entry in box.list("kinds") if entry.name == "file") == 5


def test_paths_that_cannot_be_used_say_why(box: Sandbox) -> None:
    refused(errno.ENOENT, lambda: box.read("missing"))
    refused(errno.ENOENT, lambda: box.list("missing"))
    refused(errno.ENOENT, lambda: box.remove("missing"))
    refused(errno.EISDIR, lambda: box.read("given"))
    refused(errno.ENOTDIR, lambda: box.write("given/a/b", b""))
    refused(errno.EINVAL, lambda: box.read("a\0b"))


def test_rights_are_those_of_whoever_is_asked_for(box: Sandbox) -> None:
    box.run("sh", "-c", "umask 077; echo secret > /root/secret", user="root")
    refused(errno.EACCES, lambda: box.read("/root/secret"))
    assert box.read("/root/secret", user="root") == b"secret\n"
    refused(errno.EACCES, lambda: box.write("/root/mine", b""))
    box.write("/root/mine", b"", user="root")
    box.run("sh", "-c", "ln -sf /root/secret trap")
    refused(errno.EACCES, lambda: box.read("trap"))


def test_what_is_no_file_is_never_waited_for(box: Sandbox) -> None:
    box.run("sh", "-c", "mkfifo -m 666 pipe; ln -sf /proc/1/mem mem; ln -sf /proc/self/environ environ")
    for name in ("pipe", "mem", "environ", "/dev/zero"):
        with pytest.raises(SandboxFileError):
            box.read(name)
    with pytest.raises(SandboxFileError):
        box.write("pipe", b"x")


def test_removing(box: Sandbox) -> None:
    box.write("tree/a/b/c", b"")
    refused(errno.ENOTEMPTY, lambda: box.remove("tree"))
    box.run("sh", "-c", "mkdir -p outside && echo kept > outside/kept && ln -s ../../outside tree/a/link")
    box.remove("tree", recursive=True)
    refused(errno.ENOENT, lambda: box.list("tree"))
    assert box.read("outside/kept") == b"kept\n"
    box.mkdir("single/folder")
    refused(errno.EEXIST, lambda: box.mkdir("single/folder"))
    box.remove("single/folder")
    assert box.list("single") == []


def test_files_open_as_python_files(box: Sandbox) -> None:
    with box.open("notes", "w") as file:
        file.write("one\n")
    with box.open("notes", "a") as file:
        file.write("two é\n")
    with box.open("notes") as file:
        assert file.read() == "one\ntwo é\n"
    with box.open("notes", "rb") as file:
        assert file.read(3) == b"one"
    refused(errno.EEXIST, lambda: box.open("notes", "x"))
    with box.open("fresh", "xb") as file:
        file.write(b"\0\xff")
    assert box.read("fresh") == b"\0\xff"
    refused(errno.ENOENT, lambda: box.open("missing"))
    refused(errno.EACCES, lambda: box.open("/etc/shadow-to-be", "w").close())
