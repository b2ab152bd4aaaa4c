"""A target computes what transformers computes, however its texts are cut, placed and packed."""

import pytest
import torch

from dspark.nn.binding import embed, head_logits
from dspark.targets.load import make_binding
from dspark.targets.tiny import tiny_model
from tests.targets.ragged import Session, make_batch, packed_target, random_text

VOCAB = 97
TEXTS = [random_text(length, VOCAB, seed=length) for length in (23, 9, 14)]
# One request in pieces, one in two, one at once; the pieces meet in the same steps, and the
# sliding window of 5 lies across, inside and behind them.
CUTS = [[10, 11, 15], [4], []]

# More heads or layers than the defaults, biases, tied heads, long and scaled RoPE.
VARIANTS = {
    "llama": ("llama", {}),
    "llama, biases, tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama, heads of their own": ("llama", {"num_key_value_heads": 4}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2, window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, biases, window": (
        "qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "mistral": ("mistral", {}),
    "phi3": ("phi3", {}),
    "phi3, part of the head turns": ("phi3", {"partial_rotary_factor": 0.5}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {}),
    "granite": ("granite", {}),
    "cohere2": ("cohere2", {}),
    "gpt_oss": ("gpt_oss", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
}
FAST = {"llama", "qwen2", "qwen3", "mistral"}


def model_of(variant):
    """With random biases and norm weights too: transformers starts them at 0 and 1."""
    model_type, overrides = VARIANTS[variant]
    model = tiny_model(model_type, **overrides)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def reference(model, text):
    """transformers' own forward: logits, hidden states by tap id, final hidden states."""
    hidden = {}
    decoder = model.get_decoder()
    hooks = [
        decoder.layers[0].register_forward_pre_hook(
            lambda _m, args, kwargs: hidden.update(
                {-1: args[0] if args else kwargs["hidden_states"]}
            ),
            with_kwargs=True,
        ),
        decoder.norm.register_forward_hook(lambda _m, _a, out: hidden.update(final=out)),
    ]
    for index, layer in enumerate(decoder.layers):
        hooks.append(
            layer.register_forward_hook(
                lambda _m, _a, out, index=index: hidden.update(
                    {index: out[0] if isinstance(out, tuple) else out}
                )
            )
        )
    with torch.inference_mode():
        logits = model(torch.tensor([text]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, {key: value[0] for key, value in hidden.items()}


PATHS = [(name, False) for name in VARIANTS] + [
    (name, True) for name, (model_type, _) in VARIANTS.items() if model_type in FAST
]


@pytest.mark.parametrize(("variant", "allow_fast"), PATHS)
def test_equals_transformers(variant, allow_fast):
    model = model_of(variant)
    expected = [reference(model, text) for text in TEXTS]
    target = packed_target(model, allow_fast=allow_fast)
    assert (target.fast is not None) == allow_fast
    layers = target.num_layers
    taps = (layers - 1, -1, 1)  # in the drafter's order, not the model's
    for exact in (True, False):
        for scatter in (None, torch.Generator().manual_seed(3)):
            session = Session(target, exact=exact, taps=taps, scatter=scatter)
            for got, (logits, hidden) in zip(session.read(TEXTS, CUTS), expected, strict=True):
                torch.testing.assert_close(got["logits"], logits, atol=1e-4, rtol=0)
                want = torch.cat([hidden[tap] for tap in taps], dim=-1)
                torch.testing.assert_close(got["taps"], want, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(got["final"], hidden["final"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["llama", "llama, biases, tied", "gemma2", "gemma3", "granite"])
def test_the_binding_repeats_both_ends_of_the_model(variant, tokenizer):
    model = model_of(variant)
    binding = make_binding(model, "tiny", tokenizer, lambda _: None, init_layers=2)
    text = TEXTS[0]
    logits, hidden = reference(model, text)
    torch.testing.assert_close(embed(binding, torch.tensor(text)), hidden[-1], atol=1e-5, rtol=0)
    torch.testing.assert_close(head_logits(binding, hidden["final"]), logits, atol=1e-5, rtol=1e-5)
    columns = torch.tensor([5, 3, 90])
    torch.testing.assert_close(
        head_logits(binding, hidden["final"], columns), logits[:, columns], atol=1e-5, rtol=1e-5
    )
    assert len(binding.init_layers) == 2
    assert "norm.weight" in binding.init_layers[-1]


def test_packing_leaves_the_binding_alone(tokenizer):
    model = tiny_model("llama")
    binding = make_binding(model, "tiny", tokenizer, lambda _: None, init_layers=1)
    before = [tensor.clone() for tensor in binding.init_layers[0].values()]
    head = binding.lm_head_VD.clone()
    Session(packed_target(model)).read(TEXTS, CUTS)
    assert all(map(torch.equal, before, binding.init_layers[0].values()))
    assert torch.equal(head, binding.lm_head_VD)


def test_logits_at_the_asked_rows_only():
    target = packed_target(tiny_model("llama"))
    session = Session(target)
    whole = session.read(TEXTS[:1], [[]])[0]["logits"]
    for rows in ([], [4], [2, 22, 0]):
        table = session.table(len(TEXTS[0]))
        output = target.forward(
            make_batch([(table, 0, TEXTS[0])]),
            session.store,
            logit_rows_M=torch.tensor(rows, dtype=torch.int64),
        )
        assert output.taps_NF is None and output.final_ND is None
        assert torch.equal(output.logits_MV, whole[rows])
        session.pool.release(table)


def test_bfloat16_keys_and_values_stay_close():
    target = packed_target(tiny_model("llama"))
    full = Session(target).read(TEXTS, CUTS)
    half = Session(target, dtype=torch.bfloat16).read(TEXTS, CUTS)
    for a, b in zip(full, half, strict=True):
        difference = (a["logits"] - b["logits"]).abs().max()
        assert 0 < difference < 0.15 * a["logits"].std()
