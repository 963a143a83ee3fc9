"""Real sandboxes that start from images: what they see, who they are, and that a hostile image gains nothing."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from image_archives import Member, docker_save, folder, layer, programs, symlink

from sandmill.errors import ConfigError, ExecFailed, ImageError, SandboxCreateFailed
from sandmill.sandboxes import Sandbox
from sandmill.sandboxes.images import Store

Maker = Callable[..., Sandbox]
PASSWD = Member("etc/passwd", b"root:x:0:0::/root:/bin/sh\napp:x:1234:1234::/srv/app:/bin/sh\n")
BASE = layer(*programs("sh", "cat", "ls", "id", "stat", "touch", "env"), folder("etc"), PASSWD)


@pytest.fixture
def archive(tmp_path: Path, shared: Store) -> Callable[..., str]:
    """Writes an archive on the small base; its reference."""

    def write(*layers: bytes, **config: object) -> str:
        return f"docker-archive:{docker_save(tmp_path / 'image.tar', [BASE, *layers], config=config)}"

    return write


def output(box: Sandbox, command: str, **options: object) -> str:
    done = box.run("sh", "-c", command, timeout=10, **options)  # type: ignore[arg-type]
    assert done.exit_code == 0, done.stderr
    return done.stdout.decode().strip()


def test_layers_lie_upon_one_another(archive: Callable[..., str], make: Maker) -> None:
    lower = layer(Member("gone", b"x"), Member("kept", b"kept"), folder("d"), Member("d/old", b"x"), folder("r"), Member("r/old", b"x"))
    upper = layer(
        Member(".wh.gone"), folder("d"), Member("d/.wh..wh..opq"), Member("d/new", b"x"), Member(".wh.r"), folder("r"), Member("r/new")
    )
    box = make(image=archive(lower, upper))
    assert output(box, "cat kept; ls /d /r; ls /", workdir="/").split() >= ["kept"]
    assert sorted(entry.name for entry in box.list("/d")) == ["new"]
    assert sorted(entry.name for entry in box.list("/r")) == ["new"]
    names = {entry.name for entry in box.list("/")}
    assert "gone" not in names
    assert {"kept", "proc", "dev", "sys", "tmp", "workspace"} <= names


def test_env_workdir_and_user_of_the_image_are_respected(archive: Callable[..., str], make: Maker) -> None:
    owned = layer(folder("srv/app", uid=1234, gid=1234))
    box = make(image=archive(owned, Env=["A=image", "B=image"], WorkingDir="/srv/app", User="app"), env={"B": "caller"})
    assert output(box, "echo $A $B $HOME $USER; pwd; id -u; touch mine; stat -c %u mine").split() == [
        "image", "caller", "/srv/app", "app", "/srv/app", "1234", "1234",
    ]  # fmt: skip
    assert box.spec.workdir == "/srv/app"
    box.write("written", b"x")
    assert output(box, "stat -c %u written") == "1234"
    assert output(box, "id -u", user="root") == "0"
    assert output(box, "id -u; touch /tmp/x; stat -c %u /tmp/x", user="77").split() == ["77", "77"]
    with pytest.raises(ConfigError, match="or a number"):
        box.run("id", user="nobody-knows")


def test_the_group_of_the_image_is_respected_by_commands_and_files(archive: Callable[..., str], make: Maker) -> None:
    box = make(image=archive(User="1234:77"), files={"early": b"x"})
    box.write("late", b"x")
    look = "id -u; id -g; touch own; stat -c '%u:%g' own late early ."
    assert output(box, look).split() == ["1234", "77", *["1234:77"] * 4]
    box = make(image=archive(User="0:5"))
    assert output(box, "id -u; id -g; touch own; stat -c '%u:%g' own").split() == ["0", "5", "0:5"]


def test_an_image_without_a_user_runs_as_its_root_and_the_caller_may_choose_a_workdir(archive: Callable[..., str], make: Maker) -> None:
    box = make(image=archive(WorkingDir="/srv"), workdir="/usr/src/app")
    assert output(box, "id -u; pwd").split() == ["0", "/usr/src/app"]


def test_sandboxes_share_layers_and_write_each_for_itself(archive: Callable[..., str], make: Maker, shared: Store) -> None:
    reference = archive(layer(Member("data", b"original", mode=0o666)))
    one, two = make(image=reference), make(image=reference)
    output(one, "echo changed > /data; touch /new")
    assert output(two, "cat /data") == "original"
    assert "new" not in {entry.name for entry in two.list("/")}
    assert output(make(image=reference), "cat /data") == "original"
    assert one.image == two.image
    assert (shared.layer_folder(one.image.layers[-1]) / "data").read_bytes() == b"original"


def test_a_live_sandbox_holds_its_image_and_lets_go_at_its_end(archive: Callable[..., str], make: Maker, shared: Store) -> None:
    box = make(image=archive())
    with pytest.raises(ImageError, match="used by a live sandbox"):
        shared.remove(box.image.digest)
    shared.prune()
    assert output(box, "cat /etc/passwd")
    box.terminate()
    shared.remove(box.image.digest)
    with pytest.raises(ImageError, match="no image"):
        make(image=box.image)


HOSTILE_ROOTS = {
    "links as mount points": [symlink("dev", "/"), symlink("proc", "/skeleton"), symlink("sys", "../..")],
    "files as mount points": [Member("dev", b"x"), Member("proc", b"x"), Member("sys", b"x")],
    "pipes as mount points": [Member("dev", kind=tarfile.FIFOTYPE), Member("proc", kind=tarfile.FIFOTYPE)],
    "whiteouts as mount points": [Member(".wh.dev"), Member(".wh.proc"), Member(".wh.sys"), Member(".wh.tmp")],
    "the workdir as a link elsewhere in the image": [folder("srv/own"), symlink("workspace", "../../../../srv/own")],
}


@pytest.mark.parametrize("name", HOSTILE_ROOTS)
def test_a_hostile_root_gets_its_own_mounts_and_reaches_nothing_else(archive: Callable[..., str], make: Maker, name: str) -> None:
    box = make(image=archive(layer(*HOSTILE_ROOTS[name])))
    assert {"null", "zero", "tty", "pts"} <= {entry.name for entry in box.list("/dev")}
    assert output(box, "cat /proc/1/status").splitlines()[0] == "Name:\tinit"
    box.write("own", b"mine")
    assert output(box, "cat own") == "mine"


@pytest.mark.parametrize(
    "target", ["/skeleton/home/user", "../../../../skeleton/etc", "/skeleton/planted", "/proc/self/fd/6", "/layers", None]
)
def test_a_workdir_that_leads_out_of_the_image_is_refused(archive: Callable[..., str], make: Maker, target: str | None) -> None:
    """The node's own tree, shared by all sandboxes, lies beside the root while that is being made."""
    with pytest.raises(SandboxCreateFailed, match="workdir"):
        make(image=archive(layer(Member("workspace", b"a file") if target is None else symlink("workspace", target))))
    plain = make()
    assert plain.run("stat", "-c", "%u", "/home/user", "/etc", "/etc/passwd").stdout.split() == [b"1000", b"0", b"0"]
    assert plain.run("ls", "-A", "/home/user").stdout == b""


def test_a_setuid_file_has_no_effect_wherever_it_comes_from(archive: Callable[..., str], make: Maker, shared: Store) -> None:
    identity = next(member for member in programs("id") if member.name == "bin/id")
    box = make(image=archive(layer(identity._replace(name="bin/suid", mode=0o6755)), User="app"))
    assert output(box, "suid -u; stat -c %a /bin/suid").split() == ["1234", "755"]
    outside = shared.layer_folder(box.image.layers[-1]) / "bin" / "suid"
    assert outside.stat().st_mode & 0o6000 == 0


def test_nobody_else_on_the_machine_can_look_into_the_store(archive: Callable[..., str], make: Maker, shared: Store) -> None:
    make(image=archive())
    assert shared.root.stat().st_mode & 0o077 == 0
    assert (shared.root / "layers").stat().st_mode & 0o077 == 0


def test_an_image_without_a_shell_is_no_failure_of_the_sandbox(tmp_path: Path, shared: Store, make: Maker) -> None:
    box = make(image=f"docker-archive:{docker_save(tmp_path / 'empty.tar', [layer(Member('a', b'x'))])}")
    with pytest.raises(ExecFailed):
        box.run("sh", "-c", "true")
    assert box.read("/a") == b"x"
    assert b"localhost" in box.read("/etc/hosts")


@pytest.mark.parametrize(
    "image",
    ["", "no/such:image", "oci:/no/such/path", "docker-archive:relative.tar", "sha256:" + "0" * 64, "../../etc", "a" * 100_000, "x\0y"],
)
def test_an_image_that_is_none_is_refused_in_one_sentence(make: Maker, image: str) -> None:
    with pytest.raises(ImageError, match=r"no (such )?image") as raised:
        make(image=image)
    assert len(str(raised.value)) < 600


def test_many_starts_leave_the_descriptors_as_they_were(archive: Callable[..., str], make: Maker) -> None:
    reference = archive()
    make(image=reference).terminate()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        make(image=reference).terminate()
    assert len(os.listdir("/proc/self/fd")) == before
