"""What a training run will take, before it starts: counted where it can be, measured where not."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from dspark.core.sampling import SamplingParams
from dspark.data.packing import BatchStream, TrainingSequence
from dspark.data.template import supervised_tokens
from dspark.drafters.model import DraftModel
from dspark.engine.budget import free_bytes
from dspark.recipes.device import clock_of, describe, peak_bytes
from dspark.recipes.features import FeatureExtractor
from dspark.recipes.regenerate import RegenerateConfig, answering_engine
from dspark.targets.load import LoadedTarget
from dspark.training.batch import load_batch
from dspark.training.config import TrainConfig
from dspark.training.objective import objective
from dspark.training.precision import autocast, matrix_dtype
from dspark.training.vocab_head import VocabHead

_PROMPT, _NEW = 16, 8
"""Tokens of a measured request."""
_SEQUENCE = 256
"""Tokens of a measured text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is left to do, in tokens. Answers that are yet to be written count in full length,
    prompts in their usual one."""

    prompts: int
    prompt_tokens_to_write: int
    responses: int
    """To be written."""
    response_tokens: int
    texts: int
    """To be trained on and validated with."""
    text_tokens: int
    """Prompts and answers: each is a row of features."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Measured on this machine just now."""

    generated_per_second: float
    features_per_second: float
    """Tokens that the target reads."""
    seconds_per_step: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    work: Work
    speeds: Speeds
    steps: int
    device: str
    matrix_products: str
    """What they are computed in: float32 or bfloat16."""
    feature_bytes_per_token: float
    """0: features are not stored."""
    deepspec_bytes_per_token: int
    """What DeepSpec's cache takes: six bfloat16 states a token."""
    state_bytes: int
    memory_bytes: int
    """Of the device: its peak while it was measured, and the optimiser's moments."""
    free_disk_bytes: int
    free_memory_bytes: int

    @property
    def disk_bytes(self) -> int:
        features = self.work.text_tokens * self.feature_bytes_per_token
        return round(features + self.state_bytes + 4 * self.work.response_tokens)

    @property
    def seconds(self) -> dict[str, float]:
        """By stage."""
        speeds, work = self.speeds, self.work
        reading = work.text_tokens / speeds.features_per_second
        return {
            "prompts": work.prompt_tokens_to_write / speeds.generated_per_second,
            "responses": work.response_tokens / speeds.generated_per_second,
            "features": reading if self.feature_bytes_per_token else 0.0,
            "training": self.steps * speeds.seconds_per_step,
        }

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "disk_bytes": self.disk_bytes, "seconds": self.seconds}

    def lines(self) -> list[str]:
        """For people."""
        work, seconds = self.work, self.seconds
        per_token = self.feature_bytes_per_token
        features = (
            f"features {_size(per_token)} a token (DeepSpec's cache: "
            f"{_size(self.deepspec_bytes_per_token)})"
            if per_token
            else "features are recomputed in every step"
        )
        short = self.disk_bytes > self.free_disk_bytes
        return [
            f"plan: {work.prompts:,} prompts, {work.responses:,} responses to write, at most "
            f"{work.response_tokens:,} tokens; {work.texts:,} texts of about "
            f"{work.text_tokens:,} tokens to train on, in {self.steps:,} steps",
            f"disk: about {_size(self.disk_bytes)} of {_size(self.free_disk_bytes)} free"
            f"{': TOO LITTLE' if short else ''}; {features}",
            f"device: {self.device}, matrix products in {self.matrix_products}",
            f"memory: about {_size(self.memory_bytes)} in all; "
            f"{_size(self.free_memory_bytes)} are free now",
            "time: about "
            + ", ".join(f"{name} {_duration(s)}" for name, s in seconds.items() if s)
            + f"; in all {_duration(sum(seconds.values()))} "
            f"(measured: {self.speeds.generated_per_second:,.0f} tokens/s written, "
            f"{self.speeds.features_per_second:,.0f} tokens/s read, "
            f"{self.speeds.seconds_per_step:.2f} s a step)",
        ]


def make_plan(
    loaded: LoadedTarget,
    model: DraftModel,
    work: Work,
    train: TrainConfig,
    responses: RegenerateConfig,
    *,
    feature_bytes_per_token: float,
    folder: Path,
    draft_vocabulary: int | None = None,
    clock: Callable[[], float] | None = None,
) -> Plan:
    """Measures a few steps of each stage; the model is as it was afterwards.

    clock: by default the device's, read when it is done.
    """
    device = loaded.target.device
    clock = clock or clock_of(device)
    generated = _generation_speed(loaded, responses, clock)
    taps = model.config.target_layer_ids
    reading = _feature_speed(loaded, taps, clock)
    step = _step_seconds(loaded, model, train, draft_vocabulary, clock)
    if not feature_bytes_per_token:
        # Every step reads its own texts.
        blocks = min(train.anchors_per_sequence, responses.max_new_tokens)
        texts = max(1, train.anchors_per_step / blocks)
        step += texts * work.text_tokens / max(1, work.texts) / reading
    parameters = sum(parameter.numel() for parameter in model.parameters())
    existing = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    return Plan(
        work=work,
        speeds=Speeds(
            generated_per_second=generated, features_per_second=reading, seconds_per_step=step
        ),
        device=describe(device),
        matrix_products=str(matrix_dtype(train.compute_dtype, device)).removeprefix("torch."),
        steps=train.steps,
        feature_bytes_per_token=feature_bytes_per_token,
        deepspec_bytes_per_token=6 * model.config.hidden_size * 2,
        state_bytes=2 * 3 * 4 * parameters,  # weights and two moments, two generations
        memory_bytes=peak_bytes(device) + 2 * 4 * parameters,
        free_disk_bytes=psutil.disk_usage(str(existing)).free,
        free_memory_bytes=free_bytes(device),
    )


def _generation_speed(
    loaded: LoadedTarget, config: RegenerateConfig, clock: Callable[[], float]
) -> float:
    """Tokens a second of a full batch that decodes."""
    engine = answering_engine(loaded, config.max_requests)
    rng = np.random.default_rng(0)
    params = SamplingParams(max_new_tokens=_NEW, min_tokens=_NEW, seed=0, verification="rejection")
    for _ in range(config.max_requests):
        engine.add(rng.integers(0, loaded.target.vocab_size, _PROMPT).tolist(), params)
    seconds, tokens = 0.0, 0
    while not engine.idle:
        started = clock()
        events = engine.step()
        record = engine.records[-1]
        if not record.prefill_tokens:
            seconds += clock() - started
            tokens += sum(len(event.tokens) for event in events)
    return tokens / max(seconds, 1e-9)


def _feature_speed(
    loaded: LoadedTarget, taps: tuple[int, ...], clock: Callable[[], float]
) -> float:
    rng = np.random.default_rng(0)
    length = min(_SEQUENCE, loaded.target.max_context)
    ids = rng.integers(0, loaded.target.vocab_size, length).astype(np.int32)
    extract = FeatureExtractor(loaded.target, taps)
    extract([ids[:8]])  # the first call warms up
    started = clock()
    extract([ids])
    return length / max(clock() - started, 1e-9)


class _RandomFeatures:
    """Stands for a feature store: time does not depend on the numbers."""

    def __init__(self, features: int, hidden: int) -> None:
        self.features, self.hidden = features, hidden
        self.generator = torch.Generator().manual_seed(0)

    def context(self, token_ids: np.ndarray, count: int) -> torch.Tensor:
        return torch.randn(count, self.features, generator=self.generator).bfloat16()

    def final(self, token_ids: np.ndarray, positions_M: np.ndarray) -> torch.Tensor:
        return torch.randn(len(positions_M), self.hidden, generator=self.generator).bfloat16()


def _step_seconds(
    loaded: LoadedTarget,
    model: DraftModel,
    config: TrainConfig,
    draft_vocabulary: int | None,
    clock: Callable[[], float],
) -> float:
    """Forward and backward of one step on random texts; the update adds little."""
    rng = np.random.default_rng(0)
    prompt = _SEQUENCE // 4
    sequences = [
        TrainingSequence(
            rng.integers(0, loaded.target.vocab_size, _SEQUENCE).astype(np.int32),
            supervised_tokens(_SEQUENCE, [(prompt, _SEQUENCE)]),
        )
        for _ in range(8)
    ]
    features = _RandomFeatures(model.config.feature_size, model.config.hidden_size)
    # Which tokens does not matter here.
    vocabulary = loaded.binding.vocab_size
    ids = None if draft_vocabulary is None else torch.arange(min(draft_vocabulary, vocabulary))
    device = loaded.target.device
    dtype = matrix_dtype(config.compute_dtype, device)
    head = VocabHead(loaded.binding, model.latent_size, dtype, draft_token_ids=ids)
    model.train()
    seconds = 0.0
    for anchors in (max(1, config.anchors_per_step // 8), config.anchors_per_step):
        stream = BatchStream(
            sequences,
            anchors_per_batch=anchors,
            anchors_per_sequence=min(config.anchors_per_sequence, _SEQUENCE - prompt),
            block_size=model.config.block_size,
            seed=0,
        )
        started = clock()
        batch = load_batch(stream.next_batch(), sequences, features, device)
        with autocast(device, dtype):
            step = objective(model, loaded.binding, head, batch, config.objective)
        step.loss.backward()  # type: ignore[no-untyped-call]
        seconds = clock() - started  # of the second: the first warms up
    model.zero_grad(set_to_none=True)
    return seconds


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
