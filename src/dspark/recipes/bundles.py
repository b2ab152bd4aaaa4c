"""Where the shipped draft bundle lies, and how a bundle becomes a drafter for a loaded target."""

from pathlib import Path

import torch

from dspark.checkpoints.bundle import Bundle
from dspark.checkpoints.fit import check_fit
from dspark.drafters.serving import DSparkDrafter, plain_linear
from dspark.nn.linear import ExactMode, PackedLinear
from dspark.targets.load import LoadedTarget

SHIPPED = "smollm2-135m"
"""Name of the bundle that comes with the package, trained for the embedded target."""


LOOKUP = "lookup"
"""Names prompt lookup where a bundle's folder could stand: it needs no training."""


def shipped_bundle() -> Path:
    return Path(__file__).parent.parent / "bundles" / SHIPPED


def make_drafter(
    bundle: Bundle, loaded: LoadedTarget, *, candidates: int | None = None
) -> DSparkDrafter:
    """Checks that a bundle fits the target, and packs it like the target.

    candidates: draft candidates per slot; None is what the bundle says.
    Raises CheckpointError for a bundle made for another target.
    """
    check_fit(bundle, loaded.binding)
    weights = loaded.weights
    mode = ExactMode(
        on=False
    )  # a draft need not repeat bit for bit: verification settles every token

    def packed(weight: torch.Tensor) -> PackedLinear:
        assert weights is not None
        return PackedLinear(weight, None, weights, mode)

    return DSparkDrafter(
        bundle.model(),
        loaded.binding,
        candidates=bundle.candidates if candidates is None else candidates,
        draft_token_ids=bundle.draft_token_ids,
        linear_factory=plain_linear if weights is None else packed,
    )
