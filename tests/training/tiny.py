"""A tiny binding, drafter, corpus and feature source: all that a training run needs."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspark.data.packing import TrainingSequence
from dspark.data.template import supervised_tokens
from dspark.drafters.config import DSparkConfig
from dspark.drafters.dspark import DSparkModel, initialise
from dspark.nn.seams import Binding
from dspark.training.features import FeatureStore

V, D, K, TAPS = 61, 16, 4, (0, 2)


def tiny_binding(*, softcap: float | None = None, scale: float = 1.0, seed: int = 0) -> Binding:
    generator = torch.Generator().manual_seed(seed)
    return Binding(
        embedding_VD=torch.randn(V, D, generator=generator),
        embedding_scale=1.0,
        lm_head_VD=torch.randn(V, D, generator=generator) * 0.5,
        logit_scale=scale,
        logit_softcap=softcap,
        num_target_layers=4,
        mask_token_id=0,
        target_name="tiny",
        embedding_hash="",
        chat_template_hash=None,
    )


def tiny_drafter(*, rank: int = 8, confidence: bool = True, seed: int = 1) -> DSparkModel:
    config = DSparkConfig(
        hidden_size=D, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=V, num_target_layers=4, target_layer_ids=TAPS,
        mask_token_id=0, block_size=K, markov_rank=rank, enable_confidence_head=confidence,
        confidence_head_with_markov=rank > 0,
    )  # fmt: skip
    model = DSparkModel(config)
    initialise(model, torch.Generator().manual_seed(seed), std=0.2)
    return model


def tiny_sequences(count: int, *, seed: int = 0) -> list[TrainingSequence]:
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        prompt, response = int(rng.integers(1, 9)), int(rng.integers(2, 16))
        ids = rng.integers(1, V, prompt + response).astype(np.int32)
        total = prompt + response
        sequences.append(TrainingSequence(ids, supervised_tokens(total, [(prompt, total)])))
    return sequences


def tiny_source(sequences: list[np.ndarray]) -> list[tuple[Tensor, Tensor]]:
    """Features that are a fixed function of the token ids."""
    out = []
    for ids in sequences:
        generator = torch.Generator().manual_seed(int(ids.sum()) * 1000 + len(ids))
        taps = torch.randn(len(ids), len(TAPS) * D, generator=generator)
        out.append((taps, torch.randn(len(ids), D, generator=generator)))
    return out


def tiny_store(folder: Path, sequences: list[TrainingSequence]) -> FeatureStore:
    store = FeatureStore(folder, target="tiny", tap_layers=TAPS, hidden_size=D)
    store.fill([s.token_ids for s in sequences], tiny_source)
    return store
