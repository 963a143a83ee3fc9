"""The store: bounded, shared by processes, and whole after a kill at any point."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from image_archives import Member, docker_save, folder, is_empty, layer

from sandmill.errors import ImageError
from sandmill.sandboxes.images.image import Image
from sandmill.sandboxes.images.importing import obtain
from sandmill.sandboxes.images.store import KEPT, SERVED, LayerRecord, Store, Use

MIB = 1 << 20


def digest_of(number: int) -> str:
    return f"sha256:{number:032x}{0:032x}"


def add(place: Store, number: int, *, name: str | None = None, below: Image | None = None, size: int = MIB) -> Image:
    """An image with one layer of `size` bytes of its own, last used at second `number`."""
    with place.draft() as draft:
        (draft / "file").write_bytes(b"x")
        place.keep(draft, LayerRecord(digest=digest_of(number), bytes=size))
    image = (below or Image()).above(digest_of(number))
    place.save(image, name)
    place.unpin(digest_of(number))
    os.utime(place.root / "images" / f"{image.digest[7:]}.json", (number, number))
    return image


def left(place: Store) -> set[int]:
    return {int(one.image.layers[-1][7:39], 16) for one in place.list()}


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    place = Store(tmp_path / "store", limit_bytes=4 * MIB)
    images = [add(place, number) for number in range(1, 5)]
    place.use(images[0]).release()  # used just now
    add(place, 5)
    assert left(place) == {1, 3, 4, 5}
    assert place.total_bytes() == 4 * MIB
    assert not place.layer_folder(digest_of(2)).exists()


def test_a_dropped_name_takes_its_image_along_unless_it_has_another(tmp_path: Path) -> None:
    place = Store(tmp_path / "store", limit_bytes=9 * MIB)
    image = add(place, 1, name=f"{SERVED}one/a")
    place.save(image, f"{SERVED}one/b")
    shared = add(place, 2, name="plain")
    add(place, 3, name=f"{SERVED}one/c", below=shared)
    place.drop(f"{SERVED}one/a")
    assert place.find(f"{SERVED}one/b") == image
    place.drop(f"{SERVED}one/b")
    place.drop(f"{SERVED}one/b")
    place.drop(f"{SERVED}one/c")
    assert (left(place), set(place.names())) == ({2}, {"plain"})
    assert not place.layer_folder(digest_of(1)).exists()


def test_a_dropped_image_that_is_used_keeps_its_layers_until_then(tmp_path: Path) -> None:
    place = Store(tmp_path / "store", limit_bytes=9 * MIB)
    use = place.use(add(place, 1, name=f"{SERVED}one/a"))
    place.drop(f"{SERVED}one/a")
    assert place.layer_folder(digest_of(1)).exists()
    use.release()
    place.collect()
    assert not place.layer_folder(digest_of(1)).exists()


def test_what_a_server_holds_is_never_evicted(tmp_path: Path) -> None:
    place = Store(tmp_path / "store", limit_bytes=2 * MIB)
    add(place, 1, name=f"{SERVED}one/a")
    add(place, 2)
    add(place, 3)
    assert left(place) == {1, 3}
    assert place.prune() == MIB
    assert left(place) == {1}


def test_what_is_used_or_kept_is_never_removed(tmp_path: Path) -> None:
    place = Store(tmp_path / "store", limit_bytes=4 * MIB)
    used = place.use(add(place, 1))
    add(place, 2, name=f"{KEPT}sb-1")
    base = add(place, 3)
    above = place.use(add(place, 4, below=base))
    with pytest.raises(ImageError, match="leaves no room"):
        add(place, 5)
    assert left(place) >= {1, 2, 4}
    assert place.record(digest_of(3)), "an image above it is used"
    assert not [path for path in (place.root / "layers").iterdir() if path.name.startswith(".")]
    used.release()
    above.release()
    add(place, 5)
    assert 2 in left(place)
    assert place.prune() > 0
    assert left(place) == {2}
    place.remove(f"{KEPT}sb-1")
    assert left(place) == set()


def test_a_layer_that_others_share_stays_for_them(tmp_path: Path) -> None:
    place = Store(tmp_path / "store")
    base = add(place, 1, name="base")
    add(place, 2, name="above", below=base)
    place.remove("base")
    assert place.find("above").layers == (digest_of(1), digest_of(2))
    assert place.record(digest_of(1))
    place.remove("above")
    assert is_empty(place)


def test_names_and_digests(place: Store) -> None:
    image = add(place, 1, name="team/image_one:v1.0")
    assert place.find("team/image_one:v1.0") == place.find(image.digest) == place.find(image.digest[7:19]) == image
    place.save(image, "second")
    assert place.list()[0].names == ("second", "team/image_one:v1.0")
    place.remove("second")
    assert place.list()[0].names == ("team/image_one:v1.0",)
    other = add(place, 2, name="team/image_one:v1.0")
    assert place.find("team/image_one:v1.0") == other
    with pytest.raises(ImageError, match=r"did you mean 'team/image_one:v1\.0'"):
        place.find("team/image_one:v1")
    with pytest.raises(ImageError, match="no image"):
        place.find(image.digest[7:15])


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/x", "-x", "a b", "a\nb", "a\0b", "é", "x" * 121, "_a"])
def test_a_name_that_is_a_path_or_an_option_is_refused(place: Store, name: str) -> None:
    with pytest.raises(ImageError, match="is no name"):
        place.save(Image(), name)
    with pytest.raises(ImageError, match="no image"):
        place.find(name)
    assert not list((place.root / "names").iterdir())


def test_the_longest_name_has_a_file(place: Store) -> None:
    name = "a" + "/_" * 59
    place.save(Image(), name)
    assert place.names() == {name: Image().digest}


def test_a_damaged_record_is_no_image_and_no_layer(place: Store) -> None:
    image = add(place, 1, name="it")
    (place.root / "images" / f"{image.digest[7:]}.json").write_bytes(b'{"layers": 7}')
    with pytest.raises(ImageError, match="no image"):
        place.find("it")
    (place.root / "records" / f"{digest_of(1)[7:]}.json").write_bytes(b"{")
    assert place.record(digest_of(1)) is None
    assert place.list() == []


def test_a_use_ends_once_for_all_holders(place: Store) -> None:
    image = add(place, 1)
    use = place.use(image)
    second = use.share()
    use.release()
    assert place.list()[0].in_use
    second.release()
    assert not place.list()[0].in_use
    assert isinstance(place.use(image), Use)


SLOW = """
    import sys, time
    from pathlib import Path
    from sandmill.sandboxes.images.importing import obtain
    from sandmill.sandboxes.images.layers import LayerWriter
    from sandmill.sandboxes.images.store import Store
    real = LayerWriter.file
    def slow(self, name, attributes, size, read):
        real(self, name, attributes, size, read)
        print(name, flush=True)
        time.sleep(float(sys.argv[3]))
    LayerWriter.file = slow
    image, use = obtain("docker-archive:" + sys.argv[2], Store(Path(sys.argv[1])))
    print(image.digest, flush=True)
"""


def importer(place: Store, archive: Path, pause_s: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", textwrap.dedent(SLOW), str(place.root), str(archive), str(pause_s)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def some_archive(tmp_path: Path) -> Path:
    lower = layer(folder("d"), *(Member(f"d/{number}", b"x" * 100) for number in range(20)))
    return docker_save(tmp_path / "image.tar", [lower, layer(*(Member(f"e{number}", b"y") for number in range(20)))])


@pytest.mark.parametrize("lines", [1, 8, 20, 35])
def test_a_kill_in_the_middle_leaves_nothing_that_is_ever_used(tmp_path: Path, place: Store, lines: int) -> None:
    archive = some_archive(tmp_path)
    process = importer(place, archive, 0.005)
    assert process.stdout is not None
    for _ in range(lines):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert place.list() == []
    whole = [place.record(path.stem) for path in (place.root / "records").iterdir()]
    assert all(record and len(list(place.layer_folder(record.digest).rglob("*"))) > 5 for record in whole)
    image, use = obtain(f"docker-archive:{archive}", place)
    assert [len(list(place.layer_folder(one).rglob("*"))) for one in image.layers[1:]] == [21, 20]
    place.collect()
    assert not [path.name for path in (place.root / "layers").iterdir() if path.name.startswith(".")]
    use.release()
    place.prune()
    assert is_empty(place)


def test_a_draft_in_work_is_not_swept_by_another_process(tmp_path: Path, place: Store) -> None:
    process = importer(place, some_archive(tmp_path), 0.02)
    assert process.stdout is not None
    digest = ""
    for line in process.stdout:
        place.collect()
        digest = line.strip()
    assert process.wait() == 0
    process.stdout.close()
    assert place.find(digest).digest == digest


def test_processes_import_the_same_image_at_once(tmp_path: Path, place: Store) -> None:
    archive = some_archive(tmp_path)
    processes = [importer(place, archive, 0.001) for _ in range(3)]
    said = [process.communicate(timeout=60)[0].splitlines()[-1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert set(said) == {place.list()[0].digest}
    assert len(place.list()) == 1
    place.collect()
    assert len(list((place.root / "layers").iterdir())) == 3


def test_a_use_ends_with_its_process(place: Store) -> None:
    image = add(place, 1)
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom sandmill.sandboxes.images.store import Store\n"
        "place = Store(Path(sys.argv[1])); use = place.use(place.find(sys.argv[2])); print('used', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(place.root), image.digest], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(ImageError, match="used by a live sandbox"):
        place.remove(image.digest)
    assert place.prune() == 0
    process.kill()
    process.wait()
    process.stdout.close()
    place.remove(image.digest)
    assert is_empty(place)


def test_a_forked_child_gives_the_pins_up_without_taking_them_from_its_parent(place: Store) -> None:
    image = add(place, 1)
    use = place.use(image)
    child = os.fork()
    if child == 0:
        place.disown()
        os._exit(0)
    os.waitpid(child, 0)
    assert place.list()[0].in_use
    use.release()
    assert not place.list()[0].in_use


def test_a_store_that_someone_holds_is_waited_for(place: Store) -> None:
    code = (
        "import fcntl, os, sys, time\n"
        "lock = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR); fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(0.3)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(place.root / "lock")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()
    place.collect()
    assert 0.05 < time.monotonic() - began < 5
    process.wait()
    process.stdout.close()
