"""What a program may plant for the host's file API: links, special files, deep trees, names that are instructions elsewhere."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sandmill.errors import SandboxFileError
from sandmill.sandboxes import Sandbox


def test_links_planted_in_the_sandbox_lead_the_host_nowhere(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host")
    box.run("ln", "-s", str(secret), "link")
    box.run("ln", "-s", "/proc/1/root" + str(secret), "magic")
    box.run("ln", "-s", "/proc/self/mem", "mem")
    box.run("ln", "-s", "/etc/shadow", "shadow")
    for name in ("link", "magic", "mem", "shadow"):
        with pytest.raises(SandboxFileError):
            box.read(name)
    with pytest.raises(SandboxFileError):
        box.write("magic", b"x")
    with pytest.raises(SandboxFileError):
        box.write("mem", b"x")
    box.run("ln", "-s", str(tmp_path), "folder")
    with pytest.raises(SandboxFileError):
        box.list("folder")
    box.write("folder2/a", b"x")
    assert secret.read_text() == "host"
    assert list(tmp_path.iterdir()) == [secret]


def test_hard_links_give_no_right_to_what_they_name(box: Sandbox) -> None:
    """The host reads with the user's rights, and a file that is not the user's gets no second name."""
    box.write("/root/secret", b"s", user="root")
    box.run("chmod", "600", "/root/secret", user="root")
    box.run("sh", "-c", "chmod 711 /root; ln /root/secret mine; ln /etc/passwd other; ln /usr/bin/env program")
    for name in ("mine", "program"):
        with pytest.raises(SandboxFileError):
            box.read(name)
    box.run("sh", "-c", "ln /root/secret /home/user/given; chmod 644 /home/user/given; ln /etc/hostname /home/user/name", user="root")
    before = Path("/etc/hostname").read_bytes()
    with pytest.raises(SandboxFileError):
        box.write("/home/user/given", b"x")
    with pytest.raises(SandboxFileError):
        box.write("/etc/hostname", b"x")
    assert Path("/etc/hostname").read_bytes() == before


def test_special_files_planted_in_the_sandbox_do_not_stop_the_host(box: Sandbox) -> None:
    box.run("mkfifo", "pipe")
    box.run("python3", "-c", "import socket; socket.socket(socket.AF_UNIX).bind('sock')")
    for name in ("pipe", "sock", "/dev/zero", "/dev/tty", "."):
        with pytest.raises(SandboxFileError):
            box.read(name)
        with pytest.raises(SandboxFileError):
            box.write(name, b"x")
    assert box.run("echo", "alive").stdout == b"alive\n"


def test_the_host_acts_with_the_users_rights_inside(box: Sandbox) -> None:
    with pytest.raises(SandboxFileError) as refused:
        box.write("/etc/passwd", b"x")
    assert refused.value.errno == errno.EACCES
    with pytest.raises(SandboxFileError):
        box.list("/root")
    with pytest.raises(SandboxFileError) as read_only:
        box.write("/usr/bin/new", b"x", user="root")
    assert read_only.value.errno == errno.EROFS
    box.write("/root/mine", b"x", user="root")
    assert [entry.name for entry in box.list("/root", user="root")] == ["mine"]
    assert box.run("stat", "-c", "%u %a", "/root/mine", user="root").stdout == b"0 644\n"


def test_a_deep_tree_is_removed_without_recursion(box: Sandbox) -> None:
    box.run("python3", "-c", "import os\nfor _ in range(700): os.mkdir('d'); os.chdir('d'); open('f', 'w').close()", timeout=20)
    assert box.run("mkdir", "-p", "wide/a/b", "wide/c").exit_code == 0
    box.remove("d", recursive=True)
    box.remove("wide", recursive=True)
    assert box.list() == []


def test_a_hostile_names_folder_listing_is_data(box: Sandbox) -> None:
    names = [b"\xff\xfe", b"\x1b[2J", b"a\nb", b"-rf", b"<script>"]
    box.run("python3", "-c", f"[open(n, 'w').close() for n in {names!r}]")
    listed = {os.fsencode(entry.name) for entry in box.list()}
    assert listed == set(names)
    for entry in box.list():
        box.remove(entry.name)
    assert box.list() == []
