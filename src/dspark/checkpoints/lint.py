"""Everything that can be wrong with a bundle's tensors, found before any of them is used."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dspark.core.errors import CheckpointError
from dspark.drafters.build import build_model
from dspark.drafters.config import DraftConfig

TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight")
"""DeepSpec stores copies of the target's tables; we read past them."""


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Tensor name to shape, of all that a bundle of this config must hold."""
    with torch.device("meta"):
        model = build_model(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def lint_shapes(config: DraftConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Every missing, extra and misshaped tensor; the target's tables may be there or not."""
    expected = expected_shapes(config)
    table = (config.vocab_size, config.hidden_size)
    allowed = expected | dict.fromkeys(TARGET_COPIES, table)
    problems = [
        f"missing {name} {list(expected[name])}" for name in sorted(expected.keys() - shapes.keys())
    ]
    problems += [
        f"extra {name} {list(shapes[name])}" for name in sorted(shapes.keys() - allowed.keys())
    ]
    problems += [
        f"{name} is {list(shapes[name])}, must be {list(allowed[name])}"
        for name in sorted(shapes.keys() & allowed.keys())
        if tuple(shapes[name]) != allowed[name]
    ]
    return problems


def lint_values(tensors: Mapping[str, Tensor]) -> list[str]:
    """Every tensor that is not floating point, or holds NaN or infinity."""
    problems = []
    for name in sorted(tensors):
        tensor = tensors[name]
        if not tensor.is_floating_point():
            problems.append(f"{name} is {tensor.dtype}, must be floating point")
        elif not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            problems.append(f"{name} has {bad} NaN or infinite values of {tensor.numel()}")
    return problems


def refuse(where: object, problems: list[str]) -> None:
    """Raises one CheckpointError that lists all problems, if there are any."""
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems)}")
