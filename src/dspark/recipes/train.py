"""From responses to a draft bundle: features, training, card."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dspark.checkpoints.bundle import BundleInfo
from dspark.checkpoints.fit import check_fit
from dspark.checkpoints.native import read_bundle, write_bundle
from dspark.core.errors import ConfigError, DataError
from dspark.data.packing import TrainingSequence
from dspark.data.prompts import Prompt
from dspark.data.responses import Response
from dspark.drafters.config import DSparkConfig
from dspark.drafters.dspark import DSparkModel
from dspark.drafters.init import initialise, initialise_from_target
from dspark.nn.seams import Binding
from dspark.recipes.card import model_card
from dspark.recipes.features import FeatureExtractor
from dspark.recipes.progress import Progress
from dspark.targets.load import LoadedTarget
from dspark.training.config import TrainConfig
from dspark.training.features import FeatureStore
from dspark.training.trainer import Metrics, Trainer, TrainResult


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftShape:
    """The drafter's size; everything else follows the target."""

    layers: int = 3
    block_size: int = 7
    markov_rank: int = 64
    taps: int = 5
    candidates: int = 64
    draft_vocabulary: int | None = None
    """Propose only this many tokens, those most frequent in the responses; None proposes any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    shape: DraftShape = field(default_factory=DraftShape)
    train: TrainConfig = field(default_factory=TrainConfig)
    warm_start: Path | None = None
    """A bundle to start from instead of the target's layers."""
    validation_responses: int = 200
    """Held-out responses the analytic validation runs over."""


def draft_config(target_config: Any, binding: Binding, shape: DraftShape) -> DSparkConfig:
    """Qwen3-shaped layers of the target's own sizes, tapping layers spread as the paper's are."""
    heads = target_config.num_attention_heads
    head_dim = getattr(target_config, "head_dim", None) or target_config.hidden_size // heads
    rope = getattr(target_config, "rope_parameters", None) or {}
    layers = binding.num_target_layers
    taps = tap_layers(layers, shape.taps)
    return DSparkConfig(
        hidden_size=binding.hidden_size,
        intermediate_size=target_config.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target_config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        vocab_size=binding.vocab_size,
        num_target_layers=layers,
        target_layer_ids=taps,
        mask_token_id=binding.mask_token_id,
        block_size=shape.block_size,
        markov_rank=shape.markov_rank,
        rms_norm_eps=target_config.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
    )


def tap_layers(layers: int, count: int) -> tuple[int, ...]:
    """`count` layers spread from the second to the fourth last, as the paper's taps are.

    Never the last one: engines that follow transformers see it after the final norm.
    """
    first, last = min(1, layers - 2), max(0, layers - 3)
    spread = (first + i * (last - first) / max(1, count - 1) for i in range(count))
    taps = tuple(sorted({round(tap) for tap in spread}))
    if count < 1 or len(taps) < count:
        raise ConfigError(
            f"{count} different taps do not fit a target of {layers} layers; use fewer (--taps)"
        )
    return taps


def train_drafter(
    loaded: LoadedTarget,
    prompts: Sequence[Prompt],
    responses: Sequence[Response],
    job: TrainJob,
    folder: Path,
    bundle_folder: Path,
    command: str,
    progress: Progress,
) -> TrainResult:
    """Trains on the responses to training prompts, validates on the others, writes the bundle.

    `folder` holds the run (features, resumable state, metrics); running again resumes it. The
    bundle is written whenever this returns, finished or stopped by `max_seconds`.
    """
    held_out_keys = {(p.file, p.line) for p in prompts if p.is_validation}
    known = {(p.file, p.line) for p in prompts}
    for response in responses:
        if (response.file, response.line) not in known:
            raise DataError(
                f"the response to {response.file}, line {response.line} has no prompt in the given "
                f"files; "
                f"give the prompts it was written for"
            )
    train = [r for r in responses if (r.file, r.line) not in held_out_keys]
    held_out = [r for r in responses if (r.file, r.line) in held_out_keys]
    held_out = held_out[: job.validation_responses]
    if not train or not held_out:
        raise DataError(
            f"{len(train)} training and {len(held_out)} validation responses; both are needed: "
            f"generate more with `dspark data regenerate`"
        )

    model, config = _starting_model(loaded, job)
    store = FeatureStore(
        folder / "features",
        target=f"{loaded.name} {loaded.binding.embedding_hash} {loaded.weights}",
        tap_layers=config.target_layer_ids,
        hidden_size=config.hidden_size,
    )
    used = [*train, *held_out]
    with progress.task("features", total=sum(len(r.token_ids) for r in used)) as advance:
        store.fill(
            [r.token_ids for r in used],
            FeatureExtractor(loaded.target, config.target_layer_ids),
            progress=lambda tokens: advance(tokens, "tokens"),
        )

    with progress.task("training", total=job.train.steps) as advance:
        trainer = Trainer(
            model,
            loaded.binding,
            store,
            [_sequence(r) for r in train],
            [_sequence(r) for r in held_out],
            job.train,
            folder,
            report=_reporter(advance),
        )
        advance(trainer.step, "")
        result = trainer.run()

    tokens = sum(len(r.response_ids) for r in train)
    summary = {
        "command": command,
        "steps": result.steps,
        "positions": result.positions,
        "seconds": round(result.seconds),
        "finished": result.finished,
        "responses": len(train),
        "response_tokens": tokens,
        "prompt_files": sorted({r.file for r in train}),
        "validation": result.validation,
    }
    draft_ids = _frequent_tokens(train, job.shape.draft_vocabulary, loaded)
    write_bundle(
        bundle_folder,
        config=config,
        info=BundleInfo(
            target=loaded.name,
            embedding_hash=loaded.binding.embedding_hash,
            chat_template_hash=loaded.binding.chat_template_hash,
            candidates=job.shape.candidates,
            training=summary,
        ),
        tensors=model.state_dict(),
        card=model_card(loaded.name, config, summary),
        dtype=torch.float16,
        draft_token_ids=draft_ids,
    )
    return result


def _starting_model(loaded: LoadedTarget, job: TrainJob) -> tuple[DSparkModel, DSparkConfig]:
    if job.warm_start is not None:
        bundle = read_bundle(job.warm_start)
        check_fit(bundle, loaded.binding)
        return bundle.model(), bundle.config
    config = draft_config(loaded.target.config, loaded.binding, job.shape)
    model = DSparkModel(config)
    generator = torch.Generator().manual_seed(job.train.seed)
    initialise(model, generator)
    if job.train.start == "target":
        initialise_from_target(model, loaded.binding, generator)
    return model, config


def _sequence(response: Response) -> TrainingSequence:
    return TrainingSequence(response.token_ids, response.supervised)


def _reporter(advance: Any) -> Any:
    seen = 0

    def report(metrics: Metrics) -> None:
        nonlocal seen
        loss, step = metrics.get("loss"), metrics["step"]
        length = (metrics.get("validation") or metrics).get("accepted_length")
        done, seen = step - seen, step
        advance(max(0, done), f"loss {loss:.3f}, accepted length {length:.2f}" if loss else "")

    return report


def _frequent_tokens(
    responses: Sequence[Response], count: int | None, loaded: LoadedTarget
) -> torch.Tensor | None:
    """The `count` token ids most frequent in the responses (ties: lower id), ascending."""
    if count is None:
        return None
    vocab = loaded.binding.vocab_size
    counts = torch.zeros(vocab, dtype=torch.int64)
    for response in responses:
        counts += torch.bincount(torch.from_numpy(response.response_ids).long(), minlength=vocab)
    order = torch.argsort(counts, descending=True, stable=True)
    return order[: min(count, vocab)].sort().values
