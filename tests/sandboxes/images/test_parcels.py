"""Parcels: a layer arrives as it was, or not at all; nothing in one reaches outside its folder."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from sandmill.errors import ImageError
from sandmill.sandboxes import Sandbox
from sandmill.sandboxes.images.layers import OPAQUE, Budget, is_opaque
from sandmill.sandboxes.images.parcels import pack, unpack
from sandmill.sandboxes.images.store import LayerRecord, Store
from sandmill.sandboxes.images.written import BEGINNING, recite

ATTRIBUTES = b"755 0 0 1700000000000000000\0"
END = b"folder " + ATTRIBUTES + b"\0\0"
FILE = b"file 644 0 0 1\0f\0" + b"3\0" + b"0-3\0abc"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def budget(most: int = 1 << 30) -> Budget:
    return Budget(max_bytes=most)


def look(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a folder that a layer keeps."""
    found: dict[str, tuple[object, ...]] = {}
    first: dict[int, str] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        info = path.lstat()
        kind, name = stat.S_IFMT(info.st_mode), str(path.relative_to(folder))
        said: object = None
        if kind == stat.S_IFREG:
            said = (info.st_size, hashlib.sha256(path.read_bytes()).hexdigest(), first.setdefault(info.st_ino, name))
        elif kind == stat.S_IFLNK:
            said = os.readlink(path)
        elif kind == stat.S_IFDIR:
            said = is_opaque(path)
        attributes = (info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns) if kind != stat.S_IFCHR else (info.st_rdev,)
        found[name] = (*attributes, said)
    return found


def strange(folder: Path) -> None:
    """All that a sandbox can leave in a layer."""
    (folder / "a" / "deep" / "er").mkdir(parents=True)
    (folder / "a" / "f").write_bytes(os.urandom(700_000))
    (folder / "a" / ".wh.no-whiteout").write_text("a file like any other")
    os.link(folder / "a" / "f", folder / "a" / "deep" / "g")
    (folder / "a" / "f").chmod(0o640)
    os.chown(folder / "a" / "f", 1000, 1001)
    (folder / "a" / "to\nnowhere").symlink_to("../../../etc/shadow")
    os.mkfifo(folder / "pipe", 0o620)
    os.mknod(folder / "gone", stat.S_IFCHR, os.makedev(0, 0))
    with (folder / os.fsdecode(b"sparse \xff")).open("wb") as file:
        file.write(b"start")
        file.seek(50 << 20)
        file.write(b"middle")
        file.truncate(100 << 20)
    (folder / "empty").touch()
    os.setxattr(folder / "a" / "deep", OPAQUE, b"y")
    (folder / "a" / "deep").chmod(0o1777)
    os.utime(folder / "a" / "deep" / "er", ns=(5, 1_700_000_000_123_456_789))


def stored(store: Store, layer: str) -> None:
    with store.draft() as draft:
        strange(draft)
        store.keep(draft, LayerRecord(digest=layer, bytes=1))


def test_a_layer_arrives_as_it_was(store: Store, tmp_path: Path) -> None:
    layer = f"sha256:{'ab' * 32}"
    stored(store, layer)
    parcel = pack(layer, store, tmp_path / "parcel")
    assert parcel.size == (tmp_path / "parcel").stat().st_size < 2 << 20
    assert parcel.digest == f"sha256:{hashlib.sha256((tmp_path / 'parcel').read_bytes()).hexdigest()}"
    (tmp_path / "there").mkdir()
    own = unpack(tmp_path / "parcel", tmp_path / "there", budget())
    assert look(tmp_path / "there") == look(store.layer_folder(layer))
    assert (tmp_path / "there" / os.fsdecode(b"sparse \xff")).stat().st_blocks < 100
    again = hashlib.sha256(BEGINNING)
    folder = os.open(tmp_path / "there", os.O_RDONLY)
    recite(folder, again.update)
    os.close(folder)
    assert own == f"sha256:{again.hexdigest()}"


def test_what_a_sandbox_wrote_has_the_same_name_there(tmp_path: Path) -> None:
    from sandmill.sandboxes.images import store as own_store

    with Sandbox.create(memory="256Mi", disk="32Mi") as box:
        box.run("sh", "-c", "mkdir d; echo x > d/f; ln d/f d/g; ln -s f d/l; truncate -s 9M hole; head -c 99999 /dev/urandom > r; rm -r ~")
        image = box.snapshot_filesystem("parcels/test")
    try:
        pack(image.layers[-1], own_store(), tmp_path / "parcel")
        (tmp_path / "there").mkdir()
        assert unpack(tmp_path / "parcel", tmp_path / "there", budget()) == image.layers[-1]
    finally:
        own_store().drop("parcels/test")


HOSTILE = {
    "a name that climbs": b"enter ..\0" + END + END,
    "a name with a slash": b"file 644 0 0 1\0a/b\0" + b"0\0" + END,
    "no name": b"enter \0" + END + END,
    "a second name of a file outside": b"link 777 0 0 1\0l\0/etc\0again 644 0 0 1\0x\0l/shadow\0" + END,
    "a second name of a link": b"link 777 0 0 1\0l\0/etc/shadow\0again 644 0 0 1\0x\0l\0" + END,
    "a second name of a file below a link": b"enter d\0" + FILE + END + b"link 777 0 0 1\0l\0d\0again 644 0 0 1\0x\0l/f\0" + END,
    "the same name twice": FILE + FILE + END,
    "a folder in place of a link": b"link 777 0 0 1\0l\0/tmp\0enter l\0" + FILE + END + END,
    "a device": b"device 644 0 0 1\0x\0" + b"1:3\0" + END,
    "data before the last data": b"file 644 0 0 1\0f\0" + b"9\0" + b"4-6\0ab0-2\0ab" + END,
    "data beyond the end": b"file 644 0 0 1\0f\0" + b"2\0" + b"0-3\0abc" + END,
    "a file of a negative size": b"file 644 0 0 1\0f\0" + b"-1\0" + END,
    "words without an end": FILE,
    "more after the end": END + FILE,
    "a word that never ends": b"enter " + b"x" * 100_000,
    "numbers that are none": b"folder abc 0 0 1\0\0\0",
    "too deep": b"enter d\0" * 400 + END * 401,
    "nothing": b"",
}


@pytest.mark.parametrize("words", HOSTILE.values(), ids=HOSTILE)
def test_nothing_hostile_is_written(words: bytes, tmp_path: Path) -> None:
    (tmp_path / "parcel").write_bytes(zstandard.compress(words))
    (tmp_path / "top" / "draft").mkdir(parents=True)
    with pytest.raises(ImageError, match="damaged or hostile"):
        unpack(tmp_path / "parcel", tmp_path / "top" / "draft", budget())
    assert os.listdir(tmp_path / "top") == ["draft"]
    inside = [path for path in (tmp_path / "top" / "draft").rglob("*") if path.is_file() and not path.is_symlink()]
    assert all(path.read_bytes() in (b"abc", b"", b"\0\0\0\0ab") for path in inside)


def test_setuid_and_foreign_owners_do_not_arrive(tmp_path: Path) -> None:
    words = b"file 6755 70000 -5 1\0f\0" + b"0\0" + b"file 644 0 0 99999999999999999999\0late\0" + b"0\0" + END
    (tmp_path / "parcel").write_bytes(zstandard.compress(words))
    (tmp_path / "draft").mkdir()
    unpack(tmp_path / "parcel", tmp_path / "draft", budget())
    info = (tmp_path / "draft" / "f").stat()
    assert (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid) == (0o755, 65534, 65534)


def bomb(count: int) -> Iterator[bytes]:
    yield b"file 644 0 0 1\0f\0" + b"%d\0" % (count << 20) + b"0-%d\0" % (count << 20)
    for _ in range(count):
        yield bytes(1 << 20)
    yield END


def test_a_bomb_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "parcel").write_bytes(zstandard.compress(b"".join(bomb(64))))
    assert (tmp_path / "parcel").stat().st_size < 100_000
    (tmp_path / "draft").mkdir()
    with pytest.raises(ImageError, match="more than 1048576 bytes"):
        unpack(tmp_path / "parcel", tmp_path / "draft", budget(1 << 20))
    assert (tmp_path / "draft" / "f").stat().st_blocks * 512 <= 2 << 20
    words = b"".join(b"whiteout %d\0" % number for number in range(5000)) + END
    (tmp_path / "parcel").write_bytes(zstandard.compress(words))
    with pytest.raises(ImageError, match="more than"):
        unpack(tmp_path / "parcel", tmp_path / "draft", budget(1 << 20))


@pytest.mark.parametrize("place", [0, -1])
def test_damaged_bytes_are_noticed(place: int, store: Store, tmp_path: Path) -> None:
    layer = f"sha256:{'cd' * 32}"
    stored(store, layer)
    pack(layer, store, tmp_path / "parcel")
    data = bytearray((tmp_path / "parcel").read_bytes())
    cut = data[: len(data) // 2] if place < 0 else data
    cut[place] ^= 0xFF
    (tmp_path / "parcel").write_bytes(cut)
    (tmp_path / "there").mkdir()
    with pytest.raises(ImageError, match="damaged or hostile"):
        unpack(tmp_path / "parcel", tmp_path / "there", budget())
