"""Any decoder-only transformers model as a target: one ragged row of tokens in, logits and taps
out."""

from typing import Any

import torch
from torch import Tensor, nn

from dspark.core.errors import TargetError
from dspark.nn.attention import attention_is_exact
from dspark.nn.attention_plan import AttentionPlan
from dspark.nn.kv_cache import KVShape, KVStore
from dspark.nn.linear import RowMode
from dspark.nn.seams import RaggedBatch, TargetOutput
from dspark.targets.attention_hook import ATTENTION_NAME, StepContext, register
from dspark.targets.fast_path import FastDecoder
from dspark.targets.pack import packed_layers

_NOT_RUN = torch.empty(0)


class HFTarget:
    """A transformers causal LM behind the Target seam. Build it with `targets.load_target`."""

    def __init__(
        self, model: nn.Module, *, mode: RowMode | None = None, fast: FastDecoder | None = None
    ) -> None:
        register()
        model.eval().requires_grad_(False)
        model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
        self.model: Any = model
        self.mode = mode or RowMode()
        self.fast = fast
        self.decoder: Any = model.get_decoder()  # type: ignore[operator]
        self.config: Any = self.decoder.config
        self.vocab_size: int = self.config.vocab_size
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.max_context = _max_context(self.config)
        self.eos_token_ids = _eos_token_ids(model)
        self.kv_shape = kv_shape(self.config)
        self.device: torch.device = model.device  # type: ignore[assignment]
        self._taps: dict[int, Tensor] = {}
        self._final: Tensor | None = None
        if fast is None:
            self._install_hooks()

    @property
    def row_exact(self) -> bool:
        """Whether this machine has row-exact kernels for every product of exact mode (float32
        cache); what else a layer may hold is not looked at. Never off the CPU, where no kernel was
        measured."""
        if self.device.type != "cpu":
            return False
        layers = [*packed_layers(self.model), *(packed_layers(self.fast) if self.fast else ())]
        fused = getattr(self.config, "attn_logit_softcapping", None) is None
        exact = all(
            layer.exact_rows is not None
            and (
                layer.exact_prompt_rows is not None
                or layer.prompt_kind is None
                or not (layer.whole or layer.mode.many)
            )
            for layer in layers
        )
        return exact and attention_is_exact(self.kv_shape, torch.float32, fused=fused)

    def forward(
        self,
        batch: RaggedBatch,
        store: KVStore,
        *,
        logit_rows_M: Tensor,
        tap_layers: tuple[int, ...] = (),
        want_final: bool = False,
    ) -> TargetOutput:
        self.mode.exact, self.mode.prompt_from = batch.exact, batch.prompt_from
        step = StepContext(AttentionPlan.build(batch), store)
        self._taps = dict.fromkeys(tap_layers, _NOT_RUN)
        with torch.inference_mode():
            run = self._run_fast if self.fast is not None else self._run_generic
            logits, final = run(batch, step, logit_rows_M)
            taps, self._taps = [self._taps[layer] for layer in tap_layers], {}
            return TargetOutput(
                logits_MV=logits.float(),
                taps_NF=torch.cat(taps, dim=-1).float() if taps else None,
                final_ND=final.float() if want_final else None,
            )

    def _run_fast(
        self, batch: RaggedBatch, step: StepContext, logit_rows_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert self.fast is not None
        final = self.fast(batch.tokens_N, batch.positions_N, step.plan, step.store, self._taps)
        return self.model.lm_head(final[logit_rows_M]), final

    def _run_generic(
        self, batch: RaggedBatch, step: StepContext, logit_rows_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = self.model(
            input_ids=batch.tokens_N[None],
            position_ids=batch.positions_N[None],
            use_cache=False,
            logits_to_keep=logit_rows_M,
            dspark_step=step,
        ).logits[0]
        final, self._final = self._final, None
        assert final is not None, "the decoder has no final norm that ran"
        return logits, final

    def _install_hooks(self) -> None:
        """Hidden states are taken where they appear, in the same forward, only when asked for."""
        for index, layer in enumerate(self.decoder.layers):
            layer.register_forward_hook(self._layer_hook(index))
        self.decoder.layers[0].register_forward_pre_hook(self._embedding_hook, with_kwargs=True)
        self.decoder.norm.register_forward_hook(self._norm_hook)

    def _layer_hook(self, index: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if index in self._taps:
                hidden = output[0] if isinstance(output, tuple) else output
                self._taps[index] = hidden[0]

        return hook

    def _embedding_hook(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if -1 in self._taps:
            self._taps[-1] = (args[0] if args else kwargs["hidden_states"])[0]

    def _norm_hook(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self._final = output[0]


def _max_context(config: Any) -> int:
    """Positions a text may have."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond it transformers turns every key of the batch by other angles than it was cached at.
        return int(rope["original_max_position_embeddings"])
    return int(config.max_position_embeddings)


def kv_shape(config: Any) -> KVShape:
    """Heads and widths of keys and values per layer, from a decoder configuration.

    Multi-head latent attention (DeepSeek-V3) expands its keys before attention, so it looks like
    ordinary attention with a value narrower than the key.
    """
    layers = config.num_hidden_layers
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "kv_lora_rank", None):
        key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        return KVShape((heads,) * layers, (key_dim,) * layers, (config.v_head_dim,) * layers)
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVShape.uniform(layers, kv_heads, dim)


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    if eos is None:
        raise TargetError(
            "the target names no end-of-sequence token (eos_token_id) in its configuration"
        )
    return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
