from pathlib import Path

import numpy as np
import pytest
import torch

from dspark.core.errors import DataError
from dspark.training.features import FeatureStore
from tests.training.tiny import TAPS, D, tiny_sequences, tiny_source

IDS = [s.token_ids for s in tiny_sequences(9)]


def _store(folder: Path, target: str = "tiny", taps: tuple[int, ...] = TAPS) -> FeatureStore:
    return FeatureStore(folder, target=target, tap_layers=taps, hidden_size=D)


def test_reads_back_rounded_to_bfloat16(tmp_path: Path) -> None:
    assert _store(tmp_path).fill(IDS, tiny_source, tokens_per_call=20, tokens_per_shard=50) == 9
    store = _store(tmp_path)
    assert len(list(tmp_path.glob("shard-*.bin"))) > 1
    for ids, (taps, final) in zip(IDS, tiny_source(IDS), strict=True):
        assert torch.equal(store.context(ids, len(ids)), taps.bfloat16())
        assert torch.equal(store.context(ids, 2), taps[:2].bfloat16())
        assert torch.equal(store.final(ids, np.array([1, 0, 1])), final[[1, 0, 1]].bfloat16())


def test_only_what_is_missing_is_computed(tmp_path: Path) -> None:
    _store(tmp_path).fill(IDS[:5], tiny_source)
    asked: list[int] = []

    def counting(sequences: list) -> list:
        asked.append(len(sequences))
        return tiny_source(sequences)

    store = _store(tmp_path)
    assert store.fill([*IDS, IDS[7]], counting) == 4
    assert sum(asked) == 4 and all(ids in store for ids in IDS)
    assert store.fill(IDS, counting) == 0


def test_killed_in_the_middle_keeps_whole_shards(tmp_path: Path) -> None:
    calls = 0

    def dying(sequences: list) -> list:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return tiny_source(sequences)

    with pytest.raises(KeyboardInterrupt):
        _store(tmp_path).fill(IDS, dying, tokens_per_call=20, tokens_per_shard=20)
    shards = sorted(tmp_path.glob("shard-*.bin"))
    assert len(shards) == 2
    # A kill between the data and its listing leaves data that does not count.
    shards[1].with_suffix(".json").unlink()
    (tmp_path / "shard-00007.bin.partial").write_bytes(b"half")
    store = _store(tmp_path)
    assert not list(tmp_path.glob("*.partial"))
    assert 0 < sum(ids in store for ids in IDS) < 9
    store.fill(IDS, tiny_source)
    for ids, (taps, _) in zip(IDS, tiny_source(IDS), strict=True):
        assert torch.equal(_store(tmp_path).context(ids, len(ids)), taps.bfloat16())


def test_bad_stores(tmp_path: Path) -> None:
    store = _store(tmp_path)
    store.fill(IDS[:2], tiny_source)
    with pytest.raises(DataError, match="another target or other taps"):
        _store(tmp_path, target="other")
    with pytest.raises(DataError, match="another target or other taps"):
        _store(tmp_path, taps=(1, 2))
    with pytest.raises(DataError, match="not finite"):
        store.fill(IDS[2:3], lambda s: [(t * torch.nan, f) for t, f in tiny_source(s)])
    shard = next(tmp_path.glob("shard-*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match="damaged"):
        _store(tmp_path)
