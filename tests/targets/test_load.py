"""Loading a target: what works, and one line for everything that does not."""

import importlib.metadata
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dspark.core.errors import ConfigError, TargetError, UserError
from dspark.data.template import template_hash
from dspark.targets import load, source
from dspark.targets.drift import target_logits
from dspark.targets.embedded import embedded_gguf
from dspark.targets.load import check_many_requests, load_target, read_model
from dspark.targets.tiny import tiny_model
from tests.targets.ragged import random_text


def load_it(source, **options):
    return load_target(str(source), weights="fp32", template_hash=template_hash, **options)


def refused(source, *words, error=TargetError):
    """The one line that loading `source` fails with; it must hold `words`."""
    with pytest.raises(error) as caught:
        load_it(source)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    assert isinstance(caught.value, UserError) and caught.value.exit_code == 2
    return message


@pytest.fixture
def broken(target_folder, tmp_path):
    """A copy of the tiny target, to be broken."""
    folder = tmp_path / "broken-model"
    shutil.copytree(target_folder, folder)
    return folder


def test_a_folder(loaded_target, target_folder):
    text = random_text(20, 264, seed=0)
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([text])).logits[0]
    logits = target_logits(loaded_target.target, torch.tensor(text))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert loaded_target.name == "tiny-llama"
    assert loaded_target.target.eos_token_ids == (2,)
    assert loaded_target.binding.mask_token_id == 259
    assert loaded_target.binding.chat_template_hash == template_hash(loaded_target.tokenizer)
    assert loaded_target.weights == "fp32"


def test_many_requests_are_told(target_folder):
    lines = []
    loaded = load_target(
        str(target_folder),
        weights="int8",
        template_hash=template_hash,
        many_requests=True,
        say=lines.append,
    )
    assert loaded.target.mode.many
    assert any(line.startswith("many requests: ") for line in lines)


def test_many_requests_are_refused_where_they_would_do_nothing():
    for kind in ("fp32", "bf16", "fp16"):
        with pytest.raises(ConfigError, match=f"q4 and int8 weights; these are {kind}; leave it"):
            check_many_requests("cpu", kind)
    with pytest.raises(ConfigError, match="the device is cuda:1; leave it out"):
        check_many_requests("cuda:1", None)
    for kind in ("q4", "int8", None):
        check_many_requests("cpu", kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_is_loaded_in_float32_whatever_it_is_stored_in(broken, dtype):
    """Gemma scales its embedding by a constant that bfloat16 would round."""
    model = tiny_model("gemma3_text", vocab_size=264)
    model.to(dtype).save_pretrained(broken)
    expected = AutoModelForCausalLM.from_pretrained(broken, dtype=torch.float32)
    text = torch.tensor(random_text(12, 264, seed=0))
    with torch.inference_mode():
        logits = expected(text[None]).logits[0]
    loaded = load_it(broken)
    torch.testing.assert_close(target_logits(loaded.target, text), logits, atol=1e-4, rtol=0)
    assert loaded.binding.embedding_scale == pytest.approx(48**0.5, rel=1e-6)
    assert all(parameter.dtype == torch.float32 for parameter in loaded.target.model.parameters())


def test_nothing_there(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "there is no model folder")
    refused(tmp_path / "nowhere.gguf", "nowhere.gguf", "there is no GGUF file")
    refused(tmp_path, "config.json")
    (tmp_path / "file.txt").write_text("a file")
    refused(tmp_path / "file.txt", "config.json")


def test_a_hub_id_that_is_not_there(monkeypatch):
    asked = []

    def connect(*args):
        asked.append(args)
        raise OSError("no network")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("socket.socket.connect", connect)
    monkeypatch.setattr("socket.getaddrinfo", connect)
    refused("nobody/no-such-model", "nobody/no-such-model")
    assert not asked


def test_broken_files(broken):
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    refused(broken, "broken-model")
    weights.write_bytes(b"")
    refused(broken, "broken-model")
    weights.unlink()
    refused(broken, "broken-model", "model.safetensors")
    weights.write_bytes(whole)
    load_it(broken)
    (broken / "config.json").write_text("{ not json")
    refused(broken, "broken-model")


def test_a_missing_or_misshaped_tensor_is_not_made_up(broken):
    """transformers fills it with random numbers and a warning."""
    path = broken / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, path, metadata={"format": "pt"})
    refused(broken, name, "missing")
    save_file(tensors | {name: torch.zeros(3, 3)}, path, metadata={"format": "pt"})
    refused(broken, name)


def test_no_tokenizer(broken):
    for file in broken.glob("*token*"):
        file.unlink()
    refused(broken, "broken-model")


def test_an_encoder_decoder_is_refused_before_its_weights_are_read(broken):
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    (broken / "config.json").write_text(json.dumps(config))
    (broken / "model.safetensors").unlink()
    refused(broken, "T5ForConditionalGeneration cannot be a target", "encoder-decoder")


def test_the_embedded_package(monkeypatch, tmp_path):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(TargetError, match=r"not installed; run: pip install .*--target"):
        read_model(None)

    class Entry:
        suffix = ".gguf"

        def __init__(self, path):
            self.path = path

        def locate(self):
            return self.path

    monkeypatch.setattr(importlib.metadata, "files", lambda name: [Entry(tmp_path / "gone.gguf")])
    with pytest.raises(TargetError, match="holds no GGUF file"):
        embedded_gguf()
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    with pytest.raises(TargetError, match="holds no GGUF file"):
        embedded_gguf()
    (tmp_path / "here.gguf").write_bytes(b"x")
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [Entry(tmp_path / "here.gguf")])
    assert embedded_gguf() == tmp_path / "here.gguf"


class TestGGUF:
    """The conversion's own mechanics; transformers' reader is stood in for."""

    @pytest.fixture
    def gguf(self, tmp_path, monkeypatch, target_folder):
        monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
        path = tmp_path / "small.gguf"
        path.write_bytes(b"one")
        self.reads = 0
        real_model = load.AutoModelForCausalLM.from_pretrained
        real_tokenizer = load.AutoTokenizer.from_pretrained

        def model_of(source, gguf_file=None, **options):
            if gguf_file is None:
                return real_model(source, **options)
            self.reads += 1
            model = real_model(str(target_folder), dtype=torch.float32)
            model.config.quantization_config = {"quant_method": "gguf"}
            return model

        def tokenizer_of(source, gguf_file=None, **options):
            return real_tokenizer(source if gguf_file is None else str(target_folder), **options)

        monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", model_of)
        monkeypatch.setattr(load.AutoTokenizer, "from_pretrained", tokenizer_of)
        return path

    def cached(self, tmp_path):
        return sorted(path.name for path in (tmp_path / "cache" / "targets").iterdir())

    def test_it_is_converted_once_for_each_content(self, gguf, tmp_path):
        assert load_it(gguf).name == "small"
        load_it(gguf)
        assert self.reads == 1
        gguf.write_bytes(b"two")
        load_it(gguf)
        assert self.reads == 2
        folders = self.cached(tmp_path)
        assert len(folders) == 2 and all(name.startswith("small-") for name in folders)

    def test_an_interrupted_conversion_leaves_nothing(self, gguf, tmp_path, monkeypatch):
        def interrupted(folder, path):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(source, "_record_source", interrupted)
            with pytest.raises(KeyboardInterrupt):
                load_it(gguf)
        assert self.cached(tmp_path) == []
        load_it(gguf)

    def test_another_process_was_first(self, gguf, tmp_path, monkeypatch):
        """Both convert; the later one finds the folder there and uses it."""
        record = source._record_source

        def race(folder, path):
            record(folder, path)
            target = next(iter(source.cache_folder().glob("targets")))
            shutil.copytree(folder, target / f"small-{source._file_hash(path)[:16]}")

        monkeypatch.setattr(source, "_record_source", race)
        load_it(gguf)
        assert len(self.cached(tmp_path)) == 1

    def test_a_broken_file(self, gguf, tmp_path, monkeypatch):
        def unreadable(source, **options):
            raise ValueError("bad magic\nmore lines")

        monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", unreadable)
        refused(gguf, "small.gguf", "bad magic")


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("DSPARK_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert source.cache_folder() == tmp_path / "dspark"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert source.cache_folder() == Path.home() / ".cache" / "dspark"
