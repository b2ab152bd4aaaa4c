"""The exact law of what a round of `rejection` emits, in fractions, by enumerating every draft.

A toy request is three functions of a token prefix (generated so far in this toy, empty at the
start). After the round every request is completed from its target up to a horizon, so laws of
different lengths compare. A lossless round leaves exactly the target's law.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

Prefix = tuple[int, ...]
Distribution = tuple[Fraction, ...]
Law = dict[tuple[Prefix, ...], Fraction]
"""Probability of each joint output, one prefix a request."""


@dataclass(frozen=True)
class ToyRequest:
    target_probs: Callable[[Prefix], Distribution]
    draft_probs: Callable[[Prefix], Distribution]
    confidence: Callable[[Prefix], Fraction]
    """Conditional confidence of the position after a prefix of draft tokens."""


A, B = 0, 1
APPENDIX_A = ToyRequest(
    target_probs=lambda prefix: (Fraction(7, 10), Fraction(3, 10)),
    draft_probs=lambda prefix: (Fraction(1, 2), Fraction(1, 2)),
    confidence=lambda prefix: Fraction(9 * (prefix[0] == A), 10) if prefix else Fraction(4, 5),
)
"""The paper's counterexample: A makes the second confidence 9/10, B makes it 0."""
APPENDIX_A_RATES = (Fraction(1), Fraction(1, 2), Fraction(9, 20))
"""SPS of 1, 2 and 3 tokens."""


def sequence_law(
    next_probs: Callable[[Prefix], Distribution], start: Prefix, length: int
) -> dict[Prefix, Fraction]:
    """The law of sequences of `length` tokens that begin with `start`."""
    law = {start: Fraction(1)}
    for _ in range(length - len(start)):
        law = {
            (*prefix, token): weight * prob
            for prefix, weight in law.items()
            for token, prob in enumerate(next_probs(prefix))
            if prob
        }
    return law


def emitted(request: ToyRequest, draft: Prefix, admitted: int) -> dict[Prefix, Fraction]:
    """The law of a round's output, given the draft and how many of its tokens are verified."""
    law: dict[Prefix, Fraction] = {}
    reached = Fraction(1)
    for position in range(admitted):
        prefix = draft[:position]
        target, drafter = request.target_probs(prefix), request.draft_probs(prefix)
        token = draft[position]
        accepted = min(Fraction(1), target[token] / drafter[token])
        residual = [max(t - d, Fraction(0)) for t, d in zip(target, drafter, strict=True)]
        if accepted < 1:
            for other, mass in enumerate(residual):
                if mass:
                    weight = reached * (1 - accepted) * mass / sum(residual)
                    law[(*prefix, other)] = law.get((*prefix, other), Fraction(0)) + weight
        reached *= accepted
    prefix = draft[:admitted]
    for token, prob in enumerate(request.target_probs(prefix)):
        if reached * prob:
            law[(*prefix, token)] = law.get((*prefix, token), Fraction(0)) + reached * prob
    return law


def round_law(
    requests: tuple[ToyRequest, ...],
    admit: Callable[[tuple[Prefix, ...]], tuple[int, ...] | None],
    *,
    block_size: int,
    horizon: int,
) -> Law:
    """The joint law of the first `horizon` tokens when the first round is decided by `admit`.

    `admit` maps the draft to lengths; None abandons the round, and a later one, which is lossless
    and draws fresh numbers, emits instead.
    """
    drafts = [sequence_law(request.draft_probs, (), block_size) for request in requests]
    law: Law = {}
    for joint in product(*(draft.items() for draft in drafts)):
        tokens = tuple(prefix for prefix, _ in joint)
        lengths = admit(tokens)
        outputs = [
            completed(request, emitted(request, draft, length), horizon)
            for request, draft, length in zip(
                requests, tokens, lengths or (0,) * len(requests), strict=True
            )
        ]
        for combination in product(*(output.items() for output in outputs)):
            key = tuple(prefix for prefix, _ in combination)
            weight = Fraction(1)
            for _, factor in (*joint, *combination):
                weight *= factor
            law[key] = law.get(key, Fraction(0)) + weight
    return law


def completed(
    request: ToyRequest, output: dict[Prefix, Fraction], horizon: int
) -> dict[Prefix, Fraction]:
    """Continues every output from the target, or cuts it, to exactly `horizon` tokens."""
    law: dict[Prefix, Fraction] = {}
    for prefix, weight in output.items():
        for whole, prob in sequence_law(request.target_probs, prefix[:horizon], horizon).items():
            law[whole] = law.get(whole, Fraction(0)) + weight * prob
    return law


def target_law(requests: tuple[ToyRequest, ...], horizon: int) -> Law:
    """The joint law of `horizon` tokens a request without any speculation."""
    law: Law = {}
    for combination in product(
        *(sequence_law(request.target_probs, (), horizon).items() for request in requests)
    ):
        weight = Fraction(1)
        for _, factor in combination:
            weight *= factor
        law[tuple(prefix for prefix, _ in combination)] = weight
    return law


def confidences(request: ToyRequest, draft: Prefix) -> list[Fraction]:
    """Conditional confidences [K] of a draft: position k reads the tokens before it."""
    return [request.confidence(draft[:position]) for position in range(len(draft))]
