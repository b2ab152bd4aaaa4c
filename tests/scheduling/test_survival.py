"""Conditional confidences to survival."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.calibration.confidence import Scaling, conditional_confidence
from dspark.scheduling.survival import survival_probabilities


@given(
    logits=st.lists(st.floats(-60, 60), min_size=1, max_size=7),
    temperature=st.floats(0.05, 20.0),
    offset=st.floats(-20.0, 20.0),
)
def test_survival_never_rises_along_a_block(
    logits: list[float], temperature: float, offset: float
) -> None:
    scaling = Scaling([temperature] * len(logits), [offset] * len(logits))
    confidence = conditional_confidence([logits], scaling)
    survival = survival_probabilities(confidence)
    assert (np.diff(survival, axis=1) <= 0).all()
    assert survival[0, -1] == pytest.approx(math.prod(confidence[0]), rel=1e-12)
