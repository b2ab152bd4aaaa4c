"""Recalibration while serving: what counts, drift, bounds, and that nothing else changes."""

import dataclasses
import itertools

import numpy as np
import pytest

from dspark.calibration.condition import CandidateSet, Condition
from dspark.calibration.confidence import Scaling
from dspark.calibration.metrics import expected_calibration_error, floor_of_ece
from dspark.calibration.online import OnlineCalibration, OnlineConfig
from dspark.calibration.scaling import survival
from dspark.core.records import RoundRecord, StepRecord
from dspark.core.sampling import SamplingParams
from tests.calibration.synthetic import BLOCK, synthetic

PROPOSALS = CandidateSet(16, 97)
DEFAULT = Condition(candidates=16, draft_vocabulary=97)
SAMPLED = SamplingParams()
SMALL = OnlineConfig(window=3000, every=1000, least=500)


def serve(calibration, rounds, sampling=SAMPLED, admitted=BLOCK):
    """Rounds as steps of one request each; the snapshot numbers they would be scheduled with."""
    calibration.expect(sampling)
    numbers = []
    rows = zip(rounds.logits_NK, rounds.entropies_NK, rounds.accepted_N, strict=True)
    for logits, entropies, accepted in rows:
        numbers.append(calibration.snapshot().number)
        record = RoundRecord(
            request=0, round=1, proposed=BLOCK, admitted=admitted,
            accepted=min(int(accepted), admitted), emitted=min(int(accepted), admitted) + 1,
            ended=False, confidence=tuple(logits), entropy=tuple(entropies),
        )  # fmt: skip
        step = StepRecord(step=0, batch_tokens=1, prefill_tokens=0, rounds=(record,))
        calibration.observe(step, {0: sampling})
    return numbers


def online(temperatures=(1.0,) * BLOCK, config=SMALL, **kwargs):
    return OnlineCalibration(
        {DEFAULT: Scaling.of_temperatures(temperatures)}, PROPOSALS, BLOCK, config=config, **kwargs
    )


def test_the_window_is_20000_rounds_by_default():
    assert OnlineConfig().window == 20_000


def test_calibrated_rounds_change_nothing():
    calibration = online()
    numbers = serve(calibration, synthetic(6000))
    assert set(numbers) == {0}
    assert not calibration.refits


def test_drift_is_found_and_undone_and_recorded():
    """Calibrated on one workload, served another: over-confident by a factor in the logits."""
    lines = []
    calibration = online(say=lines.append)
    numbers = serve(calibration, synthetic(9000, (2.0, 1.0, 2.0), seed=1))
    assert numbers[2999] == 0, "no refit before the window is full"
    assert numbers[3000] == 1
    assert calibration.snapshot().number == len(calibration.refits) > 1
    fitted = calibration.snapshot().scalings[DEFAULT]
    assert fitted.temperatures == pytest.approx([2.0, 1.0, 2.0], rel=0.2)
    assert fitted.offsets == pytest.approx([0.0] * BLOCK, abs=0.15)
    first = calibration.refits[0]
    assert first.rounds == 3000
    assert 1 in first.drifted
    assert first.mean_ece_after < first.mean_ece_before
    assert len(lines) == len(calibration.refits)
    assert f"refitted, mean ECE {first.mean_ece_before:.1%} to" in lines[0]
    held_out = synthetic(9000, (2.0, 1.0, 2.0), seed=2)
    for column in range(BLOCK):
        labels = held_out.labels(column)
        after = survival(held_out, fitted)[:, column]
        floor = floor_of_ece(after, np.random.default_rng(0)).mean()
        assert expected_calibration_error(after, labels) < floor + 0.015


def test_a_refit_is_bounded_and_so_are_all_together():
    config = OnlineConfig(
        window=2000, every=500, least=500, step=1.3, reach=1.5, offset_step=0.3, offset_reach=0.7
    )
    calibration = online(config=config)
    serve(calibration, synthetic(5000, (8.0, 8.0, 8.0), shift=-3.0))
    temperatures = [np.ones(BLOCK), *(np.array(r.temperatures) for r in calibration.refits)]
    offsets = [np.zeros(BLOCK), *(np.array(r.offsets) for r in calibration.refits)]
    for before, after in itertools.pairwise(temperatures):
        assert (after / before <= 1.3 + 1e-9).all()
    for before, after in itertools.pairwise(offsets):
        assert (np.abs(after - before) <= 0.3 + 1e-9).all()
    assert temperatures[-1] == pytest.approx([1.5] * BLOCK)
    assert offsets[-1] == pytest.approx([-0.7] * BLOCK)


def test_texts_that_accept_less_move_the_offset():
    """Served chat after math: as much order in the head, less acceptance."""
    calibration = online()
    serve(calibration, synthetic(9000, shift=-0.8, seed=1))
    fitted = calibration.snapshot().scalings[DEFAULT]
    assert fitted.offsets == pytest.approx([-0.8] * BLOCK, abs=0.25)
    assert fitted.temperatures == pytest.approx([1.0] * BLOCK, rel=0.2)


def test_positions_that_are_seldom_verified_keep_theirs():
    calibration = online()
    serve(calibration, synthetic(6000, (3.0, 3.0, 3.0)), admitted=1)
    fitted = calibration.snapshot().scalings[DEFAULT]
    assert fitted.temperatures[0] > 1.4
    assert fitted.temperatures[1:].tolist() == [1.0, 1.0]
    assert fitted.offsets[1:].tolist() == [0.0, 0.0]


def test_what_one_condition_sees_does_not_move_another():
    greedy = SamplingParams(temperature=0.0)
    calibration = OnlineCalibration({}, PROPOSALS, BLOCK, config=SMALL)
    calibration.expect(greedy)
    serve(calibration, synthetic(5000, (3.0, 3.0, 3.0), shift=-1.0))
    assert calibration.refits
    own = calibration.snapshot().scalings[Condition.of(greedy, PROPOSALS)]
    assert own.temperatures.tolist() == [1.0] * BLOCK
    assert own.offsets.tolist() == [0.0] * BLOCK


def test_offsets_are_bounded_upwards_as_well():
    config = OnlineConfig(window=2000, every=500, least=500, offset_step=0.3, offset_reach=0.7)
    calibration = online(config=config)
    serve(calibration, synthetic(6000, shift=3.0))
    assert max(calibration.refits[-1].offsets) == pytest.approx(0.7)


def test_a_condition_of_its_own_begins_at_the_nearest_and_leaves_it_alone():
    lines = []
    calibration = online(say=lines.append)
    greedy = SamplingParams(temperature=0.0)
    serve(calibration, synthetic(4000, (3.0, 3.0, 3.0)), sampling=greedy)
    assert "using the nearest: rejection, temperature 1" in lines[0]
    own = Condition.of(greedy, PROPOSALS)
    scalings = calibration.snapshot().scalings
    assert scalings[DEFAULT].temperatures.tolist() == [1.0] * BLOCK
    assert (scalings[own].temperatures > 1.4).all()


def test_an_uncalibrated_head_is_calibrated_while_serving():
    calibration = OnlineCalibration({}, PROPOSALS, BLOCK, config=SMALL)
    raw = calibration.snapshot()
    told = raw.confidence([[0.0] * BLOCK], [[1.0] * BLOCK], [SAMPLED])
    assert told.tolist() == [[0.5] * BLOCK]
    serve(calibration, synthetic(4000, (3.0, 3.0, 3.0)))
    assert (calibration.snapshot().scalings[DEFAULT].temperatures > 1.4).all()
    assert raw.number == 0, "a snapshot taken stays what it was"
    assert not raw.scalings


def test_rounds_that_verified_nothing_do_not_count():
    calibration = online()
    serve(calibration, synthetic(4000, (3.0, 3.0, 3.0)), admitted=0)
    assert not calibration.refits


def test_entropy_keeps_the_bundles_weight_and_counts_in_what_is_fitted_beside_it():
    weight = np.array([-0.8, -0.4, 0.3])
    base = Scaling([1.0] * BLOCK, [0.0] * BLOCK, weight)
    calibration = OnlineCalibration({DEFAULT: base}, PROPOSALS, BLOCK, config=SMALL)
    serve(calibration, synthetic(9000, shift=-0.8, weight=weight, seed=1))
    assert calibration.refits
    fitted = calibration.snapshot().scalings[DEFAULT]
    assert fitted.entropy_weights.tolist() == weight.tolist()
    assert fitted.offsets == pytest.approx([-0.8] * BLOCK, abs=0.25)
    assert fitted.temperatures == pytest.approx([1.0] * BLOCK, rel=0.2)


def at(temperature):
    return SamplingParams(temperature=temperature, verification="rejection")


def test_conditions_are_bounded_and_the_one_used_longest_ago_gives_way():
    """Clients choose temperatures: a window for each would fill the memory."""
    lines = []
    config = dataclasses.replace(SMALL, window=1000, every=500, least=200, conditions=2)
    calibration = online(config=config, say=lines.append)
    serve(calibration, synthetic(1500, (3.0, 3.0, 3.0)))
    assert (calibration.snapshot().scalings[DEFAULT].temperatures > 1.2).all()
    assert calibration.refits
    for temperature in (0.5, 1.0, 0.6):  # 0.5 is the one used longest ago, when 0.6 comes
        calibration.expect(at(temperature))
    scalings = calibration.snapshot().scalings
    assert {own.temperature for own in scalings} == {1.0, 0.6}
    assert (scalings[DEFAULT].temperatures > 1.2).all(), "its refit lives"
    assert calibration.dropped == 1
    told = [line for line in lines if "gives way" in line]
    assert len(told) == 1 and "2 conditions are followed" in told[0] and "0.5" in told[0]
    for number in range(200):
        calibration.expect(at(1.5 + number / 1000))
    scalings = calibration.snapshot().scalings
    assert len(scalings) == 3, "two followed, and the bundle's own"
    assert scalings[DEFAULT].temperatures.tolist() == [1.0] * BLOCK, "the bundle's again"
    assert calibration.dropped == 201
    assert len([line for line in lines if "gives way" in line]) == 1
    # A request that waited so long that its condition was dropped is followed from its rounds on.
    round_ = RoundRecord(
        request=0, round=1, proposed=BLOCK, admitted=1, accepted=1, emitted=2, ended=False,
        confidence=(0.0,) * BLOCK, entropy=(1.0,) * BLOCK,
    )  # fmt: skip
    step = StepRecord(step=0, batch_tokens=1, prefill_tokens=0, rounds=(round_,))
    calibration.observe(step, {0: at(0.5)})
    assert 0.5 in {own.temperature for own in calibration.snapshot().scalings}
    assert len(calibration.snapshot().scalings) == 3
