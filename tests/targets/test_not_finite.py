"""Weights that are damaged, or overflow, are found when the target is loaded."""

import pytest
import torch

from dspark.core.errors import TargetError
from dspark.targets.support import check_runs
from dspark.targets.tiny import tiny_model
from tests.targets.ragged import packed_target


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_a_number_that_is_none(name, value):
    model = tiny_model("llama", num_hidden_layers=2)
    check_runs(packed_target(tiny_model("llama", num_hidden_layers=2)), "tiny")
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = value
    with pytest.raises(TargetError, match="logits of tiny are not finite") as caught:
        check_runs(packed_target(model), "tiny")
    assert "\n" not in str(caught.value)
