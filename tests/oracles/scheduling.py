"""Slow, literal twins of `dspark.scheduling`, and what non-anticipation means.

Nothing here imports the production code: allocations are tuples of lengths, survival rows are
nested sequences, SPS is a callable of the batch's tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

Survival = Sequence[Sequence[Any]]
Sps = Callable[[int], Any]
Lengths = tuple[int, ...]
Tokens = tuple[tuple[int, ...], ...]
"""Draft tokens, one tuple a request."""


def paper_algorithm_1(
    survival: Survival,
    sps: Sps,
    prefill_tokens: int,
    max_admit: Sequence[int],
    *,
    stop: bool = True,
) -> Lengths:
    """Algorithm 1 line by line; without `stop` its break is deleted."""
    requests = range(len(survival))
    candidates = [
        (r, j)
        for r in requests
        for j in range(1, len(survival[r]) + 1)
        if survival[r][j - 1] > 0 and j <= max_admit[r]
    ]
    candidates.sort(key=lambda item: (-survival[item[0]][item[1] - 1], item[1], item[0]))
    lengths = [0 for _ in requests]
    best_lengths = tuple(lengths)
    batch, tau = len(survival) + prefill_tokens, len(survival)
    best = tau * sps(batch)
    gained = 0
    for r, j in candidates:
        lengths[r] = j
        batch += 1
        gained += survival[r][j - 1]
        theta = (tau + gained) * sps(batch)
        if theta > best:
            best, best_lengths = theta, tuple(lengths)
        elif stop:
            break
    return best_lengths


def allocations(survival: Survival, max_admit: Sequence[int]) -> Iterable[Lengths]:
    """Every choice of lengths that admits no position of survival 0."""
    return product(
        *(
            range(min(limit, sum(value > 0 for value in row)) + 1)
            for row, limit in zip(survival, max_admit, strict=True)
        )
    )


def tau_of(survival: Survival, lengths: Lengths) -> Any:
    """Expected tokens of a step."""
    return sum(1 + sum(row[:length]) for row, length in zip(survival, lengths, strict=True))


def theta_of(survival: Survival, lengths: Lengths, sps: Sps, prefill_tokens: int) -> Any:
    return tau_of(survival, lengths) * sps(len(survival) + prefill_tokens + sum(lengths))


def best_tau(survival: Survival, capacity: int, max_admit: Sequence[int]) -> Any:
    """The largest tau with at most `capacity` draft tokens, over every allocation."""
    return max(
        tau_of(survival, lengths)
        for lengths in allocations(survival, max_admit)
        if sum(lengths) <= capacity
    )


def best_theta(survival: Survival, sps: Sps, prefill_tokens: int, max_admit: Sequence[int]) -> Any:
    """The largest Theta over every allocation."""
    return max(
        theta_of(survival, lengths, sps, prefill_tokens)
        for lengths in allocations(survival, max_admit)
    )


def is_sequential(
    admit: Callable[[Tokens], Lengths], *, num_requests: int, block_size: int, vocab_size: int
) -> bool:
    """Whether admissions can be ordered so that each depends on admitted tokens only (law 2).

    `admit` maps the draft tokens of a whole round to lengths. A referee who sees a token only once
    its position is admitted must be able to play it: admit whatever is certain, look, go on; when
    nothing more is certain, every remaining possibility must agree that the round ends here.
    """
    block = tuple(product(range(vocab_size), repeat=block_size))
    outcomes = {tokens: admit(tokens) for tokens in product(block, repeat=num_requests)}

    def playable(possible: dict[Tokens, Lengths], seen: Lengths) -> bool:
        certain = tuple(
            min(lengths[r] for lengths in possible.values()) for r in range(num_requests)
        )
        if certain == seen:
            return all(lengths == seen for lengths in possible.values())
        views: dict[Tokens, dict[Tokens, Lengths]] = {}
        for tokens, lengths in possible.items():
            view = tuple(row[:count] for row, count in zip(tokens, certain, strict=True))
            views.setdefault(view, {})[tokens] = lengths
        return all(playable(view, certain) for view in views.values())

    return playable(outcomes, (0,) * num_requests)
