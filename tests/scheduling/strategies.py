"""What hypothesis draws for the scheduler: awkward confidences and jagged curves."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dspark.scheduling.cost import SpsCurve
from dspark.scheduling.survival import survival_probabilities

# Few values, so that ties abound; 0 and 1 among them.
EXACT_CONFIDENCE = st.sampled_from(
    [Fraction(0), Fraction(1, 4), Fraction(1, 2), Fraction(4, 5), Fraction(9, 10), Fraction(1)]
)
FLOAT_CONFIDENCE = st.one_of(
    st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.floats(min_value=0.0, max_value=1.0)
)


@st.composite
def confidence_arrays(
    draw: st.DrawFn, values: st.SearchStrategy, max_requests: int = 3, max_block: int = 3
) -> np.ndarray:
    """Conditional confidences [R, K]."""
    requests = draw(st.integers(1, max_requests))
    block = draw(st.integers(1, max_block))
    rows = draw(
        st.lists(
            st.lists(values, min_size=block, max_size=block),
            min_size=requests,
            max_size=requests,
        )
    )
    exact = isinstance(rows[0][0], Fraction)
    return np.array(rows, dtype=object if exact else np.float64)


def jagged_rates(max_tokens: int) -> st.SearchStrategy[list[Fraction]]:
    """Any positive rates at all, over up to `max_tokens` tokens; some tables end earlier."""
    rate = st.sampled_from([Fraction(k, 10) for k in (1, 2, 3, 5, 8, 9, 10)])
    return st.lists(rate, min_size=2, max_size=max_tokens)


@st.composite
def smooth_rates(draw: st.DrawFn, max_tokens: int) -> list[Fraction]:
    """1 / (fixed + each * B): a step takes a fixed time and some for each token."""
    fixed, each = draw(st.integers(1, 40)), draw(st.integers(0, 20))
    return [Fraction(1, fixed + each * size) for size in range(1, max_tokens + 1)]


@dataclass(frozen=True)
class Case:
    """All that a search is given, in exact numbers or in float64."""

    survival_RK: np.ndarray
    sps: SpsCurve
    prefill_tokens: int
    max_admit_R: np.ndarray

    @property
    def options(self) -> dict[str, Any]:
        return {"prefill_tokens": self.prefill_tokens, "max_admit_R": self.max_admit_R}

    def sps_at(self, batch_tokens: int) -> Any:
        return self.sps([batch_tokens])[0]


@st.composite
def cases(draw: st.DrawFn, values: st.SearchStrategy = EXACT_CONFIDENCE) -> Case:
    confidence_RK = draw(confidence_arrays(values))
    requests, block = confidence_RK.shape
    most = requests * (block + 1) + 3
    rates = draw(jagged_rates(most) | smooth_rates(most))
    if confidence_RK.dtype != object:
        rates = [float(rate) for rate in rates]
    limits = draw(st.lists(st.integers(0, block), min_size=requests, max_size=requests))
    return Case(
        survival_RK=survival_probabilities(confidence_RK),
        sps=SpsCurve.from_points(range(1, len(rates) + 1), rates),
        prefill_tokens=draw(st.integers(0, 3)),
        max_admit_R=np.array(limits),
    )
