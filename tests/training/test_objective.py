"""The objective over packed batches."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dspark.core.errors import ConfigError
from dspark.data.anchors import sample_anchors
from dspark.data.packing import pack
from dspark.training.batch import Batch, load_batch
from dspark.training.objective import Objective, objective, slot_weights
from dspark.training.vocab_head import VocabHead
from tests.oracles.plain_losses import plain_losses
from tests.training.tiny import K, tiny_binding, tiny_drafter, tiny_sequences, tiny_store

BINDING = tiny_binding()
SEQUENCES = tiny_sequences(5)
CHOSEN = [
    (i, sample_anchors(s.supervised, 4, seed=0, epoch=0, sequence=i))
    for i, s in enumerate(SEQUENCES)
]


def _batch(tmp_path: Path, chosen: list) -> Batch:
    return load_batch(pack(SEQUENCES, chosen, K), SEQUENCES, tiny_store(tmp_path / "f", SEQUENCES))


def _head(rank: int = 8) -> VocabHead:
    return VocabHead(BINDING, rank, torch.float32, chunk=16, tile=4)


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("rank", "confidence"), [(8, True), (0, False), (0, True)])
def test_packed_equals_one_sequence_at_a_time(tmp_path: Path, rank: int, confidence: bool) -> None:
    model = tiny_drafter(rank=rank, confidence=confidence)
    config = Objective()
    packed = _batch(tmp_path, CHOSEN)
    total = float(slot_weights(packed.supervised_AK, config.loss_decay).sum())
    whole = objective(model, BINDING, _head(rank), packed, config)
    whole.loss.backward()
    together = _gradients(model)
    model.zero_grad()
    losses, lengths = [], []
    for one in CHOSEN:
        step = objective(
            model, BINDING, _head(rank), _batch(tmp_path, [one]), config, total_weight=total
        )
        step.loss.backward()
        losses.append(step.loss.detach())
        lengths.append(step.metrics["accepted_length"])
    torch.testing.assert_close(whole.loss.detach(), sum(losses))
    torch.testing.assert_close(
        whole.metrics["accepted_length"].value, sum(lengths[1:], lengths[0]).value
    )
    for name, gradient in _gradients(model).items():
        torch.testing.assert_close(together[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_the_paper_s_formula(tmp_path: Path) -> None:
    model, config = tiny_drafter(), Objective()
    batch = _batch(tmp_path, CHOSEN)
    store = tiny_store(tmp_path / "f", SEQUENCES)
    step = objective(model, BINDING, _head(), batch, config)
    hidden = model.forward_blocks(
        BINDING,
        batch.anchors_A,
        batch.anchor_positions_A,
        batch.context_NF,
        batch.context_positions_N,
        batch.visible_AN,
    )
    weights, chosen = slot_weights(batch.supervised_AK, 4.0), batch.supervised_AK
    torch.testing.assert_close(
        weights[0, :2], torch.tensor([1.0, np.exp(-0.25)], dtype=torch.float32)
    )
    weights = weights[chosen] / weights.sum()
    previous = batch.previous_AK[chosen]
    teacher = torch.cat(
        [
            store.final(SEQUENCES[i].token_ids, np.array([anchor + k]))
            for i, anchors in CHOSEN
            for anchor in anchors
            for k in range(K)
            if anchor + 1 + k < len(SEQUENCES[i].token_ids)
        ]
    )
    loss, _, acceptance = plain_losses(
        BINDING,
        hidden_MD=hidden[chosen],
        latent_Mr=model.markov_head.embed(previous),
        w2_Vr=model.markov_head.markov_w2.weight,
        teacher_UD=teacher.float(),
        teacher_rows_M=torch.arange(len(teacher)),
        labels_M=batch.labels_AK[chosen],
        weights_M=weights,
        ce=0.1,
        l1=0.9,
    )
    confidence = model.confidence(hidden[chosen], previous)
    bce = F.binary_cross_entropy_with_logits(confidence, acceptance.detach(), reduction="none")
    torch.testing.assert_close(step.loss, loss + (weights * bce).sum())
    survival = torch.zeros(chosen.shape)
    survival[chosen] = acceptance.detach()
    survival = survival.cumprod(1)
    expected = 1 + survival.sum() / len(chosen)
    torch.testing.assert_close(step.metrics["accepted_length"].value, expected)


def test_no_anchor_sees_another_document_or_its_own_position(tmp_path: Path) -> None:
    model, batch = tiny_drafter(), _batch(tmp_path, CHOSEN)
    features = batch.context_NF.float().requires_grad_()
    hidden = model.forward_blocks(
        BINDING, batch.anchors_A, batch.anchor_positions_A, features, batch.context_positions_N,
        batch.visible_AN,
    )  # fmt: skip
    packed = pack(SEQUENCES, CHOSEN, K)
    rows_seen = 0
    for a, (start, end) in enumerate(packed.context_ranges_A2):
        (gradient,) = torch.autograd.grad(hidden[a].square().sum(), features, retain_graph=True)
        moved = gradient.abs().sum(1) > 0
        expected = torch.zeros_like(moved)
        expected[start:end] = True
        assert torch.equal(moved, expected)
        rows_seen += int(moved.sum())
    assert rows_seen == sum(int(a) for _, anchors in CHOSEN for a in anchors)


def test_features_come_from_the_right_rows(tmp_path: Path) -> None:
    store = tiny_store(tmp_path / "f", SEQUENCES)
    batch = _batch(tmp_path, CHOSEN)
    row_of = dict(zip(batch.slots_M.tolist(), batch.teacher_rows_M.tolist(), strict=True))
    start = block = 0
    for index, anchors in CHOSEN:
        ids = SEQUENCES[index].token_ids
        count = int(anchors[-1])
        assert torch.equal(batch.context_NF[start : start + count], store.context(ids, count))
        assert batch.context_positions_N[start : start + count].tolist() == list(range(count))
        start += count
        for anchor in anchors:
            for k in range(K):
                if anchor + 1 + k < len(ids):
                    expected = store.final(ids, np.array([anchor + k]))[0]
                    assert torch.equal(batch.teacher_UD[row_of.pop(block * K + k)], expected)
            block += 1
    assert not row_of, "a slot that is not supervised"
    rows = batch.teacher_rows_M
    assert rows[0] == 0 and rows[-1] == len(batch.teacher_UD) - 1 < len(rows) - 1
    assert set(rows.diff().tolist()) == {0, 1}


def test_bad_weights() -> None:
    for bad in ({"ce": -1.0}, {"l1": float("nan")}, {"loss_decay": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            Objective(**bad)
