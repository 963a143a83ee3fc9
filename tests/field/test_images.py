"""Field cases about images: names that are paths, disks that orphans fill, set-up failures that pose as output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandmill.errors import ImageError, SandboxCreateFailed
from sandmill.sandboxes import Sandbox
from sandmill.sandboxes.images import Store, store
from sandmill.sandboxes.images.image import Image
from sandmill.sandboxes.images.store import LayerRecord


@pytest.mark.case(23)
@pytest.mark.parametrize("name", ["../escaped-case", "/etc/x", "..", "row\n003", "-rf"])
def test_benchflow_361_a_name_never_becomes_a_path(tmp_path: Path, name: str) -> None:
    place = Store(tmp_path / "state" / "images")
    with pytest.raises(ImageError, match="is no name for an image"):
        place.save(Image(), name)
    place.save(Image(), "a/../../../escaped-case")  # dots and slashes inside are letters like others
    assert place.find("a/../../../escaped-case") == Image()
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["images"]


@pytest.mark.case(23)
def test_coder_eval_159_names_with_slashes_map_one_to_one(tmp_path: Path) -> None:
    place = Store(tmp_path)
    names = ["suite/row_003", "suite_row/003", "suite_/row003", "suite/_row003", "suite_srow", "suite/row"]
    for number, name in enumerate(names):
        place.save(Image(workdir=f"/{number}"), name)
    assert [place.find(name).workdir for name in names] == [f"/{number}" for number in range(len(names))]
    assert sorted(place.names()) == sorted(names)


@pytest.mark.case(18)
def test_trajectoryrl_203_a_killed_owner_leaves_no_layer_behind(tmp_path: Path) -> None:
    code = (
        "import time\nfrom sandmill.sandboxes import Sandbox\n"
        "box = Sandbox.create(); box.write('a', b'x' * 1000000); copies = box.fork(3); print('forked', flush=True); time.sleep(60)\n"
    )
    environment = os.environ | {"SANDMILL_STATE": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == b"forked\n"
    place = Store(tmp_path / "images")
    assert place.total_bytes() > 1_000_000
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    place.collect()
    assert place.total_bytes() == 0
    assert not list((tmp_path / "images" / "layers").iterdir())
    deadline = time.monotonic() + 5
    while list((tmp_path / "owners").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list((tmp_path / "owners").iterdir())


@pytest.mark.case(18)
def test_trajectoryrl_203_a_full_store_is_an_error_of_its_own_and_the_sandbox_lives_on(tmp_path: Path) -> None:
    place = Store(tmp_path, limit_bytes=1 << 20)
    with place.draft() as draft, pytest.raises(ImageError, match="leaves no room"):
        place.keep(draft, LayerRecord(digest="sha256:" + "1" * 64, bytes=2 << 20))
    assert place.total_bytes() == 0
    with Sandbox.create(memory="256Mi") as box:
        shared, box_limit = store(), store().limit_bytes
        shared.limit_bytes = 1
        try:
            with pytest.raises(ImageError, match="leaves no room"):
                box.snapshot_filesystem()
        finally:
            shared.limit_bytes = box_limit
        assert box.run("echo", "alive").stdout == b"alive\n"


@pytest.mark.case(25)
def test_cycls_36_a_root_that_cannot_be_made_is_no_command_output(tmp_path: Path) -> None:
    with Sandbox.create() as box:
        box.run("sh", "-c", "rmdir /workspace; touch /workspace", user="root")
        box.run("sh", "-c", "ln -s /proc/self/root/tmp /srv/way", user="root")
        image = box.snapshot_filesystem()
    with pytest.raises(SandboxCreateFailed, match="could not create a sandbox: workdir"):
        Sandbox.create(image=image, workdir="/srv/way/x/y")
    store().remove(image.digest)


@pytest.mark.case(43)
def test_pier_51_a_background_writer_does_not_live_on_in_the_copy_that_is_graded(tmp_path: Path) -> None:
    with Sandbox.create() as box:
        box.exec("sh", "-c", "while :; do echo 1 > reward.txt; sleep 0.01; done")
        while b"reward.txt" not in box.run("ls").stdout:
            time.sleep(0.01)
        (copy,) = box.fork(1)
        with copy:
            copy.remove("reward.txt")
            time.sleep(0.1)
            assert copy.list() == []
