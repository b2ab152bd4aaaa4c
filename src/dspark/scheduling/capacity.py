"""Capacity decided ahead of the round (paper, section 5.2).

A pipelined engine must know the size of a step before the step before it has finished, so the
number of draft tokens to verify comes from the survival of two rounds earlier. That is also what
makes an unconstrained search lossless: it cannot see the tokens it decides about. Which tokens fill
the capacity is then decided by the round's own survival (`search.top_k_admission`).
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dspark.scheduling.arrays import IntArray, NumberArray, as_numbers
from dspark.scheduling.cost_model import Sps
from dspark.scheduling.search import unconstrained_search

_ROUNDS_IN_MEAN = 100
"""The mean forgets: about so many rounds of a request weigh in it."""


class LaggedSurvival:
    """Remembers the survival of the last rounds, and gives out only what is `lag` rounds old.

    In every round: first `before`, to decide the round's capacity, then `record`. A request
    without survival that old is taken for an average one: the mean of every position over what
    other requests had, just as old.
    """

    def __init__(self, prior_K: npt.ArrayLike, *, lag: int = 2) -> None:
        """`prior_K` [K]: what to expect before any survival is old enough."""
        assert lag >= 1, f"lag is {lag}; capacity may not be decided from the round it decides"
        self._mean_K = as_numbers(prior_K)
        self._seen = 0
        self._rounds: deque[tuple[dict[int, int], NumberArray, int]] = deque(maxlen=lag)
        """Of each round: rows by request, their survival, the slots that were drafted."""
        self._lag = lag

    def before(self, requests: Sequence[int]) -> NumberArray:
        """Survival [R, K] of these requests (by id), `lag` rounds before the round to decide."""
        survival_RK: NumberArray = np.tile(self._average_K, (len(requests), 1))
        if len(self._rounds) == self._lag:
            rows, old_RK, _ = self._rounds[0]
            found = [(r, rows[request]) for r, request in enumerate(requests) if request in rows]
            if found:
                here, there = zip(*found, strict=True)
                survival_RK[[*here]] = old_RK[[*there]]
        return survival_RK

    @property
    def _average_K(self) -> NumberArray:
        """Means of slots that were drafted in unlike rounds may rise, survival never does."""
        average_K: NumberArray = np.minimum.accumulate(self._mean_K)
        return average_K

    def record(
        self, requests: Sequence[int], survival_RK: npt.ArrayLike, length: int | None = None
    ) -> None:
        """Keeps the survival [R, K] of the requests that drafted in a round.

        Once a round, after its capacity is decided; a round without any draft has no requests.
        length: slots that were drafted; None is all. Of the others nothing was learned: they are
        taken for average ones, which never outlive the last that was drafted.
        """
        survival = as_numbers(survival_RK).copy()
        length = length or survival.shape[1]
        survival[:, length:] = np.minimum(
            self._average_K[length:], survival[:, length - 1 : length]
        )
        # Keyed by request, not by batch slot: a new request never inherits another's survival.
        rows = {request: row for row, request in enumerate(requests)}
        assert len(rows) == len(survival)
        self._rounds.append((rows, survival, length))
        if len(self._rounds) == self._lag:
            _, old_RK, drafted = self._rounds[0]  # old enough from the next round on
            count = len(old_RK)
            self._seen = min(self._seen + count, max(_ROUNDS_IN_MEAN, count))
            change_K = old_RK.sum(axis=0) - count * self._mean_K
            change_K[drafted:] = 0
            self._mean_K = self._mean_K + change_K / (self._seen + 1)


def lagged_capacity(
    lagged_survival_RK: npt.ArrayLike,
    sps: Sps,
    *,
    prefill_tokens: int = 0,
    max_admit_R: IntArray | None = None,
) -> int:
    """Draft tokens to verify in a round: the best count, had survival stayed as it was.

    lagged_survival_RK: of this round's requests, from earlier rounds (`LaggedSurvival.before`).
    The other arguments are this round's, as in `search.algorithm_1`.
    """
    lengths = unconstrained_search(
        lagged_survival_RK, sps, prefill_tokens=prefill_tokens, max_admit_R=max_admit_R
    )
    return int(lengths.sum())
