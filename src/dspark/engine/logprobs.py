"""Log-probabilities of tokens under the target, before anything a request does to them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.core.records import TokenLogprob
from dspark.core.sampling import SamplingParams


def token_logprobs(
    params: SamplingParams, logits_MV: Tensor, first_row: int, tokens: Sequence[int]
) -> tuple[TokenLogprob, ...]:
    """Of T tokens, drawn at consecutive rows of the target's own logits; () if not asked for."""
    if params.logprobs is None:
        return ()
    logits_TV = logits_MV[first_row : first_row + len(tokens)]
    logprobs_TV = logits_TV.log_softmax(-1)
    index_T1 = torch.tensor(tokens, device=logits_TV.device)[:, None]
    own_T = logprobs_TV.gather(1, index_T1)[:, 0].tolist()
    values_TK, ids_TK = logprobs_TV.topk(min(params.logprobs, logits_TV.shape[1]))
    likeliest = zip(ids_TK.tolist(), values_TK.tolist(), strict=True)
    return tuple(
        TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, (ids, values) in zip(tokens, own_T, likeliest, strict=True)
    )
