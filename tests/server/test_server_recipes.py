"""Archives that callers upload: files and folders of them, never anything outside the folder."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sandmill.errors import ConfigError
from sandmill.sandboxes.images.dockerfile import json_words, parse, words
from sandmill.server import recipes
from sandmill.server.recipes import dockerfile_of, unpack, unpack_part


def archive(place: Path, fill: Callable[[tarfile.TarFile], None], mode: str = "w:gz") -> Path:
    with tarfile.open(place, mode) as made:
        fill(made)
    return place


def member(name: str, data: bytes = b"", **fields: object) -> Callable[[tarfile.TarFile], None]:
    def fill(made: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        for field, value in fields.items():
            setattr(info, field, value)
        made.addfile(info, io.BytesIO(data))

    return fill


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_files_folders_and_the_executable_bit(tmp_path: Path, mode: str) -> None:
    def fill(made: tarfile.TarFile) -> None:
        member("a/run", b"x", mode=0o4755)(made)
        member("./b", b"y", mode=0o666)(made)
        member("empty", type=tarfile.DIRTYPE)(made)

    unpack(archive(tmp_path / "t", fill, mode), tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")): path.stat().st_mode & 0o7777 for path in (tmp_path / "out").rglob("*")}
    assert found == {"a": 0o755, "a/run": 0o755, "b": 0o644, "empty": 0o755}


@pytest.mark.parametrize(
    "fill",
    [
        member("../out", b"x"),
        member("a/../../out", b"x"),
        member("/".join("x" * 101), b"x"),
        member("link", type=tarfile.SYMTYPE, linkname="/etc"),
        member("hard", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        member("pipe", type=tarfile.FIFOTYPE),
        member("disk", type=tarfile.BLKTYPE),
    ],
)
def test_what_is_not_a_file_below_the_folder_is_refused(tmp_path: Path, fill: Callable[[tarfile.TarFile], None]) -> None:
    with pytest.raises(ConfigError, match="archive"):
        unpack(archive(tmp_path / "t", fill), tmp_path / "folder")
    assert {path.name for path in tmp_path.iterdir()} == {"t", "folder"}


def test_an_absolute_name_lies_below_the_folder(tmp_path: Path) -> None:
    unpack(archive(tmp_path / "t", member("/etc/x", b"x")), tmp_path / "out")
    assert (tmp_path / "out" / "etc" / "x").read_bytes() == b"x"


def test_a_file_where_a_folder_is_needed(tmp_path: Path) -> None:
    def fill(made: tarfile.TarFile) -> None:
        member("a", b"x")(made)
        member("a/b", b"y")(made)

    with pytest.raises(ConfigError, match="cannot be unpacked"):
        unpack(archive(tmp_path / "t", fill), tmp_path / "out")


@pytest.mark.parametrize("data", [b"", b"no archive", b"\x1f\x8b" + b"\0" * 50])
def test_what_is_no_archive_is_no_context(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(ConfigError, match="cannot be read"):
        unpack(tmp_path / "t", tmp_path / "out")


def test_a_truncated_archive(tmp_path: Path) -> None:
    whole = archive(tmp_path / "t", member("a", bytes(range(256)) * 1000)).read_bytes()
    (tmp_path / "t").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="cannot be read"):
        unpack(tmp_path / "t", tmp_path / "out")


def test_an_archive_that_claims_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "_MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match="more than"):
        unpack(archive(tmp_path / "t", member("a", b"x" * 1001)), tmp_path / "out")
    assert not (tmp_path / "out" / "a").exists()


def test_one_file_is_told_from_a_folder_by_its_destination(tmp_path: Path) -> None:
    one = archive(tmp_path / "t", member("main.py", b"x"))
    assert unpack_part(one, tmp_path / "0", "/srv/main.py")
    assert not unpack_part(one, tmp_path / "1", "/srv/app")
    assert ((tmp_path / "0" / "file").read_bytes(), (tmp_path / "1" / "main.py").read_bytes()) == (b"x", b"x")


@pytest.mark.parametrize("value", ["plain", 'a "b" $HOME ${X} \\ \\n #x', " spaced ", "", "'single'", "[", "ends with \\"])
def test_values_mean_themselves(value: str) -> None:
    text = dockerfile_of([{"env": {"A": value}}, {"run": [value or "true"]}, {"workdir": f"/{value}"}], "host", None, [])
    _, env, run, workdir = parse(text)
    assert words(env.text, lambda name: "replaced", env) == [f"A={value}"]
    assert json_words(run.text) == ["/bin/sh", "-ec", value or "true"]
    assert words(workdir.text, lambda name: "replaced", workdir) == [f"/{value}"]
