"""Runs: exact resume after being killed anywhere, learning, stopping, and what is refused."""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.core.errors import ConfigError, DataError, DSparkError
from dspark.training.config import TrainConfig
from dspark.training.state import load_state
from dspark.training.trainer import Trainer
from tests.training.tiny import K, tiny_binding, tiny_drafter, tiny_sequences, tiny_store

SEQUENCES = tiny_sequences(12)
HELD_OUT = tiny_sequences(3, seed=9)


class Clock:
    """One second a reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


NO_SAVES = {"save_every_seconds": 1e9}
"""But the last: each waits for the disk."""


def _trainer(folder: Path, **changes: Any) -> Trainer:
    options = {
        "steps": 12, "anchors_per_step": 10, "anchors_per_sequence": 4, "learning_rate": 1e-2,
        "save_every_seconds": 3.0, "log_every": 2, "validate_every": 5, "compute_dtype": "float32",
    }  # fmt: skip
    model = changes.pop("model", None) or tiny_drafter()
    sequences = changes.pop("sequences", SEQUENCES)
    report = changes.pop("report", lambda metrics: None)
    draft_token_ids = changes.pop("draft_token_ids", None)
    store = tiny_store(folder.parent / "features", [*sequences, *HELD_OUT])
    config = TrainConfig.from_dict({**options, **changes})
    return Trainer(
        model,
        tiny_binding(),
        store,
        sequences,
        HELD_OUT,
        config,
        folder,
        draft_token_ids=draft_token_ids,
        clock=Clock(),
        report=report,
    )


def _bits(trainer: Trainer) -> dict[str, torch.Tensor]:
    return dict(trainer.model.state_dict())


def _assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trainer]:
    """A run that nothing interrupted, by its compute type."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path_factory.mktemp(dtype)
        found[dtype] = _trainer(folder / "whole", compute_dtype=dtype, **NO_SAVES)
        found[dtype].run()
    return found


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("killed_at", [1, 4, 7, 11])
def test_killed_and_resumed_is_bit_equal(
    tmp_path: Path, killed_at: int, compute_dtype: str, wholes: dict[str, Trainer]
) -> None:
    whole = wholes[compute_dtype]

    class Killed(BaseException):
        pass

    broken = _trainer(tmp_path / "broken", compute_dtype=compute_dtype)
    step = broken.training_step

    def dying_step() -> None:
        if broken.step == killed_at:
            raise Killed
        step()

    broken.training_step = dying_step  # type: ignore[method-assign]
    with pytest.raises(Killed):
        broken.run()
    resumed = _trainer(
        tmp_path / "broken", model=tiny_drafter(seed=77), compute_dtype=compute_dtype
    )
    assert resumed.step <= killed_at
    result = resumed.run()
    assert result.steps == 12 and result.finished and result.positions == 12 * 10 * K
    _assert_same(_bits(whole), _bits(resumed))
    assert result.validation == whole.validate()
    steps = [
        json.loads(x) for x in (tmp_path / "broken" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [s["step"] for s in steps if "loss" in s] == [2, 4, 6, 8, 10, 12]


def test_damaged_state_falls_back_to_the_one_before(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path / "run")
    trainer.training_step()
    trainer.save()
    trainer.training_step()
    trainer.save()
    state = tmp_path / "run" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-100])
    assert _trainer(tmp_path / "run").step == 1
    (tmp_path / "run" / "state.previous.safetensors").write_bytes(b"junk")
    with pytest.raises(DataError, match="damaged"):
        _trainer(tmp_path / "run")


def test_killed_in_the_middle_of_saving(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path / "run")
    for _ in range(2):
        trainer.training_step()
        trainer.save()
    (tmp_path / "run" / "state.partial").write_bytes(b"half a state")
    assert _trainer(tmp_path / "run").step == 2
    # Between the two renames only the older generation has its name.
    (tmp_path / "run" / "state.safetensors").unlink()
    resumed = _trainer(tmp_path / "run")
    assert resumed.step == 1
    resumed.training_step()
    _assert_same(_bits(trainer), _bits(resumed))


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    first = _trainer(tmp_path / "run").run()
    files = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    again = _trainer(tmp_path / "run").run()
    assert again.finished and again.steps == 12 and again.validation == first.validation
    assert files == {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}


def test_time_limit_stops_between_steps_and_resumes(
    tmp_path: Path, wholes: dict[str, Trainer]
) -> None:
    first = _trainer(tmp_path / "run", max_seconds=4.0)
    result = first.run()
    assert not result.finished and 0 < result.steps < 12
    resumed = _trainer(tmp_path / "run", max_seconds=None)
    assert resumed.step == result.steps
    assert resumed.run().finished
    _assert_same(_bits(wholes["float32"]), _bits(resumed))


def test_ctrl_c_saves_the_finished_step(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path / "run", save_every_seconds=1e9)
    step = trainer.training_step

    def interrupted_step() -> None:
        step()
        if trainer.step == 3:
            signal.raise_signal(signal.SIGINT)

    trainer.training_step = interrupted_step  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    state = load_state(tmp_path / "run")
    assert state is not None and state.numbers["step"] == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_the_last_validation_loses_no_step(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path / "run", save_every_seconds=1e9, validate_every=1000)

    def interrupted_validation() -> None:
        raise KeyboardInterrupt

    trainer.validate = interrupted_validation  # type: ignore[assignment,method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    state = load_state(tmp_path / "run")
    assert state is not None and state.numbers["step"] == 12
    again = _trainer(tmp_path / "run")
    result = again.run()
    assert result.finished and result.steps == 12 and result.validation
    _assert_same(_bits(trainer), _bits(again))


def test_one_sequence_can_be_learned(tmp_path: Path) -> None:
    reports: list[dict[str, Any]] = []
    trainer = _trainer(
        tmp_path / "run", sequences=SEQUENCES[:1], steps=150, validate_every=1000, log_every=10,
        report=reports.append, **NO_SAVES,
    )  # fmt: skip
    trainer.run()
    losses = [r["loss"] for r in reports if "loss" in r]
    lengths = [r["accepted_length"] for r in reports if "loss" in r]
    assert losses[-1] < 0.6 * losses[0]
    assert lengths[-1] > lengths[0] + 1.0


def test_not_a_number_stops_before_the_update(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path / "run")
    trainer.training_step()
    before = {name: tensor.clone() for name, tensor in _bits(trainer).items()}
    trainer.head.weight_IV[0, 0] = float("nan")
    with pytest.raises(DSparkError, match=r"step 1: the loss is nan.*bad-batch-1") as caught:
        trainer.training_step()
    assert caught.value.exit_code == 1
    assert (tmp_path / "run" / "bad-batch-1.safetensors").exists()
    _assert_same(before, _bits(trainer))


def test_learning_rate_moves_from_the_first_step_to_the_last() -> None:
    for steps in (1, 2, 3, 100):
        config = TrainConfig(steps=steps, warmup=0.04)
        rates = [config.learning_rate_at(step) for step in range(steps)]
        assert min(rates) > 0 and max(rates) == pytest.approx(config.learning_rate)
        assert rates[-1] == min(rates[round(0.04 * steps) :])
    config = TrainConfig(steps=100, warmup=0.1)
    assert config.learning_rate_at(0) == pytest.approx(6e-5)
    assert config.learning_rate_at(55) == pytest.approx(3e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rat": 1}, "did you mean 'learning_rate'"),
        ({"objective": {"l2": 1.0}}, "unknown training key 'l2'; did you mean 'l1'"),
        ({"objective": {"loss_decay": 0.0}}, "loss_decay is 0.0"),
        ({"steps": 0}, "steps is 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"compute_dtype": "float8"}, "compute_dtype is float8"),
        ({"warmup": 1.5}, "warmup is 1.5"),
    ],
)
def test_bad_configuration(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig.from_dict(values)


def test_resuming_something_else_is_refused(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path / "run")
    trainer.training_step()
    trainer.save()
    with pytest.raises(ConfigError, match=r"started with learning_rate 0\.01, not 0\.1"):
        _trainer(tmp_path / "run", learning_rate=0.1)
    with pytest.raises(DataError, match="not those"):
        _trainer(tmp_path / "run", sequences=SEQUENCES[:-1])
    with pytest.raises(DataError, match="another shape"):
        _trainer(tmp_path / "run", model=tiny_drafter(rank=4))
    with pytest.raises(DataError, match="no training sequence"):
        _trainer(tmp_path / "other", sequences=[])


def test_a_draft_vocabulary_is_part_of_the_run(tmp_path: Path) -> None:
    ids = torch.arange(5, 40)
    trainer = _trainer(tmp_path / "run", draft_token_ids=ids)
    trainer.training_step()
    trainer.save()
    _trainer(tmp_path / "run", draft_token_ids=ids.clone())
    for other in (ids + 1, None):
        with pytest.raises(DataError, match="was started with a draft vocabulary of 35 tokens"):
            _trainer(tmp_path / "run", draft_token_ids=other)
    plain = _trainer(tmp_path / "plain")
    plain.training_step()
    plain.save()
    with pytest.raises(DataError, match="was started with no draft vocabulary, not a draft voc"):
        _trainer(tmp_path / "plain", draft_token_ids=ids)
    assert plain.window["accepted_length"].value != trainer.window["accepted_length"].value


def test_a_full_disk_keeps_the_state_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(tmp_path / "run")
    trainer.training_step()
    trainer.save()
    trainer.training_step()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DSparkError, match=r"No space left.*saved before is whole"):
            trainer.save()
    assert not list((tmp_path / "run").glob("*.partial"))
    assert _trainer(tmp_path / "run").step == 1
