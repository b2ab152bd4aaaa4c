"""Small runs of every trained drafter, on any device."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.nn.seams import Binding
from dspark.training.config import TrainConfig
from dspark.training.features import OnlineFeatures
from dspark.training.objective import CROSS_ENTROPY, DSPARK, EAGLE3, Objective
from dspark.training.trainer import Trainer
from tests.drafters.tiny import tiny_binding, tiny_chain_config, tiny_config, tiny_model
from tests.training.tiny import tiny_sequences

NO_HEADS = {
    "markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False,
}  # fmt: skip
KINDS: dict[str, tuple[Any, Objective]] = {
    "dspark": (tiny_config(), DSPARK),
    "gated": (tiny_config(markov_head_type="gated"), DSPARK),
    "rnn": (tiny_config(markov_head_type="rnn"), DSPARK),
    "dflash": (tiny_config(**NO_HEADS), CROSS_ENTROPY),
    "eagle3": (tiny_chain_config("eagle3"), EAGLE3),
    "mtp": (tiny_chain_config("mtp"), CROSS_ENTROPY),
}
STEPS = 3
SEQUENCES = tiny_sequences(12)
HELD_OUT = tiny_sequences(3, seed=9)

Move = Callable[[Any, Binding], tuple[Any, Binding]]
"""A model and its binding, brought to a device."""


def on(device: torch.device | str) -> Move:
    """Brings them to a device that torch knows."""

    def move(model: Any, binding: Binding) -> tuple[Any, Binding]:
        tables = {
            name: getattr(binding, name).to(device) for name in ("embedding_VD", "lm_head_VD")
        }
        return model.to(device), dataclasses.replace(binding, **tables)

    return move


def features_of(config: Any) -> OnlineFeatures:
    """A fixed function of the token ids, on the CPU."""

    def source(sequences: list[np.ndarray]) -> list[tuple[Tensor, Tensor]]:
        out = []
        for ids in sequences:
            generator = torch.Generator().manual_seed(int(ids.sum()) * 1000 + len(ids))
            taps = torch.randn(len(ids), config.feature_size, generator=generator)
            out.append((taps, torch.randn(len(ids), config.hidden_size, generator=generator)))
        return out

    return OnlineFeatures(source)


def trainer_of(kind: str, folder: Path, move: Move, **options: Any) -> Trainer:
    """A run of a few steps. Its weights are large, so that one wrong number shows."""
    config, objective = KINDS[kind]
    softcap = None if kind in ("gated", "dflash") else 20.0
    model, binding = move(tiny_model(config), tiny_binding(config, logit_softcap=softcap))
    values: dict[str, Any] = {
        "steps": STEPS, "anchors_per_step": 10, "anchors_per_sequence": 4, "learning_rate": 1e-2,
        "log_every": 1, "validate_every": 2, "compute_dtype": "float32", "objective": objective,
        **options,
    }  # fmt: skip
    return Trainer(
        model, binding, features_of(config), SEQUENCES, HELD_OUT, TrainConfig(**values), folder
    )
