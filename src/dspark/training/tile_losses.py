"""The losses of a few positions from draft logits and teacher probabilities, and their gradient in
place: what `VocabHead` does between its products. R positions are a tile, C the draft columns."""

from dataclasses import dataclass

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class LossWeights:
    ce: float
    l1: float
    soft_ce: float


def tile_losses(
    scratch: tuple[Tensor, ...],
    draft_RC: Tensor,
    t_RC: Tensor,
    columns_R1: Tensor,
    loss: LossWeights,
    weights_R1: Tensor | None,
) -> Tensor:
    """[3, R]: cross-entropy, total variation, and cross-entropy to the teacher (0 where it weighs
    nothing); with `weights_R1`, `draft_RC` turns from logits into the weighted loss's gradient.

    For d = softmax(draft), t = the teacher's probabilities, s = sign(t - d):
    dCE/dlogits = d - onehot(label), d||d - t||_1/dlogits = d (<s, d> - s), and sum(t) d - t for the
    cross-entropy to the teacher. A label of column -1 has no cross-entropy.
    """
    d_RC, spare_RC = scratch[0][: len(draft_RC)], scratch[2][: len(draft_RC)]
    torch.softmax(draft_RC, 1, dtype=torch.float32, out=d_RC)
    inside_R1, label_R1 = columns_R1 >= 0, columns_R1.clamp_min(0)
    label_probs_R = d_RC.gather(1, label_R1).squeeze(1).clamp_min(_TINY)
    own_R = -label_probs_R.log()
    soft_R, mass_R1 = torch.zeros_like(own_R), None
    if loss.soft_ce:  # sum(t) logsumexp(draft) - <t, draft>; logsumexp is own + the label's logit
        mass_R1 = t_RC.sum(1, keepdim=True)
        normaliser_R = own_R + draft_RC.gather(1, label_R1).squeeze(1)
        soft_R = mass_R1.squeeze(1) * normaliser_R
        soft_R -= torch.mul(t_RC, draft_RC, out=spare_RC).sum(1)
    torch.sub(t_RC, d_RC, out=t_RC)
    variation_R = torch.clamp_max(t_RC, 0.0, out=spare_RC).sum(1).neg()
    if weights_R1 is not None:
        ce_R1, l1_R1 = loss.ce * weights_R1 * inside_R1, loss.l1 * weights_R1
        if mass_R1 is not None:  # t - sum(t) d, from t - d
            torch.add(t_RC, d_RC * (1.0 - mass_R1), out=spare_RC)
            spare_RC.mul_(loss.soft_ce * weights_R1)
        signed_RC = t_RC.sign_().mul_(d_RC)
        d_RC.mul_(ce_R1 + l1_R1 * signed_RC.sum(1, keepdim=True))
        d_RC.addcmul_(signed_RC, -l1_R1)
        if mass_R1 is not None:
            d_RC.sub_(spare_RC)
        d_RC.scatter_add_(1, label_R1, -ce_R1)
        draft_RC.copy_(d_RC)
    return torch.stack([own_R * inside_R1.squeeze(1), variation_R, soft_R])
