"""The training run: steps, validation, saving, stopping, resuming.

Every random choice is a function of (seed, epoch, sequence), so weights, optimiser moments, the
step and the cursor are the whole state: a run that was killed and resumed ends in the same bits
(law 9).
"""

import hashlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from dspark.core.errors import DataError, DSparkError
from dspark.data.packing import BatchStream, Cursor, TrainingSequence, every_block
from dspark.drafters.model import DraftModel
from dspark.nn.seams import Binding
from dspark.training.batch import Batch, load_batch
from dspark.training.config import TrainConfig
from dspark.training.features import FeatureStore
from dspark.training.objective import Ratio, Step, objective
from dspark.training.state import RunState, load_state, save_state
from dspark.training.vocab_head import VocabHead

Metrics = dict[str, Any]
"""Name -> number, or one number a slot."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    steps: int
    positions: int
    """Drafted positions trained on, over the whole run."""
    seconds: float
    """Time spent in training steps and validation, over the whole run, resumed parts included."""
    finished: bool
    """False: stopped by `max_seconds`, to be resumed."""
    validation: Metrics
    """accepted_length, acceptance and conditional_acceptance per slot, cross_entropy,
    confidence_error; empty without held-out sequences."""


class Trainer:
    """One run in one folder. `model` holds the starting weights; resuming overwrites them."""

    def __init__(
        self,
        model: DraftModel,
        binding: Binding,
        store: FeatureStore,
        sequences: Sequence[TrainingSequence],
        held_out: Sequence[TrainingSequence],
        config: TrainConfig,
        folder: Path | str,
        *,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[Metrics], None] = lambda metrics: None,
    ) -> None:
        """Starts the run, or resumes it if the folder holds its state.

        `report` gets every line of metrics. Raises DataError or ConfigError where the folder holds
        another run.
        """
        self.model, self.binding, self.store, self.config = model, binding, store, config
        self.sequences, self.held_out = sequences, held_out
        self.folder = Path(folder)
        self.clock, self.report = clock, report
        self.block_size = model.config.block_size
        self.dtype = config.torch_dtype
        self.head = VocabHead(binding, model.latent_size, self.dtype)
        self.stream = BatchStream(
            sequences,
            anchors_per_batch=config.anchors_per_step,
            anchors_per_sequence=config.anchors_per_sequence,
            block_size=self.block_size,
            seed=config.seed,
        )
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.step, self.positions, self.seconds = 0, 0, 0.0
        self.window: dict[str, Ratio] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        state = load_state(self.folder)
        if state is not None:
            self._restore(state)
        self._trim_metrics()

    def training_step(self) -> None:
        """Forward, backward, update: one batch of `anchors_per_step` blocks."""
        batch = load_batch(self.stream.next_batch(), self.sequences, self.store)
        with self._autocast():
            step = objective(self.model, self.binding, self.head, batch, self.config.objective)
        step.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        if not (math.isfinite(step.loss.item()) and math.isfinite(norm.item())):
            raise self._not_finite(batch, step, norm.item())
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.positions += self.config.anchors_per_step * self.block_size
        one = torch.ones(())
        _add(self.window, {**step.metrics, "gradient_norm": Ratio(norm, one)})

    def run(self) -> TrainResult:
        """Trains to the end, `max_seconds` or Ctrl-C (KeyboardInterrupt, after saving)."""
        if self.step == 0:
            self.save()  # the starting weights are part of the run
        begun = last_save = mark = self.clock()
        resumed_at = self.step
        self.model.train()
        with _deferred_interrupt() as interrupted:
            while self.step < self.config.steps:
                self.training_step()
                now = self.clock()
                self.seconds += now - mark
                mark = now
                if self.step % self.config.log_every == 0 or self.step == self.config.steps:
                    self._log_window()
                if self.step % self.config.validate_every == 0 and self.step < self.config.steps:
                    self._log({"step": self.step, "validation": self.validate()})
                limit = self.config.max_seconds
                stop = interrupted() or (limit is not None and now - begun >= limit)
                # The last step, too: validation takes its time, and may be interrupted.
                due = self.step == self.config.steps or stop
                if due or now - last_save >= self.config.save_every_seconds:
                    self.save()
                    last_save = now
                if interrupted():
                    raise KeyboardInterrupt
                if stop:
                    break
        finished = self.step >= self.config.steps
        validation = self.validate()
        self.seconds += self.clock() - mark
        if finished and self.step > resumed_at:
            self.save()
            self._log(
                {"step": self.step, "seconds": round(self.seconds, 1), "validation": validation}
            )
        return TrainResult(self.step, self.positions, self.seconds, finished, validation)

    @torch.no_grad()
    def validate(self) -> Metrics:
        """Analytic numbers on the held-out responses: always the same blocks."""
        totals: dict[str, Ratio] = {}
        for packed in every_block(
            self.held_out,
            anchors_per_batch=self.config.anchors_per_step,
            anchors_per_sequence=self.config.validation_anchors,
            block_size=self.block_size,
        ):
            batch = load_batch(packed, self.held_out, self.store)
            with self._autocast():
                step = objective(self.model, self.binding, self.head, batch, self.config.objective)
            _add(totals, step.metrics)
        return _numbers(totals)

    def save(self) -> None:
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, tensor in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = tensor
        numbers = {
            "step": self.step,
            "positions": self.positions,
            "seconds": self.seconds,
            "cursor": [self.stream.cursor.epoch, self.stream.cursor.index],
            "config": self.config.to_dict(),
            "data": _fingerprint(self.sequences),
            "compute_dtype": str(self.dtype),
        }
        save_state(self.folder, RunState(tensors, numbers))

    def _restore(self, state: RunState) -> None:
        numbers = state.numbers
        self.config.check_resume(numbers["config"])
        if numbers["data"] != _fingerprint(self.sequences):
            raise DataError(
                f"the training sequences are not those {self.folder} was started with; "
                f"start another run folder from its last bundle"
            )
        if numbers["compute_dtype"] != str(self.dtype):
            raise DataError(
                f"{self.folder} was computed in {numbers['compute_dtype']}, here it would be "
                f"{self.dtype}; start another run folder"
            )
        prefix = "model."
        weights = {k[len(prefix) :]: v for k, v in state.tensors.items() if k.startswith(prefix)}
        try:
            self.model.load_state_dict(weights)
        except RuntimeError:
            raise DataError(
                f"{self.folder} holds a drafter of another shape; start another run folder"
            ) from None
        for name, parameter in self.model.named_parameters():
            entry = f"optimizer.{name}."
            moments = {k[len(entry) :]: v for k, v in state.tensors.items() if k.startswith(entry)}
            if moments:
                self.optimizer.state[parameter] = moments
        self.step, self.positions = numbers["step"], numbers["positions"]
        self.seconds = numbers["seconds"]
        self.stream.cursor = Cursor(*numbers["cursor"])

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def _not_finite(self, batch: Batch, step: Step, norm: float) -> DSparkError:
        path = self.folder / f"bad-batch-{self.step}.safetensors"
        save_file({item.name: getattr(batch, item.name) for item in fields(Batch)}, path)
        return DSparkError(
            f"step {self.step}: the loss is {step.loss.item()} and the gradient norm {norm}; "
            f"the weights are those before this step, its batch is in {path}; "
            f"lower learning_rate, or check the features"
        )

    def _log_window(self) -> None:
        rate = self.positions / self.seconds if self.seconds else 0.0
        self._log(
            {
                "step": self.step,
                "seconds": round(self.seconds, 1),
                "positions_per_second": round(rate),
                "learning_rate": self.config.learning_rate_at(self.step - 1),
                **_numbers(self.window),
            }
        )
        self.window = {}

    def _log(self, metrics: Metrics) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        self.report(metrics)

    def _trim_metrics(self) -> None:
        """Drops a torn last line, and the lines of steps taken after the last save."""
        path = self.folder / "metrics.jsonl"
        if path.exists():
            lines = path.read_text().split("\n")[:-1]
            path.write_text("".join(f"{x}\n" for x in lines if json.loads(x)["step"] <= self.step))


@contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted and waits for the end of the step; a second one is not patient."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed: list[bool] = []

    def note(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, previous)


def _add(totals: dict[str, Ratio], metrics: dict[str, Ratio]) -> None:
    for name, ratio in metrics.items():
        totals[name] = totals[name] + ratio if name in totals else ratio


def _numbers(totals: dict[str, Ratio]) -> Metrics:
    values = {name: ratio.value.double() for name, ratio in totals.items()}
    return {name: np.round(value.numpy(), 5).tolist() for name, value in values.items()}


def _fingerprint(sequences: Sequence[TrainingSequence]) -> str:
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(len(sequence.token_ids).to_bytes(8, "little"))
        digest.update(np.asarray(sequence.token_ids, dtype="<i4").tobytes())
        digest.update(np.packbits(sequence.supervised).tobytes())
    return digest.hexdigest()
