"""What a store gives back."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.nn.kv_cache import KVShape, KVStore
from dspark.nn.pages import PageTable


@given(pages=st.permutations(range(6)).map(lambda order: order[:4]), length=st.integers(1, 12))
def test_a_store_gives_back_what_was_written(pages, length):
    store = KVStore(KVShape((2,), (3,), (5,)), 18, read_ahead=16)
    table = PageTable(list(pages), 3)
    keys, values = torch.randn(length, 2, 3), torch.randn(length, 2, 5)
    store.write(0, table.slots(0, length), keys, values)
    for padded in (length, length + 4):
        got_keys, got_values = store.read(0, table, length, padded)
        assert got_keys.shape == (padded, 2, 3) and got_values.shape == (padded, 2, 5)
        assert torch.equal(got_keys[:length], keys) and torch.equal(got_values[:length], values)
        assert got_keys.isfinite().all() and got_values.isfinite().all()


def test_bytes_per_token():
    shape = KVShape((2, 4), (8, 8), (8, 16))
    assert shape.bytes_per_token(torch.float32) == 4 * (2 * 16 + 4 * 24)
    assert KVShape.uniform(3, 2, 8).bytes_per_token(torch.bfloat16) == 2 * 3 * 2 * 16


def test_pages_are_copied_whole():
    store = KVStore(KVShape((2, 1), (3, 4), (5, 4)), 12, read_ahead=0)
    for memory in (*store.keys, *store.values):
        memory.normal_()
    before = [memory.clone() for memory in (*store.keys, *store.values)]
    store.copy([(3, 0), (1, 2)], page_size=3)
    store.copy([], page_size=3)
    for memory, old in zip((*store.keys, *store.values), before, strict=True):
        assert torch.equal(memory[0:3], old[9:12]) and torch.equal(memory[6:9], old[3:6])
        assert torch.equal(memory[3:6], old[3:6]) and torch.equal(memory[9:12], old[9:12])


def test_a_new_store_is_zero_in_every_type():
    for dtype in (torch.float32, torch.bfloat16):
        store = KVStore(KVShape.uniform(1, 1, 2), 4, read_ahead=2, dtype=dtype)
        assert store.keys[0].dtype == dtype and store.keys[0].shape == (6, 1, 2)
        assert not store.keys[0].any() and not store.values[0].any()
