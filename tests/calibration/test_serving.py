"""Conditions, the nearest of them, and the snapshot that a round is scheduled with."""

import dataclasses

import numpy as np
import pytest

from dspark.calibration.condition import CandidateSet, Condition
from dspark.calibration.confidence import Scaling, conditional_confidence
from dspark.calibration.serving import FixedCalibration, Snapshot, Uncalibrated
from dspark.core.sampling import SamplingParams

PROPOSALS = CandidateSet(64, 16384)


def condition(**changes):
    return dataclasses.replace(Condition(candidates=64, draft_vocabulary=16384), **changes)


WARM = Scaling([2.0, 4.0], [-0.5, 0.25], [-0.5, 0.0])
GREEDY = Scaling([0.5, 0.25], [0.0, 1.0], [0.0, -2.0])
TABLE = {condition(): WARM, condition(temperature=0.0): GREEDY}
LOGITS = np.array([[1.0, -2.0], [1.0, -2.0]])
ENTROPIES = np.array([[0.5, 2.0], [0.25, 1.0]])


def test_a_condition_holds_all_that_acceptance_depends_on_and_no_seed():
    sampling = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3)
    assert Condition.of(sampling, PROPOSALS) == condition(
        rule="coupled", temperature=0.7, top_k=5, top_p=0.9, min_p=0.1
    )
    other = dataclasses.replace(sampling, seed=4, max_new_tokens=9)
    assert Condition.of(other, PROPOSALS) == Condition.of(sampling, PROPOSALS)


def test_greedy_requests_share_one_condition():
    greedy = SamplingParams(temperature=0.0, top_k=5, top_p=0.5, seed=1)
    assert Condition.of(greedy, PROPOSALS) == condition(temperature=0.0)


@pytest.mark.parametrize(
    ("sampling", "nearest"),
    [
        ({}, "sampled"),
        ({"temperature": 0.3}, "sampled"),
        ({"seed": 1}, "sampled"),
        ({"temperature": 0.0}, "greedy"),
        ({"temperature": 0.01, "top_p": 0.5, "seed": 1}, "sampled"),
    ],
)
def test_the_nearest_condition_is_used(sampling, nearest):
    snapshot = Snapshot(0, PROPOSALS, TABLE)
    found = snapshot.nearest(Condition.of(SamplingParams(**sampling), PROPOSALS))
    assert found == condition(temperature={"sampled": 1.0, "greedy": 0.0}[nearest])


def test_blocks_cut_short_take_what_their_positions_have():
    snapshot = Snapshot(0, PROPOSALS, TABLE)
    sampled, greedy = SamplingParams(), SamplingParams(temperature=0.0)
    short = snapshot.confidence(LOGITS[:, :1], ENTROPIES[:, :1], [sampled, greedy])
    assert np.array_equal(short, snapshot.confidence(LOGITS, ENTROPIES, [sampled, greedy])[:, :1])


def test_the_rule_counts_more_than_a_temperature_nearby():
    table = {condition(rule="coupled"): WARM, condition(temperature=0.5): GREEDY}
    snapshot = Snapshot(0, PROPOSALS, table)
    assert snapshot.nearest(Condition.of(SamplingParams(temperature=1.0), PROPOSALS)) == condition(
        temperature=0.5
    )
    assert snapshot.nearest(Condition.of(SamplingParams(seed=1), PROPOSALS)) == condition(
        rule="coupled"
    )


def test_every_row_gets_the_scaling_of_its_condition():
    snapshot = Snapshot(0, PROPOSALS, TABLE)
    sampling = [SamplingParams(), SamplingParams(temperature=0.0)]
    confidence = snapshot.confidence(LOGITS, ENTROPIES, sampling)
    assert confidence[0].tolist() == WARM.confidence(LOGITS, ENTROPIES)[0].tolist()
    assert confidence[1].tolist() == GREEDY.confidence(LOGITS, ENTROPIES)[1].tolist()
    assert confidence[0].tolist() != confidence[1].tolist()


def test_without_calibration_confidences_are_the_heads():
    snapshot = Uncalibrated().snapshot()
    assert snapshot.number == 0
    confidence = snapshot.confidence(LOGITS, ENTROPIES, [SamplingParams()] * 2)
    assert confidence.tolist() == conditional_confidence(LOGITS).tolist()


def test_a_substitute_condition_is_said_once():
    lines = []
    calibration = FixedCalibration(TABLE, PROPOSALS, say=lines.append)
    for sampling in (SamplingParams(), SamplingParams(temperature=0.0, seed=2)):
        calibration.expect(sampling)
    assert not lines
    calibration.expect(SamplingParams(temperature=0.7, seed=1))
    calibration.expect(SamplingParams(temperature=0.7, seed=2))
    (line,) = lines
    assert "none for coupled, temperature 0.7" in line
    assert "nearest: rejection, temperature 1, 64 candidates of 16384 tokens" in line
