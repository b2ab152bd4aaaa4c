import math

import numpy as np
import pytest
import torch

from dspark.core.sampling import SamplingParams
from dspark.nn.sampling import (
    SamplingRows,
    inverse_cdf,
    probs_from_logits,
    race,
)


def probs(logits, **sampling):
    rows = SamplingRows.of([SamplingParams(**sampling)])
    return probs_from_logits(torch.tensor([logits], dtype=torch.float64), rows)[0].tolist()


def test_equal_logits_keep_the_lowest_ids():
    tied = [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    assert probs(tied, temperature=0) == [0, 1, 0, 0, 0, 0]
    assert probs(tied, top_k=2) == [0, 0.5, 0.5, 0, 0, 0]
    assert [p > 0 for p in probs(tied, top_k=4)] == [True, True, True, False, True, False]
    assert probs(tied, top_p=0.4) == [0, 0.5, 0.5, 0, 0, 0]


def test_top_p_counts_what_top_k_left():
    logits = [math.log(weight) for weight in (40, 30, 20, 10)]
    # Of all four, 40 + 30 reach 0.7; of the first three, 70/90 do so only with the second.
    assert probs(logits, top_k=3, top_p=0.75) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert probs(logits, top_p=0.75) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-6])
def test_the_coldest_temperatures_stay_finite(temperature):
    rows = SamplingRows.of([SamplingParams(temperature=temperature)])
    logits_MV = torch.tensor([[30.0, 31.0, -1e8]])
    assert probs_from_logits(logits_MV, rows).tolist() == [[0.0, 1.0, 0.0]]


def test_rows_follow_their_request_and_keep_the_dtype():
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=1)]
    logits_MV = torch.tensor([[1.0, 2.0]]).repeat(4, 1)
    sampled = torch.softmax(torch.tensor([1.0, 2.0]), 0).tolist()
    mixed = probs_from_logits(logits_MV, SamplingRows.of(params, [1, 0, 2, 1]))
    assert mixed.dtype == torch.float32
    assert mixed.tolist() == [sampled, [0, 1], [0, 1], sampled]


def test_a_nucleus_larger_than_the_first_guess():
    flat = torch.zeros(1, 5000)
    kept = probs_from_logits(flat, SamplingRows.of([SamplingParams(top_p=0.5)]))
    assert (kept > 0).sum() == pytest.approx(2500, abs=1)
    assert kept[0, 2502:].max() == 0


def test_inputs_are_left_alone():
    logits_MV = torch.randn(3, 50)
    before = logits_MV.clone()
    for sampling in ({}, {"temperature": 0}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}):
        probs_from_logits(logits_MV, SamplingRows.of([SamplingParams(**sampling)] * 3))
    assert torch.equal(logits_MV, before)


def test_float64_in_float64_out_and_sums_to_one():
    params = [SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(temperature=0)]
    drawn_from = probs_from_logits(torch.randn(2, 300).double(), SamplingRows.of(params))
    assert drawn_from.dtype == torch.float64
    torch.testing.assert_close(drawn_from.sum(-1), torch.ones(2).double(), rtol=0, atol=1e-14)


def test_race_is_the_argmax_of_log_probs_plus_gumbel_noise():
    generator = torch.Generator().manual_seed(3)
    probs_MV = torch.randn(200, 9, generator=generator).softmax(-1)
    exponentials = -torch.rand(200, 9, generator=generator, dtype=torch.float64).log()
    gumbels = -exponentials.log()
    assert torch.equal(race(probs_MV, exponentials), (probs_MV.double().log() + gumbels).argmax(-1))


def test_impossible_tokens_win_no_race():
    exponentials = torch.tensor([2.0**-60, 700.0], dtype=torch.float64)
    assert race(torch.tensor([0.0, 1e-38]), exponentials) == 1


def test_inverse_cdf_steps_at_the_cumulated_weights_and_skips_zeros():
    weights = torch.tensor([0.0, 2.0, 0.0, 6.0, 0.0]).repeat(4, 1)
    below_one = math.nextafter(1.0, 0.0)
    uniforms = torch.tensor([0.0, math.nextafter(0.25, 0), 0.25, below_one], dtype=torch.float64)
    assert inverse_cdf(weights, uniforms).tolist() == [1, 1, 3, 3]


def test_top_p_is_reached_by_a_set_that_has_exactly_that_much():
    logits = torch.zeros(1, 4, dtype=torch.float64)
    rows = SamplingRows.of([SamplingParams(top_p=0.5)])
    assert probs_from_logits(logits, rows).tolist() == [[0.5, 0.5, 0.0, 0.0]]


def test_inverse_cdf_reaches_rare_tokens():
    """Cumulated in float32, 1 + 1e-9 is 1, and the token behind it could never be drawn."""
    weights = torch.tensor([1.0, 1e-9, 1e-9])
    below = torch.tensor([1.0 - 3e-9, 1.0 - 1.5e-9, 1.0 - 0.5e-9], dtype=torch.float64)
    assert [int(inverse_cdf(weights, uniform)) for uniform in below] == [0, 1, 2]


def test_race_compares_in_float64():
    """Exponentials that differ in the last bits decide, or ties would favour low token ids."""
    exponentials = torch.tensor([1.0, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        assert race(torch.tensor([0.5, 0.5], dtype=dtype), exponentials) == 1
