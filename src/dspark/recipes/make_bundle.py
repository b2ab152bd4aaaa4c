"""Zero to bundle: prompts, responses, features, training, in one call."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dspark.checkpoints.native import check_replaceable
from dspark.data.prompts import read_prompts
from dspark.data.responses import ResponseFile
from dspark.data.template import template_hash
from dspark.nn.linear import WeightKind
from dspark.recipes.one_process import one_process
from dspark.recipes.progress import Progress
from dspark.recipes.regenerate import RegenerateConfig, regenerate
from dspark.recipes.train import TrainJob, starting_model, train_drafter
from dspark.recipes.values import set_threads
from dspark.targets.load import load_target
from dspark.training.trainer import TrainResult


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleRun:
    """Everything that `dspark train` asks for."""

    prompts: Sequence[Path]
    output: Path
    """Folder of the bundle."""
    run: Path
    """Folder of responses, features and resumable state."""
    command: str
    """For the card: how this run was started."""
    target: str | None = None
    weights: WeightKind | None = None
    threads: int | None = None
    skip_bad: bool = False
    """Leave bad lines of the prompt files out instead of stopping there."""
    generate: bool = True
    """Write the responses that are missing; otherwise use those there are."""
    responses: RegenerateConfig = field(default_factory=RegenerateConfig)
    job: TrainJob = field(default_factory=TrainJob)


def make_bundle(run: BundleRun, progress: Progress) -> TrainResult:
    """Runs or resumes every stage; each is skipped as far as it is done.

    Raises subclasses of UserError; those about the drafter before the first response is written.
    """
    set_threads(run.threads)
    check_replaceable(run.output)
    prompts = read_prompts(*run.prompts, skip_bad=run.skip_bad, say=progress.say)
    loaded = load_target(
        run.target,
        weights=run.weights,
        template_hash=template_hash,
        init_layers=run.job.shape.layers_to_start,
        say=progress.say,
    )
    model = starting_model(loaded, run.job)
    with one_process(run.run):
        responses = ResponseFile(
            run.run / "responses.jsonl",
            target=loaded.name,
            template_hash=loaded.binding.chat_template_hash,
            vocab_size=loaded.target.vocab_size,
        )
        if run.generate:
            regenerate(loaded, prompts, responses, run.responses, progress)
        return train_drafter(
            loaded,
            model,
            prompts,
            responses.responses,
            run.job,
            folder=run.run,
            bundle_folder=run.output,
            command=run.command,
            progress=progress,
        )
