"""Tapped features and final hidden states of whole sequences, from the target's own forward."""

import torch
from torch import Tensor

from dspark.data.template import TokenIds
from dspark.nn.attention import KEY_TILE
from dspark.nn.kv_cache import KVStore
from dspark.nn.pages import PagePool, PageTable
from dspark.nn.seams import RaggedBatch, Target

_ROWS = 512
"""Tokens of one forward."""


class FeatureExtractor:
    """A `training.features.FeatureSource`: of each sequence taps [T, F] and final states [T, D], on
    the target's device."""

    def __init__(self, target: Target, tap_layers: tuple[int, ...]) -> None:
        self.target = target
        self.tap_layers = tap_layers

    def __call__(self, sequences: list[TokenIds]) -> list[tuple[Tensor, Tensor]]:
        longest = max(len(ids) for ids in sequences)
        pool = PagePool(1, longest)
        device = self.target.device
        store = KVStore(self.target.kv_shape, longest, read_ahead=KEY_TILE, device=device)
        table = pool.allocate(longest)
        results = []
        for ids in sequences:
            taps, finals = [], []
            for start in range(0, len(ids), _ROWS):
                chunk = ids[start : start + _ROWS]
                output = self.target.forward(
                    _chunk_batch(chunk, start, table, device),
                    store,
                    logit_rows_M=torch.zeros(1, dtype=torch.int64, device=device),
                    tap_layers=self.tap_layers,
                    want_final=True,
                )
                assert output.taps_NF is not None
                assert output.final_ND is not None
                taps.append(output.taps_NF)
                finals.append(output.final_ND)
            results.append((torch.cat(taps), torch.cat(finals)))
        return results


def _chunk_batch(
    chunk: TokenIds, start: int, table: PageTable, device: torch.device
) -> RaggedBatch:
    end = start + len(chunk)
    return RaggedBatch(
        tokens_N=torch.from_numpy(chunk).long().to(device),
        positions_N=torch.arange(start, end, device=device),
        requests_N=torch.zeros(len(chunk), dtype=torch.int64, device=device),
        slots_N=table.slots(start, end).to(device),
        starts=(0, len(chunk)),
        context_lengths=(end,),
        tables=(table,),
        exact=False,
        prompt_from=0,
    )
