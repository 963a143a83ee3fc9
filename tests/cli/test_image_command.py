"""`sandmill image`: the real command on a store of the test's own (SANDMILL_STATE)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sandboxes" / "images"))
from image_archives import Member, docker_save, folder, layer


@pytest.fixture(autouse=True)
def own_state(sandmill):
    sandmill.env["SANDMILL_STATE"] = str(sandmill.folder / "state")


def test_build_use_list_show_remove(sandmill):
    context = sandmill.folder / "context"
    context.mkdir()
    (context / "a").write_text("copied\n")
    (context / "Dockerfile").write_text("FROM host\nARG X=1\nENV X=$X\nWORKDIR /srv/app\nCOPY a .\nRUN echo $X > x\n")
    first = sandmill("image", "build", "context", "-t", "team/app:1", "--build-arg", "X=seven", "--memory", "256Mi")
    assert first.returncode == 0, first.stderr
    digest = first.stdout.decode().strip()
    assert b"[6/6] RUN echo $X > x\n" in first.stderr
    again = sandmill("image", "build", "context", "--build-arg", "X=seven", "--json", "--memory", "256Mi")
    assert json.loads(again.stdout) == {"digest": digest, "layers": 2}
    assert b"[6/6] RUN echo $X > x  (from the store)\n" in again.stderr
    done = sandmill("sandbox", "run", "--image", "team/app:1", "--", "sh", "-c", "pwd; cat a x; echo $X")
    assert done.stdout == b"/srv/app\ncopied\nseven\nseven\n"
    listed = json.loads(sandmill("image", "ls", "--json").stdout)
    assert [one["digest"] for one in listed if one["names"] == ["team/app:1"]] == [digest]
    assert b"team/app:1" in sandmill("image", "ls").stdout
    shown = json.loads(sandmill("image", "show", digest[7:19]).stdout)
    assert (shown["image"]["workdir"], shown["image"]["env"]) == ("/srv/app", {"X": "seven"})
    assert sandmill("image", "rm", "team/app:1").stdout == b"removed team/app:1\n"
    assert b"0 MB are left" in sandmill("image", "prune").stdout
    done = sandmill("image", "show", "team/app:1")
    assert done.returncode != 0
    assert done.stderr.startswith(b"error: no image 'team/app:1'")


def test_import(sandmill):
    docker_save(sandmill.folder / "image.tar", [layer(folder("d"), Member("d/a", b"x"))])
    assert sandmill("image", "import", "docker-archive:image.tar", "-t", "it").returncode == 0
    assert json.loads(sandmill("image", "show", "it").stdout)["image"]["on_host"] is False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["build", "."], "the Dockerfile cannot be read"),
        (["build", "bad"], "bad/Dockerfile:2: 'ADD' is not supported; the nearest instruction is COPY"),
        (["build", "good", "--network", "some"], "--network: it is none or open, not 'some'"),
        (["build", "good", "--build-arg", "x"], "--build-arg: it is NAME=VALUE"),
        (["build", "good", "-t", "../x"], "is no name for an image"),
        (["import", "docker-archive:no.tar"], "no such image folder or archive"),
        (["rm", "none"], "no image 'none'"),
        (["prune", "--keep", "many"], "--keep"),
    ],
)
def test_mistakes_are_one_sentence(sandmill, words, said):
    for name, text in (("bad", "FROM host\nADD a b\n"), ("good", "FROM host\n")):
        (sandmill.folder / name).mkdir()
        (sandmill.folder / name / "Dockerfile").write_text(text)
    done = sandmill("image", *words)
    assert done.returncode != 0
    assert said in done.stderr.decode()
    assert done.stderr.decode().splitlines()[-1].startswith("error: ")
    assert b"Traceback" not in done.stderr
