"""Building images for real: every instruction, the cache, and what a build cannot reach."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from image_archives import Member, docker_save, layer, programs, symlink

from sandmill.errors import ConfigError
from sandmill.sandboxes import Egress, Image, Sandbox
from sandmill.sandboxes.images import Store

Maker = Callable[..., Sandbox]
Builder = Callable[..., Image]


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    folder.mkdir()
    return folder


@pytest.fixture
def build(context: Path, shared: Store) -> Builder:
    """Builds a Dockerfile's text in small sandboxes."""

    def run(*lines: str, files: Mapping[str, bytes] | None = None, **options: object) -> Image:
        for name, data in (files or {}).items():
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            (context / name).write_bytes(data)
        return Image.build("\n".join(lines) + "\n", context, **{"memory": "256Mi", "disk": "64Mi"} | options)  # type: ignore[arg-type]

    return run


def output(box: Sandbox, command: str, **options: object) -> str:
    done = box.run("sh", "-c", command, timeout=10, **options)  # type: ignore[arg-type]
    assert done.exit_code == 0, done.stderr
    return done.stdout.decode().strip()


def test_every_instruction(build: Builder, make: Maker, context: Path) -> None:
    (context / "tool").write_text("#!/bin/sh\necho tool $1\n")
    (context / "tool").chmod(0o755)
    image = build(
        "ARG BASE=nothing",
        "FROM $BASE",
        "ARG WHO=world",
        'ENV GREETING="hello there" PATH=/opt/tools:$PATH:/usr/bin:/bin',
        "ENV OLD form of it",
        "WORKDIR /srv/app",
        "WORKDIR inner",
        "COPY tool /opt/tools/",
        "COPY data .",
        "COPY --chown=user --chmod=600 data/a.txt renamed",
        'RUN echo "$GREETING $WHO" > said; id -u > who',
        "USER root",
        'RUN ["touch", "/root/by root"]',
        files={"data/a.txt": b"a", "data/sub/b.txt": b"b"},
        build_args={"BASE": "host", "WHO": "you"},
        name="tests/every",
    )
    box = make(image="tests/every")
    assert box.image == image
    assert output(box, "pwd; tool x; cat said who a.txt sub/b.txt; echo; echo $OLD; id -u; ls /root").split("\n") == [
        "/srv/app/inner", "tool x", "hello there you", "1000", "ab", "form of it", "0", "by root",
    ]  # fmt: skip
    assert output(box, "stat -c '%a %U' renamed") == "600 user"
    assert output(box, "echo $WHO") == ""


def test_steps_are_taken_from_the_store_as_long_as_nothing_changed(build: Builder) -> None:
    said: list[str] = []

    def cached(*lines: str, **options: object) -> list[bool]:
        said.clear()
        build(*lines, report=said.append, **options)
        return ["from the store" in line for line in said if "RUN" in line or "COPY" in line]

    lines = ("FROM host", "COPY a .", "RUN cat a > b; date +%N > c")
    assert cached(*lines, files={"a": b"1"}) == [False, False]
    assert cached(*lines) == [True, True]
    assert cached(*lines, files={"a": b"2"}) == [False, False]
    assert cached(*lines, files={"a": b"1"}) == [True, True]
    assert cached("FROM host", "COPY a .", "ENV X=1", "RUN cat a > b; date +%N > c") == [True, False]
    assert cached("FROM host", "ARG A", "COPY a .", "RUN echo", build_args={"A": "1"}) == [True, False]
    assert cached("FROM host", "ARG A", "COPY a .", "RUN echo", build_args={"A": "2"}) == [True, False]


def test_a_build_on_a_foreign_image(build: Builder, make: Maker, tmp_path: Path) -> None:
    lower = layer(*programs("sh", "cat", "ls"), symlink("links", "srv"), Member("srv/x", b"x"))
    archive = docker_save(tmp_path / "base.tar", [lower], config={"Env": ["FROM_BASE=yes"]})
    image = build(
        f"FROM docker-archive:{archive}", "COPY a /links/a", "RUN cat /srv/a > /srv/b; echo $FROM_BASE > /srv/c", files={"a": b"A"}
    )
    box = make(image=image)
    assert output(box, "cat /srv/b /srv/c; ls /links") == "Ayes\na\nb\nc\nx"
    assert not image.on_host


def test_a_step_has_no_network_unless_it_is_given_one(build: Builder) -> None:
    with pytest.raises(ConfigError, match="Network is unreachable"):
        build("FROM host", "RUN python3 -c \"import socket; socket.create_connection(('192.0.2.1', 80), 2)\"")
    asks = "RUN python3 -c \"import socket; socket.gethostbyname('a.example.org')\""
    build("FROM host", asks, network=Egress.allow("*.example.org"))
    with pytest.raises(ConfigError, match="gaierror"):
        build("FROM host", asks + " # anew", network=Egress.allow("b.example.org"))


FAILED = [
    (("FROM host", "RUN echo oops; exit 3"), "Dockerfile:2: RUN: it ended with exit code 3: oops"),
    (("FROM host", "RUN kill -9 $$"), "RUN: it ended with signal 9: it wrote nothing"),
    (("FROM host", 'RUN ["/no/such"]'), "'/no/such' cannot be started: No such file or directory"),
    (("FROM host", "RUN printf '\\033[31m\\n\\377red'; exit 1"), "exit code 1: [31m \ufffdred"),
    (("FROM host", "COPY ../x ."), "'../x' lies outside the context"),
    (("FROM host", "COPY /../../etc/passwd ."), "lies outside the context"),
    (("FROM host", "COPY missing ."), "matches 'missing'"),
    (("FROM host", "COPY a"), "one or more sources and a destination"),
    (("FROM host", "COPY --chmod=u+x a b"), "an octal number"),
    (("FROM host", "COPY --chown=nobody-knows a b"), "--chown failed"),
    (("FROM host", "COPY a /usr/bin/a"), "it cannot write into the image"),
    (("FROM no/such:image",), "Dockerfile:1: FROM: no image 'no/such:image'"),
    (("FROM scratch",), "the nearest base is host"),
    (("FROM --platform=linux/s390x host",), "cannot be built here"),
    (("FROM host AS x",), "it takes one image"),
    (("FROM host", "USER nobody-knows"), "Dockerfile:2: USER: the image has no user"),
    (("FROM host", "USER user:nobody-knows"), "Dockerfile:2: USER: the image has no group"),
    (("FROM host", "WORKDIR /proc/x"), "Dockerfile:2: WORKDIR: workdir must lie outside"),
    (("FROM host", "ENV A"), "Dockerfile:2: ENV: it takes NAME=VALUE"),
    (("FROM host", "ENV A=1 =2"), "has an empty name"),
]


@pytest.mark.parametrize(("lines", "sentence"), FAILED)
def test_what_fails_is_said_with_its_line(build: Builder, shared: Store, lines: tuple[str, ...], sentence: str) -> None:
    before = shared.names()
    with pytest.raises(ConfigError) as raised:
        build(*lines, files={"a": b"x"}, name="tests/failed")
    assert sentence in str(raised.value)
    assert len(str(raised.value)) < 1200
    assert shared.names() == before


def test_a_step_that_never_ends_is_killed(build: Builder) -> None:
    with pytest.raises(ConfigError, match=r"it did not end within 0\.3 s"):
        build("FROM host", "RUN sleep 60", timeout=0.3)


def test_an_argument_that_nothing_declares_is_refused(build: Builder) -> None:
    with pytest.raises(ConfigError, match="no ARG declares 'B'"):
        build("FROM host", "ARG A", build_args={"B": "1"})


def test_the_context_ends_at_its_folder(build: Builder, make: Maker, context: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("outside")
    (context / "d").mkdir()
    (context / "d" / "link").symlink_to("../../secret")
    (context / "way").symlink_to("..")
    box = make(image=build("FROM host", "COPY d /opt/d"))
    assert output(box, "readlink /opt/d/link") == "../../secret"
    with pytest.raises(ConfigError, match="matches 'way/secret'"):
        build("FROM host", "COPY way/secret .")
    os.mkfifo(context / "pipe")
    with pytest.raises(ConfigError, match="neither a file nor a folder nor a link"):
        build("FROM host", "COPY pipe .")


def test_what_dockerignore_names_is_left_out(build: Builder, make: Maker) -> None:
    files = {"keep.txt": b"", "drop.log": b"", "d/deep/drop.log": b"", "d/keep.log": b"", ".git/config": b"", ".dockerignore": b""}
    files[".dockerignore"] = b"# comment\n**/*.log\n!d/keep.log\n.git\n.dockerignore\n"
    box = make(image=build("FROM host", "COPY . /opt/x", "COPY *.txt /opt/", files=files))
    assert output(box, "cd /opt && find . -type f | sort").split() == ["./keep.txt", "./x/d/keep.log", "./x/keep.txt"]
