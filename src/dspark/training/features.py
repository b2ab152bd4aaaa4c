"""Tapped features and final hidden states of training sequences: stored, or computed on demand.

They come from a callable (this room knows no target). A store computes them once and keeps them in
memory-mapped safetensors shards of rows [taps | final], a row a token, without padding:

    bf16    2 (F + D) bytes a token: 6.9 kB for five taps of width 576
    int8    half of that: every tap of a token has its own scale, as their sizes differ much

Sequences are known by the hash of their token ids, so a store that already holds some of them
computes only the others. A shard appears under its name when it is whole; whatever a killed run
left half-written is removed. Its checksum is compared when it is first read.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dspark.core.errors import DataError, DSparkError
from dspark.data.template import TokenIds

FeatureSource = Callable[[list[TokenIds]], list[tuple[Tensor, Tensor]]]
"""Token ids of sequences -> for each (taps [T, F], hidden states after the final norm [T, D]), on
the target's device."""

FeatureKind = Literal["bf16", "int8"]

FORMAT = "dspark-features/2"


class OnlineFeatures:
    """No store: a sequence's features are computed whenever a step reads them."""

    def __init__(self, source: FeatureSource) -> None:
        self._source = source
        self._last: tuple[TokenIds, Tensor, Tensor] | None = None

    def context(self, token_ids: TokenIds, count: int) -> Tensor:
        return self._of(token_ids)[0][:count]

    def final(self, token_ids: TokenIds, positions_M: np.ndarray) -> Tensor:
        final_TD = self._of(token_ids)[1]
        return final_TD[torch.from_numpy(positions_M).to(final_TD.device)]

    def _of(self, token_ids: TokenIds) -> tuple[Tensor, Tensor]:
        # A step asks for the context of a sequence, then for its final states.
        if self._last is None or self._last[0] is not token_ids:
            ((taps_TF, final_TD),) = self._source([token_ids])
            _check_finite(taps_TF, final_TD)
            self._last = token_ids, taps_TF.bfloat16(), final_TD.bfloat16()
        return self._last[1:]


def feature_bytes(kind: FeatureKind, taps: int, hidden_size: int) -> int:
    """Bytes that a store takes for a token."""
    width = (taps + 1) * hidden_size
    return 2 * width if kind == "bf16" else width + 4 * (taps + 1)


class FeatureStore:
    def __init__(
        self,
        folder: Path | str,
        *,
        target: str,
        tap_layers: tuple[int, ...],
        hidden_size: int,
        kind: FeatureKind = "bf16",
    ) -> None:
        """Opens or creates the store. DataError if it holds another target's features, or others.

        `target` is whatever identifies the weights (name and embedding hash).
        """
        self.folder = Path(folder)
        self.kind = kind
        self.parts = len(tap_layers) + 1
        self.features = len(tap_layers) * hidden_size
        self.width = self.features + hidden_size
        self.bytes_per_token = feature_bytes(kind, len(tap_layers), hidden_size)
        self._places: dict[str, tuple[_Shard, int, int]] = {}
        self._next = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_identity(
            {"format": FORMAT, "target": target, "tap_layers": list(tap_layers), "kind": kind}
        )
        for leftover in self.folder.glob("*.partial"):
            leftover.unlink()
        for path in sorted(self.folder.glob("shard-*.safetensors")):
            self._open(path)

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

        Stopping between shards loses nothing. Neighbours in length share a call. DSparkError where
        the disk has no room, before anything is computed.
        """
        missing = {_hash(ids): ids for ids in sequences if ids not in self}
        ordered = sorted(missing.values(), key=len)
        self._check_room(sum(map(len, ordered)))
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
        shard, start, _ = self._places[_hash(token_ids)]
        return shard.read(slice(start, start + count), slice(0, self.parts - 1))

    def final(self, token_ids: TokenIds, positions_M: np.ndarray) -> Tensor:
        shard, start, _ = self._places[_hash(token_ids)]
        rows_M = torch.from_numpy(positions_M + start)
        return shard.read(rows_M, slice(self.parts - 1, self.parts))

    def _row(self, ids: TokenIds, taps_TF: Tensor, final_TD: Tensor) -> Tensor:
        _check_finite(taps_TF, final_TD)
        row = torch.cat([taps_TF, final_TD], dim=1).to("cpu", torch.bfloat16)
        assert row.shape == (len(ids), self.width), (row.shape, len(ids), self.width)
        return row

    def _check_room(self, tokens: int) -> None:
        needed, free = tokens * self.bytes_per_token, shutil.disk_usage(self.folder).free
        if needed > free:
            smaller = " or int8" if self.kind == "bf16" else ""
            raise DSparkError(
                f"the features of {tokens:,} tokens take {needed / 1e9:.2f} GB, and {self.folder} "
                f"has {free / 1e9:.2f} GB left; make room, or use --features none{smaller}"
            )

    def _write(self, hashes: list[str], lengths: list[int], rows_NW: Tensor) -> None:
        path = self.folder / f"shard-{self._next:05d}.safetensors"
        tensors = {"rows": rows_NW} if self.kind == "bf16" else _quantised(rows_NW, self.parts)
        listing = json.dumps({"hashes": hashes, "lengths": lengths})
        metadata = {"listing": listing, "crc32": str(_checksum(listing, tensors))}
        try:
            _write_whole(path, save(tensors, metadata))
        except OSError as error:
            path.with_name(path.name + ".partial").unlink(missing_ok=True)
            raise DSparkError(
                f"{path}: {error.strerror}; the shards before it are whole: make room, then run "
                f"the same command again"
            ) from error
        self._open(path)

    def _open(self, path: Path) -> None:
        shard = _Shard(path, self.parts, self.width)
        start = 0
        for key, length in zip(shard.hashes, shard.lengths, strict=True):
            self._places[key] = shard, start, length
            start += length
        # Behind all there are, so that a shard that was deleted leaves no name to write over.
        self._next = int(path.stem.removeprefix("shard-")) + 1

    def _check_identity(self, identity: dict[str, object]) -> None:
        path = self.folder / "store.json"
        if not path.exists():
            _write_whole(path, json.dumps(identity).encode())
            return
        found = json.loads(path.read_text())
        if found.get("format") != FORMAT:
            raise DataError(
                f"{self.folder} holds features in an older format; delete it: they are computed "
                f"again"
            )
        if found != identity:
            raise DataError(
                f"{self.folder} holds features of another target, other taps or another kind (so "
                f"are those of weights in another precision); delete it: they are computed again"
            )


class _Shard:
    """One file of rows, mapped into memory."""

    def __init__(self, path: Path, parts: int, width: int) -> None:
        self.path, self.parts = path, parts
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata()
                self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.listing, self.crc32 = metadata["listing"], int(metadata["crc32"])
            entry = json.loads(self.listing)
            self.hashes: list[str] = entry["hashes"]
            self.lengths: list[int] = entry["lengths"]
            if self.tensors["rows"].shape != (sum(self.lengths), width):
                raise ValueError(f"its rows are {tuple(self.tensors['rows'].shape)}")
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(error) from None
        self._verified = False

    def read(self, rows: slice | Tensor, parts: slice) -> Tensor:
        """bfloat16 [rows, parts * D]. DataError on the first read of a shard that is damaged."""
        if not self._verified:
            if _checksum(self.listing, self.tensors) != self.crc32:
                raise self._damaged("its checksum does not match")
            self._verified = True
        values = self.tensors["rows"].unflatten(1, (self.parts, -1))[rows, parts]
        if "scales" in self.tensors:
            values = values * self.tensors["scales"][rows, parts, None]
        return values.flatten(1).to(torch.bfloat16)

    def _damaged(self, reason: object) -> DataError:
        return DataError(
            f"{self.path} is damaged ({reason}); delete the file: its features are computed again"
        )


def _quantised(rows_NW: Tensor, parts: int) -> dict[str, Tensor]:
    """int8 rows [N, W] and float32 scales [N, parts]."""
    values_NPD = rows_NW.float().unflatten(1, (parts, -1))
    scales_NP = values_NPD.abs().amax(2).clamp_min(torch.finfo(torch.float32).tiny) / 127
    rounded_NPD = (values_NPD / scales_NP[..., None]).round_().to(torch.int8)
    return {"rows": rounded_NPD.flatten(1), "scales": scales_NP}


def _checksum(listing: str, tensors: dict[str, Tensor]) -> int:
    found = zlib.crc32(listing.encode())
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].contiguous().view(torch.uint8).numpy().data, found)
    return found


def _check_finite(taps_TF: Tensor, final_TD: Tensor) -> None:
    if not (torch.isfinite(taps_TF).all() and torch.isfinite(final_TD).all()):
        raise DataError("the target gave features that are not finite; check its weights")


def _hash(token_ids: TokenIds) -> str:
    return hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes()).hexdigest()[:32]


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
