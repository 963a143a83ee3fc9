"""Forks have the same files at every backend, and nothing else of their origin; what stands still goes on."""

from __future__ import annotations

import time

import pytest
from places import Maker, Place

from sandmill.errors import ExecFailed, ImageError, SandboxError
from sandmill.sandboxes import Sandbox

PREPARE = """
set -e
umask 022
mkdir -p tree/old/deep tree/empty; echo kept > tree/old/deep/file; mv tree/old tree/new
echo secret > private; chmod 600 private
printf '#!/bin/sh\\necho runs\\n' > script; chmod 755 script
ln -s ../etc/passwd link; ln -s nowhere dangling; mkfifo pipe
ln private second
head -c 3000000 /dev/urandom > large; sha256sum large > sum
touch -d 2001-02-03T04:05:06Z dated; mkdir closed; echo in > closed/in; chmod 555 closed
touch "$(printf 'a\\377\\nb')" -- -rf; : > empty
rm given/a; echo other > given/b
echo mine > /tmp/mine; echo home > ~/home
"""
AS_ROOT = """
echo all > /root/file; chmod 4755 /root/file; mv /etc/group /etc/groups; echo new > /etc/own; chown 1000:1000 /etc/own
mkdir -p /run/a; echo run > /run/a/b
"""
LOOK = """
find . /tmp /var/tmp /home/user /etc /root /run/a -mindepth 1 \\
  \\( -name .guest -o -name .end -o -name .sandmill-guest \\) -prune -o \\
  -printf '%P %y %m %U %G %l\\n' | sort; sha256sum -c sum; stat -c %Y dated
cat tree/new/deep/file second given/b /tmp/mine ~/home; ./script
"""


def look(box: Sandbox) -> list[str]:
    done = box.run("sh", "-c", LOOK, user="root", env={"HOME": "/home/user"})
    assert done.stderr == b""
    return done.stdout.decode("utf-8", "surrogateescape").splitlines()


@pytest.fixture
def origin(make: Maker) -> Sandbox:
    box = make(files={"given/a": b"a\n", "given/b": b"b\n"}, env={"GREETING": "hello"})
    done = box.run("sh", "-c", PREPARE)
    assert (done.exit_code, done.stderr) == (0, b"")
    done = box.run("sh", "-c", AS_ROOT, user="root")
    assert (done.exit_code, done.stderr) == (0, b"")
    return box


def test_a_fork_has_every_file_as_it_was(origin: Sandbox, where: Place) -> None:
    before = look(origin)
    running = origin.exec("sh", "-c", "sleep 4741; sleep 4741")
    forks = origin.fork(2, name="twin")
    try:
        assert sorted(fork.name for fork in forks) == ["twin-0", "twin-1"]
        for fork in forks:
            found = look(fork)
            assert [line.replace(" 4755 ", " 755 ") for line in before] == found  # setuid does not travel
            assert b"4741" not in fork.run("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
            assert fork.run("sh", "-c", "echo $GREETING; pwd").stdout == b"hello\n/workspace\n"
        assert running.returncode is None
    finally:
        for fork in forks:
            fork.terminate()


def test_forks_do_not_share_what_they_write(origin: Sandbox) -> None:
    one, two = origin.fork(2)
    with one, two:
        one.write("given/b", b"1")
        two.run("sh", "-c", "rm -r tree; echo 2 > own")
        assert (origin.read("given/b"), two.read("given/b")) == (b"other\n", b"other\n")
        assert origin.read("tree/new/deep/file") == one.read("tree/new/deep/file") == b"kept\n"
        with pytest.raises(SandboxError):
            origin.read("own")


def test_a_fork_can_be_forked(origin: Sandbox) -> None:
    [child] = origin.fork(1)
    with child:
        child.run("sh", "-c", "echo more > more; rm -rf tree/empty")
        [grandchild] = child.fork(1)
        with grandchild:
            assert look(grandchild) == look(child)
            assert grandchild.read("more") == b"more\n"


def test_a_number_that_makes_no_sense_is_refused(origin: Sandbox) -> None:
    with pytest.raises(ImageError, match="one or more"):
        origin.fork(0)


def test_what_is_frozen_stands_still_until_it_is_thawed(make: Maker) -> None:
    box = make()
    ticking = box.exec("sh", "-c", "i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.02; done")
    deadline = time.monotonic() + 20
    while not box.run("sh", "-c", "cat count 2>/dev/null").stdout:
        assert time.monotonic() < deadline
    box.freeze()
    box.freeze()
    before = box.read("count")
    time.sleep(0.3)
    assert box.read("count") == before
    with pytest.raises(ExecFailed, match="frozen"):
        box.run("true")
    box.thaw()
    while box.read("count") in (before, b""):
        assert time.monotonic() < deadline
    ticking.kill()
