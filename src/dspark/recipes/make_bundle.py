"""Zero to bundle: prompts, responses, features, training, evaluation, in one call."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from dspark.checkpoints.native import check_replaceable
from dspark.core.errors import ConfigError
from dspark.core.sampling import SamplingParams
from dspark.data.prompts import Prompt, read_prompts
from dspark.data.responses import ResponseFile
from dspark.data.template import encode_messages, template_hash
from dspark.drafters.model import DraftModel
from dspark.nn.linear import WeightKind
from dspark.recipes.card import add_evaluation
from dspark.recipes.evaluate import Evaluation, evaluate
from dspark.recipes.llm import LLM
from dspark.recipes.one_process import one_process
from dspark.recipes.plan import Plan, Work, make_plan
from dspark.recipes.progress import Progress
from dspark.recipes.regenerate import RegenerateConfig, longest_prompt, regenerate, unanswered
from dspark.recipes.synthesize import SynthesizeConfig, synthesize
from dspark.recipes.train import (
    TrainJob,
    bytes_per_token,
    starting_model,
    teach_drafters,
    train_drafter,
)
from dspark.recipes.training_data import TrainingData, from_conversations, from_responses
from dspark.recipes.values import set_threads
from dspark.targets.load import LoadedTarget, check_device, load_target
from dspark.targets.source import target_name
from dspark.training.ranks import Parallel, Ranks, join
from dspark.training.trainer import TrainResult

_LONGEST_TEXT = 2048
"""Tokens of a given conversation that are trained on."""
_SYNTHESISED_PROMPT = 48
"""Tokens of a prompt that is yet to be written, chat template included: what is usual."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleRun:
    """Everything that `dspark train` asks for."""

    command: str
    """For the card: how this run was started."""
    prompts: Sequence[Path] = ()
    """Empty: the target writes its own."""
    output: Path | None = None
    """Folder of the bundle; None: <target>-<drafter> where the command runs."""
    run: Path | None = None
    """Folder of prompts, responses, features and resumable state; None: <output>-run."""
    target: str | None = None
    weights: WeightKind | None = None
    device: str = "cpu"
    """Where everything runs: cpu, or cuda. Under torchrun cuda is a GPU for each process."""
    threads: int | None = None
    skip_bad: bool = False
    """Leave bad lines of the prompt files out instead of stopping there."""
    generate: bool = True
    """Write the responses that are missing; otherwise use those there are."""
    given_answers: bool = False
    """Train on the answers that conversations came with."""
    plan_only: bool = False
    synthesis: SynthesizeConfig = field(default_factory=SynthesizeConfig)
    responses: RegenerateConfig = field(default_factory=RegenerateConfig)
    evaluation_prompts: int = 16
    """Held-out prompts that are decoded at the end; 0 is none."""
    job: TrainJob = field(default_factory=TrainJob)
    teacher_ranks: int = 0
    """Of the ranks that torchrun started, how many run the target instead of training."""
    parallel: Parallel = "ddp"
    """How several training ranks share the work."""

    def __post_init__(self) -> None:
        if self.given_answers and not self.prompts:
            raise ConfigError("given answers come with conversations; name them with --prompts")
        if not (self.generate or self.prompts or self.synthesised.exists()):
            raise ConfigError(
                "without --prompts and with --no-generate there is nothing to train on"
            )
        if self.evaluation_prompts < 0:
            raise ConfigError(
                f"evaluation_prompts is {self.evaluation_prompts}; it must be at least 0"
            )

    @property
    def output_folder(self) -> Path:
        name = target_name(self.target).rsplit("/", 1)[-1]
        return self.output or Path(f"{name}-{self.job.shape.drafter}")

    @property
    def run_folder(self) -> Path:
        return self.run or self.output_folder.with_name(f"{self.output_folder.name}-run")

    @property
    def synthesised(self) -> Path:
        return self.run_folder / "synthesised.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleResult:
    output: Path
    plan: Plan | None
    """None: a run that had begun was resumed."""
    training: TrainResult | None
    """None: only a plan was asked for."""
    evaluation: Evaluation | None


def make_bundle(run: BundleRun, progress: Progress) -> BundleResult | None:
    """Runs or resumes every stage; each is skipped as far as it is done.

    Under torchrun all ranks call this; it is None on all but the first, which alone generates,
    evaluates and writes, while the others wait.

    Raises subclasses of UserError; those about the drafter before the first response is written.
    """
    set_threads(run.threads)
    check_device(run.device, run.weights)
    with join(teachers=run.teacher_ranks, parallel=run.parallel, device=run.device) as ranks:
        run = replace(run, device=ranks.device)
        ranks.check_divides(run.job.train.anchors_per_step)
        progress = progress if ranks.is_first else Progress(quiet=True)
        if not ranks.alone:
            progress.say(str(ranks))
        plan, training, held_out = _train(run, ranks, progress)
    if not ranks.is_first:
        return None
    evaluation = None
    if training is not None and training.finished and run.evaluation_prompts:
        evaluation = _evaluate(run, held_out[: run.evaluation_prompts], progress)
        add_evaluation(run.output_folder, evaluation)
    return BundleResult(
        output=run.output_folder, plan=plan, training=training, evaluation=evaluation
    )


def _train(
    run: BundleRun, ranks: Ranks, progress: Progress
) -> tuple[Plan | None, TrainResult | None, list[Prompt]]:
    """Everything up to the bundle: the plan of a run that begins, the result, held-out prompts."""
    output, folder = run.output_folder, run.run_folder
    check_replaceable(output)
    prompts = (
        read_prompts(*run.prompts, skip_bad=run.skip_bad, say=progress.say) if run.prompts else []
    )
    loaded = load_target(
        run.target,
        weights=run.weights,
        device=run.device,
        template_hash=template_hash,
        init_layers=run.job.shape.layers_to_start,
        say=progress.say,
    )
    if run.generate and not run.given_answers:
        longest_prompt(loaded.target.max_context, run.responses)  # told before prompts are written
    model = starting_model(loaded, run.job)
    given = _given(run, loaded, prompts, progress) if run.given_answers else None
    plan = None
    if ranks.is_first and (run.plan_only or not (folder / "state.safetensors").exists()):
        progress.say("plan: measuring a few steps of each stage ...")
        plan = _plan(run, loaded, model, prompts, given)
        for line in plan.lines():
            progress.say(line)
    if run.plan_only:
        return plan, None, []

    with one_process(folder) if ranks.is_first else nullcontext():
        with ranks.first():
            if not run.prompts:
                if run.generate and ranks.is_first:
                    synthesize(loaded, run.synthesised, run.synthesis, progress)
                prompts = read_prompts(run.synthesised)
            data = given or _answered(run, loaded, prompts, ranks, progress)
        if ranks.is_teacher:
            teach_drafters(loaded, model, data, run.job, ranks)
            return None, None, []
        training = train_drafter(
            loaded,
            model,
            data,
            run.job,
            folder=folder,
            bundle_folder=output,
            command=run.command,
            progress=progress,
            ranks=ranks,
        )
    return plan, training, [prompt for prompt in prompts if prompt.is_validation]


def _given(
    run: BundleRun, loaded: LoadedTarget, prompts: Sequence[Prompt], progress: Progress
) -> TrainingData:
    return from_conversations(
        loaded.tokenizer,
        prompts,
        thinking=run.responses.thinking,
        max_tokens=min(_LONGEST_TEXT, loaded.target.max_context),
        say=progress.say,
    )


def _answered(
    run: BundleRun,
    loaded: LoadedTarget,
    prompts: Sequence[Prompt],
    ranks: Ranks,
    progress: Progress,
) -> TrainingData:
    responses = _response_file(run, loaded)
    if run.generate and ranks.is_first:
        regenerate(loaded, prompts, responses, run.responses, progress)
    return from_responses(prompts, responses.responses)


def _response_file(run: BundleRun, loaded: LoadedTarget) -> ResponseFile:
    return ResponseFile(
        run.run_folder / "responses.jsonl",
        target=loaded.name,
        template_hash=loaded.binding.chat_template_hash,
        vocab_size=loaded.target.vocab_size,
        thinking=run.responses.thinking,
    )


def _plan(
    run: BundleRun,
    loaded: LoadedTarget,
    model: DraftModel,
    prompts: Sequence[Prompt],
    given: TrainingData | None,
) -> Plan:
    return make_plan(
        loaded,
        model,
        _work(run, loaded, prompts, given),
        run.job.train,
        run.responses,
        feature_bytes_per_token=bytes_per_token(model.config, run.job.features),
        folder=run.run_folder,
        draft_vocabulary=run.job.shape.draft_vocabulary,
    )


def _work(
    run: BundleRun, loaded: LoadedTarget, prompts: Sequence[Prompt], given: TrainingData | None
) -> Work:
    if given is not None:
        held_out = given.held_out[: run.job.validation_responses]
        sequences = [*given.train, *held_out]
        return Work(
            prompts=len(prompts), prompt_tokens_to_write=0, responses=0, response_tokens=0,
            texts=len(sequences), text_tokens=sum(len(s.token_ids) for s in sequences),
        )  # fmt: skip
    config = run.responses
    if run.synthesised.exists() and not run.prompts:
        prompts = read_prompts(run.synthesised)
    to_write = 0 if run.prompts else max(0, run.synthesis.count - len(prompts))
    there = None
    if (run.run_folder / "responses.jsonl").exists():  # a plan makes no folder
        there = _response_file(run, loaded)
    tokens = 0 if there is None else sum(len(response.token_ids) for response in there.responses)
    texts = 0 if there is None else len(there)
    answers = 0
    if run.generate:
        for question in unanswered(loaded.tokenizer, prompts, there, config):
            answers += question.left
            texts += 1
            tokens += len(encode_messages(loaded.tokenizer, question.messages))
            tokens += question.left * config.max_new_tokens
        samples = to_write * len(config.temperatures)
        answers += samples
        texts += samples
        tokens += samples * (_SYNTHESISED_PROMPT + config.max_new_tokens)
    return Work(
        prompts=len(prompts) + to_write,
        prompt_tokens_to_write=to_write * _SYNTHESISED_PROMPT,
        responses=answers,
        response_tokens=answers * config.max_new_tokens,
        texts=texts,
        text_tokens=tokens,
    )


def _evaluate(run: BundleRun, held_out: Sequence[Prompt], progress: Progress) -> Evaluation:
    progress.say("evaluating by decoding held-out prompts")
    llm = LLM(
        run.target,
        draft=run.output_folder,
        weights=run.weights,
        device=run.device,
        max_requests=8,
        progress=Progress(quiet=True),
    )
    sampling = SamplingParams(
        temperature=1.0, max_new_tokens=run.responses.max_new_tokens, verification="rejection"
    )
    return evaluate(llm, held_out, sampling, progress=progress)
