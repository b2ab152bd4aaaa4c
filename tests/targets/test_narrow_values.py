"""Latent attention: values narrower than keys, which torch's fused kernel does not take."""

import torch

from dspark.targets.tiny import tiny_model
from tests.targets.ragged import Session, packed_target, random_text

VOCAB = 97


def test_rows_are_exact_across_key_tiles():
    """A chunk pads the keys of all its rows to the tiles of its last one."""
    target = packed_target(tiny_model("deepseek_v3", num_hidden_layers=1))
    shape = target.kv_shape
    assert shape.key_dims != shape.value_dims
    assert target.row_exact
    text = random_text(530, VOCAB, seed=1)

    def read(*cuts):
        return Session(target, page_size=16, pages=36).read([text], [list(cuts)])[0]["logits"]

    by_token = read(*range(500, 530))
    assert torch.equal(read(), by_token)
    assert torch.equal(read(505, 513, 521), by_token)
