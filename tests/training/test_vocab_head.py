"""The chunked, hand-differentiated loss against the plain one."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from dspark.nn.seams import Binding
from dspark.training.vocab_head import VocabHead, VocabInputs, vocab_losses
from tests.oracles.plain_losses import plain_losses
from tests.training.tiny import D, V, tiny_binding

M = 23


def _inputs(rank: int, *, seed: int = 3, requires_grad: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(M, D, generator=generator)
    latent = torch.randn(M, rank, generator=generator)
    w2 = torch.randn(V, rank, generator=generator)
    for tensor in (hidden, latent, w2):
        tensor.requires_grad_(requires_grad)
    # Positions that share a teacher row, in runs that straddle tiles and chunks.
    steps = torch.rand(M, generator=generator) < 0.6
    rows = steps.cumsum(0) - steps[0].long()
    labels = torch.randint(0, V, (int(rows[-1]) + 1,), generator=generator)
    return {
        "hidden_MD": hidden,
        "latent_Mr": latent,
        "w2_Vr": w2,
        "teacher_UD": torch.randn(len(labels), D, generator=generator),
        "teacher_rows_M": rows,
        "labels_M": labels[rows],
        "weights_M": torch.rand(M, generator=generator) / M,
    }


def _both(
    binding: Binding,
    rank: int,
    dtype: torch.dtype,
    soft_ce: float = 0.0,
    ids: torch.Tensor | None = None,
) -> tuple[list, list]:
    results = []
    for chunked in (True, False):
        inputs = _inputs(rank)
        if chunked:
            head = VocabHead(binding, rank, dtype, draft_token_ids=ids, chunk=10, tile=3)
            out = vocab_losses(head, VocabInputs(**inputs), ce=0.3, l1=0.7, soft_ce=soft_ce)
            values = [out.loss, out.cross_entropy_M, out.acceptance_M]
        else:
            plain = plain_losses(
                binding, **inputs, ce=0.3, l1=0.7, soft_ce=soft_ce, draft_token_ids=ids
            )
            values = list(plain)
        (2.5 * values[0]).backward()
        gradients = [inputs[name].grad for name in ("hidden_MD", "latent_Mr", "w2_Vr")]
        results.append([v.detach() for v in values] + gradients)
    return results[0], results[1]


@pytest.mark.parametrize("rank", [0, 6])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("scale", "soft_ce"), [(1.0, 0.0), (0.3, 0.0), (1.0, 0.6)])
def test_chunked_is_plain_to_float32_rounding(
    rank: int, softcap: float | None, scale: float, soft_ce: float
) -> None:
    binding = tiny_binding(softcap=softcap, scale=scale)
    chunked, plain = _both(binding, rank, torch.float32, soft_ce)
    for ours, theirs in zip(chunked, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rank", [0, 6])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("soft_ce", [0.0, 0.6])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_draft_vocabulary_is_probability_0_elsewhere(
    rank: int, softcap: float | None, soft_ce: float, ordered: bool
) -> None:
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(8))[: V // 2]
    ids = ids.sort().values if ordered else ids
    labels = _inputs(rank)["labels_M"]
    assert 0 < torch.isin(labels, ids).sum() < len(labels), "some labels inside, some outside"
    binding = tiny_binding(softcap=softcap)
    chunked, plain = _both(binding, rank, torch.float32, soft_ce, ids)
    for ours, theirs in zip(chunked, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
    whole, _ = _both(binding, rank, torch.float32, soft_ce)
    assert (chunked[2] - whole[2]).abs().max() > 0.01, "it makes a difference"
    outside = torch.ones(V, dtype=torch.bool).index_fill(0, ids, False)
    assert not chunked[5][outside].any(), "W2 of what is never proposed stays as it is"


def test_all_tokens_as_a_draft_vocabulary_change_no_bit() -> None:
    some, _ = _both(tiny_binding(), 6, torch.bfloat16, ids=torch.arange(V))
    none, _ = _both(tiny_binding(), 6, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(some, none, strict=True))


@pytest.mark.parametrize("ids", [None, torch.arange(0, V, 2)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_bfloat16_stays_near(softcap: float | None, ids: torch.Tensor | None) -> None:
    chunked, plain = _both(tiny_binding(softcap=softcap), 6, torch.bfloat16, ids=ids)
    assert (chunked[2] - plain[2]).abs().max() < 0.02
    for ours, theirs in zip(chunked[3:], plain[3:], strict=True):
        assert (ours - theirs).norm() < 0.05 * theirs.norm()


def test_large_logits_are_exact_where_the_probability_is() -> None:
    """Logits around 64, where a bfloat16 step is 0.5, of inputs that bfloat16 holds exactly."""
    binding = tiny_binding()
    lm_head = binding.lm_head_VD.bfloat16().float()
    lm_head[:, 0] = 8.0
    binding = dataclasses.replace(binding, lm_head_VD=lm_head)
    inputs = _inputs(0, requires_grad=False)
    for name in ("hidden_MD", "teacher_UD"):
        inputs[name] = inputs[name].bfloat16().float()
        inputs[name][:, 0] = 8.0
    _, exact_ce, exact = plain_losses(binding, **inputs, ce=1.0, l1=1.0)
    head = VocabHead(binding, 0, torch.bfloat16)
    ours = vocab_losses(head, VocabInputs(**inputs), ce=1.0, l1=1.0)
    assert (ours.acceptance_M - exact).abs().max() < 0.01
    assert (ours.cross_entropy_M - exact_ce).abs().max() < 0.02
    rounded = (inputs["hidden_MD"] @ lm_head.T).bfloat16().float()
    rounded_ce = F.cross_entropy(rounded, inputs["labels_M"], reduction="none")
    assert (rounded_ce - exact_ce).abs().max() > 0.1, "without references it would show"


def test_gradients_agree_with_finite_differences() -> None:
    """In float32 and so coarse, but independent of autograd and of the oracle."""
    binding, inputs = tiny_binding(), _inputs(6)
    head = VocabHead(binding, 6, torch.float32, chunk=8, tile=8)
    vocab_losses(head, VocabInputs(**inputs), ce=0.3, l1=0.7).loss.backward()
    generator = torch.Generator().manual_seed(5)
    for name in ("hidden_MD", "latent_Mr", "w2_Vr"):
        tensor = inputs[name]
        direction = torch.randn(tensor.shape, generator=generator)
        with torch.no_grad():
            up, down = (
                vocab_losses(
                    head, VocabInputs(**{**inputs, name: tensor + e * direction}), ce=0.3, l1=0.7
                ).loss
                for e in (3e-3, -3e-3)
            )
        slope = (tensor.grad * direction).sum()
        assert abs((up - down) / 6e-3 - slope) < 0.01 * slope.abs() + 2e-4, name


def test_teacher_equal_to_draft_is_accepted_always() -> None:
    inputs = _inputs(0)
    inputs["teacher_UD"] = inputs["hidden_MD"].detach()
    inputs["teacher_rows_M"] = torch.arange(M)
    head = VocabHead(tiny_binding(), 0, torch.float32)
    out = vocab_losses(head, VocabInputs(**inputs), ce=0.0, l1=1.0)
    torch.testing.assert_close(out.acceptance_M, torch.ones(M))
    assert out.loss.abs() < 1e-5
