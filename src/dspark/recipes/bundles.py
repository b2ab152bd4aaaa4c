"""Where the shipped draft bundle lies, and how a bundle becomes a drafter for a loaded target."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dspark.checkpoints.bundle import Bundle
from dspark.checkpoints.fit import check_fit
from dspark.checkpoints.native import read_config
from dspark.core.errors import ConfigError
from dspark.drafters.captured import CapturedDrafter
from dspark.drafters.chain import ChainModel
from dspark.drafters.chain_serving import ChainDrafter
from dspark.drafters.config import DraftConfig
from dspark.drafters.dspark import DSparkModel
from dspark.drafters.fused import LinearFactory, bf16_linear, plain_linear
from dspark.drafters.lookup import PromptLookup
from dspark.drafters.serving import DSparkDrafter
from dspark.nn.four_bit import nearest_four_bit
from dspark.nn.graphs import Capture
from dspark.nn.linear import PackedLinear, RowMode, WeightKind, best_kind
from dspark.nn.seams import Drafter
from dspark.scheduling.parse import check_form, parse_policy
from dspark.targets.captured import LIMITS, CapturedTarget, why_eager
from dspark.targets.hf import HFTarget
from dspark.targets.load import LoadedTarget

SHIPPED = "smollm2-135m"
"""Name of the bundle that comes with the package, trained for the embedded target."""


LOOKUP = "lookup"
"""Names prompt lookup where a bundle's folder could stand: it needs no training."""


def shipped_bundle() -> Path:
    return Path(__file__).parent.parent / "bundles" / SHIPPED


def bundle_folder(draft: str | Path | None, target: str | None) -> Path | None:
    """The folder of the bundle that `LLM(target, draft=draft)` takes; None where it takes none.

    Raises ConfigError for an empty name, which would be the folder one stands in.
    """
    if draft == "":
        raise ConfigError(
            "draft is an empty name; give a bundle's folder or lookup, or leave it out"
        )
    if draft == "auto":
        return shipped_bundle() if target is None else None
    return None if draft is None or draft == LOOKUP else Path(draft)


def whole_block(config: DraftConfig | None) -> int:
    """Slots of a drafter that is not cut short; None is prompt lookup."""
    return PromptLookup().block_size if config is None else config.block_size


def check_policies(
    texts: Sequence[str],
    target: str | None,
    draft: str | Path | None,
    draft_length: int | None = None,
) -> None:
    """Raises ConfigError for a policy or a length that the drafter of `LLM(target, draft=draft)`
    cannot have, before anything is loaded; only whether there is a cost table is seen after it."""
    for text in texts:
        check_form(text)  # before the folder is looked at
    folder = bundle_folder(draft, target)
    if draft_length is not None and draft_length < 1:
        raise ConfigError(f"draft_length is {draft_length}; it must be at least 1, or None")
    if draft_length is not None and folder is None and draft != LOOKUP:
        raise ConfigError("draft_length is for a drafter; give one with draft, or leave it out")
    config = None if folder is None else read_config(folder)[0]
    if config is None and draft != LOOKUP:
        for text in texts:
            parse_policy(text, block_size=None)
        return
    whole = whole_block(config)
    for text in texts:
        check_form(
            text,
            block_size=whole if draft_length is None else min(whole, draft_length),
            has_confidence=config is not None and config.has_confidence,
        )


def wants_graphs(cuda_graphs: bool | None, device: str) -> bool:
    """Whether to capture what can be in CUDA graphs; None is wherever there is CUDA.

    Raises ConfigError where they are asked for and there is none.
    """
    if cuda_graphs and device == "cpu":
        raise ConfigError("cuda_graphs need a CUDA device, and the device is cpu; leave them out")
    return device != "cpu" and cuda_graphs is not False


def tell_graphs(
    target: HFTarget, drafter: Drafter | None, say: Callable[[str], None], *, asked: bool
) -> None:
    """Says what is captured in CUDA graphs and what is not, and why.

    Raises ConfigError if they were asked for and there is nothing to capture.
    """
    captured = isinstance(drafter, CapturedDrafter)
    if isinstance(target, CapturedTarget):
        say(f"CUDA graphs for verification: {LIMITS}")
    elif asked and not captured:
        raise ConfigError(
            "cuda_graphs have nothing to capture: the drafter is none of DSpark's or DFlash's, and "
            f"the target is not captured because {why_eager(target.model)}; leave them out"
        )
    else:
        say(f"verification runs eagerly, without CUDA graphs: {why_eager(target.model)}")
    if drafter is not None and not captured:
        say("the draft runs eagerly: CUDA graphs are for DSpark's and DFlash's")


def make_drafter(
    bundle: Bundle,
    loaded: LoadedTarget,
    *,
    candidates: int | None = None,
    capture: Capture | None = None,
) -> Drafter:
    """Checks that a bundle fits the target, and packs it like the target.

    candidates: draft candidates per slot; None is what the bundle says.
    capture: how to capture the draft of a DSpark or DFlash bundle; None runs it eagerly.
    Raises CheckpointError for a bundle made for another target.
    """
    check_fit(bundle, loaded.binding)
    # A draft need not be exact, nor repeat bit for bit: verification settles every token. So next
    # to a 4-bit target, whose steps are short, the drafter's weights are rounded to 4 bits: 1%
    # more rounds, each a sixth shorter (docs/log.md). Otherwise the kind that is best for blocks.
    kind: WeightKind = "q4" if loaded.weights == "q4" else best_kind()[0]
    mode = RowMode(exact=False)

    def packed(weight: torch.Tensor) -> PackedLinear:
        if kind == "q4":
            weight = nearest_four_bit(weight)
        return PackedLinear(weight, None, kind, mode)

    factory: LinearFactory = packed
    target = loaded.target
    if loaded.weights is None:  # not on a CPU
        factory = bf16_linear if target.model.dtype == torch.bfloat16 else plain_linear
    model = bundle.model().to(target.device)
    options: dict[str, Any] = {
        "candidates": bundle.candidates if candidates is None else candidates,
        "draft_token_ids": bundle.draft_token_ids,
        "linear_factory": factory,
    }
    if isinstance(model, ChainModel):
        return ChainDrafter(model, loaded.binding, **options)
    assert isinstance(model, DSparkModel), type(model)
    if capture is not None:
        return CapturedDrafter(model, loaded.binding, capture=capture, **options)
    return DSparkDrafter(model, loaded.binding, **options)
