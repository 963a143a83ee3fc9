"""The sandbox calls of the published Python SDK, in an order in which one leads to the next."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from client_calls import Work, sdk, until


@sdk("Sandbox.create(cpu=1, memory=..., idle_timeout=..., max_cost=..., network=Egress.deny())")
def _(work: Work) -> None:
    import nodus

    work["sb"] = nodus.Sandbox.create(
        cpu=1, memory="512Mi", disk=64, timeout="2h", idle_timeout="5m", on_idle="stop", max_cost=1,
        env={"GREETING": "hello"}, labels={"team": "a"}, network=nodus.Egress.deny(),
    )  # fmt: skip


@sdk('sb.open(path, "w") as a context manager, and "r"')
def _(work: Work) -> None:
    with work["sb"].open("main.py", "w") as file:
        file.write("import os\nprint(os.environ['GREETING'])\n")
    with work["sb"].open("/workspace/main.py") as file:
        assert file.read().startswith("import os")


@sdk('sb.exec("bash", "-c", cmd) with .stdout.read(), .stderr.read(), .wait(), .returncode')
def _(work: Work) -> None:
    process = work["sb"].exec("bash", "-c", "python3 main.py; echo oops >&2; exit 4")
    assert (process.stdout.read(), process.stderr.read(), process.wait(), process.returncode) == ("hello\n", "oops\n", 4, 4)


@sdk('sb.exec("one string with spaces") under a shell')
def _(work: Work) -> None:
    assert work["sb"].exec("echo a | tr a b").stdout.read() == "b\n"


@sdk("sb.exec(..., env=, workdir=)")
def _(work: Work) -> None:
    assert work["sb"].exec("sh", "-c", "echo $A; pwd", env={"A": "1"}, workdir="/tmp").stdout.read() == "1\n/tmp\n"


@sdk("sb.exec(..., timeout=)")
def _(work: Work) -> None:
    process = work["sb"].exec("sh", "-c", "echo part; sleep 99", timeout=0.4)
    assert (process.stdout.read(), process.wait(timeout=5)) == ("part\n", 124)


@sdk("for piece in process.stdout")
def _(work: Work) -> None:
    assert "".join(work["sb"].exec("sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.05; done").stdout) == "1\n2\n3\n"


@sdk("process.stdout.read_bytes() of what is no text")
def _(work: Work) -> None:
    assert work["sb"].exec("printf", "\\377\\360").stdout.read_bytes() == b"\xff\xf0"


@sdk("process.stdin.write, .drain, .write_eof")
def _(work: Work) -> None:
    process = work["sb"].exec("cat", stdin=True)
    process.stdin.write("over ")
    process.stdin.write(b"the wire")
    process.stdin.drain()
    process.stdin.write_eof()
    assert (process.stdout.read(), process.wait()) == ("over the wire", 0)


@sdk("process.signal(...)")
def _(work: Work) -> None:
    process = work["sb"].exec("sleep", "99")
    process.signal("SIGTERM")
    assert process.wait(timeout=5) == 143


@sdk("process.cancel()")
def _(work: Work) -> None:
    process = work["sb"].exec("sleep", "99")
    process.cancel()
    assert process.wait(timeout=5) == 137


@sdk("process.wait(timeout=) raises TimeoutError")
def _(work: Work) -> None:
    process = work["sb"].exec("sleep", "99")
    with pytest.raises(TimeoutError):
        process.wait(timeout=0.2)
    process.cancel()


@sdk("sb.exec(..., pty=True) with attach(tty=True), resize, exit_code")
def _(work: Work) -> None:
    process = work["sb"].exec("bash", "--norc", pty=True)
    with process.attach(tty=True) as session:
        session.resize(31, 101)
        session.write("stty size; tty; exit 7\n")
        said = b"".join(data for _, data in session)
        assert b"31 101" in said
        assert b"/dev/pts/" in said
        assert session.exit_code == 7


@sdk("process.attach(stdin=True) with close_stdin")
def _(work: Work) -> None:
    process = work["sb"].exec("cat", stdin=True)
    with process.attach(stdin=True) as session:
        session.write("through a socket")
        session.close_stdin()
        assert (b"".join(data for _, data in session), session.exit_code) == (b"through a socket", 0)


@sdk("sb.files.write, .read, .list, .remove")
def _(work: Work) -> None:
    files = work["sb"].files
    files.write("/workspace/data", bytes(range(256)))
    assert files.read("/workspace/data") == bytes(range(256))
    assert {entry["name"] for entry in files.list("/workspace")} == {"main.py", "data"}
    files.remove("/workspace/data")
    assert {entry["name"] for entry in files.list("/workspace")} == {"main.py"}


@sdk("sb.files.write(..., expected_sha256=)")
def _(work: Work) -> None:
    from nodus import errors

    files = work["sb"].files
    files.write("/workspace/x", "one")
    files.write("/workspace/x", "two", expected_sha256=hashlib.sha256(b"one").hexdigest())
    with pytest.raises(errors.NodusError) as refused:
        files.write("/workspace/x", "three", expected_sha256=hashlib.sha256(b"one").hexdigest())
    assert refused.value.reason == "SHA256Mismatch"
    assert files.read("/workspace/x") == b"two"


@sdk("sb.status(), sb.name, sb.object_id")
def _(work: Work) -> None:
    status = work["sb"].status()
    assert (status.phase, status.activity, status.cost.limit_usd) == ("Running", "Idle", "1.00")
    assert work["sb"].object_id


@sdk("sb.stop(), sb.start(): the workspace survives")
def _(work: Work) -> None:
    work["sb"].stop()
    until(lambda: work["sb"].status().phase == "Stopped")
    work["sb"].start()
    assert work["sb"].files.read("/workspace/x") == b"two"
    until(lambda: work["sb"].status().phase == "Running")


@sdk("sb.exec on a stopped sandbox starts it")
def _(work: Work) -> None:
    work["sb"].stop()
    until(lambda: work["sb"].status().phase == "Stopped")
    assert work["sb"].exec("cat", "x").stdout.read() == "two"


@sdk("Sandbox.create(name=) twice reconnects; another spec is AlreadyExists")
def _(work: Work) -> None:
    import nodus

    first = nodus.Sandbox.create(name="named", memory="256Mi")
    assert nodus.Sandbox.create(name="named", memory="256Mi").object_id == first.object_id
    with pytest.raises(nodus.errors.AlreadyExists) as refused:
        nodus.Sandbox.create(name="named", memory="512Mi")
    assert [cause["field"] for cause in refused.value.causes] == ["spec.resources.memory"]


@sdk("Sandbox.from_name, Sandbox.from_id, Sandbox.list(labels=)")
def _(work: Work) -> None:
    import nodus

    named = nodus.Sandbox.from_name("named")
    assert nodus.Sandbox.from_id(named.object_id).name == "named"
    assert [sandbox.name for sandbox in nodus.Sandbox.list(labels={"team": "a"})] == [work["sb"].name]


@sdk('Sandbox.create("program", ...) with sb.wait() and sb.logs()')
def _(work: Work) -> None:
    import nodus

    sandbox = nodus.Sandbox.create("sh", "-c", "echo from the main command; exit 3", memory="256Mi")
    assert sandbox.wait() == 3
    assert list(sandbox.logs()) == ["from the main command\n"]
    sandbox.terminate()


@sdk("Secret.create, Secret.from_name, Secret.from_dict; Sandbox.create(secrets=[...])")
def _(work: Work) -> None:
    import nodus

    nodus.Secret.create("tokens", {"TOKEN": "s3cret"})
    nodus.Secret.create("tokens", {"TOKEN": "n3wer"})
    given = [nodus.Secret.from_name("tokens"), nodus.Secret.from_dict({"OTHER": "value"})]
    sandbox = nodus.Sandbox.create(memory="256Mi", secrets=given)
    assert sandbox.exec("sh", "-c", "echo $TOKEN $OTHER; cat /run/secrets/tokens/TOKEN").stdout.read() == "n3wer value\nn3wer"
    sandbox.terminate()


@sdk("asynchronous forms: await Sandbox.create.aio(...), exec.aio, stdout.read.aio")
def _(work: Work) -> None:
    import asyncio

    import nodus

    async def body() -> str:
        sandbox = await nodus.Sandbox.create.aio(memory="256Mi")
        process = await sandbox.exec.aio("echo", "async")
        said: str = await process.stdout.read.aio()
        await sandbox.terminate.aio()
        return said

    assert asyncio.run(body()) == "async\n"


@sdk("errors.NotFound, errors.Invalid with causes")
def _(work: Work) -> None:
    import nodus

    with pytest.raises(nodus.errors.NotFound):
        nodus.Sandbox.from_name("nobody")
    with pytest.raises(nodus.errors.Invalid) as refused:
        nodus.Sandbox.create(cpu="many")
    assert [cause["field"] for cause in refused.value.causes] == ["spec.resources.cpu"]


@sdk("nodus.api.estimate, and create with its ETag")
def _(work: Work) -> None:
    import nodus

    body = {"kind": "Sandbox", "metadata": {"name": "estimated"}, "spec": {"image": "nodus/agent-tools"}}
    estimate, tag = nodus.api.estimate(body)
    assert estimate["rateUSDPerHour"] == "0.0179"
    assert nodus.api.create(body, if_match=tag)["metadata"]["name"] == "estimated"


@sdk("nodus.api.apply: create, change, unchanged")
def _(work: Work) -> None:
    import nodus

    body = {"apiVersion": "nodus.dev/v1", "kind": "Sandbox", "metadata": {"name": "applied"}, "spec": {"image": "nodus/agent-tools"}}
    nodus.api.apply(body)
    changed = nodus.api.apply(body | {"spec": {"image": "nodus/agent-tools", "lifecycle": {"idleTimeout": "9m"}}})
    assert changed[0]["spec"]["lifecycle"]["idleTimeout"] == "9m"


@sdk("nodus.api.get, list, patch (merge and json), watch, delete, logs, exec, files")
def _(work: Work) -> None:
    import nodus

    assert nodus.api.get("Sandbox", "applied")["kind"] == "Sandbox"
    nodus.api.patch("Sandbox", "applied", {"metadata": {"labels": {"x": "y"}}})
    nodus.api.patch("Sandbox", "applied", [{"op": "add", "path": "/metadata/labels/z", "value": "1"}], type="json")
    assert nodus.api.list("Sandbox", label_selector={"x": "y", "z": "1"})[0]["metadata"]["name"] == "applied"
    for event in nodus.api.watch("Sandbox", field_selector={"metadata.name": "applied"}):
        assert (event["type"], event["object"]["metadata"]["name"]) == ("ADDED", "applied")
        break
    assert nodus.api.exec("Sandbox", "applied", ["echo", "x"]).stdout.read() == "x\n"
    nodus.api.files("Sandbox", "applied").write("/workspace/f", b"f")
    nodus.api.delete("Sandbox", "applied")
    assert not nodus.api.list("Sandbox", label_selector={"x": "y"})


@sdk("nodus.api.healthz, readyz; api.list of Offering, Event, UsageRecord, Process")
def _(work: Work) -> None:
    import nodus

    assert nodus.api.healthz()
    assert nodus.api.readyz().ready
    assert {"sandbox", "h100-sxm"} <= {offering["metadata"]["name"] for offering in nodus.api.list("Offering")}
    for kind in ("Event", "UsageRecord", "Process"):
        assert nodus.api.list(kind)


@sdk("sb.refresh_secrets()")
def _(work: Work) -> None:
    work["sb"].refresh_secrets()


@sdk("sb.snapshot_filesystem(name); Sandbox.create(image=image.name)")
def _(work: Work) -> None:
    import nodus

    work["sb"].files.write("/home/user/kept", "kept")
    image = work["sb"].snapshot_filesystem("prepared")
    copy = nodus.Sandbox.create(image=image.name, memory="256Mi")
    assert copy.exec("cat", "x", "/home/user/kept").stdout.read() == "twokept"
    assert nodus.api.get("Image", "prepared")["status"]["phase"] == "Ready"
    copy.terminate()


@sdk("Image.from_dockerfile(path, context=...).build(), with its log")
def _(work: Work) -> None:
    import contextlib
    import io

    import nodus

    folder = Path(work["folder"], "context")
    folder.mkdir()
    (folder / "hello.sh").write_text("#!/bin/sh\necho from the context\n")
    (folder / "hello.sh").chmod(0o755)
    (folder / "Dockerfile").write_text("FROM nodus/agent-tools\nWORKDIR /srv/app\nCOPY hello.sh .\nRUN ./hello.sh > said\n")
    with contextlib.redirect_stdout(io.StringIO()) as log:
        image = nodus.Image.from_dockerfile(folder / "Dockerfile", context=folder).build()
    assert "[4/4] RUN ./hello.sh > said" in log.getvalue()
    assert (image.digest or "").startswith("sha256:")
    sandbox = nodus.Sandbox.create(image=image.name, memory="256Mi")
    assert sandbox.exec("sh", "-c", "cat said; ./hello.sh", workdir="/srv/app").stdout.read() == "from the context\n" * 2
    sandbox.terminate()


@sdk('Image.from_registry("nodus/agent-tools").run_commands, .env, .workdir, .add_local_file, .add_local_dir; .build()')
def _(work: Work) -> None:
    import nodus

    folder = Path(work["folder"], "local")
    folder.mkdir()
    (folder / "one.txt").write_text("one\n")
    image = (
        nodus.Image.from_registry("nodus/agent-tools").run_commands("mkdir -p /opt/made", "echo made > /opt/made/it").env({"SAID": "a $b"})
        .add_local_file(folder / "one.txt", "/opt/one.txt").add_local_dir(folder, "/opt/dir").workdir("/opt").build(show_logs=False)
    )  # fmt: skip
    sandbox = nodus.Sandbox.create(image=image.name, memory="256Mi")
    assert (
        sandbox.exec("sh", "-c", 'cat made/it one.txt dir/one.txt; echo "$SAID"', workdir="/opt").stdout.read() == "made\none\none\na $b\n"
    )
    sandbox.terminate()


@sdk("Image.build() of what fails raises ImageBuildFailed")
def _(work: Work) -> None:
    import nodus

    with pytest.raises(nodus.errors.ImageBuildFailed, match="exit code 3"):
        nodus.Image.from_registry("nodus/agent-tools").run_commands("exit 3").build(show_logs=False)


@sdk("nodus.api.get, list and delete of Image")
def _(work: Work) -> None:
    import nodus

    assert {image["status"]["phase"] for image in nodus.api.list("Image")} == {"Ready", "Failed"}
    nodus.api.delete("Image", "prepared")
    with pytest.raises(nodus.errors.NotFound):
        nodus.api.get("Image", "prepared")


@sdk(
    "Image.pip_install(...).build()",
    refused="Invalid",
    why="builds reach what spec.network allows, which the SDK does not send; run steps install",
)
def _(work: Work) -> None:
    import nodus

    nodus.Image.from_registry("nodus/agent-tools").pip_install("six").build(show_logs=False)


@sdk("Sandbox.create(network=Egress.open())")
def _(work: Work) -> None:
    import nodus

    nodus.Sandbox.create(network=nodus.Egress.open()).terminate()


@sdk("Sandbox.create(network=Egress.allow(...))", refused="Unsupported", why="the SDK itself refuses it before sending")
def _(work: Work) -> None:
    import nodus

    nodus.Sandbox.create(network=nodus.Egress.allow("example.org"))


@sdk(
    'Sandbox.create(image="example.org/acme/tools:1.2")',
    refused="ImageNotFound",
    why="nothing is pulled; images are the project's own or under nodus/",
)
def _(work: Work) -> None:
    import nodus

    nodus.Sandbox.create(image="example.org/acme/tools:1.2")


@sdk('Sandbox.create(gpu="H100")', refused="Invalid", why="this server places no accelerators")
def _(work: Work) -> None:
    import nodus

    nodus.Sandbox.create(gpu="H100")


@sdk("sb.terminate()")
def _(work: Work) -> None:
    import nodus

    for sandbox in nodus.Sandbox.list():
        sandbox.terminate()
    assert nodus.Sandbox.list() == []
