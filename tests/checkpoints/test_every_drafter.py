"""Law 8 for every kind of drafter: written and read back, bit-equal tensors and equal drafts."""

from pathlib import Path

import pytest
import torch

from dspark.checkpoints.bundle import BundleInfo
from dspark.checkpoints.native import read_bundle, write_bundle
from tests.engine.setup import BLOCK, GREEDY, PROMPTS, UNTRAINED, run, served, untrained


@pytest.mark.parametrize("name", UNTRAINED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_round_trip(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    network = untrained(name).to(dtype)
    info = BundleInfo(target="tiny", embedding_hash="e")
    for folder, tensors in (("a", network.state_dict()), ("b", None)):
        tensors = tensors or read_bundle(tmp_path / "a").tensors
        write_bundle(
            tmp_path / folder,
            config=network.config,
            info=info,
            tensors=tensors,
            card="",
            dtype=dtype,
        )
    files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in "ab"]
    assert files[0] == files[1]
    bundle = read_bundle(tmp_path / "b")
    assert bundle.config == network.config
    for key, tensor in network.state_dict().items():
        assert torch.equal(bundle.tensors[key], tensor), key
    length = 1 if name == "mtp" else BLOCK
    own, again = (
        run(PROMPTS[2:4], GREEDY, (served(model), length)).rounds
        for model in (network.float(), bundle.model())
    )
    assert own == again
