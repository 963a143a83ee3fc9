from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "reports"))


class Sandmill:
    """The real command, as a process of its own in its own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "HOME": str(folder), "NO_COLOR": "1"}

    def __call__(self, *words, timeout=120, **options):
        return self.python("-m", "sandmill.cli", *words, timeout=timeout, **options)

    def python(self, *words, timeout=120, **options):
        command = [sys.executable, *(word if isinstance(word, bytes) else str(word) for word in words)]
        options = {"stdin": subprocess.DEVNULL, **options}
        return subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, timeout=timeout, check=False, **options)

    def start(self, *words, **options):
        command = [sys.executable, "-m", "sandmill.cli", *map(str, words)]
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen(command, cwd=self.folder, env=self.env, **options)


@pytest.fixture
def sandmill(tmp_path):
    return Sandmill(tmp_path)
