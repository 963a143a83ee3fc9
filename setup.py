"""Compiles the sandbox warden (native/*.c) into the package, for wheels and editable installs alike.

Needs a C compiler and a static libc.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HERE = Path(__file__).parent
FLAGS = (
    "-std=gnu11 -O2 -static -Wall -Wextra -fstack-protector-strong -D_FORTIFY_SOURCE=2"
    " -ffunction-sections -fdata-sections -Wl,--gc-sections,-s"
)


def compile_warden(target: Path) -> None:
    """Writes the static executable `target`. Ends the build with one sentence when there is no compiler or it fails."""
    sources = sorted(str(path) for path in (HERE / "native").glob("*.c"))
    compiler = os.environ.get("CC", "cc").split()
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        subprocess.run([*compiler, *FLAGS.split(), "-o", str(fresh), *sources], check=True)
    except FileNotFoundError:
        raise SystemExit(
            f"sandmill: no C compiler ({compiler[0]}) to build the sandbox warden;"
            " install one (Debian: apt-get install gcc libc6-dev) or set CC"
        ) from None
    except subprocess.CalledProcessError:
        raise SystemExit(
            "sandmill: the C compiler could not build the sandbox warden (its messages are above);"
            " a static libc is needed (Debian: libc6-dev)"
        ) from None
    os.replace(fresh, target)


class BuildWithWarden(build_py):
    """build_py that also builds the warden: into the source tree when editable, else into the wheel."""

    def run(self) -> None:
        place = HERE / "src" if self.editable_mode else Path(self.build_lib)
        compile_warden(place / "sandmill" / "sandboxes" / "warden" / "warden")
        super().run()

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        built = Path(self.build_lib) / "sandmill" / "sandboxes" / "warden" / "warden"
        return super().get_outputs(include_bytecode) + ([] if self.editable_mode else [str(built)])


class BinaryDistribution(Distribution):
    """The wheel carries a machine's executable, so it is tagged for that platform."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """The warden is no Python extension: one wheel per platform serves every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithWarden, "bdist_wheel": PlatformWheel}, distclass=BinaryDistribution)
