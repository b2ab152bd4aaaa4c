"""The training room on another device than the CPU, and in bfloat16.

There is no GPU here, so a second device stands for one (`second_device`): a tensor that is made on
the CPU by mistake, or read as numpy, stops the run. `tests/gpu` repeats runs on a real one.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dspark.data.packing import pack
from dspark.training.batch import load_batch
from dspark.training.config import TrainConfig
from dspark.training.features import FeatureStore, OnlineFeatures
from dspark.training.objective import objective
from dspark.training.precision import autocast, matrix_dtype
from dspark.training.ranks import Ranks
from dspark.training.schedule import batch_stream
from dspark.training.state import load_state
from dspark.training.teacher import Teacher
from dspark.training.trainer import Trainer
from dspark.training.vocab_head import VocabHead
from tests.training.device_runs import KINDS, SEQUENCES, STEPS, features_of, on, trainer_of
from tests.training.second_device import (
    THERE,
    SecondDevice,
    There,
    binding_there,
    model_there,
)

CPU = torch.device("cpu")
here = on("cpu")
every_kind = pytest.mark.parametrize("kind", KINDS)


def there(model: Any, binding: Any) -> Any:
    return model_there(model), binding_there(binding)


@pytest.fixture
def second_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch has a list of devices with fused kernels, on which this one is not.
    adam = import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_device_dtype_check_for_fused", lambda parameter: None)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in trainer.weights().items()}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6, msg=name)


class TestTheSecondDevice:
    """It refuses what a GPU refuses, or the tests below could not fail."""

    def test_tensors_of_both_devices_do_not_mix(self) -> None:
        with SecondDevice():
            ours = torch.arange(3.0, device=THERE)
            with pytest.raises(RuntimeError, match="tensors on two devices"):
                ours + torch.ones(3)
            with pytest.raises(RuntimeError, match="tensors on two devices"):
                ours[torch.tensor([0, 1])]
            assert isinstance(ours * 2 + torch.tensor(1.0), There)

    def test_what_names_no_device_is_made_on_the_cpu(self) -> None:
        with SecondDevice():
            assert type(torch.zeros(3)) is type(torch.arange(3)) is Tensor
            made = torch.zeros(3, device=THERE)
            assert isinstance(made, There) and isinstance(made.new_empty(2), There)
            assert isinstance(torch.ones_like(made), There)

    def test_its_numbers_are_not_numpy(self) -> None:
        with SecondDevice():
            made = torch.ones(3, device=THERE)
            with pytest.raises((RuntimeError, TypeError)):
                made.numpy()
            assert made.cpu().numpy().tolist() == [1.0] * 3

    def test_it_counts_who_waits_for_it(self) -> None:
        with SecondDevice():
            made, before = torch.ones(3, device=THERE), There.reads
            _ = made.sum() * made
            assert There.reads == before
            _ = made[0].item(), made.cpu(), made.tolist(), made.nonzero()
            assert There.reads == before + 4


@every_kind
def test_a_run_there_is_the_run_here(kind: str, tmp_path: Path, second_device: None) -> None:
    expected = trainer_of(kind, tmp_path / "here", here)
    result = expected.run()
    with SecondDevice():
        trainer = trainer_of(kind, tmp_path / "there", there)
        got = trainer.run()
        assert all(isinstance(parameter, There) for parameter in trainer.model.parameters())
        for moments in trainer.optimizer.state.values():
            assert all(isinstance(tensor, There) for tensor in moments.values())
    assert_close(weights(trainer), weights(expected))
    assert got.steps == STEPS and got.validation.keys() == result.validation.keys()
    for name, value in result.validation.items():
        assert got.validation[name] == pytest.approx(value, abs=2e-5)


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_a_run_changes_devices(kind: str, tmp_path: Path, second_device: None) -> None:
    """Saved there and resumed here, and the other way round; what is saved is on the CPU."""
    whole = trainer_of(kind, tmp_path / "whole", here)
    whole.run()

    def two_steps(folder: Path, move: Any) -> None:
        trainer = trainer_of(kind, folder, move)
        trainer.training_step()
        trainer.training_step()
        trainer.save()

    with SecondDevice():
        two_steps(tmp_path / "came", there)
    state = load_state(tmp_path / "came")
    assert state is not None and {type(tensor) for tensor in state.tensors.values()} == {Tensor}
    came = trainer_of(kind, tmp_path / "came", here)
    assert came.step == 2
    came.run()
    assert_close(weights(came), weights(whole))

    two_steps(tmp_path / "went", here)
    with SecondDevice():
        went = trainer_of(kind, tmp_path / "went", there)
        assert went.step == 2
        went.run()
    assert_close(weights(went), weights(whole))


def test_a_step_waits_for_its_device_five_times(tmp_path: Path, second_device: None) -> None:
    """Loss, gradient norm, twice where sequences begin and end, and once whose row is whose."""
    with SecondDevice():
        trainer = trainer_of("dspark", tmp_path, there, anchors_per_step=40)
        trainer.training_step()
        before = There.reads
        trainer.training_step()
        assert There.reads - before == 5


def test_a_batch_that_went_wrong_there_is_saved(tmp_path: Path, second_device: None) -> None:
    with SecondDevice():
        trainer = trainer_of("dspark", tmp_path, there)
        trainer.head.weight_IV[0, 0] = float("nan")
        with pytest.raises(Exception, match="step 0: the loss is nan"):
            trainer.training_step()
    assert (tmp_path / "bad-batch-0.safetensors").exists()


def test_features_that_were_computed_there(tmp_path: Path) -> None:
    """A store is on disk, and so on the CPU; without one they stay where they are."""
    config, _ = KINDS["dspark"]
    text = SEQUENCES[0].token_ids
    plain = features_of(config)

    def source(sequences: list[Any]) -> list[tuple[Tensor, Tensor]]:
        found = plain._source(sequences)
        return [(There(taps), There(final)) for taps, final in found]

    store = FeatureStore(
        tmp_path, target="tiny", tap_layers=config.target_layer_ids, hidden_size=config.hidden_size
    )
    positions = SEQUENCES[0].supervised.nonzero()[0]
    with SecondDevice():
        store.fill([text], source)
        online = OnlineFeatures(source)
        context, final = online.context(text, 3), online.final(text, positions)
        assert isinstance(context, There) and isinstance(final, There)
    assert type(store.context(text, 3)) is Tensor
    assert torch.equal(store.context(text, 3), context.cpu())
    assert torch.equal(store.final(text, positions), final.cpu())


def test_teachers_send_from_the_cpu() -> None:
    config, _ = KINDS["dspark"]
    plain = features_of(config)._source
    train = TrainConfig(anchors_per_step=6)
    stream = batch_stream(SEQUENCES, train, config.block_size)

    def source(sequences: list[Any]) -> list[tuple[Tensor, Tensor]]:
        return [(There(taps), There(final)) for taps, final in plain(sequences)]

    def rows(source: Any) -> list[Tensor]:
        teacher = Teacher(Ranks(rank=1, drafters=1, teachers=1), source, stream, [], [])
        pairs = teacher._rows(packed, SEQUENCES)
        return [tensor for pair in pairs for tensor in pair]

    packed = stream.next_batch()
    with SecondDevice():
        sent = rows(source)
    assert {type(tensor) for tensor in sent} == {Tensor}
    assert all(torch.equal(one, other) for one, other in zip(sent, rows(plain), strict=True))


@every_kind
def test_bf16_products_there(kind: str, tmp_path: Path) -> None:
    """The vocabulary's products are bfloat16 by themselves, without autocast."""
    config, weights_of = KINDS[kind]
    chosen = [(i, SEQUENCES[i].supervised.nonzero()[0][:2] - 1) for i in range(4)]
    packed = pack(SEQUENCES, chosen, config.block_size)

    def loss(move: Any, device: Any) -> Tensor:
        trainer = trainer_of(kind, tmp_path, move)
        model, binding = trainer.loss.model, trainer.loss.binding
        head = VocabHead(binding, model.latent_size, torch.bfloat16)
        batch = load_batch(packed, SEQUENCES, features_of(config), device)
        step = objective(model, binding, head, batch, weights_of)
        step.loss.backward()
        return step.loss.detach().cpu()

    with SecondDevice():
        got = loss(there, THERE)
    torch.testing.assert_close(got, loss(here, CPU), rtol=1e-4, atol=1e-6)


@every_kind
def test_bf16_autocast_keeps_losses_and_gradients_in_float32(kind: str, tmp_path: Path) -> None:
    exact = trainer_of(kind, tmp_path / "exact", here)
    trainer = trainer_of(kind, tmp_path / "bf16", here, compute_dtype="bfloat16")
    assert trainer.dtype == torch.bfloat16
    products, found = set(), []
    for module in trainer.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, inputs, output: products.add(output.dtype))
    wrapped = trainer.loss

    def recording(*args: Any) -> Any:
        assert torch.is_autocast_enabled("cpu")
        found.append(wrapped(*args))
        return found[-1]

    trainer.loss = recording  # type: ignore[assignment]
    exact.training_step()
    trainer.training_step()
    assert not torch.is_autocast_enabled("cpu")
    assert products == {torch.bfloat16}
    loss, metrics = found[0]
    assert loss.dtype == torch.float32
    for name, ratio in metrics.items():
        assert ratio.value.dtype == torch.float32, name
    for tensor in (*trainer.model.parameters(), *trainer.window["loss"].numerator[None]):
        assert tensor.dtype == torch.float32
    for moments in trainer.optimizer.state.values():
        assert {tensor.dtype for tensor in moments.values()} == {torch.float32}
    ours, theirs = trainer.window["loss"].value.item(), exact.window["loss"].value.item()
    assert ours != theirs and ours == pytest.approx(theirs, rel=0.05)


def test_what_products_are_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:1")
    for capability, expected in (((7, 5), torch.float32), ((9, 0), torch.bfloat16)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _, c=capability: c)
        assert matrix_dtype("auto", gpu) == expected
    for wanted, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        assert matrix_dtype(wanted, gpu) == matrix_dtype(wanted, CPU) == dtype
    with autocast(CPU, torch.float32):
        assert not torch.is_autocast_enabled("cpu")
    with autocast(CPU, torch.bfloat16):
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
