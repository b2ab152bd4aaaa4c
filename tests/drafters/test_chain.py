"""Eagle3 and MTP: training against DeepSpec's training-time test, serving against training."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.drafters.chain import ChainModel
from dspark.drafters.chain_serving import ChainDrafter
from dspark.drafters.model import Blocks
from dspark.nn.binding import head_logits
from dspark.nn.seams import Binding
from tests.drafters.tiny import (
    Served,
    features,
    sampled,
    tiny_binding,
    tiny_chain_config,
    tiny_model,
    uniform_noise,
)

KINDS = ("eagle3", "mtp")
CLOSE: dict[str, Any] = {"atol": 3e-5, "rtol": 3e-5}


def setup(kind: str) -> tuple[ChainModel, Binding]:
    config = tiny_chain_config(kind)
    return tiny_model(config), tiny_binding(config)


def plain_states(model: ChainModel, binding: Binding, text: Tensor, taps_TF: Tensor) -> Tensor:
    """Hidden states [steps, T - 1, D] of all positions at every step, as DeepSpec unrolls them:
    whole sequences, ids shifted by one a step, a mask that is causal over the first step's rows and
    diagonal over later ones. `text` has T + steps tokens, `taps_TF` the features of T positions."""
    c, w = model.config, dict(model.named_parameters())
    d, T = c.head_dim, len(taps_TF)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * w[name + ".weight"]

    def turn(x: Tensor, positions: Tensor) -> Tensor:
        frequencies = c.rope_theta ** (-torch.arange(d // 2) * 2.0 / d)
        angles = positions[:, None].float() * frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    eagle3 = "fc.weight" in w
    state = taps_TF @ w["fc.weight"].T if eagle3 else taps_TF
    layer, attention = "layers.0.", "layers.0.self_attn."
    share = c.num_attention_heads // c.num_key_value_heads
    keys, values, masks, hidden = [], [], [], []
    for step in range(c.block_size):
        e = binding.embedding_VD[text[1 + step : 1 + step + T]] * binding.embedding_scale
        if eagle3:
            residual = state
            inner = torch.cat(
                [norm(e, layer + "input_layernorm"), norm(state, layer + "hidden_norm")], -1
            )
        else:
            residual = (
                torch.cat([norm(e, "enorm"), norm(state, "hnorm")], -1) @ w["eh_proj.weight"].T
            )
            inner = norm(residual, layer + "input_layernorm")
        positions = torch.arange(T) + step

        def heads(part: str, inner: Tensor = inner) -> Tensor:
            return (inner @ w[f"{attention}{part}.weight"].T).unflatten(-1, (-1, d))

        q = turn(norm(heads("q_proj"), attention + "q_norm"), positions)
        k = turn(norm(heads("k_proj"), attention + "k_norm"), positions)
        keys.append(k.repeat_interleave(share, 1))
        values.append(heads("v_proj").repeat_interleave(share, 1))
        masks.append(torch.eye(T).bool() if step else torch.ones(T, T).bool().tril())
        scores = torch.einsum("qhd,khd->hqk", q, torch.cat(keys)) / d**0.5
        scores = scores.masked_fill(~torch.cat(masks, 1), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), torch.cat(values)).flatten(1)
        x = residual + attended @ w[attention + "o_proj.weight"].T
        inner = norm(x, layer + "post_attention_layernorm")
        up = F.silu(inner @ w[layer + "mlp.gate_proj.weight"].T) * (
            inner @ w[layer + "mlp.up_proj.weight"].T
        )
        state = x + up @ w[layer + "mlp.down_proj.weight"].T
        hidden.append(norm(state, "norm"))
    return torch.stack(hidden)


def texts_and_features(model: ChainModel, lengths: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(61, (n + model.config.block_size + 1,), generator=generator),
            features(model.config, n, seed=n),
        )
        for n in lengths
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_chains_are_the_training_time_test(kind: str) -> None:
    """Two sequences side by side, anchors at many positions, the very first included."""
    model, binding = setup(kind)
    K = model.config.block_size
    sequences = texts_and_features(model, (9, 6))
    anchors = [[1, 2, 5, 9], [1, 6]]
    starts, rows = [0, 9], 15
    visible = torch.zeros(6, rows, dtype=torch.bool)
    flat = [(s, a) for s, own in enumerate(anchors) for a in own]
    for i, (s, a) in enumerate(flat):
        visible[i, starts[s] : starts[s] + a] = True
    blocks = Blocks(
        context_NF=torch.cat([taps for _, taps in sequences]),
        context_positions_N=torch.cat([torch.arange(len(taps)) for _, taps in sequences]),
        context_next_N=torch.cat([text[1 : len(taps) + 1] for text, taps in sequences]),
        visible_AN=visible,
        anchors_A=torch.stack([sequences[s][0][a] for s, a in flat]),
        anchor_positions_A=torch.tensor([a for _, a in flat]),
        previous_AK=torch.stack([sequences[s][0][a : a + K] for s, a in flat]),
    )
    with torch.no_grad():
        slots = model.forward_slots(binding, blocks)
        assert slots.latent_AKr is slots.w2_Vr is slots.confidence_AK is None
        for i, (s, a) in enumerate(flat):
            want = plain_states(model, binding, *sequences[s])[:, a - 1]
            torch.testing.assert_close(slots.hidden_AKD[i], want, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_an_anchor_without_a_feature_before_it_gives_finite_states(kind: str) -> None:
    model, binding = setup(kind)
    K = model.config.block_size
    blocks = Blocks(
        context_NF=features(model.config, 2), context_positions_N=torch.arange(2),
        context_next_N=torch.tensor([3, 4]),
        visible_AN=torch.tensor([[False, False], [True, True]]),
        anchors_A=torch.tensor([5, 6]), anchor_positions_A=torch.tensor([0, 2]),
        previous_AK=torch.ones(2, K, dtype=torch.int64),
    )  # fmt: skip
    slots = model.forward_slots(binding, blocks)
    assert torch.isfinite(slots.hidden_AKD).all()
    slots.hidden_AKD.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def draft(served: Served, texts: list[list[int]], tables: list[Any], temperature: float) -> Any:
    return served.drafter.draft(
        torch.tensor([text[-1] for text in texts]),
        torch.tensor([len(text) - 1 for text in texts]),
        tables,
        served.store,
        texts=texts,
        sampling=sampled(*[temperature] * len(texts)),
        noise=uniform_noise,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("candidates", [0, 5])
def test_drafting_equals_the_training_time_test(kind: str, candidates: int) -> None:
    """Context given over many rounds or at once, requests of several lengths in one batch."""
    model, binding = setup(kind)
    K = model.config.block_size
    served = Served.of(ChainDrafter(model, binding, candidates=candidates))
    cases = [(9, ()), (9, (1, 4, 1)), (1, ()), (14, (13,))]
    pairs = texts_and_features(model, tuple(n for n, _ in cases))
    texts = [text[: n + 1].tolist() for (text, _), (n, _) in zip(pairs, cases, strict=True)]
    texts[1] = texts[0]
    tables = [
        served.admit(pairs[i if i != 1 else 0][1], chunks, text=texts[i])
        for i, (_, chunks) in enumerate(cases)
    ]
    block = draft(served, texts, tables, 0.8)
    assert torch.equal(block.tokens_RK[0], block.tokens_RK[1])
    torch.testing.assert_close(block.probs_RKC[0], block.probs_RKC[1], **CLOSE)
    for r, (n, _) in enumerate(cases):
        taps = pairs[r if r != 1 else 0][1]
        text = torch.tensor([*texts[r], *block.tokens_RK[r].tolist()])
        with torch.no_grad():
            hidden = plain_states(model, binding, text, taps)[:, n - 1]
        probs_KV = (head_logits(binding, hidden).double() / 0.8).softmax(-1)
        kept = probs_KV.gather(1, block.candidates_RKC[r])
        assert kept.shape == (K, candidates or 61)
        want = kept / kept.sum(-1, keepdim=True)
        torch.testing.assert_close(block.probs_RKC[r], want, **CLOSE)
        assert block.tokens_RK[r].tolist() == [
            int(ids[p.argmax()]) for ids, p in zip(block.candidates_RKC[r], want, strict=True)
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_reads_every_committed_position_and_none_after(kind: str) -> None:
    model, binding = setup(kind)
    served = Served.of(ChainDrafter(model, binding, candidates=0), pages=128)
    text = list(range(20, 33))
    context = features(model.config, 12)

    def probs(taps: Tensor, tokens: list[int] = text) -> Tensor:
        return draft(served, [text[:10]], [served.admit(taps, text=tokens)], 1.0).probs_RKC

    base = probs(context)
    for position in range(12):
        changed = context.clone()
        changed[position] += 1.0
        assert torch.equal(probs(changed), base) == (position >= 9), position
        tokens = list(text)
        tokens[position] += 1
        # Token 0 is no feature's next token; token 9 is the anchor, which the draft is told itself.
        seen = 0 < position < 9
        assert torch.equal(probs(context, tokens), base) != seen, position


@pytest.mark.parametrize("kind", KINDS)
def test_scattered_pages_give_the_same_block(kind: str) -> None:
    model, binding = setup(kind)
    served = Served.of(ChainDrafter(model, binding))
    text = list(range(14))
    whole = served.admit(features(model.config, 13), text=text)
    holes = [served.pool.allocate(4) for _ in range(served.pool.free_pages)]
    for table in holes[::2]:
        served.pool.release(table)
    scattered = served.admit(features(model.config, 13), text=text)
    assert scattered.first_slot is None
    a, b = (draft(served, [text], [table], 1.0) for table in (whole, scattered))
    assert torch.equal(a.probs_RKC, b.probs_RKC)


def test_a_shortened_block_is_the_beginning_of_the_whole() -> None:
    model, binding = setup("eagle3")
    served = Served.of(ChainDrafter(model, binding))
    text = list(range(12))
    table = served.admit(features(model.config, 11), text=text)
    whole = draft(served, [text], [table], 1.0)
    served.drafter = served.drafter.shortened(2)
    short = draft(served, [text], [table], 1.0)
    assert torch.equal(short.tokens_RK, whole.tokens_RK[:, :2])
    assert torch.equal(short.probs_RKC, whole.probs_RKC[:, :2])


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_follow_the_probabilities_they_come_with(kind: str) -> None:
    """2,000 drafts of the first slot: each frequency is within 4.5 standard deviations; a right
    drafter fails once in about 30,000 seeds."""
    model, binding = setup(kind)
    served = Served.of(ChainDrafter(model, binding, candidates=5))
    text = list(range(10))
    tables = [served.admit(features(model.config, 9), text=text)] * 200
    generator = np.random.Generator(np.random.Philox(3))

    def noise(slot: int, token_ids_RC: Tensor) -> Tensor:
        return torch.from_numpy(generator.exponential(size=tuple(token_ids_RC.shape)))

    first = []
    for _ in range(10):
        block = served.drafter.draft(
            torch.tensor([9] * 200), torch.tensor([9] * 200), tables, served.store,
            texts=[text] * 200, sampling=sampled(*[1.0] * 200), noise=noise,
        )  # fmt: skip
        first.append(block.tokens_RK[:, 0])
    drawn = torch.cat(first)
    for token, prob in zip(block.candidates_RKC[0, 0], block.probs_RKC[0, 0], strict=True):
        spread = (prob * (1 - prob) / len(drawn)).sqrt()
        assert ((drawn == token).double().mean() - prob).abs() <= 4.5 * spread, int(token)
