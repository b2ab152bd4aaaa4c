"""ECE, AUC, Brier, bias and the floor, against what they mean written out plainly."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.calibration.metrics import (
    Metrics,
    bin_of,
    expected_calibration_error,
    floor_of_ece,
    interval,
)
from dspark.core.bins import BINS

SAMPLES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.049, 0.05, 0.3, 0.31, 0.5, 0.9, 0.95, 1.0]),
        st.booleans(),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=30,
)


def columns(sample):
    predictions, labels, prompts = zip(*sample, strict=True)
    return np.array(predictions), np.array(labels), np.array(prompts)


def plain_ece(pairs):
    total = 0.0
    for index in range(BINS):
        inside = [(p, y) for p, y in pairs if min(int(p * BINS), BINS - 1) == index]
        total += abs(sum(p for p, _ in inside) - sum(y for _, y in inside))
    return total / len(pairs)


def plain_auc(pairs):
    accepted = [p for p, y in pairs if y]
    rejected = [p for p, y in pairs if not y]
    if not accepted or not rejected:
        return math.nan
    wins = sum((a > r) + (a == r) / 2 for a in accepted for r in rejected)
    return wins / (len(accepted) * len(rejected))


def repeated(sample, weights):
    """The sample in which each prompt occurs as often as its weight says."""
    names = sorted({owner for _, _, owner in sample})
    often = dict(zip(names, weights, strict=True))
    return [(p, y) for p, y, owner in sample for _ in range(int(often[owner]))]


def test_bins_have_equal_width_and_the_last_holds_one():
    assert bin_of(np.array([0.0, 0.049, 0.05, 0.999, 1.0])).tolist() == [0, 0, 1, 19, 19]


@given(sample=SAMPLES, seed=st.integers(0, 99))
def test_every_metric_is_its_definition_also_on_resampled_prompts(sample, seed):
    predictions, labels, prompts = columns(sample)
    metrics = Metrics(predictions, labels, prompts)
    drawn = metrics.resampled(np.random.default_rng(seed), 3)
    assert (drawn.sum(1) == metrics.prompts).all()
    for weights in (*metrics.once, *drawn):
        pairs = repeated(sample, weights)
        row = weights[None]
        gaps = [p - y for p, y in pairs]
        assert metrics.ece(row)[0] == pytest.approx(plain_ece(pairs), abs=1e-12)
        assert metrics.bias(row)[0] == pytest.approx(sum(gaps) / len(gaps), abs=1e-12)
        brier = sum(gap**2 for gap in gaps) / len(gaps)
        assert metrics.brier(row)[0] == pytest.approx(brier, abs=1e-12)
        auc = plain_auc(pairs)
        assert metrics.auc(row)[0] == pytest.approx(auc, abs=1e-12, nan_ok=True)
    plain = expected_calibration_error(predictions, labels)
    assert plain == pytest.approx(metrics.ece(metrics.once)[0], abs=1e-12)


def test_the_floor_is_what_a_perfect_predictor_shows():
    generator = np.random.default_rng(1)
    predictions = generator.beta(1, 2, size=400)
    shown = [
        expected_calibration_error(predictions, generator.random(400) < predictions)
        for _ in range(200)
    ]
    floor = floor_of_ece(predictions, np.random.default_rng(2))
    assert floor.mean() == pytest.approx(np.mean(shown), rel=0.05)
    assert np.quantile(floor, 0.95) == pytest.approx(np.quantile(shown, 0.95), rel=0.1)


def test_the_floor_falls_with_the_square_root_of_the_sample():
    predictions = np.random.default_rng(0).random(500)
    few = floor_of_ece(predictions, np.random.default_rng(0)).mean()
    many = floor_of_ece(np.tile(predictions, 16), np.random.default_rng(0)).mean()
    assert few / many == pytest.approx(4, rel=0.15)


def test_resampling_prompts_is_wider_than_rounds_that_agree_within_prompts_suggest():
    """Forty rounds of a prompt that all end alike are one observation, not forty."""
    labels = np.repeat(np.arange(20) % 2 == 0, 40)
    predictions = np.full(800, 0.5)
    by_prompt = Metrics(predictions, labels, np.repeat(np.arange(20), 40))
    by_round = Metrics(predictions, labels, np.arange(800))
    widths = []
    for metrics in (by_prompt, by_round):
        low, high = interval(metrics.bias(metrics.resampled(np.random.default_rng(0), 400)))
        widths.append(high - low)
    assert widths[0] > 4 * widths[1]


def test_an_undefined_resample_leaves_no_interval():
    assert interval(np.array([0.1, math.nan])) is None
    assert interval(np.linspace(0, 1, 201)) == pytest.approx((0.025, 0.975))
