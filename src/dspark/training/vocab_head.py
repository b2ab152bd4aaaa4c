"""The vocabulary end of the objective, chunk by chunk, with a hand-written backward.

Everything that touches [positions, V] is the cost of training a small drafter: two matrix products (draft
logits and teacher logits), two softmaxes, and one product back. So a chunk of positions at a time is taken
through all of it, forward and gradient together, into buffers that are reused; nothing of width V outlives
its chunk. `plain_losses` in tests/oracles is the same thing spelled out.

Draft logits are [hidden ; latent] [LM head ; W2]^T in one product. The latent is what the sequential head
makes of the tokens before a slot; for the vanilla Markov head it is W1[previous] (paper, equation 5).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.nn.seams import Binding

_REFERENCE_PARTS = 3  # bf16 pieces that carry a float32 number
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class VocabLosses:
    """Per position, detached except for `loss`."""

    loss: Tensor
    """sum over positions of weight * (ce * CE + l1 * ||draft - teacher||_1): the part with a gradient."""
    cross_entropy_M: Tensor
    acceptance_M: Tensor
    """1 - total variation distance: the chance that rejection sampling accepts (paper, equation 8)."""


class VocabHead:
    """The frozen LM head beside room for W2, laid out for both products and both directions.

    In bfloat16 a logit of 20 is rounded by 0.06, which moves total variation by 0.01. So logits are taken
    relative to the label's: the reference enters the product as three more columns against ones, and the
    rounding is then small where the probability is (measured: 0.003, the rounding of the inputs alone).
    """

    def __init__(
        self, binding: Binding, rank: int, dtype: torch.dtype, *, chunk: int = 256, tile: int = 16
    ) -> None:
        """`chunk` positions share a matrix product, `tile` rows are in float32 at a time."""
        V, D = binding.lm_head_VD.shape
        self.dtype, self.rank, self.hidden_size = dtype, rank, D
        self.chunk, self.tile = chunk, tile
        self.softcap = binding.logit_softcap
        # A softcap is not linear, so references cannot be subtracted inside the product.
        self.references = _REFERENCE_PARTS if dtype == torch.bfloat16 and self.softcap is None else 0
        device = binding.lm_head_VD.device
        self.lm_head_VD = binding.lm_head_VD
        self.logit_scale = binding.logit_scale
        self.weight_IV = torch.ones(D + self.references + rank, V, dtype=dtype, device=device)
        self.weight_IV[:D].copy_(binding.lm_head_VD.T * binding.logit_scale)
        self.draft_CV = torch.empty(chunk, V, dtype=dtype, device=device)
        self.teacher_CV = torch.empty(chunk, V, dtype=dtype, device=device)
        self.scratch = tuple(torch.empty(tile, V, device=device) for _ in range(3))

    @property
    def teacher_rows(self) -> int:
        return self.hidden_size + self.references

    def set_w2(self, w2_Vr: Tensor) -> None:
        self.weight_IV[self.teacher_rows :].copy_(w2_Vr.T)

    def label_logits(self, hidden_MD: Tensor, labels_M: Tensor) -> Tensor:
        """float32 LM head logits [M] of one token a row."""
        rows_MD = self.lm_head_VD.index_select(0, labels_M)
        return (hidden_MD.float() * rows_MD).sum(1) * self.logit_scale

    def inputs(self, hidden_MD: Tensor, reference_M: Tensor, latent_Mr: Tensor | None) -> Tensor:
        """Rows [M, I] of the product: hidden, minus the reference in pieces, latent."""
        parts = [hidden_MD.to(self.dtype)]
        rest_M = -reference_M
        for _ in range(self.references):
            piece_M = rest_M.to(self.dtype)
            parts.append(piece_M[:, None])
            rest_M = rest_M - piece_M.float()
        if latent_Mr is not None:
            parts.append(latent_Mr.to(self.dtype))
        return torch.cat(parts, dim=1)


def vocab_losses(
    head: VocabHead,
    *,
    hidden_MD: Tensor,
    latent_Mr: Tensor,
    w2_Vr: Tensor,
    teacher_hidden_MD: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    ce: float,
    l1: float,
) -> VocabLosses:
    """Losses of M positions, differentiable in hidden, latent and W2 (never in the teacher)."""
    loss, cross_entropy_M, acceptance_M = _VocabLoss.apply(
        hidden_MD, latent_Mr, w2_Vr, teacher_hidden_MD, labels_M, weights_M, head, ce, l1,
        torch.is_grad_enabled(),
    )  # fmt: skip
    return VocabLosses(loss, cross_entropy_M, acceptance_M)


class _VocabLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, latent_Mr: Tensor, w2_Vr: Tensor, teacher_hidden_MD: Tensor,
        labels_M: Tensor, weights_M: Tensor, head: VocabHead, ce: float, l1: float, want_gradients: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        head.set_w2(w2_Vr)
        M, D = hidden_MD.shape
        reference_M = head.label_logits(hidden_MD, labels_M)
        reference_M += (latent_Mr.float() * w2_Vr.index_select(0, labels_M)).sum(1)
        draft_MI = head.inputs(hidden_MD, reference_M, latent_Mr)
        teacher_reference_M = head.label_logits(teacher_hidden_MD, labels_M)
        teacher_MI = head.inputs(teacher_hidden_MD, teacher_reference_M, None)
        cross_entropy_M = hidden_MD.new_empty(M, dtype=torch.float32)
        variation_M = torch.empty_like(cross_entropy_M)
        grad_hidden_MD = grad_latent_Mr = grad_w2_rV = None
        if want_gradients:
            grad_hidden_MD = torch.empty(M, D, device=hidden_MD.device)
            grad_latent_Mr = torch.empty(M, head.rank, device=hidden_MD.device)
            grad_w2_rV = torch.zeros(head.rank, w2_Vr.shape[0], device=hidden_MD.device)
        for start in range(0, M, head.chunk):
            rows = slice(start, min(start + head.chunk, M))
            logits_CV = head.draft_CV[: rows.stop - start]
            _chunk_losses(
                head, draft_MI[rows], teacher_MI[rows], labels_M[rows], weights_M[rows], ce, l1,
                logits_CV, cross_entropy_M[rows], variation_M[rows], want_gradients,
            )  # fmt: skip
            if want_gradients:
                _chunk_gradients(head, draft_MI, rows, logits_CV, grad_hidden_MD, grad_latent_Mr, grad_w2_rV)
        if want_gradients:
            ctx.save_for_backward(grad_hidden_MD, grad_latent_Mr, grad_w2_rV)
            ctx.dtypes = hidden_MD.dtype, latent_Mr.dtype, w2_Vr.dtype
        loss = (weights_M * (ce * cross_entropy_M + 2.0 * l1 * variation_M)).sum()
        acceptance_M = (1.0 - variation_M).clamp(0.0, 1.0)
        ctx.mark_non_differentiable(cross_entropy_M, acceptance_M)
        return loss, cross_entropy_M, acceptance_M

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_hidden_MD, grad_latent_Mr, grad_w2_rV = ctx.saved_tensors
        hidden, latent, w2 = ctx.dtypes
        return (
            (grad_hidden_MD * grad_loss).to(hidden),
            (grad_latent_Mr * grad_loss).to(latent),
            (grad_w2_rV * grad_loss).T.to(w2),
            *[None] * 7,
        )


def _chunk_losses(
    head: VocabHead, draft_CI: Tensor, teacher_CI: Tensor, labels_C: Tensor, weights_C: Tensor,
    ce: float, l1: float, draft_CV: Tensor, cross_entropy_C: Tensor, variation_C: Tensor,
    want_gradients: bool,
) -> None:  # fmt: skip
    """Fills the losses and turns `draft_CV` (logits) into the gradient of the raw draft logits."""
    teacher_CV = head.teacher_CV[: len(draft_CV)]
    torch.mm(teacher_CI, head.weight_IV[: head.teacher_rows], out=teacher_CV)
    cap = head.softcap
    if cap is None:
        torch.mm(draft_CI, head.weight_IV, out=draft_CV)
    else:
        D = head.hidden_size
        torch.mm(draft_CI[:, :D], head.weight_IV[:D], out=draft_CV)
        draft_CV.div_(cap).tanh_().mul_(cap)
        if head.rank:
            draft_CV.addmm_(draft_CI[:, D:], head.weight_IV[D:])
        teacher_CV.div_(cap).tanh_().mul_(cap)
    for start in range(0, len(draft_CV), head.tile):
        rows = slice(start, min(start + head.tile, len(draft_CV)))
        _tile_losses(
            head.scratch, draft_CV[rows], teacher_CV[rows], labels_C[rows], weights_C[rows], ce, l1,
            cross_entropy_C[rows], variation_C[rows], want_gradients,
        )  # fmt: skip


def _tile_losses(
    scratch: tuple[Tensor, ...], draft_RV: Tensor, teacher_RV: Tensor, labels_R: Tensor, weights_R: Tensor,
    ce: float, l1: float, cross_entropy_R: Tensor, variation_R: Tensor, want_gradients: bool,
) -> None:  # fmt: skip
    """With d = softmax(draft), t = softmax(teacher) and s = sign(t - d):

    dCE/dlogits = d - onehot(label);  d||d - t||_1/dlogits = d (<s, d> - s).
    """
    d_RV, t_RV, spare_RV = (buffer[: len(draft_RV)] for buffer in scratch)
    torch.softmax(draft_RV, 1, dtype=torch.float32, out=d_RV)
    torch.softmax(teacher_RV, 1, dtype=torch.float32, out=t_RV)
    label_R1 = labels_R[:, None]
    cross_entropy_R.copy_(-d_RV.gather(1, label_R1).clamp_min(_TINY).log().squeeze(1))
    torch.sub(t_RV, d_RV, out=t_RV)
    torch.clamp_min(t_RV, 0.0, out=spare_RV)
    torch.sum(spare_RV, 1, out=variation_R)
    if not want_gradients:
        return
    signed_RV = t_RV.sign_().mul_(d_RV)
    ce_R1, l1_R1 = (ce * weights_R)[:, None], (l1 * weights_R)[:, None]
    d_RV.mul_(ce_R1 + l1_R1 * signed_RV.sum(1, keepdim=True))
    d_RV.addcmul_(signed_RV, -l1_R1)
    d_RV.scatter_add_(1, label_R1, -ce_R1)
    draft_RV.copy_(d_RV)


def _chunk_gradients(
    head: VocabHead, draft_MI: Tensor, rows: slice, grad_CV: Tensor, grad_hidden_MD: Tensor,
    grad_latent_Mr: Tensor, grad_w2_rV: Tensor,
) -> None:  # fmt: skip
    D, latent_columns = head.hidden_size, slice(head.teacher_rows, None)
    if head.rank:
        grad_w2_rV += draft_MI[rows, latent_columns].T @ grad_CV
    if head.softcap is None:
        grad_CI = grad_CV @ head.weight_IV.T
        grad_hidden_MD[rows] = grad_CI[:, :D]
        grad_latent_Mr[rows] = grad_CI[:, latent_columns]
        return
    grad_latent_Mr[rows] = grad_CV @ head.weight_IV[latent_columns].T
    raw_CV = draft_MI[rows, :D] @ head.weight_IV[:D]
    grad_CV.mul_(1.0 - (raw_CV / head.softcap).tanh_().square_())
    grad_hidden_MD[rows] = grad_CV @ head.weight_IV[:D].T
