"""Zero to bundle: prompts, responses, features, training, in one call."""

from collections.abc import Sequence
from contextlib import nullcontext
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
from dspark.recipes.train import TrainJob, starting_model, teach_drafters, train_drafter
from dspark.recipes.values import set_threads
from dspark.targets.load import load_target
from dspark.training.ranks import Parallel, Ranks, join
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
    teacher_ranks: int = 0
    """Of the ranks that torchrun started, how many run the target instead of training."""
    parallel: Parallel = "ddp"
    """How several training ranks share the work."""


def make_bundle(run: BundleRun, progress: Progress) -> TrainResult | None:
    """Runs or resumes every stage; each is skipped as far as it is done.

    Under torchrun all ranks call this; it is None on all but the first, which alone generates and
    writes, while the others wait.

    Raises subclasses of UserError; those about the drafter before the first response is written.
    """
    set_threads(run.threads)
    with join(teachers=run.teacher_ranks, parallel=run.parallel) as ranks:
        ranks.check_divides(run.job.train.anchors_per_step)
        progress = progress if ranks.is_first else Progress(quiet=True)
        if not ranks.alone:
            progress.say(str(ranks))
        result = _make_bundle(run, ranks, progress)
    return result if ranks.is_first else None


def _make_bundle(run: BundleRun, ranks: Ranks, progress: Progress) -> TrainResult | None:
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
    with one_process(run.run) if ranks.is_first else nullcontext():
        with ranks.first():
            responses = ResponseFile(
                run.run / "responses.jsonl",
                target=loaded.name,
                template_hash=loaded.binding.chat_template_hash,
                vocab_size=loaded.target.vocab_size,
            )
            if run.generate and ranks.is_first:
                regenerate(loaded, prompts, responses, run.responses, progress)
        if ranks.is_teacher:
            teach_drafters(loaded, model, prompts, responses.responses, run.job, ranks)
            return None
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
            ranks=ranks,
        )
