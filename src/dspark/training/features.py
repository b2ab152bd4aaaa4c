"""Tapped features and final hidden states of training sequences, computed once per run.

They come from a callable (this room knows no target) and lie in memory-mapped shards of bfloat16
rows [taps | final], 2 (F + D) bytes a token: 6.9 kB for five taps of width 576. Sequences are known
by the hash of their token ids, so a store that already holds some of them computes only the others.
A shard appears under its name when it is whole; whatever a killed run left half-written is ignored
and removed.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspark.core.errors import DataError
from dspark.data.template import TokenIds

FeatureSource = Callable[[list[TokenIds]], list[tuple[Tensor, Tensor]]]
"""Token ids of sequences -> for each (taps [T, F], hidden states after the final norm [T, D])."""

FORMAT = "dspark-features/1"


class FeatureStore:
    def __init__(
        self, folder: Path | str, *, target: str, tap_layers: tuple[int, ...], hidden_size: int
    ) -> None:
        """Opens or creates the store. DataError if it holds another target's features.

        `target` is whatever identifies the weights (name and embedding hash).
        """
        self.folder = Path(folder)
        self.features = len(tap_layers) * hidden_size
        self.width = self.features + hidden_size
        self._places: dict[str, tuple[int, int, int]] = {}
        self._shards: list[np.ndarray] = []
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_identity({"format": FORMAT, "target": target, "tap_layers": list(tap_layers)})
        for leftover in self.folder.glob("*.partial"):
            leftover.unlink()
        for listing in sorted(self.folder.glob("shard-*.json")):
            self._open(listing)

    def __contains__(self, token_ids: TokenIds) -> bool:
        return _hash(token_ids) in self._places

    def fill(
        self,
        sequences: Sequence[TokenIds],
        source: FeatureSource,
        *,
        tokens_per_call: int = 8192,
        tokens_per_shard: int = 65536,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> int:
        """Computes what is missing, a shard at a time; how many sequences that was.

        Stopping between shards loses nothing. Neighbours in length share a call.
        """
        missing = {_hash(ids): ids for ids in sequences if ids not in self}
        ordered = sorted(missing.values(), key=len)
        for shard in _cut(ordered, tokens_per_shard):
            rows, lengths = [], []
            for call in _cut(shard, tokens_per_call):
                for ids, (taps_TF, final_TD) in zip(call, source(call), strict=True):
                    rows.append(self._row(ids, taps_TF, final_TD))
                    lengths.append(len(ids))
                progress(sum(map(len, call)))
            self._write([_hash(ids) for ids in shard], lengths, torch.cat(rows))
        return len(ordered)

    def context(self, token_ids: TokenIds, count: int) -> Tensor:
        """bfloat16 taps [count, F] of positions 0 .. count - 1."""
        return _tensor(self._rows(token_ids)[:count, : self.features])

    def final(self, token_ids: TokenIds, positions_M: np.ndarray) -> Tensor:
        """bfloat16 final hidden states [M, D] at the given positions."""
        return _tensor(self._rows(token_ids)[positions_M, self.features :])

    def _rows(self, token_ids: TokenIds) -> np.ndarray:
        shard, start, length = self._places[_hash(token_ids)]
        return self._shards[shard][start : start + length]

    def _row(self, ids: TokenIds, taps_TF: Tensor, final_TD: Tensor) -> Tensor:
        row = torch.cat([taps_TF, final_TD], dim=1).to(torch.bfloat16)
        assert row.shape == (len(ids), self.width), (row.shape, len(ids), self.width)
        if not torch.isfinite(row).all():
            raise DataError("the target gave features that are not finite; check its weights")
        return row

    def _write(self, hashes: list[str], lengths: list[int], rows_NW: Tensor) -> None:
        stem = self.folder / f"shard-{len(self._shards):05d}"
        data = rows_NW.contiguous().view(torch.int16).numpy().tobytes()
        _write_whole(stem.with_suffix(".bin"), data)
        # The listing is what makes a shard count: it comes last.
        listing = json.dumps({"hashes": hashes, "lengths": lengths})
        _write_whole(stem.with_suffix(".json"), listing.encode())
        self._open(stem.with_suffix(".json"))

    def _open(self, listing: Path) -> None:
        try:
            entry = json.loads(listing.read_text())
            rows = sum(entry["lengths"])
            data = listing.with_suffix(".bin")
            if data.stat().st_size != rows * self.width * 2:
                raise ValueError(f"{data.name} has {data.stat().st_size} bytes")
            mapped = np.memmap(data, dtype=np.uint16, mode="r", shape=(rows, self.width))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{listing} is damaged ({error}); delete the folder to rebuild it"
            ) from None
        start = 0
        for key, length in zip(entry["hashes"], entry["lengths"], strict=True):
            self._places[key] = (len(self._shards), start, length)
            start += length
        self._shards.append(mapped)

    def _check_identity(self, identity: dict[str, object]) -> None:
        path = self.folder / "store.json"
        if not path.exists():
            _write_whole(path, json.dumps(identity).encode())
        elif json.loads(path.read_text()) != identity:
            raise DataError(
                f"{self.folder} holds features of another target or other taps; delete it"
            )


def _hash(token_ids: TokenIds) -> str:
    return hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes()).hexdigest()[:32]


def _tensor(rows: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows).view(np.int16)).view(torch.bfloat16)


def _cut(sequences: list[TokenIds], tokens: int) -> list[list[TokenIds]]:
    """Runs of sequences of at most `tokens` tokens (a longer sequence stands alone)."""
    runs: list[list[TokenIds]] = []
    size = 0
    for ids in sequences:
        if not runs or size + len(ids) > tokens:
            runs.append([])
            size = 0
        runs[-1].append(ids)
        size += len(ids)
    return runs


def _write_whole(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
