"""What a drafter does with its target's two vocabulary tables."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.nn.seams import Binding


def embed(binding: Binding, tokens: Tensor) -> Tensor:
    """The target's input embeddings [..., D] of token ids, with the target's scale."""
    rows = F.embedding(tokens, binding.embedding_VD)
    return rows if binding.embedding_scale == 1.0 else rows * binding.embedding_scale


def finish_logits(binding: Binding, raw: Tensor) -> Tensor:
    """The target's logit scale and softcap, on raw LM head products."""
    if binding.logit_scale != 1.0:
        raw = raw * binding.logit_scale
    if binding.logit_softcap is not None:
        raw = torch.tanh(raw / binding.logit_softcap) * binding.logit_softcap
    return raw


def head_logits(binding: Binding, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """The target's logits of hidden states [..., D] (after the final norm): [..., V].

    With `token_ids` [C], only those columns, [..., C].
    """
    head = binding.lm_head_VD if token_ids is None else binding.lm_head_VD[token_ids]
    return finish_logits(binding, F.linear(hidden, head))
