"""The serving form against the training forward and against its slow twins."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.core.sampling import SamplingParams
from dspark.drafters.dspark import DSparkModel
from dspark.drafters.serving import DSparkDrafter
from dspark.nn.binding import head_logits
from dspark.nn.pages import PageTable
from dspark.nn.seams import DraftBlock
from tests.drafters.tiny import (
    Served,
    features,
    sampled,
    tiny_binding,
    tiny_config,
    tiny_model,
    uniform_noise,
)

CONFIG = tiny_config()
BINDING = tiny_binding(CONFIG)
CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 2e-5}


def trained_hidden(model: DSparkModel, anchor: int, context_NF: Tensor) -> Tensor:
    """Hidden states [K, D] of one block by the training forward."""
    N = len(context_NF)
    with torch.no_grad():
        return model.forward_blocks(
            BINDING,
            torch.tensor([anchor]),
            torch.tensor([N]),
            context_NF,
            torch.arange(N),
            torch.ones(1, N, dtype=torch.bool),
        )[0]


def draft(
    served: Served,
    anchors: list[int],
    positions: list[int],
    tables: list[PageTable],
    sampling: list[SamplingParams],
    noise: Any = uniform_noise,
) -> DraftBlock:
    return served.drafter.draft(
        torch.tensor(anchors),
        torch.tensor(positions),
        tables,
        served.store,
        texts=[
            [0] * position + [anchor] for anchor, position in zip(anchors, positions, strict=True)
        ],
        sampling=sampling,
        noise=noise,
    )


def test_equals_the_training_forward_context_given_over_many_rounds_or_at_once() -> None:
    model = tiny_model(CONFIG)
    served = Served.of(DSparkDrafter(model, BINDING))
    context = features(CONFIG, 23)
    for chunks in ((), (7,), (1, 4, 1, 2, 9)):
        table = served.admit(context, chunks)
        got = served.drafter.block_hidden(
            torch.tensor([5]), torch.tensor([23]), [table], served.store
        )
        torch.testing.assert_close(got[0], trained_hidden(model, 5, context), **CLOSE)


def test_a_shortened_block_is_that_of_a_model_with_blocks_as_short() -> None:
    model = tiny_model(CONFIG)
    served = Served.of(DSparkDrafter(model, BINDING, candidates=8))
    table = served.admit(features(CONFIG, 9))
    K = CONFIG.block_size - 1
    whole, served.drafter = served.drafter, served.drafter.shortened(K)
    short = DSparkModel(replace(CONFIG, block_size=K))
    short.load_state_dict(model.state_dict())
    got = served.drafter.block_hidden(torch.tensor([5]), torch.tensor([9]), [table], served.store)
    torch.testing.assert_close(got[0], trained_hidden(short, 5, features(CONFIG, 9)), **CLOSE)
    block = draft(served, [5], [9], [table], sampled(1.0))
    assert block.tokens_RK.shape == (1, K) and block.probs_RKC.shape == (1, K, 8)
    own = Served.of(DSparkDrafter(short, BINDING, candidates=8))
    other = draft(own, [5], [9], [own.admit(features(CONFIG, 9))], sampled(1.0))
    assert torch.equal(block.candidates_RKC, other.candidates_RKC)
    torch.testing.assert_close(block.probs_RKC, other.probs_RKC)
    assert torch.equal(block.tokens_RK, other.tokens_RK)
    assert whole.block_size == CONFIG.block_size
    assert whole.shortened(99).block_size == CONFIG.block_size


def test_requests_of_different_lengths_in_one_batch_equal_each_alone() -> None:
    served = Served.of(DSparkDrafter(tiny_model(CONFIG), BINDING, candidates=8))
    lengths, anchors = [11, 1, 0, 30], [4, 8, 15, 16]
    tables = [served.admit(features(CONFIG, n, seed=n)) for n in lengths]
    together = draft(served, anchors, lengths, tables, sampled(1.0, 0.0, 0.5, 1.0))
    for r, temperature in enumerate((1.0, 0.0, 0.5, 1.0)):
        alone = draft(served, [anchors[r]], [lengths[r]], [tables[r]], sampled(temperature))
        assert torch.equal(together.tokens_RK[r], alone.tokens_RK[0])
        assert torch.equal(together.candidates_RKC[r], alone.candidates_RKC[0])
        torch.testing.assert_close(together.probs_RKC[r], alone.probs_RKC[0], **CLOSE)
        assert together.confidence_RK is not None and alone.confidence_RK is not None
        torch.testing.assert_close(together.confidence_RK[r], alone.confidence_RK[0], **CLOSE)


def test_scattered_pages_give_the_same_block() -> None:
    served = Served.of(DSparkDrafter(tiny_model(CONFIG), BINDING))
    whole = served.admit(features(CONFIG, 13))
    holes = [served.pool.allocate(4) for _ in range(served.pool.free_pages)]
    for table in holes[::2]:
        served.pool.release(table)
    scattered = served.admit(features(CONFIG, 13))
    assert scattered.first_slot is None
    a, b = (
        served.drafter.block_hidden(torch.tensor([5]), torch.tensor([13]), [table], served.store)
        for table in (whole, scattered)
    )
    assert torch.equal(a, b)


def test_features_at_the_anchor_are_invisible_and_the_one_before_is_not() -> None:
    served = Served.of(DSparkDrafter(tiny_model(CONFIG), BINDING), pages=128)
    context = features(CONFIG, 12)

    def hidden(taps: Tensor) -> Tensor:
        return served.drafter.block_hidden(
            torch.tensor([5]), torch.tensor([9]), [served.admit(taps)], served.store
        )

    base = hidden(context)
    for position in range(12):
        changed = context.clone()
        changed[position] += 1.0
        assert torch.equal(hidden(changed), base) == (position >= 9), position


def slow_twin(
    model: DSparkModel, hidden_KD: Tensor, tokens: list[int], temperature: float
) -> tuple[Tensor, Tensor]:
    """Full-vocabulary draft probabilities [K, V] (float64) and confidence logits [K], from the
    checkpoint's tensors, for tokens = [anchor, x_1 .. x_K]."""
    w = model.state_dict()
    probs, confidence = [], []
    for k, h in enumerate(hidden_KD):
        e = w["markov_head.markov_w1.weight"][tokens[k]]
        raw = BINDING.lm_head_VD @ h * BINDING.logit_scale
        softcap = BINDING.logit_softcap
        assert softcap is not None
        logits = softcap * torch.tanh(raw / softcap) + w["markov_head.markov_w2.weight"] @ e
        probs.append((logits.double() / temperature).softmax(-1))
        confidence.append(
            w["confidence_head.proj.weight"][0] @ torch.cat([h, e])
            + w["confidence_head.proj.bias"][0]
        )
    return torch.stack(probs), torch.stack(confidence)


@pytest.mark.parametrize("candidates", [0, 61, 1000])
def test_full_vocabulary_probabilities_and_confidences_are_the_slow_twins(candidates: int) -> None:
    model, context = tiny_model(CONFIG), features(CONFIG, 9)
    served = Served.of(DSparkDrafter(model, BINDING, candidates=candidates))
    block = draft(served, [7], [9], [served.admit(context)], sampled(0.8))
    tokens = [7, *block.tokens_RK[0].tolist()]
    probs, confidence = slow_twin(model, trained_hidden(model, 7, context), tokens, 0.8)
    assert block.candidates_RKC[0].tolist() == [list(range(61))] * CONFIG.block_size
    torch.testing.assert_close(block.probs_RKC[0], probs, **CLOSE)
    assert block.confidence_RK is not None
    torch.testing.assert_close(block.confidence_RK[0], confidence, **CLOSE)
    assert tokens[1:] == probs.argmax(-1).tolist()


def test_candidates_are_the_best_base_logits_with_the_twins_probabilities_renormalised() -> None:
    model, context = tiny_model(CONFIG), features(CONFIG, 9)
    served = Served.of(DSparkDrafter(model, BINDING, candidates=5))
    block = draft(served, [7], [9], [served.admit(context)], sampled(0.8))
    tokens = [7, *block.tokens_RK[0].tolist()]
    hidden = trained_hidden(model, 7, context)
    probs, _ = slow_twin(model, hidden, tokens, 0.8)
    base = head_logits(BINDING, hidden)
    for k in range(CONFIG.block_size):
        chosen = block.candidates_RKC[0, k]
        assert set(chosen.tolist()) == set(base[k].topk(5).indices.tolist())
        kept = probs[k, chosen]
        torch.testing.assert_close(block.probs_RKC[0, k], kept / kept.sum(), **CLOSE)
        assert tokens[k + 1] in chosen.tolist()


def test_draft_vocabulary_restricts_the_full_one() -> None:
    model, context = tiny_model(CONFIG), features(CONFIG, 9)
    ids = torch.tensor([2, 3, 11, 29, 40, 59])
    for candidates in (0, 3):
        drafter = DSparkDrafter(model, BINDING, candidates=candidates, draft_token_ids=ids)
        served = Served.of(drafter)
        # The anchor is no draft token: W1 keeps every row, W2 and the head only these.
        block = draft(served, [7], [9], [served.admit(context)], sampled(0.8))
        tokens = [7, *block.tokens_RK[0].tolist()]
        probs, _ = slow_twin(model, trained_hidden(model, 7, context), tokens, 0.8)
        assert set(tokens[1:]) <= set(ids.tolist())
        for k in range(CONFIG.block_size):
            chosen = block.candidates_RKC[0, k]
            assert len(chosen) == (candidates or len(ids))
            assert set(chosen.tolist()) <= set(ids.tolist())
            kept = probs[k, chosen]
            torch.testing.assert_close(block.probs_RKC[0, k], kept / kept.sum(), **CLOSE)


def test_tokens_follow_the_probabilities_they_come_with() -> None:
    """4,000 drafts: the first two tokens have the law that the slow twin gives them.

    Each of the ten frequencies is within 4.5 standard deviations; a right drafter fails once in
    about 15,000 seeds.
    """
    model, context = tiny_model(CONFIG), features(CONFIG, 9)
    served = Served.of(DSparkDrafter(model, BINDING, candidates=5))
    R, rounds = 200, 20
    generator = np.random.Generator(np.random.Philox(11))

    def noise(slot: int, token_ids_RC: Tensor) -> Tensor:
        return torch.from_numpy(generator.exponential(size=tuple(token_ids_RC.shape)))

    tables = [served.admit(context)] * R
    blocks = [
        draft(served, [7] * R, [9] * R, tables, sampled(*[1.0] * R), noise) for _ in range(rounds)
    ]
    first = torch.cat([block.tokens_RK[:, 0] for block in blocks])
    second = torch.cat([block.tokens_RK[:, 1] for block in blocks])
    best = blocks[0].candidates_RKC[0, 0, 0]
    follows = second[first == best]
    row = int((blocks[0].tokens_RK[:, 0] == best).nonzero()[0])
    for drawn, slot, source in ((first, 0, 0), (follows, 1, row)):
        law = blocks[0].probs_RKC[source, slot]
        for token, prob in zip(blocks[0].candidates_RKC[source, slot], law, strict=True):
            spread = (prob * (1 - prob) / len(drawn)).sqrt()
            frequency = (drawn == token).double().mean()
            assert (frequency - prob).abs() <= 4.5 * spread + 1e-12, (slot, int(token))


def test_noise_is_asked_slot_by_slot_for_the_candidates_token_ids() -> None:
    served = Served.of(DSparkDrafter(tiny_model(CONFIG), BINDING, candidates=5))
    asked = []

    def noise(slot: int, token_ids_RC: Tensor) -> Tensor:
        asked.append((slot, token_ids_RC.tolist()))
        return uniform_noise(slot, token_ids_RC)

    block = draft(served, [7], [9], [served.admit(features(CONFIG, 9))], sampled(1.0), noise)
    assert asked == [(k, block.candidates_RKC[:, k].tolist()) for k in range(CONFIG.block_size)]


def test_greedy_drafts_one_hot_whatever_the_noise() -> None:
    served = Served.of(DSparkDrafter(tiny_model(CONFIG), BINDING, candidates=5))
    table = served.admit(features(CONFIG, 9))

    def noise(slot: int, token_ids_RC: Tensor) -> Tensor:
        return torch.linspace(1.0, 1e-12, token_ids_RC.shape[1], dtype=torch.float64)[None]

    plain = draft(served, [7], [9], [table], sampled(0.0))
    noisy = draft(served, [7], [9], [table], sampled(0.0), noise)
    assert torch.equal(plain.tokens_RK, noisy.tokens_RK)
    assert torch.equal(plain.probs_RKC.sort(-1).values[..., -1], torch.ones(1, 4).double())
    assert torch.equal(plain.probs_RKC.sum(-1), torch.ones(1, 4).double())


@pytest.mark.parametrize("confidence", [False, True])
def test_dflash_has_no_sequential_head(confidence: bool) -> None:
    config = tiny_config(
        markov_rank=0, enable_confidence_head=confidence, confidence_head_with_markov=False
    )
    model, context = tiny_model(config), features(config, 9)
    served = Served.of(DSparkDrafter(model, BINDING, candidates=0))
    block = draft(served, [7], [9], [served.admit(context)], sampled(1.0))
    hidden = trained_hidden(model, 7, context)
    want = head_logits(BINDING, hidden).double().softmax(-1)
    torch.testing.assert_close(block.probs_RKC[0], want, **CLOSE)
    if confidence:
        assert model.confidence_head is not None and block.confidence_RK is not None
        proj = model.confidence_head.proj
        logits = F.linear(hidden, proj.weight, proj.bias)[:, 0].detach()
        torch.testing.assert_close(block.confidence_RK[0], logits, **CLOSE)
    else:
        assert block.confidence_RK is None


def test_every_matrix_goes_through_the_linear_factory() -> None:
    shapes = []

    def factory(weight: Tensor) -> Any:
        shapes.append(tuple(weight.shape))
        return lambda x: F.linear(x, weight)

    DSparkDrafter(
        tiny_model(CONFIG), BINDING, draft_token_ids=torch.arange(10), linear_factory=factory
    )
    layer = [(64, 24), (24, 32), (80, 24), (24, 40)]  # q|k|v, o, gate|up, down
    assert shapes == [(24, 72), (64, 24), *layer, *layer, (10, 24)]


def test_training_confidence_equals_serving_confidence() -> None:
    model, context = tiny_model(CONFIG), features(CONFIG, 9)
    served = Served.of(DSparkDrafter(model, BINDING))
    block = draft(served, [7], [9], [served.admit(context)], sampled(1.0))
    previous = torch.tensor([[7, *block.tokens_RK[0, :-1].tolist()]])
    got = model.confidence(trained_hidden(model, 7, context)[None], previous)
    assert block.confidence_RK is not None
    torch.testing.assert_close(got, block.confidence_RK, **CLOSE)


def test_half_precision_context_stays_close() -> None:
    served = Served.of(DSparkDrafter(tiny_model(CONFIG), BINDING))
    half = Served.of(served.drafter)
    half.store.keys = [keys.half() for keys in half.store.keys]
    half.store.values = [values.half() for values in half.store.values]
    a, b = (
        s.drafter.block_hidden(
            torch.tensor([5]), torch.tensor([9]), [s.admit(features(CONFIG, 9))], s.store
        )
        for s in (served, half)
    )
    assert b.dtype == torch.float32
    torch.testing.assert_close(a, b, atol=0.02, rtol=0.02)


def test_binding_without_scales_is_the_plain_head() -> None:
    plain = tiny_binding(CONFIG, embedding_scale=1.0, logit_scale=1.0, logit_softcap=None)
    x = torch.randn(2, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head_logits(plain, x), F.linear(x, plain.lm_head_VD))
    columns = torch.tensor([5, 2])
    torch.testing.assert_close(
        head_logits(BINDING, x, columns), head_logits(BINDING, x)[:, columns]
    )
