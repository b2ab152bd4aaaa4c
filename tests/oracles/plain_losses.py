"""The objective of the vocabulary end, spelled out: whole logits, autograd, no chunks."""

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.nn.binding import head_logits
from dspark.nn.seams import Binding


def plain_losses(
    binding: Binding,
    *,
    hidden_MD: Tensor,
    latent_Mr: Tensor,
    w2_Vr: Tensor,
    teacher_UD: Tensor,
    teacher_rows_M: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    ce: float,
    l1: float,
    soft_ce: float = 0.0,
    draft_token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, cross-entropy [M], acceptance [M]).

    With `draft_token_ids` the draft has probability 0 elsewhere, a label elsewhere has no
    cross-entropy, and the teacher's cross-entropy is over its part inside.
    """
    logits_MV = head_logits(binding, hidden_MD) + latent_Mr @ w2_Vr.T
    inside_V = torch.ones(logits_MV.shape[1], dtype=torch.bool)
    if draft_token_ids is not None:
        inside_V = torch.zeros_like(inside_V).index_fill(0, draft_token_ids, True)
    logits_MV = logits_MV.masked_fill(~inside_V, -torch.inf)
    teacher_MV = head_logits(binding, teacher_UD[teacher_rows_M]).softmax(-1)
    l1_M = (logits_MV.softmax(-1) - teacher_MV).abs().sum(-1)
    taught_M = inside_V[labels_M]
    reachable_M = torch.where(taught_M, labels_M, inside_V.nonzero()[0])
    cross_entropy_M = taught_M * F.cross_entropy(logits_MV, reachable_M, reduction="none")
    log_draft_MC = logits_MV.log_softmax(-1)[:, inside_V]
    soft_M = -(teacher_MV[:, inside_V] * log_draft_MC).sum(-1)
    loss = (weights_M * (ce * cross_entropy_M + l1 * l1_M + soft_ce * soft_M)).sum()
    return loss, cross_entropy_M, 1.0 - l1_M / 2.0
