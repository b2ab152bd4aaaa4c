"""Tokens inside repeated n-grams, against a definition written down naively."""

import numpy as np
import pytest

from dspark.evaluation.repetition import repeated_share, repeated_tokens


def naive(tokens: list[int], n: int) -> int:
    """Marks every token of every n-gram that occurred before, one by one."""
    marked = set()
    for start in range(len(tokens) - n + 1):
        for earlier in range(start):
            if tokens[earlier : earlier + n] == tokens[start : start + n]:
                marked |= set(range(start, start + n))
    return len(marked)


def test_by_hand() -> None:
    assert repeated_tokens([1, 2, 3, 4, 1, 2, 3, 5], n=3) == 3
    assert repeated_tokens([1, 2, 3, 4, 5, 6, 7, 8], n=3) == 0
    assert repeated_tokens([7, 7, 7, 7, 7], n=3) == 4  # the n-grams from the second token on
    assert repeated_tokens([1, 2], n=3) == 0


@pytest.mark.parametrize("seed", range(8))
def test_equals_the_naive_count(seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(3, size=60).tolist()
    for n in (2, 3, 5):
        assert repeated_tokens(tokens, n) == naive(tokens, n)


def test_texts_do_not_repeat_each_other() -> None:
    text = list(range(10))
    assert repeated_share([text, text]) == 0.0
    assert repeated_share([text + text, text]) == 10 / 30
    assert repeated_share([]) is None
    assert repeated_share([[]]) is None
