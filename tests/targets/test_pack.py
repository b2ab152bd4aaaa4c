"""Packing changes speed and rounding, and measures its rounding."""

import pytest
import torch
from torch import nn

from dspark.core.errors import ConfigError
from dspark.nn.linear import KINDS, check_kind
from dspark.targets.drift import Drift, measure_drift, target_logits
from dspark.targets.identity import embedding_hash
from dspark.targets.pack import FusedRMSNorm, pack_model, packed_layers
from dspark.targets.tiny import tiny_model
from tests.targets.ragged import packed_target, random_text

SEQUENCES = [random_text(length, 97, seed=length) for length in (30, 11)]
# Largest logit difference relative to the logits' spread, and least greedy agreement.
LIMITS = {"fp32": (1e-5, 1.0), "fp16": (0.02, 0.9), "bf16": (0.25, 0.6), "int8": (0.25, 0.6)}
LIMITS["q4"] = LIMITS["int8"]  # what random weights become, which lie on no grid


def plain_logits(model):
    def logits(tokens_T):
        with torch.inference_mode():
            return model(tokens_T[None]).logits[0]

    return logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["llama", "phi3"])  # the fast and the generic path
def test_drift_of_each_kind(kind, model_type):
    try:
        check_kind(kind)
    except ConfigError:
        pytest.skip(f"{kind} does not run on this machine")
    reference = tiny_model(model_type)
    target = packed_target(tiny_model(model_type), kind)
    drift = measure_drift(plain_logits(reference), target, SEQUENCES)
    spread = float(plain_logits(reference)(torch.tensor(SEQUENCES[0])).std())
    limit, agreement = LIMITS[kind]
    assert drift.positions == 41
    assert drift.largest_logit_difference < limit * spread
    assert drift.mean_logit_difference < drift.largest_logit_difference
    assert drift.greedy_agreement >= agreement
    if kind != "fp32":
        assert drift.largest_logit_difference > 1e-4 * spread


def test_drift_is_counted_right():
    target = packed_target(tiny_model("llama"))
    text = SEQUENCES[1]
    logits = target_logits(target, torch.tensor(text))

    def off_at_the_end(tokens_T):
        other = logits.clone()
        other[-1, 5] = other[-1].max() + 3.0
        return other

    drift = measure_drift(off_at_the_end, target, [text])
    largest = float(logits[-1].max() + 3.0 - logits[-1, 5])
    assert drift.largest_logit_difference == pytest.approx(largest)
    assert drift.mean_logit_difference == pytest.approx(largest / 97 / len(text))
    assert drift.greedy_agreement == pytest.approx(1 - 1 / len(text))
    assert str(Drift(0.25, 0.01, 0.5, 4)) == (
        "largest logit difference 0.25, greedy agreement 50.0% over 4 positions"
    )


def test_only_layers_that_see_the_whole_batch_tell_prompts_apart():
    """`prompt_from` counts the rows of the batch: an LM head gets the sampled ones, an expert its
    own."""
    try:
        check_kind("int8")
    except ConfigError:
        pytest.skip("int8 does not run on this machine")
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    pack_model(model, "int8")
    assert not model.lm_head.whole
    block = {id(layer) for layer in packed_layers(model.model.layers[0].mlp)}
    for layer in packed_layers(model.model.layers[0]):
        assert layer.whole == (id(layer) not in block)


def test_everything_is_packed_once():
    model = tiny_model("llama", num_hidden_layers=2)
    packed = pack_model(model, "fp32")
    assert packed.fast is not None
    assert len(list(packed_layers(packed.fast))) == 2 * 4  # qkv, output, gate-up, down
    assert len(list(packed_layers(model))) == 1  # the LM head
    generic = tiny_model("llama", num_hidden_layers=2)
    assert pack_model(generic, "fp32", allow_fast=False).fast is None
    assert len(list(packed_layers(generic))) == 2 * 4 + 1
    assert not any(type(module) is nn.Linear for module in generic.modules())
    assert sum(isinstance(module, FusedRMSNorm) for module in generic.modules()) == 5


def test_what_only_looks_like_a_norm_or_a_linear_is_left_alone():
    class OddRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(48)), 1e-6

        def forward(self, x):
            return x * self.weight

    class Router(nn.Linear):
        def forward(self, x):
            return super().forward(x).softmax(-1)

    model = tiny_model("phi3", num_hidden_layers=1)
    model.odd, model.router = OddRMSNorm(), Router(48, 4)
    pack_model(model, "fp32")
    assert type(model.odd) is OddRMSNorm
    assert type(model.router) is Router


def test_a_shared_product_holds_nothing_back():
    model = tiny_model("llama", num_hidden_layers=1)
    packed = pack_model(model, "fp32", allow_fast=False)
    packed.mode.exact = False
    attention = model.get_decoder().layers[0].self_attn
    x = torch.randn(1, 3, 48)
    first = [layer(x) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert attention.q_proj.shared._input is None
    x.mul_(2.0)  # the same object with other values, as a buffer that is used again
    second = [layer(x) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(2 * a, b)


class TestEmbeddingHash:
    def table(self, rows=1000, seed=0):
        return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))

    def test_it_is_stable(self):
        table = torch.arange(600 * 4, dtype=torch.float32).view(600, 4) / 64
        assert embedding_hash(table) == (
            "773b60b944fbe50cc3de28903df1e3856d38e201f71f63fbdb11bfef1f4bb9b5"
        )

    def test_storage_does_not_matter(self):
        table = self.table().half()
        name = embedding_hash(table.float())
        assert embedding_hash(table) == name
        assert embedding_hash(table.double()) == name
        assert embedding_hash(table.float().T.contiguous().T) == name
        coarse = self.table().bfloat16()
        assert embedding_hash(coarse) == embedding_hash(coarse.float())

    def test_another_model_has_another_name(self):
        names = {embedding_hash(self.table(seed=seed)) for seed in range(5)}
        names |= {embedding_hash(self.table()[:999]), embedding_hash(self.table()[:, :7])}
        assert len(names) == 7

    @pytest.mark.parametrize("rows", [1, 2, 255, 256, 257])
    def test_small_tables_count_whole(self, rows):
        table = self.table(rows)
        changed = table.clone()
        changed[-1, 0] += 1
        assert embedding_hash(table) != embedding_hash(changed)
