"""Cost models to test policies with."""

import numpy as np

from dspark.scheduling.cost_model import CostModel, Curve, PartCost


def curve(*seconds: float, slope: float = 0.0) -> Curve:
    return Curve(np.array(seconds, dtype=np.float64), slope)


ZERO = curve(0.0)


def linear_model(
    *, fixed: float = 1.0, row: float = 0.1, draft: float = 0.2, draft_row: float = 0.01
) -> CostModel:
    """A step of `fixed` and `row` a token; a draft block of `draft` and `draft_row` a request."""
    return CostModel(
        forward=PartCost(curve(fixed, slope=row), ZERO),
        rest=PartCost(ZERO, ZERO),
        draft=PartCost(ZERO, curve(0.0, draft + draft_row, slope=draft_row)),
    )


def step_model(*tokens: float, draft: float = 0.0) -> CostModel:
    """A step of `tokens[B - 1]` seconds at B tokens; a draft block of `draft`."""
    return CostModel(
        forward=PartCost(curve(0.0, *tokens, slope=0.0), ZERO),
        rest=PartCost(ZERO, ZERO),
        draft=PartCost(ZERO, curve(0.0, draft)),
    )
