"""`calibrate` on a tiny target: what it fits is what its rounds say, and what engines then use."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dspark.calibration.condition import CandidateSet, Condition
from dspark.calibration.online import OnlineCalibration
from dspark.calibration.report import report
from dspark.calibration.scaling import fit_scaling, fit_temperatures
from dspark.calibration.serving import FixedCalibration, Uncalibrated
from dspark.checkpoints.native import read_bundle, write_bundle
from dspark.core.errors import CheckpointError, ConfigError, DataError
from dspark.core.sampling import SamplingParams
from dspark.data.prompts import read_prompts
from dspark.recipes.calibrate import calibrate, check_files
from dspark.recipes.calibrate_result import draw, export_file, remarks_on
from dspark.recipes.calibrate_rounds import split_halves
from dspark.recipes.calibration import (
    candidate_set,
    expected_survival,
    read_calibration,
    serving_calibration,
)
from dspark.recipes.llm import LLM
from dspark.recipes.round_file import RoundFile
from dspark.scheduling.probing import Probing
from tests.recipes.tiny import BLOCK, write_all, write_draft, write_target

SAMPLED = SamplingParams(max_new_tokens=40, verification="rejection")
GREEDY = dataclasses.replace(SAMPLED, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrate")
    write_all(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder / "target"), draft=folder / "draft", weights="fp32", max_requests=8)


@pytest.fixture(scope="module")
def prompts(folder):
    return read_prompts(folder / "math.jsonl")


@pytest.fixture(scope="module")
def run(folder):
    return folder / "run"


@pytest.fixture(scope="module")
def result(llm, prompts, run):
    return calibrate(llm, prompts, SAMPLED, command="a test", samples=2, run=run)


def settings_of(run):
    header = json.loads((run / "rounds.jsonl").read_text().splitlines()[0])
    return {key: value for key, value in header.items() if key != "format"}


def test_the_stored_figures_are_what_the_code_makes_of_the_rounds(result, run, folder):
    """A refit from the rounds on disk: figures in a bundle cannot drift from the code."""
    texts = RoundFile(run / "rounds.jsonl", settings_of(run)).texts
    assert len(texts) == 12
    fitted, held_out = split_halves(texts, BLOCK)
    stored = read_calibration(read_bundle(folder / "draft")).entries[result.condition]
    scaling = fit_scaling(fitted)
    assert stored.temperatures == tuple(scaling.temperatures)
    assert stored.offsets == tuple(scaling.offsets)
    assert stored.entropy_weights == tuple(scaling.entropy_weights)
    assert all(stored.entropy_weights)
    assert stored.temperatures_alone == tuple(fit_temperatures(fitted))
    without = fit_scaling(fitted.without_entropy())
    again = report(held_out, stored.scaling, stored.temperatures_alone, without, seed=0)
    assert json.loads(json.dumps([p.to_json() for p in again])) == [*stored.positions]
    assert again == result.positions
    assert stored.rounds_fitted == len(fitted) == result.entry.rounds_fitted
    assert stored.mean_survival == fitted.mean_survival


def test_the_halves_share_no_prompt_and_lose_no_round(run, result):
    texts = RoundFile(run / "rounds.jsonl", settings_of(run)).texts
    fitted, held_out = split_halves(texts, BLOCK)
    assert not {*fitted.prompts_N} & {*held_out.prompts_N}
    assert len({*fitted.prompts_N}) == len({*held_out.prompts_N}) == 3
    assert len(fitted) + len(held_out) == sum(map(len, texts.values()))


def test_rounds_verify_whole_blocks_but_for_the_end_of_a_text(run, result):
    texts = RoundFile(run / "rounds.jsonl", settings_of(run)).texts
    for rounds in texts.values():
        assert all(judged == BLOCK for _, judged, *_ in rounds[:-BLOCK])


@pytest.mark.parametrize(
    "row",
    [
        [2, 1, [0.0] * BLOCK, [1.0] * BLOCK],
        [0, BLOCK + 1, [0.0] * BLOCK, [1.0] * BLOCK],
        [0, 1, [0.0] * (BLOCK - 1), [1.0] * BLOCK],
        [0, 1, [0.0] * BLOCK, [float("nan")] * BLOCK],
        [0, 1, [None] * BLOCK, [1.0] * BLOCK],
        ["0", 1, [0.0] * BLOCK, [1.0] * BLOCK],
    ],
)
def test_what_is_no_round_of_the_block_is_told_by_its_line(row, run, result, tmp_path):
    lines = (run / "rounds.jsonl").read_text().splitlines()
    text = json.loads(lines[2]) | {"rounds": [row]}
    (tmp_path / "rounds.jsonl").write_text("\n".join([*lines[:2], json.dumps(text), ""]))
    with pytest.raises(DataError, match=r"rounds.jsonl, line 3: not the rounds of a text"):
        RoundFile(tmp_path / "rounds.jsonl", settings_of(run))


def test_every_round_keeps_the_entropies_of_its_block(run, result):
    texts = RoundFile(run / "rounds.jsonl", settings_of(run)).texts
    entropies = [entropy for rounds in texts.values() for *_, own in rounds for entropy in own]
    assert len({*entropies}) > 20
    assert all(0 < entropy <= np.log(256) for entropy in entropies)


def test_a_finished_run_is_not_run_again_and_gives_the_same(llm, prompts, run, result, monkeypatch):
    monkeypatch.setattr(llm.loaded.target, "forward", None)  # calling it would fail
    again = calibrate(llm, prompts, SAMPLED, command="a test", samples=2, run=run)
    assert again.to_json() == result.to_json()
    assert again.entry == result.entry


def test_an_interrupted_run_goes_on_and_gives_the_same(
    llm, prompts, run, result, tmp_path, monkeypatch
):
    """Under `rejection` a text depends on its own noise alone: it may be written in any batch."""
    lines = (run / "rounds.jsonl").read_text().splitlines(keepends=True)
    torn = "".join(lines[:5]) + lines[5][:40]
    (tmp_path / "rounds.jsonl").write_text(torn)
    again = calibrate(llm, prompts, SAMPLED, command="a test", samples=2, run=tmp_path)
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == len(lines)
    assert again.entry.rounds_fitted == result.entry.rounds_fitted


def test_a_run_folder_of_other_settings_is_refused(llm, prompts, run, result):
    with pytest.raises(DataError, match="with seed 0, not 1; give another --run folder"):
        calibrate(llm, prompts, SAMPLED, command="", seed=1, run=run)


def test_rounds_of_an_older_version_have_no_entropies_and_are_refused(
    llm, prompts, run, result, tmp_path
):
    header, *lines = (run / "rounds.jsonl").read_text().splitlines()
    old = json.loads(header) | {"format": "dspark-rounds/1"}
    (tmp_path / "rounds.jsonl").write_text("\n".join([json.dumps(old), *lines]) + "\n")
    with pytest.raises(DataError, match="without the draft's entropies"):
        calibrate(llm, prompts, SAMPLED, command="", samples=2, run=tmp_path)


def test_conditions_lie_side_by_side_and_the_nearest_serves(llm, prompts, folder, result):
    calibrate(llm, prompts, GREEDY, command="greedy", samples=1)
    lines = []

    class Saying:
        quiet, say = False, lines.append

    served = LLM(str(folder / "target"), draft=folder / "draft", weights="fp32", progress=Saying())
    assert isinstance(served.calibration, FixedCalibration)
    scalings = served.calibration.snapshot().scalings
    assert [*scalings] == [
        Condition(candidates=256, draft_vocabulary=264),
        Condition(temperature=0.0, candidates=256, draft_vocabulary=264),
    ]
    served_with = scalings[result.condition]
    # The resumed run above fitted it again, on logits rounded in other batches.
    assert served_with.temperatures == pytest.approx([*result.entry.temperatures], rel=1e-4)
    expected = expected_survival(read_bundle(folder / "draft"))
    assert expected == result.entry.mean_survival
    assert served_with.offsets == pytest.approx([*result.entry.offsets], abs=1e-4)
    assert any(line.startswith("calibration: rejection, temperature 1") for line in lines)
    other = SamplingParams(temperature=0.9, max_new_tokens=2)
    for policy in ("off", None):
        served.start([[5, 6]], other, policy=policy)
    assert not any("using the nearest" in line for line in lines), "neither reads a confidence"
    served.calibration.expect(other)
    assert "using the nearest: rejection, temperature 1" in lines[-1]


def test_without_a_calibration_the_start_says_so(folder, tmp_path):
    bundle = write_draft(tmp_path / "draft", folder / "target")
    lines = []

    class Saying:
        quiet, say = False, lines.append

    llm = LLM(str(folder / "target"), draft=bundle, weights="fp32", progress=Saying())
    assert isinstance(llm.calibration, Uncalibrated)
    assert any("calibration: none in this bundle" in line for line in lines)


def test_a_calibration_of_the_format_before_serves_without_entropy_and_the_start_says_so(
    folder, result, tmp_path
):
    copy = Path(shutil.copytree(folder / "draft", tmp_path / "copy"))
    document = json.loads((copy / "calibration.json").read_text())
    document["format_version"] = 2
    for condition in document["conditions"]:
        del condition["entropy_weights"]
    (copy / "calibration.json").write_text(json.dumps(document))
    lines = []
    calibration = serving_calibration(read_bundle(copy), lines.append)
    scaling = calibration.snapshot().scalings[result.condition]
    assert scaling.entropy_weights.tolist() == [0.0] * BLOCK
    assert "256 candidates of 264 tokens (fitted without the draft's entropy" in lines[0]
    new = []
    serving_calibration(read_bundle(folder / "draft"), new.append)
    assert "without" not in new[0]


def test_a_calibration_of_other_weights_is_refused_at_load_and_replaced_by_a_new_one(
    folder, prompts, result, tmp_path
):
    bundle = write_draft(tmp_path / "draft", folder / "target")
    document = json.loads((folder / "draft" / "calibration.json").read_text())
    document["weights_sha256"] = "0" * 64
    (bundle / "calibration.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="fitted for weights with hash 000000000000"):
        LLM(str(folder / "target"), draft=bundle, weights="fp32")
    llm = LLM(str(folder / "target"), draft=bundle, weights="fp32", calibrated=False)
    calibrate(llm, prompts, SAMPLED, command="", samples=2)
    assert len(read_calibration(read_bundle(bundle)).entries) == 1


def test_a_bundle_without_a_confidence_head_is_refused_by_name(folder, prompts, tmp_path):
    whole = read_bundle(write_draft(tmp_path / "whole", folder / "target"))
    config = dataclasses.replace(
        whole.config, enable_confidence_head=False, confidence_head_with_markov=False
    )
    tensors = {k: v for k, v in whole.tensors.items() if not k.startswith("confidence_head")}
    write_bundle(tmp_path / "bare", config=config, info=whole.info, tensors=tensors, card="")
    llm = LLM(str(folder / "target"), draft=tmp_path / "bare", weights="fp32")
    with pytest.raises(CheckpointError, match="bare has no confidence head"):
        calibrate(llm, prompts, SAMPLED, command="")


def test_nothing_to_calibrate_is_refused(folder, prompts, llm):
    plain = LLM(str(folder / "target"), weights="fp32")
    with pytest.raises(ConfigError, match="no drafter to calibrate"):
        calibrate(plain, prompts, SAMPLED, command="")
    with pytest.raises(DataError, match="one prompt cannot be split"):
        calibrate(llm, prompts[:1], SAMPLED, command="")
    short = dataclasses.replace(SAMPLED, max_new_tokens=6)
    with pytest.raises(DataError, match=r"verified rounds .* at least 20"):
        calibrate(llm, prompts[:2], short, command="")


def test_few_rounds_are_said(result):
    assert "few: a perfect predictor would show an ECE of" in result.remarks[0]


def test_what_a_fit_could_not_go_beyond_is_said(result):
    inner = {"temperature": 2.0, "temperature_alone": 2.0, "offset": 0.5, "entropy_weight": -0.5}
    positions = [dataclasses.replace(own, **inner) for own in result.positions]
    assert not any("at the edge" in line for line in remarks_on(positions))
    for name, value, said in (
        ("temperature", 10.0, "the temperature of positions [2] is at the edge of what is tried"),
        ("temperature_alone", 0.1, "the temperature alone of positions [2] is at the edge"),
        ("offset", -5.0, "the offset of positions [2] is at the edge of what is tried, -5 to 5"),
        ("entropy_weight", 5.0, "the entropy weight of positions [2] is at the edge"),
    ):
        edge = [positions[0], dataclasses.replace(positions[1], **{name: value}), *positions[2:]]
        assert [line for line in remarks_on(edge) if said in line], name


def test_the_candidate_set_is_what_a_slot_may_propose(folder):
    bundle = read_bundle(folder / "draft")
    assert candidate_set(bundle) == CandidateSet(256, 264)
    info = dataclasses.replace(bundle.info, candidates=0)
    assert candidate_set(dataclasses.replace(bundle, info=info)) == CandidateSet(264, 264)


def test_other_engines_files_and_the_diagram(result, tmp_path):
    path = export_file(result, "sglang", tmp_path / "sts.json")
    assert json.loads(path.read_text())["temperatures"] == [*result.entry.temperatures_alone]
    assert export_file(result, "tensorrt-llm", None).parent == result.path.parent
    draw(result, tmp_path / "reliability.svg")
    drawn = (tmp_path / "reliability.svg").read_text()
    assert drawn.count('id="axes_') == BLOCK
    with pytest.raises(DataError, match=r"cannot draw .*a\.svg"):
        draw(result, tmp_path / "none" / "a.svg")


def test_a_bundle_with_calibrations_is_still_replaced_whole(result, folder, tmp_path):
    copy = Path(shutil.copytree(folder / "draft", tmp_path / "copy"))
    write_draft(copy, write_target(tmp_path / "target"))
    assert not [*copy.glob("calibration*")]


def test_curves_are_the_reports_own_numbers(result):
    for position, (before, after) in zip(result.positions, result.curves, strict=True):
        for curve, ece in ((before, position.ece_before), (after, position.ece_after)):
            assert sum(curve.counts) == position.samples
            gaps = np.abs(np.subtract(curve.predicted, curve.accepted))
            assert np.dot(gaps, curve.counts) / position.samples == pytest.approx(ece)


def test_files_that_could_not_be_written_are_refused_first(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'sglang'"):
        check_files("sglanf", None, None)
    with pytest.raises(ConfigError, match="--output is where --format writes"):
        check_files(None, tmp_path / "x.json", None)
    with pytest.raises(ConfigError, match="a folder that exists"):
        check_files(None, None, tmp_path / "none" / "x.png")
    with pytest.raises(ConfigError, match=r"end in \.png, \.svg, \.pdf"):
        check_files(None, None, tmp_path / "x.txt")
    with pytest.raises(ConfigError, match="a folder that exists"):
        check_files("sglang", tmp_path, None)


def test_recalibration_is_off_unless_asked_for_and_probes(folder, result, tmp_path):
    target, draft = str(folder / "target"), folder / "draft"
    assert not isinstance(LLM(target, draft=draft, weights="fp32").policy, Probing)
    llm = LLM(target, draft=draft, weights="fp32", policy="fixed:1", recalibrate=True)
    assert isinstance(llm.calibration, OnlineCalibration)
    assert isinstance(llm.policy, Probing)
    assert llm.policy.name == "fixed:1"
    generation = llm.start([[5, 6, 7]] * 3, SamplingParams(max_new_tokens=240, ignore_eos=True))
    generation.run()
    rounds = [record for step in generation.records for record in step.rounds]
    lengths = {record.admitted for record in rounds}
    # 0: a text's last token may have no room for a draft.
    assert {1, BLOCK} <= lengths <= {0, 1, BLOCK}
    assert 1 <= sum(record.admitted == BLOCK for record in rounds) < 9
    with pytest.raises(ConfigError, match="needs a draft bundle"):
        LLM(target, weights="fp32", recalibrate=True)
