"""Our attention, registered with transformers under one name.

transformers calls the registered function from inside every attention layer with whatever keyword
arguments the model call carried; the step's plan and store arrive that way, so nothing is global.

No function that makes masks is registered under that name. transformers then makes none, as ours
come from the plan, and does not look for packed texts, for which it would read positions on the
host in every step.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from dspark.nn.attention import fused_serves, plain_attention, ragged_attention
from dspark.nn.attention_plan import AttentionPlan
from dspark.nn.kv_cache import KVStore
from dspark.nn.padded_attention import PaddedPlan

ATTENTION_NAME = "dspark_ragged"


@dataclass(slots=True)
class StepContext:
    """What attention needs of the running step; passed as the keyword argument `dspark_step`."""

    plan: AttentionPlan | PaddedPlan
    store: KVStore


def step_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dspark_step: StepContext | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, H, N, D], key and value [1, KV, N, D] -> ([1, N, H, value_dim], None)."""
    assert dspark_step is not None, "the target was called without its step"
    plan, store = dspark_step.plan, dspark_step.store
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    store.write(layer, plan.slots_N, key[0].transpose(0, 1), value[0].transpose(0, 1))
    rows = query[0].transpose(0, 1)
    fused = softcap is None and s_aux is None and fused_serves(store.shape, layer)
    if isinstance(plan, PaddedPlan):
        assert fused, "such a target is not captured"
        out = plan.attend(rows, store, layer, scale=scale, window=sliding_window)
    elif fused:
        out = ragged_attention(rows, plan, store, layer, scale=scale, window=sliding_window)
    else:
        out = plain_attention(
            rows, plan, store, layer,
            scale=scale, window=sliding_window, softcap=softcap, sinks_H=s_aux,
        )  # fmt: skip
    return out[None], None


def register() -> None:
    AttentionInterface.register(ATTENTION_NAME, step_attention)
