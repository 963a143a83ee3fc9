"""Layers from hostile archives: nothing outside the layer's folder is touched, nothing half-made is kept."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import stat
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import zstandard
from image_archives import Member, digest, docker_save, folder, hard_link, is_empty, layer, symlink

from sandmill.errors import ImageError
from sandmill.sandboxes.images.importing import obtain
from sandmill.sandboxes.images.layers import OPAQUE, Budget, LayerWriter
from sandmill.sandboxes.images.store import Store
from sandmill.sandboxes.images.unpack import unpack

GIB = 1 << 30


def unpacked(tmp_path: Path, members: Iterable[Member] | bytes, **limits: int) -> Path:
    """Unpacks a layer beside a canary that must stay as it is."""
    outside, root = tmp_path / "outside", tmp_path / "layer"
    outside.mkdir()
    (outside / "canary").write_text("untouched")
    root.mkdir()
    data = members if isinstance(members, bytes) else layer(*members)
    try:
        unpack(io.BytesIO(data), LayerWriter(root, Budget(**{"max_bytes": GIB} | limits)), digest=None, diff_id=None, max_bytes=GIB)
    finally:
        assert (outside / "canary").read_text() == "untouched"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["layer", "outside"]
        assert sorted(path.name for path in outside.iterdir()) == ["canary"]
    return root


HOSTILE = {
    "climbs": [Member("../outside/canary", b"x")],
    "climbs in the middle": [Member("a/../../outside/canary", b"x")],
    "hard link climbs": [hard_link("a", "../outside/canary")],
    "hard link through a link": [symlink("d", "/etc"), hard_link("a", "d/passwd")],
    "hard link to nothing": [hard_link("a", "etc/passwd")],
    "hard link to a folder": [folder("d"), hard_link("a", "d")],
    "hard link to a whiteout": [Member(".wh.gone"), hard_link("a", "gone")],
    "hard link replaces its target's folder": [folder("d"), Member("d/f", b"x"), hard_link("d", "d/f")],
    "links in a circle": [symlink("a", "b"), symlink("b", "a"), Member("a/x", b"x")],
    "below a file": [Member("a", b"x"), Member("a/b", b"x")],
    "whiteout of nothing": [Member("a/.wh.")],
    "whiteout of itself": [Member("a/.wh..")],
    "whiteout of what is above": [Member("a/.wh...")],
    "the top as a file": [Member("./", b"x")],
    "name too long": [Member("a" * 300, b"x")],
    "nested too deeply": [folder("/".join("d" * 250))],
    "path too long": [Member("/".join(["d" * 200] * 20), b"x")],
    "link to nowhere": [symlink("a", "x" * 5000)],
    "sparse": [Member("a", b"x", kind=tarfile.GNUTYPE_SPARSE)],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_layer_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ImageError):
        unpacked(tmp_path, HOSTILE[name])


@pytest.mark.parametrize("target", ["/outside", "../outside", "/etc", "../../../../../../..", "/proc/self/root/tmp"])
def test_a_link_as_parent_leads_only_within_the_layer(tmp_path: Path, target: str) -> None:
    root = unpacked(tmp_path, [symlink("way", target), Member("way/canary", b"mine")])
    assert [path.read_bytes() for path in root.rglob("canary") if not path.parent.is_symlink()] == [b"mine"]


def test_an_absolute_name_lies_at_the_top_of_the_layer(tmp_path: Path) -> None:
    assert (unpacked(tmp_path, [Member("/etc/x", b"x")]) / "etc" / "x").read_bytes() == b"x"


def test_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    root = unpacked(tmp_path, [symlink("a", "../outside/canary"), Member("a", b"mine"), symlink("b", "../outside"), folder("b")])
    assert (root / "a").read_bytes() == b"mine"
    assert (root / "b").is_dir()
    assert not (root / "b").is_symlink()


def test_setuid_and_setgid_are_dropped(tmp_path: Path) -> None:
    root = unpacked(tmp_path, [Member("su", b"x", mode=0o6755), folder("d", mode=0o3777), hard_link("su2", "su")])
    assert (root / "su").stat().st_mode & 0o7777 == 0o755
    assert (root / "su2").stat().st_ino == (root / "su").stat().st_ino
    assert (root / "d").stat().st_mode & 0o7777 == 0o1777


def test_devices_are_never_made(tmp_path: Path) -> None:
    kinds = (tarfile.CHRTYPE, tarfile.BLKTYPE)
    root = unpacked(tmp_path, [Member(f"dev{number}", kind=kind) for number, kind in enumerate(kinds)] + [Member("a", b"x")])
    assert os.listdir(root) == ["a"]


def test_owners_are_kept_and_those_that_cannot_be_become_nobody(tmp_path: Path) -> None:
    own = (os.geteuid(), os.getegid())
    expected = [own, own] if own[0] else [(33, 34), (65534, 65534)]  # without root, everything belongs to whoever imports
    root = unpacked(tmp_path, [Member("a", b"x", uid=33, gid=34), Member("b", b"x", uid=1_000_650_000, gid=70_000)])
    assert [(info.st_uid, info.st_gid) for info in map(os.stat, (root / "a", root / "b"))] == expected


def test_what_a_layer_removes_becomes_a_whiteout(tmp_path: Path) -> None:
    root = unpacked(
        tmp_path, [Member("a/.wh.gone"), Member("b/.wh..wh..opq"), Member("c/.wh.new"), folder("c/new"), Member(".wh..wh.plnk")]
    )
    info = (root / "a" / "gone").lstat()
    assert stat.S_ISCHR(info.st_mode)
    assert info.st_rdev == 0
    assert os.getxattr(root / "b", OPAQUE) == b"y"
    assert os.getxattr(root / "c" / "new", OPAQUE) == b"y", "the folder below would show through"
    assert sorted(os.listdir(root)) == ["a", "b", "c"]


def test_what_a_layer_has_itself_is_not_hidden_by_its_own_whiteout(tmp_path: Path) -> None:
    root = unpacked(tmp_path, [Member("a", b"mine"), Member(".wh.a"), folder("d"), Member("d/f", b"mine"), Member(".wh.d")])
    assert (root / "a").read_bytes() == (root / "d" / "f").read_bytes() == b"mine"
    assert os.getxattr(root / "d", OPAQUE) == b"y"


def test_an_attribute_in_the_archive_cannot_pose_as_the_overlays_own(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("d")
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        info.pax_headers = {"SCHILY.xattr.user.overlay.opaque": "y", "SCHILY.xattr.user.overlay.redirect": "/etc"}
        archive.addfile(info)
    assert os.listxattr(unpacked(tmp_path, buffer.getvalue()) / "d") == []


@pytest.mark.parametrize(
    ("limits", "members"),
    [
        ({"max_bytes": 1 << 20}, [Member("a", b"\0" * (2 << 20))]),
        ({"max_entries": 100}, [Member(f"f{number}") for number in range(200)]),
        ({"max_entries": 50}, [folder("/".join("d" * 60))]),
    ],
)
def test_sizes_and_counts_are_bounded(tmp_path: Path, limits: dict[str, int], members: list[Member]) -> None:
    with pytest.raises(ImageError, match="more than"):
        unpacked(tmp_path, members, **limits)


def test_a_header_that_claims_gigabytes_is_not_read(tmp_path: Path) -> None:
    huge = tarfile.TarInfo("x")
    huge.type, huge.size = tarfile.XHDTYPE, 7 << 30
    with pytest.raises(ImageError, match="header is 7516192768 bytes long"):
        unpacked(tmp_path, huge.tobuf(tarfile.GNU_FORMAT) + b"\0" * 4096)


def test_a_size_that_the_archive_does_not_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError):
        unpacked(tmp_path, [Member("a", size=1 << 40)])


def test_a_chain_of_headers_is_refused(tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 0
    with pytest.raises(ImageError):
        unpacked(tmp_path, header.tobuf(tarfile.GNU_FORMAT) * 5000)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.ZstdCompressor().compress], ids=["plain", "gzip", "zstd"])
def test_every_compression_gives_the_same_tree(tmp_path: Path, pack: object) -> None:
    root = unpacked(tmp_path, pack(layer(folder("d"), Member("d/a", b"x" * 300_000))))  # type: ignore[operator]
    assert (root / "d" / "a").stat().st_size == 300_000


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress], ids=["gzip", "zstd"])
def test_a_truncated_layer_is_refused(tmp_path: Path, pack: object) -> None:
    data = pack(layer(Member("a", os.urandom(300_000))))  # type: ignore[operator]
    with pytest.raises(ImageError):
        unpacked(tmp_path, data[: len(data) // 2])


def test_an_unknown_compression_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="bzip2 or xz"):
        unpacked(tmp_path, lzma.compress(layer(Member("a"))))


def test_a_bomb_ends_at_the_limit(tmp_path: Path) -> None:
    bomb = gzip.compress(layer(Member("a", b"\0" * (64 << 20))))
    with pytest.raises(ImageError):
        unpacked(tmp_path, bomb, max_bytes=1 << 20)


def test_a_bomb_behind_the_archives_end_ends_too(tmp_path: Path) -> None:
    root = tmp_path / "layer"
    root.mkdir()
    data = gzip.compress(layer(Member("a")) + b"\0" * (8 << 20))
    with pytest.raises(ImageError, match="longer"):
        unpack(io.BytesIO(data), LayerWriter(root, Budget(max_bytes=GIB)), digest=None, diff_id=None, max_bytes=1 << 20)


@pytest.mark.parametrize("wrong", ["digest", "diff_id"])
def test_a_wrong_digest_is_refused(tmp_path: Path, wrong: str) -> None:
    plain = layer(Member("a", b"x"))
    packed = gzip.compress(plain)
    right = {"digest": digest(packed), "diff_id": digest(plain)}
    writer = LayerWriter(tmp_path, Budget(max_bytes=GIB))
    with pytest.raises(ImageError, match="should"):
        unpack(io.BytesIO(packed), writer, max_bytes=GIB, **(right | {wrong: digest(b"other")}))


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_of_a_refused_image_stays(tmp_path: Path, place: Store, name: str) -> None:
    good = layer(Member("fine", b"x"))
    archive = docker_save(tmp_path / "image.tar", [good, layer(*HOSTILE[name])])
    with pytest.raises(ImageError):
        obtain(f"docker-archive:{archive}", place)
    place.collect()
    assert is_empty(place)
