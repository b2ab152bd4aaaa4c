"""Law 5 at the target: a row's bits depend on nothing else in the batch, nor on the pieces."""

import random

import pytest
import torch

from dspark.targets.tiny import tiny_model
from tests.targets.ragged import Session, packed_target, random_text

VOCAB = 97
LENGTHS = (5, 40, 508, 521)  # across the key tile of 512
MODELS = {
    "llama": {"num_hidden_layers": 2},
    "mistral": {"num_hidden_layers": 2},
    "qwen3": {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 128},
    "gemma2": {"num_hidden_layers": 2},
    "gemma3_text": {"num_hidden_layers": 2},
    "qwen3_moe": {"num_hidden_layers": 1},
}


def pieces(rng, length):
    """Cut points: a prefill of some chunk size, then verification blocks of any size."""
    cuts, at = [], max(1, length - rng.randint(15, 30)) if rng.random() < 0.7 else 0
    while at < length:
        if at:
            cuts.append(at)
        at += rng.choice([1, 1, 2, 3, 5, 8, 9]) if length - at < 60 else rng.randint(50, 300)
    return cuts


def check_rows_are_exact(target, seed, trials=2, lengths=LENGTHS, prompt_from=None):
    rng = random.Random(seed)
    texts = [random_text(length, VOCAB, seed=length) for length in lengths]
    paged = {"page_size": 16, "pages": 40, "prompt_from": prompt_from}
    alone = [Session(target, **paged).read([t], [[]])[0]["logits"] for t in texts]
    for trial in range(trials):
        scatter = torch.Generator().manual_seed(trial) if trial % 2 else None
        size = rng.choice([4, 16, 64])
        paged = {"page_size": size, "pages": 1300 // size, "prompt_from": prompt_from}
        session = Session(target, scatter=scatter, **paged)
        chosen = rng.sample(range(len(texts)), rng.randint(2, len(texts)))
        cuts = [pieces(rng, len(texts[i])) for i in chosen]
        for i, rows in zip(chosen, session.read([texts[i] for i in chosen], cuts), strict=True):
            assert torch.equal(rows["logits"], alone[i]), (trial, lengths[i])


@pytest.mark.parametrize("model_type", MODELS)
def test_rows_do_not_depend_on_the_batch(model_type):
    target = packed_target(tiny_model(model_type, **MODELS[model_type]))
    assert target.row_exact
    check_rows_are_exact(target, seed=1)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "int8"])
def test_every_kind_of_weights(kind):
    target = packed_target(tiny_model("llama", num_hidden_layers=2), kind)
    if not target.row_exact:
        pytest.skip(f"{kind} is not row-exact on this machine, and says so")
    check_rows_are_exact(target, seed=2)


def wide_model():
    """As wide as the default target: with 48 inputs a sum has no other order."""
    wide = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9}
    return tiny_model("llama", num_hidden_layers=1, num_key_value_heads=3, head_dim=64, **wide)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "int8"])
def test_prompts_of_every_kind_of_weights(kind):
    """Prompts keep to row counts of their own: large ones, whatever pieces they are read in."""
    target = packed_target(wide_model(), kind)
    if not target.row_exact:
        pytest.skip(f"{kind} is not row-exact on this machine, and says so")
    check_rows_are_exact(target, seed=4, lengths=(40, 300, 521), prompt_from=0)


@pytest.mark.parametrize("many_requests", [True, False])
def test_many_requests(many_requests):
    """One kernel for all rows: even a prompt's and a decoded token's agree then, and only then."""
    target = packed_target(wide_model(), "int8", many_requests=many_requests)
    if not target.row_exact:
        pytest.skip("int8 is not row-exact on this machine, and says so")
    text = random_text(90, VOCAB, seed=5)
    cuts = [[50, *range(51, 90)], [60, 70, 71, 75]]
    whole = Session(target, prompt_from=0).read([text], [[]])[0]["logits"]
    for prompt_from, texts in ((None, [text]), (None, [text, text]), (0, [text, text])):
        session = Session(target, prompt_from=prompt_from)
        for rows in session.read(texts, cuts[: len(texts)]):
            same = torch.equal(rows["logits"], whole)
            assert same == (many_requests or prompt_from == 0), prompt_from


def test_any_number_of_threads():
    """Shares of a tensor that end inside a row must not show; five threads make such shares."""
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        for model_type in ("llama", "gemma3_text"):
            target = packed_target(tiny_model(model_type, num_hidden_layers=2))
            check_rows_are_exact(target, seed=3, lengths=(40, 508, 521))
    finally:
        torch.set_num_threads(before)


def test_the_switch_is_needed():
    """Without exact mode the same comparison fails somewhere, or the tests above would be empty."""
    target = packed_target(tiny_model("llama", num_hidden_layers=2))
    text = random_text(90, VOCAB, seed=1)
    whole = Session(target, exact=False).read([text], [[]])[0]["logits"]
    cut = Session(target, exact=False).read([text], [list(range(1, 90))])[0]["logits"]
    assert not torch.equal(whole, cut)
    torch.testing.assert_close(whole, cut, atol=1e-4, rtol=0)
