"""Bundles as they are looked at before anything is done with them: what they need, and how little hostile ones get."""

from __future__ import annotations

import gzip
import resource
import tarfile
from pathlib import Path

import pytest
from bundles import bundle, odd

from sandmill.errors import ConfigError
from sandmill.server.bundles import check_bundle


def needs(folder: Path, source: str, python: str = "3.11", **site: str) -> tuple[str, ...]:
    path = folder / "bundle.tar.gz"
    path.write_bytes(bundle({"m.py": source} | {f"site/{name}.py": text for name, text in site.items()}))
    return check_bundle(path, "m", python)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import sympy", ("sympy==1.14.0",)),
        ("import json, numpy as np", ("numpy==2.4.4",)),
        ("def f():\n    from math_verify.parser import parse", ("math-verify==0.9.0",)),
        ("import sympy_extra\nx = 'import'\n", ()),
        ("import os", ()),
    ],
)
def test_what_clients_take_for_installed_is_installed(tmp_path: Path, source: str, found: tuple[str, ...]) -> None:
    assert needs(tmp_path, source) == found


def test_numpy_is_the_one_that_fits(tmp_path: Path) -> None:
    assert needs(tmp_path, "import numpy", "3.13") == ("numpy==2.5.3",)


def test_what_a_bundle_brings_is_not_installed(tmp_path: Path) -> None:
    assert needs(tmp_path, "import sympy, regex", sympy="") == ("regex==2026.9.29",)


def test_no_more_is_inflated_than_a_bundle_may_hold(tmp_path: Path) -> None:
    path = tmp_path / "bomb.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        head = odd("zeros", size=2 << 30)
        file.write(head.tobuf(tarfile.GNU_FORMAT))
        for _ in range(300):
            file.write(bytes(1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match="unpacks to more than"):
        check_bundle(path, "m", "3.11")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_a_name_that_says_gigabytes_gets_no_more(tmp_path: Path) -> None:
    path = tmp_path / "long.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(odd("././@PaxHeader", size=1 << 40, type=tarfile.XHDTYPE).tobuf(tarfile.GNU_FORMAT))
        file.write(bytes(1 << 20))
    with pytest.raises(ConfigError):
        check_bundle(path, "m", "3.11")


def test_many_entries_are_too_many(tmp_path: Path) -> None:
    path = tmp_path / "many.tar.gz"
    path.write_bytes(bundle({f"f{number}": odd(f"f{number}") for number in range(20_001)}))
    with pytest.raises(ConfigError, match="more than 20000 entries"):
        check_bundle(path, "m", "3.11")
