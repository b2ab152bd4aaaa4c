"""A tiny drafter, its binding, and a context in pages, for tests of drafters and checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dspark.core.sampling import SamplingParams
from dspark.drafters.build import build_model
from dspark.drafters.config import DraftConfig, DSparkConfig, Eagle3Config, MtpConfig
from dspark.drafters.dspark import initialise
from dspark.nn.kv_cache import KVStore
from dspark.nn.pages import PagePool, PageTable
from dspark.nn.seams import Binding, Drafter

PAGE = 4


def tiny_config(**changes: Any) -> DSparkConfig:
    values: dict[str, Any] = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 61,
        "num_target_layers": 5,
        "target_layer_ids": (-1, 1, 3),
        "mask_token_id": 60,
        "block_size": 4,
        "markov_rank": 6,
    }
    return DSparkConfig(**values | changes)


def tiny_chain_config(kind: str, **changes: Any) -> Eagle3Config | MtpConfig:
    values = {item.name: getattr(tiny_config(), item.name) for item in fields(DraftConfig)}
    values["num_hidden_layers"] = 1
    if kind == "eagle3":
        return Eagle3Config(**values | changes)
    return MtpConfig(**values | {"block_size": 1, "target_layer_ids": (4,)} | changes)


def tiny_binding(config: DraftConfig, seed: int = 0, **changes: Any) -> Binding:
    generator = torch.Generator().manual_seed(seed)
    shape = (config.vocab_size, config.hidden_size)
    values: dict[str, Any] = {
        "embedding_VD": torch.randn(shape, generator=generator),
        "embedding_scale": 1.5,
        "lm_head_VD": torch.randn(shape, generator=generator),
        "logit_scale": 0.7,
        "logit_softcap": 20.0,
        "num_target_layers": config.num_target_layers,
        "mask_token_id": 60,
        "target_name": "tiny",
        "embedding_hash": "e" * 64,
        "chat_template_hash": "c" * 64,
    }
    return Binding(**values | changes)


def tiny_model(config: DraftConfig, seed: int = 1) -> Any:
    """Weights large enough that every part of the network shows in the result."""
    generator = torch.Generator().manual_seed(seed)
    model = build_model(config)
    initialise(model, generator, std=0.3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model


def features(config: DraftConfig, rows: int, seed: int = 2) -> Tensor:
    return torch.randn(rows, config.feature_size, generator=torch.Generator().manual_seed(seed))


@dataclass
class Served:
    """Requests whose context lies in pages."""

    drafter: Any
    store: KVStore
    pool: PagePool

    @classmethod
    def of(cls, drafter: Drafter, pages: int = 64) -> "Served":
        store = KVStore(drafter.kv_shape, pages * PAGE, read_ahead=8)
        return cls(drafter, store, PagePool(pages, PAGE))

    def admit(
        self, taps_NF: Tensor, chunks: tuple[int, ...] = (), text: Sequence[int] | None = None
    ) -> PageTable:
        """A request with this context, given in chunks of these sizes and then the rest.

        `text` has a token more than there are features: the anchor. Zeros by default.
        """
        next_tokens = torch.tensor((text or [0] * (len(taps_NF) + 1))[1:])
        table = self.pool.allocate(len(taps_NF) + 8)
        start = 0
        for size in (*chunks, len(taps_NF) - sum(chunks)):
            positions = torch.arange(start, start + size)
            slots = table.slots(start, start + size)
            self.drafter.extend_context(
                taps_NF[positions], next_tokens[positions], positions, slots, self.store
            )
            start += size
        return table


def uniform_noise(slot: int, token_ids_RC: Tensor) -> Tensor:
    """Noise that does not prefer any token: the most likely one wins."""
    return torch.ones(token_ids_RC.shape, dtype=torch.float64)


def sampled(*temperatures: float) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature) for temperature in temperatures]
