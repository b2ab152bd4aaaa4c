"""Loops: small targets repeat themselves when greedy, and repeated text is easy to draft."""

from collections.abc import Sequence

NGRAM = 8
"""Long enough that ordinary phrases and idioms of code seldom come twice; loops always do."""


def repeated_tokens(tokens: Sequence[int], n: int = NGRAM) -> int:
    """Tokens that lie inside an n-gram which already occurred earlier in the same text."""
    seen: set[tuple[int, ...]] = set()
    covered = counted = 0
    for start in range(len(tokens) - n + 1):
        gram = tuple(tokens[start : start + n])
        if gram in seen:
            counted += start + n - max(covered, start)
            covered = start + n
        seen.add(gram)
    return counted


def repeated_share(texts: Sequence[Sequence[int]], n: int = NGRAM) -> float | None:
    """Share of all tokens that lie inside repeated n-grams; None without a token.

    Printed beside accepted lengths at temperature 0, where a loop would flatter them.
    """
    total = sum(map(len, texts))
    return sum(repeated_tokens(text, n) for text in texts) / total if total else None
