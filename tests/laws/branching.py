"""Exact laws of random programs, by running them once for every way their draws can fall.

The program draws through a `Branching` in place of a random stream. Draws with the same key are the
same number, as in `core.random`, so the law also shows what a reused key does. A draw falls into
one of a few cells; the program must behave the same all over a cell.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np

Outcome = TypeVar("Outcome", bound=Hashable)


class Branching:
    """Stands in for `RequestRandom` on a vocabulary of two tokens.

    A pair of exponentials matters to a race through w = E[0] / (E[0] + E[1]) alone, which is
    uniform: every draw is a uniform. `cuts` are the points in (0, 1) where any program step may
    change its mind about one.
    """

    def __init__(self, cuts: Sequence[Fraction]) -> None:
        edges = [Fraction(0), *sorted(set(cuts)), Fraction(1)]
        self._cells = [
            (float((low + high) / 2), high - low) for low, high in itertools.pairwise(edges)
        ]
        self._planned: list[int] = []
        self._taken: dict[Hashable, int] = {}

    def law(self, program: Callable[[], Outcome]) -> dict[Outcome, Fraction]:
        """The exact law of what `program` returns."""
        law: dict[Outcome, Fraction] = defaultdict(Fraction)
        self._planned = []
        while True:
            self._taken = {}
            outcome = program()
            weight = Fraction(1)
            for cell in self._taken.values():
                weight *= self._cells[cell][1]
            law[outcome] += weight
            # The next path in lexical order: drop exhausted draws at the end, advance the last.
            path = list(self._taken.values())
            while path and path[-1] == len(self._cells) - 1:
                path.pop()
            if not path:
                return law
            self._planned = [*path[:-1], path[-1] + 1]

    def coupled_exponentials(self, position: int, vocab_size: int) -> np.ndarray:
        assert vocab_size == 2
        return self._pair("coupled", position)

    def round_exponentials(self, round_number: int, slots: int, count: int) -> np.ndarray:
        assert count == 2
        return np.array([self._pair("draft", round_number, slot) for slot in range(slots)])

    def round_uniforms(self, round_number: int, purpose: str, count: int) -> np.ndarray:
        return np.array([self._uniform(purpose, round_number, slot) for slot in range(count)])

    def _pair(self, *key: Hashable) -> np.ndarray:
        share = self._uniform(*key)
        return np.array([share, 1 - share])

    def _uniform(self, *key: Hashable) -> float:
        if key not in self._taken:
            number = len(self._taken)
            self._taken[key] = self._planned[number] if number < len(self._planned) else 0
        return self._cells[self._taken[key]][0]
