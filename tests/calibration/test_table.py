"""`calibration.json`: what is written is read, and nothing else."""

import dataclasses
import json
import math

import numpy as np
import pytest

from dspark.calibration.condition import Condition
from dspark.calibration.export import export
from dspark.calibration.report import report
from dspark.calibration.scaling import fit_scaling, fit_temperatures
from dspark.calibration.table import CalibrationTable, Entry, read_table, write_table
from dspark.core.errors import CheckpointError, ConfigError
from tests.calibration.synthetic import BLOCK, synthetic

DEFAULT = Condition(candidates=16, draft_vocabulary=97)
GREEDY = dataclasses.replace(DEFAULT, temperature=0.0)


def entry():
    rounds = synthetic(400, (2.0, 1.0, 0.5), weight=-0.5)
    scaling, alone = fit_scaling(rounds), fit_temperatures(rounds)
    without = fit_scaling(rounds.without_entropy())
    positions = report(rounds, scaling, alone, without, seed=0, resamples=20)
    return Entry(
        temperatures=tuple(scaling.temperatures.tolist()),
        offsets=tuple(scaling.offsets.tolist()),
        entropy_weights=tuple(scaling.entropy_weights.tolist()),
        temperatures_alone=tuple(alone.tolist()),
        mean_survival=rounds.mean_survival,
        positions=tuple(position.to_json() for position in positions),
        rounds_fitted=400, rounds_held_out=400, prompts_fitted=20, prompts_held_out=20,
        command="dspark calibrate", data_sha256="d" * 64,
    )  # fmt: skip


ENTRY = entry()


@pytest.fixture
def path(tmp_path):
    table = CalibrationTable(block_size=BLOCK, weights_sha256="a" * 64)
    table = table.with_entry(GREEDY, ENTRY).with_entry(DEFAULT, ENTRY)
    write_table(table, tmp_path / "calibration.json")
    return tmp_path / "calibration.json"


def read(path, block_size=BLOCK, weights="a" * 64):
    return read_table(path, block_size=block_size, weights_sha256=weights)


def test_what_is_written_is_read(path):
    table = read(path)
    assert [*table.entries] == [GREEDY, DEFAULT]
    for condition in (GREEDY, DEFAULT):
        found = table.entries[condition]
        assert found.temperatures == ENTRY.temperatures
        assert found.offsets == ENTRY.offsets
        assert found.entropy_weights == ENTRY.entropy_weights
        assert found.scaling.entropy_weights.tolist() == [*ENTRY.entropy_weights]
        assert found.has_entropy
        assert found.temperatures_alone == ENTRY.temperatures_alone
        assert [*map(dict, found.positions)] == json.loads(json.dumps([*ENTRY.positions]))
    assert [item.name for item in path.parent.iterdir()] == ["calibration.json"]


def test_the_file_leads_with_the_default_conditions_positions(path):
    document = json.loads(path.read_text())
    assert [p["position"] for p in document["positions"]] == [1, 2, 3]
    assert {"ece_before", "ece_after", "auc", "brier", "samples"} <= document["positions"][0].keys()
    only_greedy = CalibrationTable(block_size=BLOCK, weights_sha256="").with_entry(GREEDY, ENTRY)
    assert only_greedy.to_json()["positions"] is None


def test_a_condition_fitted_again_replaces_the_old_one(path):
    newer = dataclasses.replace(ENTRY, command="again")
    table = read(path).with_entry(GREEDY, newer)
    assert table.entries[GREEDY].command == "again"
    assert len(table.entries) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 7}, "fitted for blocks of 3, the drafter's block is 7"),
        ({"weights": "b" * 64}, "hash aaaaaaaaaaaa, the bundle's are bbbbbbbbbbbb"),
    ],
)
def test_a_calibration_of_another_drafter_is_refused(path, arguments, message):
    with pytest.raises(CheckpointError, match=message):
        read(path, **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format_version=1), "format_version must be 3"),
        (lambda d: d.update(format_version=True), "format_version must be 3"),
        (lambda d: d.update(format_version=2), "format_version 2 has no entropy_weights"),
        (lambda d: d["conditions"][0].pop("entropy_weights"), "entropy_weights"),
        (lambda d: d["conditions"][0].update(entropy_weights=[0.0]), "weights must hold 3 numbers"),
        (lambda d: d["conditions"][0].update(entropy_weights=[0, 0, math.inf]), "finite"),
        (lambda d: d.update(block_size="3"), "block_size must be a whole number"),
        (lambda d: d.update(conditions=[]), "at least one entry"),
        (lambda d: d.pop("weights_sha256"), "weights_sha256"),
        (lambda d: d["conditions"].append(d["conditions"][0]), "is there twice"),
        (lambda d: d["conditions"][0].update(temperatures=[1.0, 2.0]), "must hold 3 numbers"),
        (lambda d: d["conditions"][0].update(temperatures_alone=[1.0]), "alone must hold 3"),
        (lambda d: d["conditions"][0].update(offsets=[0.0, math.nan, 0.0]), "finite"),
        (lambda d: d["conditions"][0].pop("offsets"), "offsets"),
        (lambda d: d["conditions"][0].update(offsets=7), "offsets must hold 3 numbers"),
        (lambda d: d["conditions"][0].update(offsets=[True, 0.0, 0.0]), "offsets must hold 3"),
        (lambda d: d["conditions"][0].update(temperatures=[10**400, 1, 1]), "not a calibration"),
        (lambda d: d["conditions"][0].update(positions=[]), "of positions must hold 3"),
        (lambda d: d["conditions"][0].update(positions=[{}] * 3), "ece_before"),
        (lambda d: d["conditions"][0].update(temperatures=[1.0, 0.0, 1.0]), "must be positive"),
        (lambda d: d["conditions"][0].update(temperatures=[1.0, -2.0, 1.0]), "must be positive"),
        (lambda d: d["conditions"][0].update(temperatures=[1.0, "x", 1.0]), "must hold 3 numbers"),
        (lambda d: d["conditions"][0].update(temperatures=[1.0, math.nan, 1.0]), "finite"),
        (lambda d: d["conditions"][0].update(temperatures=[1.0, math.inf, 1.0]), "finite"),
        (lambda d: d["conditions"][0].update(rule="sampled"), "rejection or coupled"),
        (lambda d: d["conditions"][1].update(temperature=-1.0), "temperature is -1.0"),
        (lambda d: d["conditions"][0].update(candidates=0), "candidates is 0"),
        (lambda d: d["conditions"][0].update(mean_survival=[0.5, 2.0, 0.1]), "3 shares"),
        (lambda d: d["conditions"][0].update(colour=1), "colour"),
        (lambda d: d["conditions"][0].pop("top_p"), "top_p"),
    ],
)  # fmt: skip
def test_whatever_is_wrong_is_one_line_with_the_file(path, change, message):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_format_before_had_no_entropy_and_is_read_as_weights_of_zero(path):
    document = json.loads(path.read_text())
    document["format_version"] = 2
    for condition in document["conditions"]:
        del condition["entropy_weights"]
    path.write_text(json.dumps(document))
    table = read(path)
    for entry in table.entries.values():
        assert entry.offsets == ENTRY.offsets
        assert entry.entropy_weights == (0.0,) * BLOCK
        assert not entry.has_entropy
    write_table(table, path)
    assert json.loads(path.read_text())["format_version"] == 3
    assert read(path).entries == table.entries


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * 100_000])
def test_a_file_that_is_none_is_refused(path, text):
    path.write_text(text)
    with pytest.raises(CheckpointError, match="not a calibration"):
        read(path)


def test_other_engines_shapes():
    sglang = export(ENTRY, "sglang", dataset="math")
    assert sglang["temperatures"] == [*ENTRY.temperatures_alone]
    assert sglang["ece_after"] == np.mean([p["ece_temperature_alone"] for p in ENTRY.positions])
    assert {"dataset", "num_samples", "ece_before", "ece_after"} < sglang.keys()
    assert export(ENTRY, "tensorrt-llm", dataset="math") == {
        "sts_temperatures": [*ENTRY.temperatures_alone]
    }
    with pytest.raises(ConfigError, match="sglang or tensorrt-llm"):
        export(ENTRY, "vllm", dataset="math")
