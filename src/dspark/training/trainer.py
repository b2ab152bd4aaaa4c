"""The training run: steps, validation, saving, stopping, resuming.

Every random choice is a function of (seed, epoch, sequence), so weights, optimiser moments, the
step and the cursor are the whole state: a run that was killed and resumed ends in the same bits
(law 9). With several ranks each trains on its share of every batch, and all take the same steps.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark.core.errors import DataError, DSparkError
from dspark.data.packing import Cursor, PackedBlocks, TrainingSequence
from dspark.drafters.model import DraftModel
from dspark.nn.seams import Binding
from dspark.training.batch import Batch, Features, load_batch
from dspark.training.config import TrainConfig
from dspark.training.interrupt import deferred_interrupt
from dspark.training.metrics import Metrics, MetricsFile, add, nothing, numbers
from dspark.training.objective import Ratio, StepLoss, slot_weights
from dspark.training.precision import autocast, matrix_dtype
from dspark.training.ranks import ALONE, Command, Ranks, full
from dspark.training.schedule import (
    batch_stream,
    fingerprint,
    validation_batches,
    validation_rounds,
)
from dspark.training.state import (
    RunState,
    check_draft_tokens,
    load_state,
    restore_moments,
    restore_weights,
    save_state,
    state_tensors,
)
from dspark.training.teacher import Received
from dspark.training.vocab_head import VocabHead


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
        features: Features,
        sequences: Sequence[TrainingSequence],
        held_out: Sequence[TrainingSequence],
        config: TrainConfig,
        folder: Path | str,
        *,
        draft_token_ids: Tensor | None = None,
        ranks: Ranks = ALONE,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[Metrics], None] = lambda metrics: None,
    ) -> None:
        """Starts the run, or resumes it if the folder holds its state, whichever number of ranks
        wrote it. Drafter ranks construct it together, with the same arguments.

        `draft_token_ids` are all that the drafter will propose (None: any); it is trained for that.
        `report` gets every line of metrics, on the first rank. Raises DataError or ConfigError
        where the folder holds another run. The run is on the device of `model` and `binding`.
        """
        ranks.check_divides(config.anchors_per_step)
        self.model, self.features, self.config = model, features, config
        self.sequences, self.held_out = sequences, held_out
        self.folder = Path(folder)
        self.file = MetricsFile(self.folder / "metrics.jsonl")
        self.ranks, self.clock, self.report = ranks, clock, report
        self.block_size = model.config.block_size
        self.device = binding.lm_head_VD.device
        self.dtype = matrix_dtype(config.compute_dtype, self.device)
        self.draft_token_ids = draft_token_ids
        self.head = VocabHead(
            binding, model.latent_size, self.dtype, draft_token_ids=draft_token_ids
        )
        self.stream = batch_stream(sequences, config, self.block_size)
        self.step, self.positions, self.seconds = 0, 0, 0.0
        self.window: dict[str, Ratio] = {}
        state = load_state(self.folder)
        if state is not None:
            self._restore(state)
        # Nothing is written before every rank has read.
        ranks.check_same(self.step, f"state in {self.folder}")
        self.loss = ranks.wrap(StepLoss(model, binding, self.head, config.objective), model)
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        if state is not None:
            restore_moments(model, self.optimizer, state)
        if ranks.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file.trim(self.step)

    def training_step(self) -> None:
        """Forward, backward, update: this rank's share of a batch of `anchors_per_step` blocks."""
        self.ranks.tell(Command.STEP, self.stream.cursor)
        whole = self.stream.next_batch()
        batch = self._load(self.ranks.share(whole), self.sequences)
        with autocast(self.device, self.dtype):
            loss, metrics = self.loss(batch, self._weight(whole))
        (loss * self.ranks.drafters).backward()  # the mean over ranks is the sum of their losses
        norm = full(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip))
        finite = math.isfinite(loss.item()) and math.isfinite(norm.item())
        if any(self.ranks.any(not finite)):
            raise self._not_finite(batch, loss.item(), norm.item())
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.positions += self.config.anchors_per_step * self.block_size
        one = torch.ones_like(norm)
        add(self.window, {**metrics, "gradient_norm": Ratio(norm, one)})

    def run(self) -> TrainResult:
        """Trains to the end, `max_seconds` or Ctrl-C (KeyboardInterrupt, after saving)."""
        with self.ranks.teaching():
            return self._run()

    def _run(self) -> TrainResult:
        if self.step == 0:
            self.save()  # the starting weights are part of the run
        begun = last_save = mark = self.clock()
        resumed_at = self.step
        self.model.train()
        with deferred_interrupt() as interrupted:
            while self.step < self.config.steps:
                self.training_step()
                now = self.clock()
                self.seconds += now - mark
                mark = now
                if self.step % self.config.log_every == 0 or self.step == self.config.steps:
                    self._log_window()
                if self.step % self.config.validate_every == 0 and self.step < self.config.steps:
                    self._log({"step": self.step, "validation": self.validate()})
                due, late, pressed = self.ranks.any(
                    now - last_save >= self.config.save_every_seconds,
                    now - begun >= (self.config.max_seconds or math.inf),
                    interrupted(),
                )
                # The last step, too: validation takes its time, and may be interrupted.
                if due or late or pressed or self.step == self.config.steps:
                    self.save()
                    last_save = now
                if pressed:
                    raise KeyboardInterrupt
                if late:
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
        batches = validation_batches(self.held_out, self.config, self.block_size)
        self.ranks.tell(Command.VALIDATION)
        for taken in validation_rounds(len(batches), self.ranks.drafters):
            index = taken[self.ranks.rank]
            batch = self._load(batches[index], self.held_out)
            with autocast(self.device, self.dtype):
                _, metrics = self.loss(batch)
            counts = index not in taken[: self.ranks.rank]
            add(totals, metrics if counts else nothing(metrics))
        return numbers(self.ranks.add(totals))

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors, whole. Drafter ranks call it together."""
        return {name: full(tensor) for name, tensor in self.model.state_dict().items()}

    def save(self) -> None:
        tensors = state_tensors(self.model, self.optimizer)
        if not self.ranks.is_first:
            return
        if self.draft_token_ids is not None:
            tensors["draft_token_ids"] = self.draft_token_ids
        progress = {
            "step": self.step,
            "positions": self.positions,
            "seconds": self.seconds,
            "cursor": [self.stream.cursor.epoch, self.stream.cursor.index],
            "config": self.config.to_dict(),
            "data": fingerprint(self.sequences),
            "compute_dtype": str(self.dtype),
        }
        save_state(self.folder, RunState(tensors, progress))

    def _restore(self, state: RunState) -> None:
        saved = state.numbers
        self.config.check_resume(saved["config"])
        if saved["data"] != fingerprint(self.sequences):
            raise DataError(
                f"the training sequences are not those {self.folder} was started with; "
                f"start another run folder from its last bundle"
            )
        if saved["compute_dtype"] != str(self.dtype):
            raise DataError(
                f"{self.folder} was computed in {saved['compute_dtype']}, here it would be "
                f"{self.dtype}; start another run folder"
            )
        check_draft_tokens(state, self.draft_token_ids, self.folder)
        restore_weights(self.model, state, self.folder)
        self.step, self.positions = saved["step"], saved["positions"]
        self.seconds = saved["seconds"]
        self.stream.cursor = Cursor(*saved["cursor"])

    def _load(self, packed: PackedBlocks, sequences: Sequence[TrainingSequence]) -> Batch:
        if isinstance(self.features, Received):
            self.features.start_batch()
        return load_batch(packed, sequences, self.features, self.device)

    def _weight(self, whole: PackedBlocks) -> float:
        """Of all supervised slots of a step, on all ranks."""
        supervised_AK = torch.from_numpy(whole.supervised_AK)
        return slot_weights(supervised_AK, self.config.objective.loss_decay).sum().item()

    def _not_finite(self, batch: Batch, loss: float, norm: float) -> DSparkError:
        # The one thing that every rank writes: nobody else has its share.
        rank = "" if self.ranks.drafters == 1 else f"-rank-{self.ranks.rank}"
        path = self.folder / f"bad-batch-{self.step}{rank}.safetensors"
        here = batch.to("cpu")
        save_file({item.name: getattr(here, item.name) for item in fields(Batch)}, path)
        return DSparkError(
            f"step {self.step}: the loss is {loss} and the gradient norm {norm}; "
            f"the weights are those before this step, its batch is in {path}; "
            f"lower learning_rate, or check the features"
        )

    def _log_window(self) -> None:
        window = self.ranks.add(self.window)
        rate = self.positions / self.seconds if self.seconds else 0.0
        self._log(
            {
                "step": self.step,
                "seconds": round(self.seconds, 1),
                "positions_per_second": round(rate),
                "learning_rate": self.config.learning_rate_at(self.step - 1),
                **numbers(window),
            }
        )
        self.window = {}

    def _log(self, metrics: Metrics) -> None:
        if not self.ranks.is_first:
            return
        self.file.append(metrics)
        self.report(metrics)
