"""From responses to a draft bundle: features, training, card."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dspark.checkpoints.bundle import BundleInfo
from dspark.checkpoints.fit import check_fit
from dspark.checkpoints.native import read_bundle, write_bundle
from dspark.core.errors import ConfigError
from dspark.data.packing import TrainingSequence
from dspark.drafters.build import build_model, drafter_name
from dspark.drafters.config import DraftConfig
from dspark.drafters.dspark import initialise
from dspark.drafters.init import initialise_from_target
from dspark.drafters.model import DraftModel
from dspark.recipes.card import model_card
from dspark.recipes.draft_shape import CHAINS, DraftShape, draft_config
from dspark.recipes.features import FeatureExtractor
from dspark.recipes.progress import Advance, Progress
from dspark.recipes.teach import check_same_texts, from_teachers, teach
from dspark.recipes.tensorboard import board
from dspark.recipes.training_data import TrainingData
from dspark.targets.load import LoadedTarget
from dspark.training.batch import Features
from dspark.training.config import EVERY_ANCHOR, FEATURE_MODES, FeatureMode, TrainConfig
from dspark.training.features import (
    FeatureSource,
    FeatureStore,
    OnlineFeatures,
    feature_bytes,
)
from dspark.training.objective import CROSS_ENTROPY, DSPARK, EAGLE3, Objective
from dspark.training.ranks import ALONE, Ranks
from dspark.training.trainer import Metrics, Trainer, TrainResult


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    shape: DraftShape = field(default_factory=DraftShape)
    train: TrainConfig = field(default_factory=TrainConfig)
    warm_start: Path | None = None
    """A bundle to start from instead of the target's layers."""
    validation_responses: int = 200
    """Held-out responses the analytic validation runs over."""
    features: FeatureMode = "bf16"
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.features not in FEATURE_MODES:
            raise ConfigError(
                f"features is {self.features!r}; it must be {' or '.join(FEATURE_MODES)}"
            )


def training_of(drafter: str, objective: str = "own") -> dict[str, Any]:
    """TrainConfig values a kind of drafter is trained with in its own paper.

    objective: own, or dspark for the comparison at equal loss. Eagle3 and MTP learn from every
    position of a response, the others from a sample of anchors.

    Raises ConfigError for an objective that does not exist.
    """
    if objective not in ("own", "dspark"):
        raise ConfigError(f"there is no objective {objective!r}; there are own and dspark")
    own: dict[str, Objective] = {"eagle3": EAGLE3, "mtp": CROSS_ENTROPY, "dflash": CROSS_ENTROPY}
    chosen = DSPARK if objective == "dspark" else own.get(drafter, DSPARK)
    return {
        "objective": chosen,
        **({"anchors_per_sequence": EVERY_ANCHOR} if drafter in CHAINS else {}),
    }


def train_drafter(
    loaded: LoadedTarget,
    model: DraftModel,
    data: TrainingData,
    job: TrainJob,
    *,
    folder: Path,
    bundle_folder: Path,
    command: str,
    progress: Progress,
    features: Path | None = None,
    ranks: Ranks = ALONE,
) -> TrainResult:
    """Trains, validates on the held-out answers, writes the bundle.

    `model` is where a fresh run starts (`starting_model`). `folder` holds the run (features,
    resumable state, metrics); running again resumes it. The bundle is written whenever this
    returns, finished or stopped by `max_seconds`. Runs with the same taps may share a `features`
    folder, one after the other; by default the run has its own. All training ranks call this
    together, the first one writes; with teacher ranks nothing is stored, whatever the job says.
    """
    train, held_out = data.train, data.held_out[: job.validation_responses]
    check_same_texts(ranks, train, held_out)
    source = _features(
        loaded, model.config, [*train, *held_out], job, features or folder / "features", ranks,
        progress,
    )  # fmt: skip
    draft_token_ids = _frequent_tokens(train, job.shape.draft_vocabulary, loaded)
    with (
        progress.task("training", total=job.train.steps) as advance,
        board(folder if job.tensorboard and ranks.is_first else None) as record,
    ):
        show = _reporter(advance)

        def report(metrics: Metrics) -> None:
            show(metrics)
            record(metrics)

        trainer = Trainer(
            model,
            loaded.binding,
            source,
            train,
            held_out,
            job.train,
            folder,
            draft_token_ids=draft_token_ids,
            ranks=ranks,
            report=report,
        )
        show({"step": trainer.step})  # a resumed run starts its bar there
        result = trainer.run()
        weights = trainer.weights()
    if not ranks.is_first:
        return result

    summary = {
        "command": command,
        "steps": result.steps,
        "positions": result.positions,
        "seconds": round(result.seconds),
        "finished": result.finished,
        "responses": data.answers,
        "response_tokens": data.supervised_tokens,
        "response_origin": data.origin,
        "prompt_files": [*data.files],
        "validation": result.validation,
    }
    write_bundle(
        bundle_folder,
        config=model.config,
        info=BundleInfo(
            target=loaded.name,
            embedding_hash=loaded.binding.embedding_hash,
            chat_template_hash=loaded.binding.chat_template_hash,
            candidates=job.shape.candidates,
            training=summary,
        ),
        tensors=weights,
        card=model_card(loaded.name, model.config, summary),
        dtype=torch.float16,
        draft_token_ids=draft_token_ids,
    )
    return result


def teach_drafters(
    loaded: LoadedTarget, model: DraftModel, data: TrainingData, job: TrainJob, ranks: Ranks
) -> None:
    """What a teacher rank does while the others are in `train_drafter`."""
    held_out = data.held_out[: job.validation_responses]
    teach(loaded, model.config, data.train, held_out, job.train, ranks)


def starting_model(loaded: LoadedTarget, job: TrainJob) -> DraftModel:
    """The weights a fresh run starts from, on the target's device: a bundle's, those of the
    target's last layers, or noise. They are drawn on the CPU: the same for every device.

    Raises CheckpointError for a bundle that does not fit, ConfigError for an impossible shape.
    """
    if job.warm_start is not None:
        bundle = read_bundle(job.warm_start)
        check_fit(bundle, loaded.binding)
        if (kind := drafter_name(bundle.config)) != job.shape.drafter:
            raise ConfigError(
                f"{job.warm_start} is a {kind} drafter, not {job.shape.drafter}; "
                f"use --drafter {kind}"
            )
        return bundle.model().to(loaded.target.device)
    model = build_model(draft_config(loaded.target.config, loaded.binding, job.shape))
    generator = torch.Generator().manual_seed(job.train.seed)
    initialise(model, generator)
    if job.train.start == "target":
        initialise_from_target(model, loaded.binding, generator)
    return model.to(loaded.target.device)


def bytes_per_token(config: DraftConfig, features: FeatureMode) -> int:
    """What the feature store takes for a token; 0 without one."""
    if features == "none":
        return 0
    return feature_bytes(features, len(config.target_layer_ids), config.hidden_size)


def _features(
    loaded: LoadedTarget,
    config: DraftConfig,
    sequences: Sequence[TrainingSequence],
    job: TrainJob,
    folder: Path,
    ranks: Ranks,
    progress: Progress,
) -> Features:
    """What the trainer reads: a store that holds all of these sequences, or what has none."""
    if ranks.teachers:
        return from_teachers(ranks, config, loaded.binding.vocab_size, progress)
    source = FeatureExtractor(loaded.target, config.target_layer_ids)
    if job.features == "none":
        return OnlineFeatures(source)
    weights = loaded.weights or loaded.target.model.dtype  # packed ones, or as they stand on a GPU
    with ranks.first():
        store = FeatureStore(
            folder,
            target=f"{loaded.name} {loaded.binding.embedding_hash} {weights}",
            tap_layers=config.target_layer_ids,
            hidden_size=config.hidden_size,
            kind=job.features,
        )
        _fill_store(store, sequences, source, progress)
    return store


def _fill_store(
    store: FeatureStore,
    sequences: Sequence[TrainingSequence],
    source: FeatureSource,
    progress: Progress,
) -> None:
    """Computes the features that the store lacks."""
    missing = [s.token_ids for s in sequences if s.token_ids not in store]
    with progress.task("features", total=sum(map(len, missing))) as advance:
        store.fill(missing, source, progress=lambda tokens: advance(tokens, "tokens"))


def _reporter(advance: Advance) -> Callable[[Metrics], None]:
    """Moves the bar to the step of a line of metrics, and says what the line holds."""
    seen = 0

    def report(metrics: Metrics) -> None:
        nonlocal seen
        note = ""
        if "validation" in metrics:
            length = metrics["validation"]["accepted_length"]
            note = f"accepted length {length:.2f} on held-out responses"
        elif "loss" in metrics:
            length = metrics["accepted_length"]
            note = f"loss {metrics['loss']:.3f}, accepted length {length:.2f}"
        done, seen = metrics["step"] - seen, metrics["step"]
        advance(done, note)

    return report


def _frequent_tokens(
    sequences: Sequence[TrainingSequence], count: int | None, loaded: LoadedTarget
) -> torch.Tensor | None:
    """The `count` token ids most frequent in the answers (ties: lower id), ascending."""
    if count is None:
        return None
    vocab = loaded.binding.vocab_size
    counts = torch.zeros(vocab, dtype=torch.int64)
    for sequence in sequences:
        said = torch.from_numpy(sequence.token_ids[sequence.supervised])
        counts += torch.bincount(said.long(), minlength=vocab)
    order = torch.argsort(counts, descending=True, stable=True)
    return order[: min(count, vocab)].sort().values
