"""Images that other tools wrote: the variant for this machine, digests that agree, configurations that are respected or refused."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard
from image_archives import Layout, Member, config, digest, docker_save, folder, is_empty, layer, write_tar

from sandmill.errors import ImageError
from sandmill.sandboxes.images.image import Account, Image, architecture
from sandmill.sandboxes.images.importing import obtain
from sandmill.sandboxes.images.store import Store

PASSWD = Member("etc/passwd", b"root:x:0:0::/root:/bin/sh\napp:x:1234:99::/srv/app:/bin/sh\nbad line\n")
LOWER = layer(folder("etc"), PASSWD, Member("a", b"lower"))
UPPER = layer(Member("a", b"upper"))


def taken(reference: str, place: Store) -> Image:
    image, use = obtain(reference, place)
    use.release()
    return image


def read(place: Store, image: Image, number: int, name: str) -> bytes:
    return (place.layer_folder(image.layers[number]) / name).read_bytes()


def test_a_layout_folder(tmp_path: Path, place: Store) -> None:
    layout = Layout(tmp_path / "layout")
    inner = {"Env": ["PATH=/bin", "A=1=2", "broken", "=x"], "WorkingDir": "/srv/app", "User": "app"}
    image = taken(layout.index(layout.image([LOWER, UPPER], config=inner)), place)
    assert image.env == {"PATH": "/bin", "A": "1=2"}
    assert image.workdir == "/srv/app"
    assert image.account == Account(name="app", uid=1234, gid=99, home="/srv/app")
    assert not image.on_host
    assert (read(place, image, -2, "a"), read(place, image, -1, "a")) == (b"lower", b"upper")
    assert place.find(image.digest) == image


def test_layers_are_shared_and_unpacked_once(tmp_path: Path, place: Store) -> None:
    one = taken(f"docker-archive:{docker_save(tmp_path / 'one.tar', [LOWER])}", place)
    inode = (place.layer_folder(one.layers[-1]) / "a").stat().st_ino
    two = taken(f"docker-archive:{docker_save(tmp_path / 'two.tar', [LOWER, UPPER])}", place)
    assert two.layers[: len(one.layers)] == one.layers
    assert (place.layer_folder(two.layers[1]) / "a").stat().st_ino == inode


def test_zstd_layers_of_a_layout(tmp_path: Path, place: Store) -> None:
    layout = Layout(tmp_path / "layout")
    packed = [zstandard.ZstdCompressor().compress(LOWER)]
    assert read(place, taken(layout.index(layout.image([LOWER], packed)), place), -1, "a") == b"lower"


def test_the_variant_for_this_machine_is_chosen(tmp_path: Path, place: Store) -> None:
    layout = Layout(tmp_path / "layout")
    other = layout.image([UPPER], architecture="riscv64") | {"platform": {"os": "linux", "architecture": "riscv64"}}
    own = layout.image([LOWER]) | {"platform": {"os": "linux", "architecture": architecture(), "variant": "v8"}}
    note = layout.image([UPPER]) | {"platform": {"os": "unknown", "architecture": "unknown"}}
    inner = layout.blob(json.dumps({"manifests": [note, other, own]}).encode(), "application/vnd.oci.image.index.v1+json")
    assert read(place, taken(layout.index(inner), place), -1, "a") == b"lower"


def test_an_image_for_other_machines_only_is_refused_with_what_there_is(tmp_path: Path, place: Store) -> None:
    layout = Layout(tmp_path / "layout")
    labelled = layout.image([UPPER], architecture="riscv64") | {"platform": {"os": "linux", "architecture": "riscv64"}}
    bare = layout.image([UPPER], architecture="s390x")
    with pytest.raises(ImageError, match="it has linux/riscv64, linux/s390x"):
        taken(layout.index(labelled, bare), place)
    archive = docker_save(tmp_path / "other.tar", [UPPER], architecture="s390x")
    with pytest.raises(ImageError, match=f"s390x and this machine is linux/{architecture()}"):
        taken(f"docker-archive:{archive}", place)
    assert is_empty(place)


def test_tags(tmp_path: Path, place: Store) -> None:
    layout = Layout(tmp_path / "layout")
    tagged = layout.image([LOWER]) | {"annotations": {"org.opencontainers.image.ref.name": "v1"}}
    reference = layout.index(layout.image([UPPER]), tagged)
    assert read(place, taken(f"{reference}:v1", place), -1, "a") == b"lower"
    with pytest.raises(ImageError, match="it has 'v1'"):
        taken(f"{reference}:v2", place)
    archive = docker_save(tmp_path / "saved.tar", [UPPER], tags=["name/of:it"])
    assert read(place, taken(f"docker-archive:{archive}:name/of:it", place), -1, "a") == b"upper"
    with pytest.raises(ImageError, match="it has 'name/of:it'"):
        taken(f"docker-archive:{archive}:other", place)


def test_a_layout_in_an_archive_and_a_compressed_archive(tmp_path: Path, place: Store) -> None:
    layout = Layout(tmp_path / "layout")
    layout.index(layout.image([LOWER]))
    archive = tmp_path / "layout.tar"
    write_tar(archive, {f"./{path.relative_to(layout.path)}": path.read_bytes() for path in layout.path.rglob("*") if path.is_file()})
    assert read(place, taken(f"oci:{archive}", place), -1, "a") == b"lower"
    packed = tmp_path / "saved.tar.gz"
    packed.write_bytes(gzip.compress(docker_save(tmp_path / "saved.tar", [UPPER]).read_bytes()))
    assert read(place, taken(f"docker-archive:{packed}", place), -1, "a") == b"upper"


def test_a_layer_that_is_a_link_to_another_member(tmp_path: Path, place: Store) -> None:
    archive = tmp_path / "saved.tar"

    def write(second: bytes, target: str) -> str:
        manifest = [{"Config": "config", "Layers": ["0/layer.tar", "1/layer.tar"]}]
        files = [Member("config", config([LOWER, second])), Member("manifest.json", json.dumps(manifest).encode())]
        link = Member("1/layer.tar", kind=tarfile.SYMTYPE, link=target)
        archive.write_bytes(layer(*files, Member("0/layer.tar", LOWER), link, Member("blob", UPPER)))
        return f"docker-archive:{archive}"

    assert read(place, taken(write(UPPER, "../blob"), place), -1, "a") == b"upper"
    for number, target in enumerate(("../1/layer.tar", "../../../../etc/passwd", "/etc/passwd")):
        with pytest.raises(ImageError, match="has no file"):
            taken(write(UPPER, target), Store(tmp_path / str(number)))


def test_a_layer_that_comes_twice_lies_where_it_came_last(tmp_path: Path, place: Store) -> None:
    image = taken(f"docker-archive:{docker_save(tmp_path / 'twice.tar', [LOWER, UPPER, LOWER])}", place)
    assert image.layers[1:] == (digest(UPPER), digest(LOWER))


def test_an_opaque_top_hides_the_layers_below(tmp_path: Path, place: Store) -> None:
    top = layer(Member(".wh..wh..opq"), Member("b", b"only"))
    image = taken(f"docker-archive:{docker_save(tmp_path / 'image.tar', [LOWER, top])}", place)
    assert digest(LOWER) not in image.layers
    assert image.layers[-1] == digest(top)


Spoil = dict[str, Any]


@pytest.mark.parametrize("what", ["manifest", "config", "layer"])
@pytest.mark.parametrize("how", ["changed", "truncated", "missing", "a pipe", "a link"])
def test_a_spoiled_blob_is_refused(tmp_path: Path, place: Store, what: str, how: str) -> None:
    layout = Layout(tmp_path / "layout")
    manifest = layout.image([LOWER])
    reference = layout.index(manifest)
    document = json.loads((layout.path / "blobs/sha256" / manifest["digest"][7:]).read_bytes())
    spoiled = {"manifest": manifest, "config": document["config"], "layer": document["layers"][0]}[what]
    blob = layout.path / "blobs" / "sha256" / spoiled["digest"][7:]
    data = blob.read_bytes()
    blob.unlink()
    if how == "changed":
        blob.write_bytes(data[:-30] + b"?" + data[-29:])
    elif how == "truncated":
        blob.write_bytes(data[: len(data) // 2])
    elif how == "a pipe":
        os.mkfifo(blob)
    elif how == "a link":
        blob.symlink_to("/etc/passwd")
    with pytest.raises(ImageError):
        taken(reference, place)
    place.collect()
    assert is_empty(place)


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b'{"manifests": null}',
        b'{"manifests": [{}]}',
        b"[" * 100_000,
        b'{"manifests": [{"digest": 1, "size": 1}]}',
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, place: Store, index: bytes) -> None:
    layout = Layout(tmp_path / "layout")
    (layout.path / "index.json").write_bytes(index)
    with pytest.raises(ImageError, match="not what such a document is"):
        taken(f"oci:{layout.path}", place)


@pytest.mark.parametrize("name", ["sha256:../../../etc/passwd", "sha512:" + "0" * 128, "sha256:" + "A" * 64, "/etc/passwd", ""])
def test_a_digest_that_is_a_path_is_refused(tmp_path: Path, place: Store, name: str) -> None:
    layout = Layout(tmp_path / "layout")
    with pytest.raises(ImageError, match="is no sha256 digest"):
        taken(layout.index({"digest": name, "size": 1}), place)


def test_configuration_and_manifest_must_agree_about_layers(tmp_path: Path, place: Store) -> None:
    layout = Layout(tmp_path / "layout")
    with pytest.raises(ImageError, match="disagree about the number of layers"):
        taken(layout.index(layout.image([LOWER, UPPER], [gzip.compress(LOWER)])), place)


@pytest.mark.parametrize("data", [b"", b"no archive at all", b"\x1f\x8b nonsense"])
def test_what_is_no_archive_is_refused(tmp_path: Path, place: Store, data: bytes) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(data)
    with pytest.raises(ImageError):
        taken(f"docker-archive:{path}", place)


@pytest.mark.parametrize("user", ["nobody-knows", "70000", "-1", "../../x"])
def test_a_user_that_the_image_does_not_have_is_refused(tmp_path: Path, place: Store, user: str) -> None:
    with pytest.raises(ImageError, match="has no user"):
        taken(f"docker-archive:{docker_save(tmp_path / 'image.tar', [LOWER], config={'User': user})}", place)


@pytest.mark.parametrize(
    ("workdir", "meant"), [("", ""), ("/", ""), ("srv/", "/srv"), ("/a/../b", "/b"), ("/../../etc", "/etc"), ("/proc/1", "")]
)
def test_a_workdir_is_made_plain(tmp_path: Path, place: Store, workdir: str, meant: str) -> None:
    archive = docker_save(tmp_path / "image.tar", [LOWER], config={"WorkingDir": workdir})
    assert taken(f"docker-archive:{archive}", place).workdir == meant


def test_a_password_file_that_is_a_link_is_not_followed(tmp_path: Path, place: Store) -> None:
    lower = layer(folder("etc"), Member("etc/passwd", kind=tarfile.SYMTYPE, link="/etc/passwd"))
    with pytest.raises(ImageError, match="has no user"):
        taken(f"docker-archive:{docker_save(tmp_path / 'image.tar', [lower], config={'User': 'daemon'})}", place)


@pytest.mark.parametrize(
    ("user", "uid", "gid"),
    [
        ("app", 1234, 99),
        ("1234", 1234, 99),
        ("app:7", 1234, 7),
        ("app:staff", 1234, 50),
        ("55", 55, 0),
        ("55:0", 55, 0),
        ("", 0, 0),
        ("0:staff", 0, 50),
    ],
)
def test_a_user_and_its_group(tmp_path: Path, place: Store, user: str, uid: int, gid: int) -> None:
    lower = layer(folder("etc"), PASSWD, Member("etc/group", b"staff:x:50:\nstaff:x:nonsense:\n"))
    found = taken(f"docker-archive:{docker_save(tmp_path / 'image.tar', [lower], config={'User': user})}", place).account
    assert (found.uid, found.gid) == (uid, gid)


def test_many_members_are_refused(tmp_path: Path, place: Store) -> None:
    path = tmp_path / "image.tar"
    buffer = io.BytesIO()
    for _ in range(21_000):
        buffer.write(tarfile.TarInfo("x").tobuf(tarfile.GNU_FORMAT))
    path.write_bytes(buffer.getvalue() + b"\0" * 1024)
    with pytest.raises(ImageError, match="more than 20000 members"):
        taken(f"docker-archive:{path}", place)
