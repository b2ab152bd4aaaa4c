"""How far a packed target is from the unpacked model in float32."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.nn.attention import KEY_TILE
from dspark.nn.kv_cache import KVStore
from dspark.nn.pages import PagePool
from dspark.nn.seams import RaggedBatch, Target

_PASSAGE = """The harbour was quiet before sunrise. Two engineers walked along the pier and counted
the boats: 3 + 4 = 7, and one more behind the crane. "Could you write a short program," she asked,
"that prints every even number below twenty?" He opened his notebook and wrote: for n in range(0,
20, 2): print(n). Later they drank coffee, argued about the tides, and agreed that the moon explains
most of it."""

ReferenceLogits = Callable[[Tensor], Tensor]
"""int64 tokens [T] -> float32 logits [T, V] of the unpacked model."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Compared position by position on texts both models were given; see `measure_drift`."""

    largest_logit_difference: float
    mean_logit_difference: float
    """Mean absolute difference over positions and vocabulary."""
    greedy_agreement: float
    """Share of positions whose most likely token is the same, in [0, 1]."""
    positions: int

    def __str__(self) -> str:
        return (
            f"largest logit difference {self.largest_logit_difference:.3g}, "
            f"greedy agreement {self.greedy_agreement:.1%} over {self.positions} positions"
        )


def sample_tokens(tokenizer: Any, vocab_size: int, count: int = 96) -> list[int]:
    """The first tokens of a passage of prose, arithmetic and code, to compare models on."""
    tokens = [int(token) for token in tokenizer(_PASSAGE)["input_ids"]]
    return [token for token in tokens if token < vocab_size][:count]


def measure_drift(
    reference: ReferenceLogits, target: Target, sequences: Sequence[Sequence[int]]
) -> Drift:
    """Compares the logits of both models after every token of `sequences` (teacher forcing).

    `reference` is called on one sequence at a time and must not be the packed model: packing
    changes a model in place, so take its logits first or load it twice.
    """
    assert any(len(sequence) for sequence in sequences), "there is nothing to compare"
    largest = total = 0.0
    agreeing = positions = 0
    for sequence in sequences:
        tokens_T = torch.tensor(sequence, dtype=torch.int64, device=target.device)
        expected_TV = reference(tokens_T).float()
        actual_TV = target_logits(target, tokens_T)
        difference_TV = (actual_TV - expected_TV).abs()
        largest = max(largest, float(difference_TV.max()))
        total += float(difference_TV.mean(-1).sum())
        agreeing += int((actual_TV.argmax(-1) == expected_TV.argmax(-1)).sum())
        positions += len(sequence)
    return Drift(largest, total / positions, agreeing / positions, positions)


def target_logits(target: Target, tokens_T: Tensor, store: KVStore | None = None) -> Tensor:
    """float32 logits [T, V] after every token of one text, in a single step of the target.

    Keys and values go to the first T slots of `store`, if one is given.
    """
    length = len(tokens_T)
    table = PagePool(1, length).allocate(length)
    positions_N = torch.arange(length, device=target.device)
    batch = RaggedBatch(
        tokens_N=tokens_T,
        positions_N=positions_N,
        requests_N=torch.zeros_like(positions_N),
        slots_N=table.slots(0, length).to(target.device),
        starts=(0, length),
        context_lengths=(length,),
        tables=(table,),
    )
    if store is None:
        store = KVStore(target.kv_shape, length, read_ahead=KEY_TILE, device=target.device)
    return target.forward(batch, store, logit_rows_M=positions_N).logits_MV
