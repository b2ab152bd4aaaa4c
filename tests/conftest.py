"""Tiny folders that stand for a real target and a real draft bundle."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark.checkpoints.bundle import BundleInfo
from dspark.checkpoints.native import write_bundle
from dspark.data.template import template_hash
from dspark.drafters.config import DSparkConfig
from dspark.drafters.dspark import DSparkModel, initialise
from dspark.targets.load import LoadedTarget, load_target
from dspark.targets.tiny import tiny_model

SPECIAL = ["<pad>", "<bos>", "<eos>", "<mask>", "<user>", "<assistant>"]
VOCAB = 264
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: the text of most random tokens is broken UTF-8."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        mask_token="<mask>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A random two-layer Llama with a byte tokenizer and chat template, as transformers saves it."""
    folder = tmp_path_factory.mktemp("targets") / "tiny-llama"
    tiny_model("llama", vocab_size=VOCAB, num_hidden_layers=2, mask_token_id=3).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def loaded_target(target_folder: Path) -> LoadedTarget:
    return load_target(str(target_folder), weights="fp32", template_hash=template_hash)


def drafter_config(loaded: LoadedTarget, **changes: Any) -> DSparkConfig:
    target = loaded.target
    values: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
        "target_layer_ids": (-1, target.num_layers - 1),
        "mask_token_id": loaded.binding.mask_token_id,
        "block_size": 4,
        "markov_rank": 8,
    }
    return DSparkConfig(**values | changes)


@pytest.fixture(scope="session")
def bundle_folder(tmp_path_factory: pytest.TempPathFactory, loaded_target: LoadedTarget) -> Path:
    """An untrained draft bundle that fits `target_folder`."""
    config = drafter_config(loaded_target)
    model = DSparkModel(config)
    initialise(model, torch.Generator().manual_seed(0), std=0.2)
    folder = tmp_path_factory.mktemp("bundles") / "tiny"
    write_bundle(
        folder,
        config=config,
        info=BundleInfo(
            target=loaded_target.name,
            embedding_hash=loaded_target.binding.embedding_hash,
            chat_template_hash=loaded_target.binding.chat_template_hash,
            candidates=16,
        ),
        tensors=model.state_dict(),
        card="An untrained drafter for tests.\n",
    )
    return folder
