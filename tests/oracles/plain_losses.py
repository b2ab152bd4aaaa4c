"""The objective of the vocabulary end, spelled out: whole logits, autograd, no chunks."""

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
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, cross-entropy [M], acceptance [M])."""
    logits_MV = head_logits(binding, hidden_MD) + latent_Mr @ w2_Vr.T
    teacher_MV = head_logits(binding, teacher_UD[teacher_rows_M]).softmax(-1)
    l1_M = (logits_MV.softmax(-1) - teacher_MV).abs().sum(-1)
    cross_entropy_M = F.cross_entropy(logits_MV, labels_M, reduction="none")
    soft_M = -(teacher_MV * logits_MV.log_softmax(-1)).sum(-1)
    loss = (weights_M * (ce * cross_entropy_M + l1 * l1_M + soft_ce * soft_M)).sum()
    return loss, cross_entropy_M, 1.0 - l1_M / 2.0
