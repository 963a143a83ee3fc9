"""Packages come whole or not at all, once for everybody, and nothing of them runs outside a sandbox."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from package_files import wheel

from sandmill.environments.packages import install as installing
from sandmill.environments.packages.install import add_bytecode, install, key_of, records, remove
from sandmill.environments.packages.package import Copied, Package
from sandmill.environments.packages.wheels import PYTHON
from sandmill.errors import ConfigError, EnvironmentFailed, ImageError
from sandmill.sandboxes import Sandbox

pytestmark = pytest.mark.usefixtures("installs")


def installed(package, *command, work=None):
    """Installs and runs a Python command line in a sandbox with it; what it printed. Or awaits `work(installed)`."""

    async def main():
        found = await install(package)
        try:
            if work is not None:
                return await work(found)
            async with await Sandbox.create.aio(image=found.record.image) as sandbox:
                done = await sandbox.run.aio(PYTHON, *command, timeout=60, merge_stderr=True)
                return done.stdout.decode().strip()
        finally:
            found.use.release()

    return asyncio.run(main())


def test_a_package_is_importable_with_what_it_needs(index):
    wheel(index, "small", {"small.py": "import needed\nvalue = needed.value + 1\n"}, requires=["needed==2.0"])
    wheel(index, "needed", {"needed.py": "value = 41\n"}, version="2.0")
    wheel(index, "needed", {"needed.py": "value = 0\n"}, version="3.0")
    assert installed(Package(requirements=("small==1.0",)), "-c", "import small; print(small.value)") == "42"


def test_bare_leaves_out_what_a_package_needs(index):
    wheel(index, "small", {"small.py": ""}, requires=["absent==9"])
    assert installed(Package(bare=("small==1.0",)), "-c", "import small; print('here')") == "here"


def test_the_sandbox_sees_no_packages_but_its_own(index):
    wheel(index, "small", {"small.py": ""})
    said = installed(Package(requirements=("small==1.0",)), "-c", "import sys; print([p for p in sys.path if 'packages' in p])")
    assert said.startswith("['/opt/env/lib/python3.")
    assert said.count("packages") == 1


def test_what_is_installed_belongs_to_nobody_in_the_sandbox(index):
    wheel(index, "small", {"small.py": "value = 1\n"})
    script = (
        "import small, os\ntry:\n    open(small.__file__, 'w')\nexcept OSError as error:\n    print(type(error).__name__, os.getuid() != 0)"
    )
    assert installed(Package(requirements=("small==1.0",)), "-c", script) == "PermissionError True"


def test_scripts_and_commands_run(index):
    files = {
        "small.py": "def main():\n    print('a command')\n",
        "small-1.0.dist-info/entry_points.txt": "[console_scripts]\nsmall = small:main\nbad = small:main;evil\n../up = small:main\n",
        "small-1.0.data/scripts/tool": "#!python\nprint('a script')\n",
        "small-1.0.data/data/share/note": "data\n",
    }
    wheel(index, "small", files)
    script = (
        "import subprocess\nfor one in ('small', 'tool', 'ls /opt/env/bin /opt/env/share'):\n    subprocess.run(one.split(), check=True)\n"
    )
    lines = installed(Package(requirements=("small==1.0",)), "-c", script).split()
    assert lines[:4] == ["a", "command", "a", "script"], lines
    assert set(lines[4:]) == {"/opt/env/bin:", "python", "python3", "small", "tool", "/opt/env/share:", "note"}


def test_files_come_along(tmp_path):
    folder = tmp_path / "own"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "data.txt").write_text("hello")
    (folder / "tool.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "tool.sh").chmod(0o755)
    script = "import subprocess; print(open('/opt/env/files/own/inner/data.txt').read()); subprocess.run(['/opt/env/files/own/tool.sh'])"
    said = installed(Package(files=(Copied(source=str(folder), place="own"),)), "-c", script)
    assert set(said.split()) == {"hello", "ran"}


def test_a_link_out_of_a_folder_is_refused(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "leak").symlink_to("/etc/shadow")
    with pytest.raises(ConfigError, match="leads out of"):
        installed(Package(files=(Copied(source=str(folder), place="own"),)), "-c", "")


def test_the_second_time_takes_no_time_and_no_network(index):
    path = wheel(index, "small", {"small.py": "value = 7\n"})
    package = Package(requirements=("small==1.0",))
    installed(package, "-c", "")
    path.unlink()
    start = time.monotonic()
    installed(package, work=nothing)
    assert time.monotonic() - start < 1.0
    assert installed(package, "-c", "import small; print(small.value)") == "7"


async def nothing(found):
    return found


def test_other_files_are_another_package(tmp_path):
    file = tmp_path / "file.py"
    file.write_text("1")
    package = Package(files=(Copied(source=str(file), place="file.py"),))
    before = key_of(package)
    file.write_text("2")
    assert key_of(package) != before


def test_installers_of_the_same_wait_for_one_another(index, monkeypatch):
    wheel(index, "small", {"small.py": ""})
    fetched = []
    fetch = installing._fetch

    async def counted(*arguments):
        fetched.append(1)
        await asyncio.sleep(0.3)
        return await fetch(*arguments)

    monkeypatch.setattr(installing, "_fetch", counted)

    async def main():
        found = await asyncio.gather(*(install(Package(requirements=("small==1.0",))) for _ in range(4)))
        for one in found:
            one.use.release()
        return {one.record.image for one in found}

    assert len(asyncio.run(main())) == 1
    assert len(fetched) == 1


def test_a_killed_installer_leaves_nothing_and_the_next_one_installs(index, installs):
    wheel(index, "small", {"small.py": "value = 7\n"}, requires=["needed==1.0"])
    script = (
        "import asyncio, sys\nfrom sandmill.environments.packages import install\n"
        "from sandmill.environments.packages.package import Package\n"
        "async def hang(*arguments, **more):\n    print('hanging', flush=True)\n    await asyncio.sleep(600)\n"
        "install.download = hang\nasyncio.run(install.install(Package(requirements=('small==1.0',))))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "hanging\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert list(installs.glob("*.wheels"))
    wheel(index, "needed", {"needed.py": ""})
    assert installed(Package(requirements=("small==1.0",)), "-c", "import small; print(small.value)") == "7"
    assert not [path for path in installs.iterdir() if path.suffix in (".wheels", ".lock", ".new")]


def test_what_cannot_be_installed_leaves_nothing(index, installs):
    before = records()
    wheel(index, "small", {"small.py": ""}, requires=["absent==9"])
    with pytest.raises(EnvironmentFailed, match="absent==9"):
        installed(Package(requirements=("small==1.0",)), "-c", "")
    assert before == records()
    assert not list(installs.glob("*.wheels"))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ([("../../escape.py", "x")], "climbs out"),
        ([("/etc/absolute.py", "x")], None),
        ([("small-1.0.data/nowhere/x", "x")], "no place that Python knows"),
    ],
)
def test_a_hostile_wheel_stays_in_its_place(index, tmp_path, more, reason):
    wheel(index, "small", {"small.py": ""}, more=more)
    if reason is None:
        assert installed(Package(requirements=("small==1.0",)), "-c", "import os; print(os.path.exists('/etc/absolute.py'))") == "False"
    else:
        with pytest.raises(ImageError, match=reason):
            installed(Package(requirements=("small==1.0",)), "-c", "")
    assert not list(tmp_path.rglob("escape.py"))


def test_a_damaged_wheel_is_named(index):
    path = wheel(index, "small", {"small.py": "x = 1\n" * 1000})
    data = bytearray(path.read_bytes())
    data[60:90] = b"\xff" * 30
    path.write_bytes(data)
    with pytest.raises((ImageError, EnvironmentFailed), match="small"):
        installed(Package(requirements=("small==1.0",)), "-c", "")


def test_a_python_that_is_not_there_is_one_sentence():
    with pytest.raises(EnvironmentFailed, match=r"needs python3\.42, which this machine does not have \(python3"):
        installed(Package(python="3.42"), "-c", "")


def test_a_python_that_lies_elsewhere_comes_along():
    base = str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}"))
    inner = "import sys; print(sys.version.split()[0])"
    script = f"import ctypes, json, sqlite3, ssl, subprocess, sys; subprocess.run([sys.executable, '-c', '{inner}'])"
    assert installed(Package(python=base), "-c", script) == sys.version.split()[0]


def test_what_needs_another_python_is_one_sentence(index):
    import zipfile

    path = wheel(index, "small", {"small.py": ""})
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files["small-1.0.dist-info/METADATA"] += b"Requires-Python: >=3.42\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    with pytest.raises(EnvironmentFailed, match=r"'small' requires a different Python: 3.* not in '>=3.42'"):
        installed(Package(requirements=("small==1.0",)), "-c", "")


def test_a_version_that_is_not_there_names_the_nearest(index):
    for version in ("0.9", "1.2", "3.0"):
        wheel(index, "small", {"small.py": ""}, version=version)
    with pytest.raises(EnvironmentFailed, match=r"there is no small==1.1 .*the nearest version is 1.2"):
        installed(Package(requirements=("small==1.1",)), "-c", "")


def test_removed_is_gone_and_what_is_used_stays(index):
    wheel(index, "small", {"small.py": ""})

    async def work(found):
        assert found.key in records()
        with pytest.raises(ImageError, match="used"):
            remove(found.key)
        return found.key

    key = installed(Package(requirements=("small==1.0",)), work=work)
    assert key in records()
    remove(key)
    assert key not in records()


def test_bytecode_is_added_once(index):
    wheel(index, "small", {"small.py": "value = 7\n", "other.py": "1\n"})
    package = Package(requirements=("small==1.0",))
    modules = [f"/opt/env/lib/python3.{minor}/site-packages/small.py" for minor in range(8, 20)]

    async def work(found):
        again = await add_bytecode(await install(package), ["/etc/passwd", "../x.py", *modules])
        third = await add_bytecode(await install(package), modules)
        try:
            assert again.record.compiled
            assert again.record.image == third.record.image != found.record.image
            assert again.record.digest == found.record.digest
        finally:
            again.use.release()
            third.use.release()

    installed(package, work=work)
    script = "import glob; print(sorted(p.split('/')[-1].split('.')[0] for p in glob.glob('/opt/env/lib/*/*/__pycache__/*')))"
    assert installed(package, "-c", script) == "['small']"


PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "made"
version = "1.0"
"""
BACKEND = """
import os, zipfile

def build_wheel(folder, settings=None, metadata=None):
    try:
        import socket
        socket.create_connection(("1.1.1.1", 53), timeout=1)
        network = True
    except OSError:
        network = False
    name = "made-1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as archive:
        archive.writestr("made.py", f"network = {network}\\nplace = {os.getcwd()!r}\\n")
        archive.writestr("made-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: made\\nVersion: 1.0\\n")
        archive.writestr("made-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr("made-1.0.dist-info/RECORD", "")
    return name
"""


@pytest.mark.parametrize("archived", [False, True])
def test_a_project_is_built_in_a_sandbox_without_network(index, tmp_path, archived):
    folder = tmp_path / "made-1.0"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "backend.py").write_text(BACKEND)
    place = folder
    if archived:
        place = tmp_path / "made-1.0.tar.gz"
        subprocess.run(["tar", "-czf", place, "-C", tmp_path, "made-1.0"], check=True)
    said = installed(Package(local=(str(place),)), "-c", "import made; print(made.network, made.place)")
    assert said == f"False {'/build/source/made-1.0' if archived else '/opt/env/files/source'}"
    mine = [record for record in records().values() if str(tmp_path) in str(record.package)]
    assert [record.package.local for record in mine] == [(str(place),)]


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("raise RuntimeError('broken build')", "could not be built: .*RuntimeError: broken build"),
        ("def build_wheel(folder, *more):\n    return '../../../etc/x.whl'", "left no wheel"),
        ("def build_wheel(folder, *more):\n    return 'made-1.0-py3-none-any.whl'", "left no wheel"),
    ],
)
def test_a_build_that_fails_says_why(index, tmp_path, backend, reason):
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "backend.py").write_text(backend)
    with pytest.raises(EnvironmentFailed, match=reason):
        installed(Package(local=(str(folder),)), "-c", "")
    assert not [record for record in records().values() if str(tmp_path) in str(record.package)]


def test_a_source_of_the_index_is_built_when_there_is_no_wheel(index, tmp_path):
    folder = tmp_path / "made-1.0"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "backend.py").write_text(BACKEND)
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: made\nVersion: 1.0\n")
    subprocess.run(["tar", "-czf", index / "made-1.0.tar.gz", "-C", tmp_path, "made-1.0"], check=True)
    wheel(index, "small", {"small.py": "import made\n"}, requires=["made==1.0"])
    assert installed(Package(requirements=("small==1.0",)), "-c", "import small; print(small.made.network)") == "False"
    assert not Path("/tmp/made").exists()
