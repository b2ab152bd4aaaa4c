"""The vocabulary end of the objective, chunk by chunk, with a hand-written backward.

Everything that touches [positions, V] is the cost of training a small drafter: two matrix products
(draft logits and teacher logits), two softmaxes, and one product back. So a chunk of positions at a
time is taken through all of it, forward and gradient together, in buffers that are reused; nothing
of width V outlives its chunk. `plain_losses` in tests/oracles is the same thing spelled out.

Draft logits are [hidden ; latent] [LM head ; W2]^T in one product. The latent is what the
sequential head makes of the tokens before a slot; for the vanilla Markov head it is W1[previous]
(paper, equation 5).

A drafter that proposes only C tokens, its draft vocabulary, has no logits for any other. Columns
stand in such an order that these come first, so draft logits are the first C columns and teacher
logits are all V:

* total variation is sum max(0, draft - teacher), and what the draft cannot propose adds nothing;
* cross-entropy to the label weighs 0 where the label is not among the C: nothing can learn it;
* cross-entropy to the teacher's distribution is over its part that lies in the C tokens.

Without a draft vocabulary C is V. In shapes below, B is a chunk of positions and C the columns.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.nn.seams import Binding
from dspark.training.tile_losses import LossWeights, tile_losses

_REFERENCE_PARTS = 3  # bf16 pieces that carry a float32 number
_LOGIT_BYTES = 2**27


@dataclass(frozen=True, slots=True)
class VocabInputs:
    """M positions; gradients flow to the first three."""

    hidden_MD: Tensor
    """The drafter's, after its final norm."""
    latent_Mr: Tensor
    w2_Vr: Tensor
    teacher_UD: Tensor
    """The target's, after its final norm. Neighbouring blocks share positions: U < M."""
    teacher_rows_M: Tensor
    """int64, ascending without gaps: whose row of `teacher_UD` a position is compared with."""
    labels_M: Tensor
    """The same for positions that share a teacher row: it is the token that came next."""
    weights_M: Tensor


@dataclass(frozen=True, slots=True)
class VocabLosses:
    loss: Tensor
    """sum of weight * (ce * CE + l1 * ||draft - teacher||_1 + soft_ce * CE to the teacher's whole
    distribution): the part with a gradient."""
    cross_entropy_M: Tensor
    """0 where the label is outside the draft vocabulary."""
    acceptance_M: Tensor
    """1 - total variation: how likely rejection sampling is to accept (paper, equation 8)."""
    taught_M: Tensor
    """bool: the label is in the draft vocabulary."""


@dataclass(frozen=True, slots=True)
class _Gradients:
    hidden_MD: Tensor
    latent_Mr: Tensor
    w2_Cr: Tensor


class VocabHead:
    """The frozen LM head beside room for W2, laid out for both products and both directions.

    In bfloat16 a logit of 20 is rounded by 0.06, which moves total variation by 0.01. So logits are
    taken relative to the label's: the reference enters the product as three more columns against
    ones, and the rounding is then small where the probability is (measured: 0.003, which is the
    rounding of the inputs alone).
    """

    def __init__(
        self,
        binding: Binding,
        rank: int,
        dtype: torch.dtype,
        *,
        draft_token_ids: Tensor | None = None,
        chunk: int | None = None,
        tile: int | None = None,
    ) -> None:
        """`draft_token_ids`: distinct ids [C], the draft vocabulary; None is all tokens.
        `chunk` positions share a product (default: what fits into 128 MiB of logits, at most
        1024, as every product reads the whole head); `tile` of them at a time are in float32
        (default: 16 on a CPU, in whose caches they stay; 256 elsewhere, for fewer kernels)."""
        V, D = binding.lm_head_VD.shape
        self.lm_head_VD, self.logit_scale = binding.lm_head_VD, binding.logit_scale
        self.softcap = binding.logit_softcap
        self.dtype, self.rank = dtype, rank
        self.chunk = chunk or max(64, min(1024, _LOGIT_BYTES // (V * dtype.itemsize)))
        # A softcap is not linear: a reference cannot be subtracted inside the product.
        referenced = dtype == torch.bfloat16 and self.softcap is None
        self.references = _REFERENCE_PARTS if referenced else 0
        self.hidden = slice(0, D)
        self.teacher = slice(0, D + self.references)
        self.latent = slice(D + self.references, D + self.references + rank)
        device = binding.lm_head_VD.device
        self.tile = tile or (16 if device.type == "cpu" else 256)
        ids_C = torch.arange(V, device=device) if draft_token_ids is None else draft_token_ids
        self.draft_ids_C = ids_C.to(device)
        C = len(ids_C)
        self.columns_V = torch.full((V,), -1, device=device)
        """The draft column of a token id; -1 for those that are never proposed."""
        self.columns_V[self.draft_ids_C] = torch.arange(C, device=device)
        order_V = torch.cat([self.draft_ids_C, (self.columns_V < 0).nonzero().squeeze(1)])
        self.weight_IV = torch.ones(self.latent.stop, V, dtype=dtype, device=device)
        self.weight_IV[self.hidden].copy_(binding.lm_head_VD[order_V].T * binding.logit_scale)
        self.draft_IC = self.weight_IV[:, :C]
        self._draft_BC = torch.empty(self.chunk, C, dtype=dtype, device=device)
        self._teacher_BV = torch.empty(self.chunk, V, dtype=dtype, device=device)
        self._teacher_RV = torch.empty(self.tile, V, device=device)
        self._scratch = tuple(torch.empty(self.tile, C, device=device) for _ in range(3))

    def losses(
        self, inputs: VocabInputs, weights: LossWeights, *, want_gradients: bool
    ) -> tuple[Tensor, Tensor, Tensor, _Gradients | None]:
        """(cross-entropy [M], total variation [M], cross-entropy to the teacher [M], gradients of
        the weighted sum)."""
        M, device = len(inputs.labels_M), inputs.labels_M.device
        draft_MI, teacher_UI = self._rows(inputs)
        w2_Cr = inputs.w2_Vr.index_select(0, self.draft_ids_C)
        self.draft_IC[self.latent].copy_(w2_Cr.T)
        columns_M1 = self.columns_V[inputs.labels_M][:, None]
        found_3M = torch.empty(3, M, device=device)
        gradients = None
        if want_gradients:
            gradients = _Gradients(
                hidden_MD=torch.empty(inputs.hidden_MD.shape, device=device),
                latent_Mr=torch.empty(inputs.latent_Mr.shape, device=device),
                w2_Cr=torch.zeros(w2_Cr.shape, device=device),
            )
        weights_M1 = inputs.weights_M[:, None]
        # Which rows a tile has, on the host: read once, or a device is waited for in every tile.
        teacher_of = inputs.teacher_rows_M.tolist()
        for start in range(0, M, self.chunk):
            rows = slice(start, min(start + self.chunk, M))
            first_teacher = teacher_of[start]
            draft_BC, teacher_BV = self._logits(
                draft_MI[rows], teacher_UI[first_teacher : teacher_of[rows.stop - 1] + 1]
            )
            for first in range(rows.start, rows.stop, self.tile):
                tile = slice(first, min(first + self.tile, rows.stop))
                draft_RC = draft_BC[tile.start - start : tile.stop - start]
                own, last = teacher_of[first], teacher_of[tile.stop - 1]
                found_3M[:, tile] = tile_losses(
                    self._scratch,
                    draft_RC,
                    self._teacher_probs(
                        teacher_BV[own - first_teacher : last + 1 - first_teacher],
                        inputs.teacher_rows_M[tile] - own,
                    ),
                    columns_M1[tile],
                    weights,
                    weights_M1[tile] if want_gradients else None,
                )
            if gradients is not None:
                self._backward(draft_MI, rows, draft_BC, gradients)
        cross_entropy_M, variation_M, soft_M = found_3M
        return cross_entropy_M, variation_M, soft_M, gradients

    def _rows(self, inputs: VocabInputs) -> tuple[Tensor, Tensor]:
        """Left sides of the two products: draft [M, I] and teacher [U, D + references]."""
        labels_M = inputs.labels_M
        labels_U = labels_M.new_empty(len(inputs.teacher_UD))
        labels_U[inputs.teacher_rows_M] = labels_M
        w2_Mr = inputs.w2_Vr.index_select(0, labels_M)
        bias_M = (inputs.latent_Mr.float() * w2_Mr).sum(1)
        draft = [
            *self._referenced(inputs.hidden_MD, labels_M, bias_M),
            inputs.latent_Mr.to(self.dtype),
        ]
        return torch.cat(draft, 1), torch.cat(self._referenced(inputs.teacher_UD, labels_U), 1)

    def _referenced(
        self, hidden_MD: Tensor, labels_M: Tensor, bias_M: Tensor | float = 0.0
    ) -> list[Tensor]:
        """Columns: hidden, and minus the label's logit in pieces."""
        head_MD = self.lm_head_VD.index_select(0, labels_M) * self.logit_scale
        rest_M = -(hidden_MD.float() * head_MD).sum(1) - bias_M
        columns = [hidden_MD.to(self.dtype)]
        for _ in range(self.references):
            piece_M = rest_M.to(self.dtype)
            columns.append(piece_M[:, None])
            rest_M = rest_M - piece_M.float()
        return columns

    def _logits(self, draft_BI: Tensor, teacher_UI: Tensor) -> tuple[Tensor, Tensor]:
        draft_BC, teacher_BV = self._draft_BC[: len(draft_BI)], self._teacher_BV[: len(teacher_UI)]
        torch.mm(teacher_UI, self.weight_IV[self.teacher], out=teacher_BV)
        if self.softcap is None:
            torch.mm(draft_BI, self.draft_IC, out=draft_BC)
        else:  # the sequential head's bias is added after the softcap
            teacher_BV.div_(self.softcap).tanh_().mul_(self.softcap)
            torch.mm(draft_BI[:, self.hidden], self.draft_IC[self.hidden], out=draft_BC)
            draft_BC.div_(self.softcap).tanh_().mul_(self.softcap)
            draft_BC.addmm_(draft_BI[:, self.latent], self.draft_IC[self.latent])
        return draft_BC, teacher_BV

    def _teacher_probs(self, logits_RV: Tensor, rows_R: Tensor) -> Tensor:
        """[R, C]: softmax over all V, of the columns that the draft has too, and of the rows that
        `rows_R` names (more than once, where positions share one); in scratch memory."""
        unique_RV = self._teacher_RV[: len(logits_RV)]
        torch.softmax(logits_RV, 1, dtype=torch.float32, out=unique_RV)
        t_RC = self._scratch[1][: len(rows_R)]
        columns = unique_RV[:, : t_RC.shape[1]]
        return torch.index_select(columns, 0, rows_R, out=t_RC)

    def _backward(
        self, draft_MI: Tensor, rows: slice, grad_BC: Tensor, gradients: _Gradients
    ) -> None:
        """`grad_BC` is the gradient of the draft logits of the chunk `rows`."""
        draft_BI = draft_MI[rows]
        gradients.w2_Cr.add_(grad_BC.T @ draft_BI[:, self.latent])
        if self.softcap is None:
            grad_BI = grad_BC @ self.draft_IC.T
            gradients.hidden_MD[rows] = grad_BI[:, self.hidden]
            gradients.latent_Mr[rows] = grad_BI[:, self.latent]
        else:
            head_DC = self.draft_IC[self.hidden]
            gradients.latent_Mr[rows] = grad_BC @ self.draft_IC[self.latent].T
            capped_BC = (draft_BI[:, self.hidden] @ head_DC).div_(self.softcap).tanh_()
            gradients.hidden_MD[rows] = grad_BC.mul_(1.0 - capped_BC.square_()) @ head_DC.T


def vocab_losses(
    head: VocabHead, inputs: VocabInputs, *, ce: float, l1: float, soft_ce: float = 0.0
) -> VocabLosses:
    """Losses of M positions, differentiable in hidden, latent and W2 (never in the teacher)."""
    loss, cross_entropy_M, acceptance_M = _VocabLoss.apply(
        inputs.hidden_MD, inputs.latent_Mr, inputs.w2_Vr, inputs, head,
        LossWeights(ce, l1, soft_ce), torch.is_grad_enabled(),
    )  # fmt: skip
    taught_M = head.columns_V[inputs.labels_M] >= 0
    return VocabLosses(loss, cross_entropy_M, acceptance_M, taught_M)


class _VocabLoss(torch.autograd.Function):
    """Gradients are made in the forward, where the softmaxes are at hand."""

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, latent_Mr: Tensor, w2_Vr: Tensor, inputs: VocabInputs,
        head: VocabHead, weights: LossWeights, want_gradients: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        cross_entropy_M, variation_M, soft_M, gradients = head.losses(
            inputs, weights, want_gradients=want_gradients
        )
        if gradients is not None:
            grad_Vr = torch.zeros_like(w2_Vr, dtype=torch.float32)
            grad_Vr[head.draft_ids_C] = gradients.w2_Cr
            ctx.save_for_backward(gradients.hidden_MD, gradients.latent_Mr, grad_Vr)
            ctx.dtypes = hidden_MD.dtype, latent_Mr.dtype, w2_Vr.dtype
        hard_M = weights.ce * cross_entropy_M + 2.0 * weights.l1 * variation_M
        loss = (inputs.weights_M * (hard_M + weights.soft_ce * soft_M)).sum()
        acceptance_M = (1.0 - variation_M).clamp(0.0, 1.0)
        ctx.mark_non_differentiable(cross_entropy_M, acceptance_M)
        return loss, cross_entropy_M, acceptance_M

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        scaled = (
            (gradient * grad_loss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*scaled, *[None] * 4)
