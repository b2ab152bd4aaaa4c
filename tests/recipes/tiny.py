"""A tiny random target in a folder, with a byte tokenizer, and an untrained drafter's bundle for
it."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from dspark.checkpoints.bundle import BundleInfo
from dspark.checkpoints.native import write_bundle
from dspark.data.template import template_hash
from dspark.drafters.config import DSparkConfig
from dspark.drafters.dspark import DSparkModel, initialise
from dspark.targets.load import make_binding
from dspark.targets.tiny import tiny_model

BLOCK = 3
_SPECIAL = ["<pad>", "<bos>", "<eos>"]


def write_target(folder: Path, *, max_context: int = 256) -> Path:
    """A random 2-layer Llama over bytes, as a transformers folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
    # More ids than the tokenizer has: the first of the others is the mask token.
    model = tiny_model(
        "llama", vocab_size=264, num_hidden_layers=2, max_position_embeddings=max_context
    )
    model.save_pretrained(folder)
    return folder


def write_draft(folder: Path, target: Path) -> Path:
    """A drafter that has learned nothing, so that most of its tokens are rejected."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    binding = make_binding(
        AutoModelForCausalLM.from_pretrained(target), target.name, tokenizer, template_hash
    )
    config = DSparkConfig(
        hidden_size=binding.hidden_size,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=binding.vocab_size,
        num_target_layers=binding.num_target_layers,
        target_layer_ids=(0,),
        mask_token_id=binding.mask_token_id,
        block_size=BLOCK,
        markov_rank=4,
    )
    model = DSparkModel(config)
    initialise(model, torch.Generator().manual_seed(0))
    write_bundle(
        folder,
        config=config,
        info=BundleInfo(target=binding.target_name, embedding_hash=binding.embedding_hash),
        tensors=model.state_dict(),
        card="An untrained drafter.",
    )
    return folder


def write_prompts(file: Path, turns: list[str]) -> Path:
    file.write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in turns))
    return file


def write_all(folder: Path) -> None:
    """`target`, `draft`, `math.jsonl` (6 prompts) and `chat.jsonl` (4)."""
    write_target(folder / "target")
    write_draft(folder / "draft", folder / "target")
    write_prompts(folder / "math.jsonl", [f"What is {i} plus {i}?" for i in range(6)])
    write_prompts(folder / "chat.jsonl", [f"Say hello {i} times." for i in range(4)])


def write_talker(folder: Path) -> Path:
    """A random target that knows only printable ASCII, so that all it writes is text."""
    characters = [chr(code) for code in range(33, 127)]
    pieces = [" " if c == "_" else c for c in characters]
    vocab = {token: i for i, token in enumerate([*_SPECIAL, "<user>", "<assistant>", *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
    )  # fmt: skip
    fast.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    fast.save_pretrained(folder)
    model = tiny_model(
        "llama", vocab_size=len(vocab), num_hidden_layers=3, max_position_embeddings=256
    )
    model.save_pretrained(folder)
    return folder
