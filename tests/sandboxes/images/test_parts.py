"""Parts of what a sandbox wrote: what lies below the named paths comes along as it was, and nothing else, whatever the sandbox left."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sandmill.sandboxes import Sandbox, SandboxSpec
from sandmill.sandboxes.images import Store

Maker = Callable[..., Sandbox]


def written(make: Maker, script: str) -> Sandbox:
    box = make(workdir="/app")
    done = box.run("bash", "-c", script, user="root", timeout=20, merge_stderr=True)
    assert done.exit_code == 0, done.stdout
    return box


def listed(box: Sandbox, script: str) -> str:
    return box.run("bash", "-c", script, user="root", timeout=20, merge_stderr=True).stdout.decode().strip()


def part(box: Sandbox, *paths: str, never: tuple[str, ...] = ()) -> tuple[Sandbox, tuple[str, ...]]:
    return box.fork_parts(SandboxSpec(), paths, never=never)


def test_only_what_is_named_comes_along(make: Maker) -> None:
    box = written(make, "mkdir -p /app/d /srv/x; echo in > /app/d/f; echo out > /srv/x/f; chown 1234 /app/d/f; chmod 640 /app/d/f")
    copy, left = part(box, "/app")
    with copy:
        assert listed(copy, "cat /app/d/f; stat -c '%u %a' /app/d/f; ls /srv; head -c 4 /etc/passwd") == "in\n1234 640\nroot"
    assert [path for path in left if path.startswith("/srv")] == ["/srv", "/srv/x", "/srv/x/f"]


def test_removals_come_along(make: Maker) -> None:
    box = written(make, "mkdir -p /app/d; touch /app/d/f")
    base, _ = part(box, "/app")
    with base:
        again = base
        listed(again, "rm -rf /app/d; mkdir /app/d; touch /app/d/new")
        copy, _ = part(again, "/app")
        with copy:
            assert listed(copy, "ls /app/d") == "new"


def test_a_file_can_be_named_and_a_path_below_another_is_no_hindrance(make: Maker) -> None:
    box = written(make, "mkdir -p /app/d /srv/d; echo a > /app/d/f; echo b > /srv/d/f; echo c > /srv/d/g")
    copy, _ = part(box, "/app", "/app/d/f", "/srv/d/f", "/srv/none")
    with copy:
        assert listed(copy, "cat /app/d/f /srv/d/f; ls /srv/d") == "a\nb\nf"


@pytest.mark.parametrize("script", ["ln -s /etc /app", "ln -s /etc/passwd /app", "mkfifo /app", "true"])
def test_a_named_path_that_became_something_else_is_taken_as_removed(make: Maker, script: str) -> None:
    box = written(make, f"cd /; rm -rf /app; {script}")
    copy, _ = part(box, "/app")
    with copy:
        assert (
            listed(copy, "ls /app /app/passwd 2>&1 | head -1; [ -L /app ] && echo link")
            == "ls: cannot access '/app': No such file or directory"
        )


def test_a_parent_keeps_the_attributes_that_it_had(make: Maker) -> None:
    box = written(make, "mkdir -p /srv/d; touch /srv/d/f; chmod 777 /srv; chown 1234 /srv")
    copy, _ = part(box, "/srv/d")
    with copy:
        assert listed(copy, "stat -c '%u %a' /srv; ls /srv/d") == "0 755\nf"


def test_a_parent_that_was_made_anew_hides_what_was_below_it(make: Maker) -> None:
    first = written(make, "mkdir -p /srv/d; touch /srv/d/old")
    base, _ = part(first, "/srv")
    with base:
        listed(base, "rm -rf /srv; mkdir -p /srv/d; touch /srv/d/new")
        copy, _ = part(base, "/srv/d")
        with copy:
            assert listed(copy, "ls /srv/d") == "new"
        gone, _ = part(base, "/srv/other")
        with gone:
            assert listed(gone, "ls /srv/d") == "old"


def test_everything_but_the_systems_own(make: Maker) -> None:
    box = written(make, "mkdir -p /srv/d /new/d /opt/d; touch /srv/d/f /new/d/f /opt/d/f; echo evil >> /etc/passwd")
    copy, left = part(box, "/", never=("/etc", "/opt/x"))
    with copy:
        assert listed(copy, "ls /srv/d /new/d; ls /opt; grep -c evil /etc/passwd") == "/new/d:\nf\n\n/srv/d:\nf\n0"
    assert "/etc/passwd" in left
    assert "/opt/d/f" in left


def test_nothing_of_it_stays_in_the_store(make: Maker, shared: Store) -> None:
    before = shared.total_bytes()
    box = written(make, "head -c 1000000 /dev/urandom > /app/f")
    copy, _ = part(box, "/app")
    copy.terminate()
    box.terminate()
    shared.collect()
    assert shared.total_bytes() <= before
