import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark.core.errors import DataError, DSparkError
from dspark.training import features
from dspark.training.features import FeatureKind, FeatureStore, OnlineFeatures, feature_bytes
from tests.training.tiny import TAPS, D, tiny_sequences, tiny_source

IDS = [s.token_ids for s in tiny_sequences(9)]


def _store(
    folder: Path,
    target: str = "tiny",
    taps: tuple[int, ...] = TAPS,
    kind: FeatureKind = "bf16",
) -> FeatureStore:
    return FeatureStore(folder, target=target, tap_layers=taps, hidden_size=D, kind=kind)


def test_reads_back_rounded_to_bfloat16(tmp_path: Path) -> None:
    assert _store(tmp_path).fill(IDS, tiny_source, tokens_per_call=20, tokens_per_shard=50) == 9
    store = _store(tmp_path)
    assert len(list(tmp_path.glob("shard-*.safetensors"))) > 1
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
    shards = sorted(tmp_path.glob("shard-*.safetensors"))
    assert len(shards) == 2
    shards[0].unlink()
    (tmp_path / "shard-00007.safetensors.partial").write_bytes(b"half")
    store = _store(tmp_path)
    assert not list(tmp_path.glob("*.partial"))
    assert 0 < sum(ids in store for ids in IDS) < 9
    store.fill(IDS, tiny_source)
    for ids, (taps, _) in zip(IDS, tiny_source(IDS), strict=True):
        assert torch.equal(_store(tmp_path).context(ids, len(ids)), taps.bfloat16())


def test_int8_is_near_and_half_the_size(tmp_path: Path) -> None:
    def uneven(sequences: list) -> list:
        """Taps of very different sizes, one outlier a row."""
        scaled = []
        for taps, final in tiny_source(sequences):
            taps = torch.cat([taps[:, :D], taps[:, D:] * 300], 1)
            scaled.append((taps, final))
        return scaled

    store = _store(tmp_path / "int8", kind="int8")
    assert store.fill(IDS, uneven) == 9
    tokens = sum(map(len, IDS))
    size = sum(path.stat().st_size for path in (tmp_path / "int8").glob("shard-*"))
    assert tokens * store.bytes_per_token <= size < tokens * store.bytes_per_token + 1500
    assert feature_bytes("int8", 5, 576) < 0.51 * feature_bytes("bf16", 5, 576) == 0.51 * 6912
    for ids, (taps, final) in zip(IDS, uneven(IDS), strict=True):
        ours = store.context(ids, len(ids)).float()
        assert ours.shape == taps.shape and store.context(ids, 1).dtype == torch.bfloat16
        for part in (slice(0, D), slice(D, 2 * D)):
            largest = taps[:, part].abs().amax(1, keepdim=True)
            assert ((ours - taps)[:, part].abs() <= largest * (0.5 / 127 + 0.006)).all()
        rows = np.array([1, 0])
        assert (store.final(ids, rows).float() - final[[1, 0]]).abs().max() < 0.03


def test_online_features_are_the_stored_ones(tmp_path: Path) -> None:
    calls = 0

    def counting(sequences: list) -> list:
        nonlocal calls
        calls += 1
        return tiny_source(sequences)

    store, online = _store(tmp_path), OnlineFeatures(counting)
    store.fill(IDS, tiny_source)
    for ids in IDS:
        rows = np.array([1, 0, 1])
        assert torch.equal(online.context(ids, 2), store.context(ids, 2))
        assert torch.equal(online.final(ids, rows), store.final(ids, rows))
    assert calls == len(IDS), "once for both"
    broken = OnlineFeatures(lambda s: [(t * torch.nan, f) for t, f in tiny_source(s)])
    with pytest.raises(DataError, match="not finite"):
        broken.context(IDS[0], 1)


def test_bad_stores(tmp_path: Path) -> None:
    store = _store(tmp_path)
    store.fill(IDS[:2], tiny_source)
    for changes in ({"target": "other"}, {"taps": (1, 2)}, {"kind": "int8"}):
        with pytest.raises(DataError, match="another target, other taps or another kind"):
            _store(tmp_path, **changes)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="not finite"):
        store.fill(IDS[2:3], lambda s: [(t * torch.nan, f) for t, f in tiny_source(s)])
    (tmp_path / "store.json").write_text('{"format": "dspark-features/1", "target": "tiny"}')
    with pytest.raises(DataError, match="older format; delete it: they are computed again"):
        _store(tmp_path)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("damage", ["data", "scales", "listing", "cut"])
def test_a_damaged_shard_is_named_and_can_be_replaced(
    tmp_path: Path, kind: FeatureKind, damage: str
) -> None:
    _store(tmp_path, kind=kind).fill(IDS, tiny_source, tokens_per_shard=50)
    shards = sorted(tmp_path.glob("shard-*"))
    data = bytearray(shards[1].read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    match damage:
        case "data":
            data[-5] ^= 1
        case "scales":  # whatever comes first in the file
            data[header] ^= 1
        case "listing":
            place = data.index(b"hashes") + 12
            data[place] = ord("0") if data[place] != ord("0") else ord("1")
        case "cut":
            data = data[:-2]
    shards[1].write_bytes(data)

    def read_all() -> None:
        store = _store(tmp_path, kind=kind)
        for ids in IDS:
            if ids in store:
                store.context(ids, 1)

    with pytest.raises(DataError, match=r"shard-00001\.safetensors is damaged .*delete the file"):
        read_all()
    shards[1].unlink()
    store = _store(tmp_path, kind=kind)
    assert 0 < store.fill(IDS, tiny_source) < len(IDS), "what the others hold is not computed again"
    assert all(shard.exists() for shard in shards[2:])
    read_all()


def test_a_full_disk_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        features.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000})
    )
    with pytest.raises(DSparkError, match=r"take .* GB, .* --features none or int8"):
        _store(tmp_path).fill(IDS, lambda sequences: pytest.fail("it was computed"))


def test_a_disk_that_fills_up_keeps_whole_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _store(tmp_path)
    store.fill(IDS[:3], tiny_source)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(features.os, "fsync", full)
        with pytest.raises(DSparkError, match="No space left"):
            store.fill(IDS, tiny_source)
    again = _store(tmp_path)
    assert all(ids in again for ids in IDS[:3])
    assert again.fill(IDS, tiny_source) == 6
