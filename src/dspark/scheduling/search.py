"""How many draft tokens of each request to verify (paper, Algorithm 1 and section 5.2).

With lengths l_r admitted and P prefill tokens beside them, a step runs B = R + P + sum(l_r) tokens
and is expected to emit tau = sum(1 + a[r, 1] + ... + a[r, l_r]): Theta = tau * SPS(B) a second.
Survival never rises along a block, so admitting in order of survival respects prefixes, and for
every B it gives the largest tau. All searches here walk that one greedy path; they differ in where
they stop, and that decides whether they are lossless under `rejection`:

* the survival at position j + 1 depends on the draft token at j, so whether position j is verified
  must not depend on anything after it (non-anticipation, DESIGN law 2);
* `algorithm_1` stops at the first step that does not gain: it has read nothing beyond that step;
* `top_k_admission` stops at a count that was fixed before the round: it need not look at all;
* `unconstrained_search` looks at the whole path. Fed with the survival of the round it decides, it
  is biased (Appendix A: 17/20 where the target says 7/10). It is for survival of earlier rounds,
  and for `coupled` verification, which needs no such argument.

Ties break by position first, then by request. Position first is what keeps a position before the
deeper ones of its own request when a confidence is exactly 1. Positions of survival 0 are never
admitted, nor are those beyond `max_admit_R`, a limit that must not depend on the draft.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dspark.scheduling.arrays import IntArray, NumberArray, as_numbers
from dspark.scheduling.cost_model import Sps

_FIRST_LOOK = 256
"""Entries that Algorithm 1 looks at before it looks at twice as many."""


@dataclass(frozen=True, slots=True, eq=False)
class GreedyPath:
    """Every position that may be admitted, most likely to survive first (E entries)."""

    entries_E: IntArray
    """(position - 1) * num_requests + request."""
    survival_E: NumberArray
    num_requests: int

    def lengths(self, count: int) -> IntArray:
        """Lengths [R] when the first `count` entries are admitted."""
        requests = self.entries_E[:count] % self.num_requests
        return np.bincount(requests, minlength=self.num_requests)

    def throughput(self, sps: Sps, prefill_tokens: int, *, most: int | None = None) -> NumberArray:
        """Theta [E + 1], tokens per second, when 0, 1, ... E entries are admitted; `most` stops
        after so many entries."""
        # cumsum adds in order, so an entry of Theta is a function of the entries before it alone,
        # to the last bit. A pairwise sum would let later entries in through rounding.
        gained = np.concatenate(([0], np.cumsum(self.survival_E[:most])))
        batch_tokens = self.num_requests + prefill_tokens + np.arange(len(gained))
        theta: NumberArray = (self.num_requests + gained) * sps(batch_tokens)
        return theta


def greedy_path(survival_RK: npt.ArrayLike, max_admit_R: IntArray | None = None) -> GreedyPath:
    """Sorts the positions with survival above 0 by survival, then position, then request."""
    survival = as_numbers(survival_RK)
    num_requests, block_size = survival.shape
    # A row that rises, or a NaN, would have a position admitted for the sake of a later one: bias.
    assert (survival[:, 1:] <= survival[:, :-1]).all(), "survival rises along a block"
    # Laid out position by position, index order breaks ties as it must.
    flat = survival.T.ravel()
    may_admit = flat > 0
    if max_admit_R is not None:
        may_admit &= (np.arange(1, block_size + 1)[:, None] <= max_admit_R).ravel()
    entries = np.flatnonzero(may_admit)
    entries = entries[_descending(flat[entries])]
    return GreedyPath(entries, flat[entries], num_requests)


def stop_at_first_loss(theta: NumberArray) -> int:
    """The number of entries before the first that does not raise Theta (Algorithm 1's break)."""
    no_gain = theta[1:] <= theta[:-1]
    return int(np.argmax(no_gain)) if no_gain.any() else len(no_gain)


def stop_at_best(theta: NumberArray) -> int:
    """The number of entries that gives the largest Theta; the fewest among equals."""
    return int(np.argmax(theta))


def algorithm_1(
    survival_RK: npt.ArrayLike,
    sps: Sps,
    *,
    prefill_tokens: int = 0,
    max_admit_R: IntArray | None = None,
) -> IntArray:
    """Admitted lengths [R] by Algorithm 1: greedy, up to the first entry that does not raise Theta.

    survival_RK: this round's survival, rows not rising, values in [0, 1].
    prefill_tokens: prompt tokens in the same step; they fill the batch and emit nothing here.
    max_admit_R: the most each request may admit, decided without looking at the draft.

    Lossless under `rejection`. Where Theta rises strictly and then never exceeds its peak again, it
    is the optimum.
    """
    path = greedy_path(survival_RK, max_admit_R)
    entries = len(path.entries_E)
    most = _FIRST_LOOK
    while True:  # most of a long path is never looked at
        count = stop_at_first_loss(path.throughput(sps, prefill_tokens, most=most))
        if count < most or most >= entries:
            return path.lengths(count)
        most *= 2


def unconstrained_search(
    survival_RK: npt.ArrayLike,
    sps: Sps,
    *,
    prefill_tokens: int = 0,
    max_admit_R: IntArray | None = None,
) -> IntArray:
    """Lengths [R] of the largest Theta over every possible choice, on a curve however jagged.

    Biased under `rejection` when fed with the survival of the round it decides: see the module
    text. Arguments as in `algorithm_1`.
    """
    path = greedy_path(survival_RK, max_admit_R)
    return path.lengths(stop_at_best(path.throughput(sps, prefill_tokens)))


def top_k_admission(
    survival_RK: npt.ArrayLike, capacity: int, *, max_admit_R: IntArray | None = None
) -> IntArray:
    """Lengths [R] that admit the `capacity` positions most likely to survive (section 5.2).

    Lossless under `rejection` when `capacity` (draft tokens, at least 0) does not depend on this
    round's draft. Arguments as in `algorithm_1`.
    """
    assert capacity >= 0, f"capacity is {capacity}"
    return greedy_path(survival_RK, max_admit_R).lengths(capacity)


def _descending(values: NumberArray) -> IntArray:
    """Indices by falling value, equal values in index order."""
    # A stable sort would do, at three times the cost: only numpy's unstable one is vectorised.
    order = np.argsort(-values)
    ordered = values[order]
    tied = ordered[1:] == ordered[:-1]
    if tied.any():
        run = np.concatenate(([0], np.cumsum(~tied))) * len(values)
        order = np.sort(run + order) - run
    return order
