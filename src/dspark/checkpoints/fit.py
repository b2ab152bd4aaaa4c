"""Whether a drafter belongs to a target, decided before anything runs (DESIGN decision 13)."""

import torch
from torch import Tensor

from dspark.checkpoints.bundle import Bundle
from dspark.checkpoints.lint import refuse
from dspark.nn.seams import Binding

_SAMPLE_ROWS = 4096
_LIMIT = 0.01
"""bf16 copies of a table are 0.2% off, another model's table is over 100% off."""


def check_fit(bundle: Bundle, binding: Binding) -> None:
    """Raises one CheckpointError that lists every way the bundle does not fit the target."""
    config, info = bundle.config, bundle.info
    problems = [
        f"{name} is {ours}, the target has {theirs}"
        for name, ours, theirs in (
            ("hidden size", config.hidden_size, binding.hidden_size),
            ("vocabulary", config.vocab_size, binding.vocab_size),
            ("number of target layers", config.num_target_layers, binding.num_target_layers),
        )
        if ours != theirs
    ]
    outside = [layer for layer in config.target_layer_ids if layer >= binding.num_target_layers]
    if outside:
        problems.append(
            f"it taps layers {outside}; the target's go from -1 to {binding.num_target_layers - 1}"
        )
    if info is not None and info.embedding_hash != binding.embedding_hash:
        problems.append(
            f"it was trained for {info.target} with embedding hash {info.embedding_hash[:12]}, "
            f"the target's is {binding.embedding_hash[:12]}"
        )
    if info is not None and info.chat_template_hash not in (None, binding.chat_template_hash):
        theirs = binding.chat_template_hash
        problems.append(
            f"it was trained with chat template hash {info.chat_template_hash[:12]}, "
            f"the target's is {theirs[:12] if theirs else 'none'}"
        )
    if not problems:
        problems += _different_copies(bundle, binding)
    refuse(f"draft bundle {bundle.path} does not fit the target {binding.target_name}", problems)


def _different_copies(bundle: Bundle, binding: Binding) -> list[str]:
    tables = {"embed_tokens.weight": binding.embedding_VD, "lm_head.weight": binding.lm_head_VD}
    problems = []
    for name, copy in bundle.target_copies.items():
        difference = _relative_difference(copy, tables[name])
        if difference > _LIMIT:
            problems.append(f"its copy of {name} is {difference:.0%} off the target's (limit 1%)")
    return problems


def _relative_difference(copy: Tensor, table: Tensor) -> float:
    step = max(1, len(table) // _SAMPLE_ROWS)
    theirs = table[::step].float().cpu()
    return float(
        (copy[::step].float() - theirs).norm() / theirs.norm().clamp_min(torch.finfo().tiny)
    )
