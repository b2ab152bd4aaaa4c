"""One rank of several small runs, one after the other: each test looks at one of them.

Starting processes that import torch is what takes the time, so they are started once.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.core.errors import DSparkError
from dspark.training.config import TrainConfig
from dspark.training.ranks import ALONE, Parallel, Ranks, join
from dspark.training.schedule import batch_stream, validation_batches
from dspark.training.teacher import Received, Teacher
from dspark.training.trainer import Trainer, TrainResult
from tests.training.tiny import (
    TAPS,
    D,
    K,
    tiny_binding,
    tiny_drafter,
    tiny_sequences,
    tiny_source,
    tiny_store,
)

SEQUENCES = tiny_sequences(12)
HELD_OUT = tiny_sequences(7, seed=9)
STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    world: int
    teachers: int = 0
    parallel: Parallel = "ddp"
    folder: str | None = None
    """Another run's folder, to resume it."""
    options: dict[str, Any] = field(default_factory=dict)
    last_rank: str = ""
    """What befalls the last drafter rank: interrupt, nan, slow, elsewhere."""


class Online:
    """The features of one process without a store: the target runs for every batch."""

    def context(self, ids: np.ndarray, count: int) -> Tensor:
        return tiny_source([ids])[0][0][:count].to(torch.bfloat16)

    def final(self, ids: np.ndarray, positions: np.ndarray) -> Tensor:
        return tiny_source([ids])[0][1][positions].to(torch.bfloat16)


class Recording(Trainer):
    losses: list[float]
    after: Callable[["Recording"], None] = staticmethod(lambda trainer: None)

    def training_step(self) -> None:
        super().training_step()
        # A line a step: the window is this step's.
        self.losses.append(self.ranks.add({"loss": self.window["loss"]})["loss"].value.item())
        self.after(self)


def make_trainer(
    folder: Path, ranks: Ranks, features: Any, *, clock: Any = time.monotonic, **options: Any
) -> Recording:
    config = TrainConfig.from_dict(
        {
            "steps": STEPS, "anchors_per_step": 12, "anchors_per_sequence": 5,
            "learning_rate": 1e-2, "log_every": 1, "validate_every": 4, "compute_dtype": "float32",
            "validation_anchors": 5, **options,
        }
    )  # fmt: skip
    trainer = Recording(
        tiny_drafter(), tiny_binding(), features, SEQUENCES, HELD_OUT, config, folder,
        ranks=ranks, clock=clock,
    )  # fmt: skip
    trainer.losses = []
    return trainer


def train_alone(folder: Path, features: Any, **options: Any) -> tuple[list[float], TrainResult]:
    trainer = make_trainer(folder, ALONE, features, **options)
    result = trainer.run()
    return trainer.losses, result


def one_rank(rank: int, runs: list[Run], ports: list[int], folder: Path) -> None:
    torch.set_num_threads(1)
    # The stores are the test's own, as they are torchrun's where it starts the ranks.
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    for run, port in zip(runs, ports, strict=True):
        if rank < run.world:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(run.world), MASTER_PORT=str(port))
            with join(teachers=run.teachers, parallel=run.parallel) as ranks:
                found = _serve(run, ranks) if ranks.is_teacher else _train(run, ranks, folder)
            torch.save(found, folder / f"{run.name}-{rank}.pt")


def _serve(run: Run, ranks: Ranks) -> dict[str, Any]:
    config = TrainConfig.from_dict(
        {"anchors_per_step": 12, "anchors_per_sequence": 5, "validation_anchors": 5}
    )
    sizes: list[int] = []

    def source(sequences: list[np.ndarray]) -> list[tuple[Tensor, Tensor]]:
        sizes.extend(map(len, sequences))
        # A target's rows are what they are, whatever comes later in the text.
        whole = {ids.tobytes(): ids for s in (*SEQUENCES, *HELD_OUT) for ids in [s.token_ids]}
        full = [
            next(ids for key, ids in whole.items() if key.startswith(part.tobytes()))
            for part in sequences
        ]
        return [
            (taps[: len(part)], final[: len(part)])
            for part, (taps, final) in zip(sequences, tiny_source(full), strict=True)
        ]

    teacher = Teacher(
        ranks,
        source,
        batch_stream(SEQUENCES, config, K),
        HELD_OUT,
        validation_batches(HELD_OUT, config, K),
    )
    teacher.serve()
    return {"read": sum(sizes)}


def _train(run: Run, ranks: Ranks, folder: Path) -> dict[str, Any]:
    last = run.last_rank if ranks.rank == ranks.drafters - 1 else ""
    home = folder / (run.folder or run.name)
    features: Any = (
        Received(ranks, features=len(TAPS) * D, hidden_size=D)
        if ranks.teachers
        else tiny_store(folder / f"features-{ranks.rank}", [*SEQUENCES, *HELD_OUT])
    )
    ticks = iter(range(0, 10**6, 100 if last == "slow" else 1))
    try:
        trainer = make_trainer(
            folder / "elsewhere" if last == "elsewhere" else home,
            ranks,
            features,
            clock=lambda: float(next(ticks)),
            **run.options,
        )

        def befall(trainer: Recording) -> None:
            if trainer.step == 2 and last == "interrupt":
                signal.raise_signal(signal.SIGINT)
            if trainer.step == 2 and last == "nan":
                trainer.head.weight_IV[0, 0] = float("nan")

        trainer.after = befall
        result = trainer.run()
        weights = trainer.weights()
    except (DSparkError, KeyboardInterrupt) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"losses": trainer.losses, "result": result, "weights": weights}
