"""The paper's objective (equations 8 to 12) and what can be measured while computing it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspark.core.errors import ConfigError
from dspark.drafters.model import DraftModel
from dspark.nn.seams import Binding
from dspark.training.batch import Batch
from dspark.training.vocab_head import VocabHead, VocabInputs, VocabLosses, vocab_losses


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Position-weighted ce * CE + l1 * ||draft - target||_1 + confidence * BCE(confidence, 1 - TV)
    (paper, equation 12), and with other weights what other drafters train with.

    Raises ConfigError for a negative weight.
    """

    ce: float = 0.1
    l1: float = 0.9
    """Weighs the whole L1 distance, not its half, the total variation."""
    confidence: float = 1.0
    """Nothing without a confidence head."""
    soft_ce: float = 0.0
    """Weighs the cross-entropy to the target's whole distribution: Eagle3's loss."""
    loss_decay: float = 4.0
    """Slot k weighs exp(-k / loss_decay). No block size: the released recipe has 4 for blocks of 7.
    """

    def __post_init__(self) -> None:
        for name in ("ce", "l1", "confidence", "soft_ce"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; a loss weight must be at least 0"
                )
        if not self.loss_decay > 0:
            raise ConfigError(f"loss_decay is {self.loss_decay}; it must be above 0")


DSPARK = Objective()
CROSS_ENTROPY = Objective(ce=1.0, l1=0.0, confidence=0.0)
"""DFlash's and MTP's own: nothing but the tokens of the text."""
# Slot k weighs 0.8^k. DeepSpec divides by the length of the text; here it is the sum of weights.
EAGLE3 = Objective(ce=0.0, l1=0.0, confidence=0.0, soft_ce=1.0, loss_decay=-1.0 / math.log(0.8))


@dataclass(frozen=True, slots=True)
class Ratio:
    """A mean that can be added up over batches and ranks."""

    numerator: Tensor
    denominator: Tensor

    def __add__(self, other: "Ratio") -> "Ratio":
        return Ratio(self.numerator + other.numerator, self.denominator + other.denominator)

    @property
    def value(self) -> Tensor:
        return self.numerator / self.denominator.clamp_min(1e-12)


@dataclass(frozen=True, slots=True)
class Step:
    """`loss` has a gradient; `metrics` do not."""

    loss: Tensor
    metrics: dict[str, Ratio]


def slot_weights(supervised_AK: Tensor, loss_decay: float) -> Tensor:
    """float32 [A, K]: exp(-k / loss_decay) where supervised, else 0."""
    k = torch.arange(supervised_AK.shape[1], device=supervised_AK.device)
    return supervised_AK * torch.exp(-k / loss_decay)


def objective(
    model: DraftModel,
    binding: Binding,
    head: VocabHead,
    batch: Batch,
    config: Objective,
    *,
    total_weight: float | None = None,
) -> Step:
    """Forward of one batch: loss and metrics.

    The loss is a sum over supervised slots divided by `total_weight`, the sum of slot weights over
    all ranks and accumulated batches of the step (default: this batch's own), so that splitting a
    step changes nothing.
    """
    slots = model.forward_slots(binding, batch)
    weights_AK = slot_weights(batch.supervised_AK, config.loss_decay)
    total = weights_AK.sum() if total_weight is None else total_weight
    slots_M = batch.slots_M
    weights_M = weights_AK.flatten()[slots_M] / total
    hidden_MD = slots.hidden_AKD.flatten(0, 1).index_select(0, slots_M)
    if slots.latent_AKr is None or slots.w2_Vr is None:
        latent_Mr = hidden_MD.new_empty(len(hidden_MD), 0)
        w2_Vr = hidden_MD.new_empty(binding.vocab_size, 0)
    else:
        latent_Mr = slots.latent_AKr.flatten(0, 1).index_select(0, slots_M)
        w2_Vr = slots.w2_Vr
    inputs = VocabInputs(
        hidden_MD=hidden_MD,
        latent_Mr=latent_Mr,
        w2_Vr=w2_Vr,
        teacher_UD=batch.teacher_UD,
        teacher_rows_M=batch.teacher_rows_M,
        labels_M=batch.labels_AK.flatten()[slots_M],
        weights_M=weights_M,
    )
    losses = vocab_losses(head, inputs, ce=config.ce, l1=config.l1, soft_ce=config.soft_ce)
    loss, confidence_M = losses.loss, None
    if slots.confidence_AK is not None:
        # Its gradient reaches the backbone and W1; its label, 1 - TV, has none.
        confidence_M = slots.confidence_AK.flatten().index_select(0, slots_M).float()
        bce_M = F.binary_cross_entropy_with_logits(
            confidence_M, losses.acceptance_M, reduction="none"
        )
        loss = loss + config.confidence * (weights_M * bce_M).sum()
    with torch.no_grad():
        metrics = _metrics(losses, confidence_M, batch)
        weight = weights_AK.sum()
        metrics["loss"] = Ratio(loss.detach() * total, weight)
    return Step(loss, metrics)


class StepLoss(nn.Module):
    """`objective` as a module: every parameter is used inside its forward and nowhere else, which
    is what DDP and FSDP2 wrap."""

    def __init__(
        self, model: DraftModel, binding: Binding, head: VocabHead, config: Objective
    ) -> None:
        super().__init__()
        self.model, self.binding, self.head, self.config = model, binding, head, config

    def forward(
        self, batch: Batch, total_weight: float | None = None
    ) -> tuple[Tensor, dict[str, Ratio]]:
        """(loss, metrics): a tuple, since the wrappers look for tensors in no class of ours."""
        step = objective(
            self.model, self.binding, self.head, batch, self.config, total_weight=total_weight
        )
        return step.loss, step.metrics


def _metrics(losses: VocabLosses, confidence_M: Tensor | None, batch: Batch) -> dict[str, Ratio]:
    """Analytic numbers, teacher-forced: nothing is sampled.

    accepted_length: 1 + sum over k of the product of 1 - TV up to k, mean over blocks.
    acceptance: mean 1 - TV of each slot. conditional_acceptance: the same, weighed by the chance
    that everything before was accepted (what figure 2 of the paper plots). cross_entropy: of labels
    that the drafter may propose.
    """
    supervised_AK, acceptance_M = batch.supervised_AK, losses.acceptance_M
    acceptance_AK = torch.zeros(supervised_AK.shape, device=acceptance_M.device)
    acceptance_AK.view(-1)[batch.slots_M] = acceptance_M
    survival_AK = acceptance_AK.cumprod(1)
    reached_AK = (
        torch.cat([torch.ones_like(survival_AK[:, :1]), survival_AK[:, :-1]], 1) * supervised_AK
    )
    blocks = supervised_AK[:, 0].sum()
    metrics = {
        "accepted_length": Ratio(blocks + survival_AK.sum(), blocks),
        "acceptance": Ratio(acceptance_AK.sum(0), supervised_AK.sum(0)),
        "conditional_acceptance": Ratio(survival_AK.sum(0), reached_AK.sum(0)),
        "cross_entropy": Ratio(losses.cross_entropy_M.sum(), losses.taught_M.sum()),
    }
    if confidence_M is not None:
        error_M = confidence_M.sigmoid() - acceptance_M
        metrics["confidence_error"] = Ratio(error_M.abs().sum(), supervised_AK.sum())
    return metrics
