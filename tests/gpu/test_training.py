"""Training on a GPU against training on the CPU: skipped where there is none."""

from dataclasses import replace

import pytest
import torch

from dspark.data.template import template_hash
from dspark.recipes.draft_shape import DraftShape
from dspark.recipes.features import FeatureExtractor
from dspark.recipes.make_bundle import BundleRun, make_bundle
from dspark.recipes.progress import Progress
from dspark.recipes.regenerate import RegenerateConfig
from dspark.recipes.synthesize import SynthesizeConfig
from dspark.recipes.train import TrainConfig, TrainJob
from dspark.targets.load import load_target
from dspark.training.state import load_state
from tests.drafters.tiny import tiny_model
from tests.gpu.devices import every_device, on_cuda
from tests.training.device_runs import KINDS, SEQUENCES, on, trainer_of

every_kind = pytest.mark.parametrize("kind", KINDS)


def assert_same_way(kind, trainer, expected):
    """The weights went where they went on the CPU, but for 2% of the way: Adam makes whole steps of
    gradients that are nothing but rounding, so single ones may differ by more."""
    start = tiny_model(KINDS[kind][0]).state_dict()
    ours, theirs = (
        torch.cat([(run.weights()[name].cpu() - start[name]).flatten() for name in start])
        for run in (trainer, expected)
    )
    assert float(theirs.norm()) > 0
    assert float((ours - theirs).norm() / theirs.norm()) < 0.02


@every_device
@every_kind
def test_five_steps_are_those_of_the_cpu(device, kind, tmp_path):
    expected = trainer_of(kind, tmp_path / "cpu", on("cpu"), steps=5)
    trainer = trainer_of(kind, tmp_path / "device", on(device), steps=5)
    for _ in range(5):
        for run in (expected, trainer):
            run.window = {}
            run.training_step()
        for name in ("loss", "gradient_norm", "accepted_length"):
            got, wanted = (run.window[name].value.item() for run in (trainer, expected))
            assert got == pytest.approx(wanted, rel=2e-3), (name, trainer.step)
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {device}
    assert_same_way(kind, trainer, expected)
    checked, theirs = trainer.validate(), expected.validate()
    assert checked["accepted_length"] == pytest.approx(theirs["accepted_length"], rel=5e-3)


@every_device
@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_saved_there_and_resumed_on_the_cpu(device, kind, tmp_path):
    whole = trainer_of(kind, tmp_path / "whole", on("cpu"))
    whole.run()
    for folder, first, second in (("came", device, "cpu"), ("went", "cpu", device)):
        begun = trainer_of(kind, tmp_path / folder, on(first))
        begun.training_step()
        begun.training_step()
        begun.save()
        saved = load_state(tmp_path / folder)
        assert {tensor.device.type for tensor in saved.tensors.values()} == {"cpu"}
        resumed = trainer_of(kind, tmp_path / folder, on(second))
        assert resumed.step == 2
        assert resumed.run().finished
        assert_same_way(kind, resumed, whole)


@every_device
@every_kind
def test_bf16_products_stay_close_to_float32(device, kind, tmp_path):
    exact = trainer_of(kind, tmp_path / "exact", on(device))
    rounded = trainer_of(kind, tmp_path / "bf16", on(device), compute_dtype="bfloat16")
    for run in (exact, rounded):
        run.training_step()
    loss = rounded.window["loss"]
    assert loss.numerator.dtype == torch.float32
    assert {parameter.dtype for parameter in rounded.model.parameters()} == {torch.float32}
    assert loss.value.item() == pytest.approx(exact.window["loss"].value.item(), rel=0.05)


@every_device
def test_features_of_a_target_there(device, target_folder, loaded_target):
    there = load_target(
        str(target_folder), weights="fp32", device=device, template_hash=template_hash
    )
    taps = (0, 1)
    texts = [sequence.token_ids for sequence in SEQUENCES[:3]]
    expected = FeatureExtractor(loaded_target.target, taps)(texts)
    for found, wanted in zip(FeatureExtractor(there.target, taps)(texts), expected, strict=True):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.device.type == device
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
@pytest.mark.parametrize("features", ["bf16", "none"])
def test_from_nothing_to_a_bundle(device, features, talker_folder, tmp_path):
    """Synthesis, responses, features, training and evaluation; then the same run again, resumed."""
    run = BundleRun(
        command="dspark train", target=str(talker_folder), device=device,
        output=tmp_path / "bundle", synthesis=SynthesizeConfig(count=30),
        responses=RegenerateConfig(max_new_tokens=8), evaluation_prompts=2,
        job=TrainJob(
            shape=DraftShape(taps=1, layers=1, block_size=3, markov_rank=4),
            train=TrainConfig(steps=2), features=features,
        ),
    )  # fmt: skip
    result = make_bundle(run, Progress(quiet=True))
    assert result.plan.device.startswith(device) and result.plan.memory_bytes > 0
    assert result.training.finished and result.evaluation is not None
    again = make_bundle(replace(run, evaluation_prompts=0), Progress(quiet=True))
    assert again.plan is None and again.training.steps == 2
    lengths = [r.training.validation["accepted_length"] for r in (again, result)]
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-2)
