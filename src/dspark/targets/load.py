"""From a model's files (`targets.source` finds them) to a running target."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dspark.core.errors import ConfigError, TargetError
from dspark.nn.four_bit import four_bit_grid
from dspark.nn.graphs import Capture
from dspark.nn.linear import WeightKind, best_kind, check_kind, second_kind
from dspark.nn.seams import Binding
from dspark.targets.captured import CapturedTarget, why_eager
from dspark.targets.drift import measure_drift, sample_tokens
from dspark.targets.hf import HFTarget
from dspark.targets.identity import embedding_hash
from dspark.targets.last_layers import last_layers
from dspark.targets.pack import pack_model
from dspark.targets.source import Say, first_line, locate, without_bars
from dspark.targets.support import check_config, check_runs, check_supported

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    target: HFTarget
    binding: Binding
    tokenizer: Any
    name: str
    weights: WeightKind | None
    """None: the model's own layers (not on a CPU)."""


def load_target(
    source: str | None = None,
    *,
    weights: WeightKind | None = None,
    device: str = "cpu",
    capture: Capture | None = None,
    template_hash: Callable[[Any], str | None],
    init_layers: int = 0,
    trust_remote_code: bool = False,
    many_requests: bool = False,
    say: Say = logger.info,
) -> LoadedTarget:
    """Loads, checks and packs a target.

    source: a folder, a `.gguf` file, a hub id; None is the embedded SmolLM2.
    weights: kind of packed CPU weights; None picks what suits the processor. On another device the
        layers stay transformers' own, in bf16 (None) or fp32.
    device: "cpu", or a CUDA device ("cuda", "cuda:1").
    capture: how to capture the steps of a target that can be (`targets.captured`), off the CPU;
        None runs them eagerly.
    many_requests: as in `LLM`; ConfigError where it does nothing.
    init_layers: how many of the last decoder layers' weights to keep in the binding, for training.
    say: receives start-up lines for people.

    Raises TargetError for what is missing, broken or unsupported, ConfigError for a device that is
    not there.
    """
    check_device(device, weights)
    if many_requests:
        check_many_requests(device, weights)
    model, tokenizer, name = read_model(source, trust_remote_code=trust_remote_code, say=say)
    check_supported(model)
    model = model.to(device)
    binding = make_binding(model, name, tokenizer, template_hash, init_layers)
    if device != "cpu":
        say(f"device {device}: {weights or 'bf16'} weights, no promise that tokens are "
            "independent of the batch")  # fmt: skip
        model = in_dtype(model, torch.float32 if weights == "fp32" else torch.bfloat16)
        if capture is not None and why_eager(model) is None:
            target: HFTarget = CapturedTarget(model, capture=capture)
        else:
            target = HFTarget(model)
        check_runs(target, type(model).__name__)
        return LoadedTarget(target, binding, tokenizer, name, None)
    weights = _weight_kind(model, name, weights, say)
    if many_requests:
        check_many_requests(device, weights)
    say("packing the weights, and comparing them with float32 ...")
    sample = sample_tokens(tokenizer, binding.vocab_size)
    with torch.inference_mode():
        reference_TV = model(torch.tensor([sample]), use_cache=False).logits[0].float()
    packed = pack_model(model, weights, many_requests=many_requests)
    if many_requests:
        say(
            f"many requests: {second_kind(weights)} instead of {weights} for all greedy and "
            "seeded ones"
        )
    target = HFTarget(model, mode=packed.mode, fast=packed.fast)
    check_runs(target, type(model).__name__)
    say(f"packed against float32: {measure_drift(lambda _: reference_TV, target, [sample])}")
    if not target.row_exact:
        say(f"no row-exact kernels for {weights} on this machine: tokens may depend on the batch")
    return LoadedTarget(target, binding, tokenizer, name, weights)


def check_device(device: str, weights: WeightKind | None = None) -> None:
    """Raises ConfigError for a device that is not there, or kinds of weights that it has not."""
    if device == "cpu":
        return
    kind, colon, index = device.partition(":")
    if kind != "cuda" or (colon and not (index.isascii() and index.isdigit())):
        raise ConfigError(f"device {device!r} is not supported; use cpu or cuda")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device {device!r} is not here: torch {torch.__version__} finds no CUDA; use cpu"
        )
    if colon and int(index) >= (count := torch.cuda.device_count()):
        raise ConfigError(f"device {device!r} is not here: torch finds {count}, from cuda:0 on")
    if weights not in (None, "bf16", "fp32"):
        raise ConfigError(f"weights {weights!r} are for a CPU; on {device} use bf16 or fp32")


def check_many_requests(device: str, weights: WeightKind | None) -> None:
    """Raises ConfigError where the option would do nothing; `weights` None is not known yet."""
    if device != "cpu":
        raise ConfigError(
            f"many_requests is for q4 and int8 weights on a CPU, and the device is {device}; "
            "leave it out"
        )
    if weights is not None and second_kind(weights) is None:
        raise ConfigError(
            f"many_requests is for q4 and int8 weights; these are {weights}; leave it out"
        )


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The model with its parameters in `dtype`; buffers (rotary frequencies) stay float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _weight_kind(model: Any, name: str, kind: WeightKind | None, say: Say) -> WeightKind:
    """The kind asked for, or else the one that suits the weights and the processor."""
    layer = model.get_decoder().layers[0]
    linears = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
    on_grid = all(four_bit_grid(linear.weight.detach().float()) is not None for linear in linears)
    if kind == "q4" and not on_grid:
        raise ConfigError(
            f"the weights of {name} lie on no 4-bit grid (those of a GGUF of type Q4_0 or Q4_1 "
            f"do), so q4 would change them; use --weights int8"
        )
    if kind is None:
        kind, reason = best_kind()
        if on_grid and _runs("q4"):
            kind, reason = "q4", "the 4 bits that the file holds, in groups of 32"
        say(f"weights: {kind} ({reason})")
    check_kind(kind)
    return kind


def _runs(kind: WeightKind) -> bool:
    try:
        check_kind(kind)
    except ConfigError:
        return False
    return True


def read_model(
    source: str | None, *, trust_remote_code: bool = False, say: Say = logger.info
) -> tuple[Any, Any, str]:
    """The transformers model in float32, its tokenizer and a name for it."""
    name, source = locate(source, say)
    say(f"loading {name} ...")
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        check_config(config)
        # A hub id may be downloaded first, which is worth its bars.
        with without_bars() if Path(source).is_dir() else nullcontext():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=torch.float32,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
            )
        model, report = loaded
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except TargetError:
        raise
    except Exception as error:  # transformers, safetensors and the hub client share no base class
        raise TargetError(f"cannot load the target {name}: {first_line(error)}") from error
    # transformers would go on with random numbers in their place.
    if lacking := sorted({*report["missing_keys"], *(k for k, *_ in report["mismatched_keys"])}):
        raise TargetError(
            f"cannot load the target {name}: {len(lacking)} tensors are missing or misshaped, "
            f"{lacking[0]} first; fetch the model again"
        )
    return model, tokenizer, name


def make_binding(
    model: Any,
    name: str,
    tokenizer: Any,
    template_hash: Callable[[Any], str | None],
    init_layers: int = 0,
) -> Binding:
    """The binding of a freshly loaded, not yet packed model."""
    config = model.get_decoder().config
    embedding = model.get_input_embeddings().weight.detach().float()
    head = model.get_output_embeddings().weight.detach().float()
    return Binding(
        embedding_VD=embedding,
        embedding_scale=_embedding_scale(model, config),
        lm_head_VD=embedding if torch.equal(head, embedding) else head,
        logit_scale=_logit_scale(config),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        num_target_layers=config.num_hidden_layers,
        mask_token_id=_mask_token_id(tokenizer, config.vocab_size),
        target_name=name,
        embedding_hash=embedding_hash(embedding),
        chat_template_hash=template_hash(tokenizer),
        init_layers=last_layers(
            model, init_layers, lambda: sample_tokens(tokenizer, config.vocab_size)
        ),
    )


def _embedding_scale(model: Any, config: Any) -> float:
    scale = getattr(model.get_input_embeddings(), "embed_scale", None)  # Gemma 3
    if scale is not None:
        return float(scale)
    if config.model_type in ("gemma", "gemma2"):
        return float(config.hidden_size**0.5)
    return float(getattr(config, "embedding_multiplier", 1.0))  # Granite


def _logit_scale(config: Any) -> float:
    if getattr(config, "logits_scaling", None):  # Granite divides
        return 1.0 / float(config.logits_scaling)
    return float(getattr(config, "logit_scale", None) or 1.0)  # Cohere multiplies


def _mask_token_id(tokenizer: Any, vocab_size: int) -> int:
    """A token id that never stands in text: the tokenizer's mask, a reserved one, else padding."""
    if getattr(tokenizer, "mask_token_id", None) is not None:
        return int(tokenizer.mask_token_id)
    if len(tokenizer) < vocab_size:  # an id beyond the tokenizer's own
        return len(tokenizer)
    for token in ("<reponame>", "<|fim_pad|>", "<unused0>", "<|reserved_special_token_0|>"):
        index = tokenizer.convert_tokens_to_ids(token)
        if index is not None and index != tokenizer.unk_token_id:
            return int(index)
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0)
