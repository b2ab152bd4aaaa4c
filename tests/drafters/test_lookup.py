"""Prompt lookup: what it finds, against a brute force, and that its proposals are certain."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.core.errors import ConfigError
from dspark.drafters.lookup import PromptLookup, continuation
from tests.drafters.tiny import sampled


def brute_force(text, count, longest, shortest):
    """Longest n-gram first, latest occurrence first; copies token by token."""
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                copied = list(text)
                for index in range(count):
                    copied.append(copied[end + index])
                return copied[len(text) :]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_equals_the_brute_force(text, count, shortest, more):
    found = continuation(np.array(text), count, longest=shortest + more, shortest=shortest)
    assert found.tolist() == brute_force(text, count, shortest + more, shortest)


def test_the_longest_match_wins_over_a_later_one():
    text = np.array([1, 2, 3, 7, 7, 3, 5, 9, 1, 2, 3])
    assert continuation(text, 2, longest=3, shortest=1).tolist() == [7, 7]
    assert continuation(text, 2, longest=1, shortest=1).tolist() == [5, 9]


def test_a_text_that_repeats_itself_is_continued_periodically():
    text = np.array([9, 4, 5, 4, 5])
    assert continuation(text, 5, longest=5, shortest=2).tolist() == [4, 5, 4, 5, 4]


def draft(lookup, texts):
    return lookup.draft(
        torch.tensor([text[-1] for text in texts]),
        torch.tensor([len(text) - 1 for text in texts]),
        [],
        None,
        texts=texts,
        sampling=sampled(*[1.0] * len(texts)),
        noise=None,
    )


def test_proposals_are_certain_and_their_number_is_said():
    block = draft(PromptLookup(3), [[1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 5, 6], [8]])
    assert block.lengths_R.tolist() == [3, 0, 0]
    assert block.tokens_RK[0].tolist() == [3, 4, 1]
    assert torch.equal(block.candidates_RKC[:, :, 0], block.tokens_RK)
    assert torch.equal(block.probs_RKC, torch.ones(3, 3, 1, dtype=torch.float64))


def test_a_shortened_block():
    block = draft(PromptLookup(3).shortened(2), [[1, 2, 3, 4, 1, 2]])
    assert block.lengths_R.tolist() == [2] and block.tokens_RK.tolist() == [[3, 4]]


@pytest.mark.parametrize("bad", [{"block_size": 0}, {"shortest": 0}, {"longest": 1, "shortest": 2}])
def test_bad_sizes_are_refused(bad):
    with pytest.raises(ConfigError, match="at least 1"):
        PromptLookup(**bad)
