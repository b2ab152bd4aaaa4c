"""Conditional confidences to survival."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.calibration.confidence import Scaling
from dspark.scheduling.survival import survival_probabilities


@given(
    logits=st.lists(st.floats(-60, 60), min_size=1, max_size=7),
    temperature=st.floats(0.05, 20.0),
    offset=st.floats(-20.0, 20.0),
    weight=st.floats(-5.0, 5.0),
    data=st.data(),
)
def test_survival_never_rises_along_a_block(
    logits: list[float], temperature: float, offset: float, weight: float, data: st.DataObject
) -> None:
    size = len(logits)
    entropies = data.draw(st.lists(st.floats(0, 11), min_size=size, max_size=size))
    scaling = Scaling([temperature] * size, [offset] * size, [weight] * size)
    confidence = scaling.confidence([logits], [entropies])
    survival = survival_probabilities(confidence)
    assert (np.diff(survival, axis=1) <= 0).all()
    assert survival[0, -1] == pytest.approx(math.prod(confidence[0]), rel=1e-12)
