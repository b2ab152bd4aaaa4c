"""The paper's comparison (section 4.2, table 1 and figure 2), small but fair.

Every drafter learns from the same responses, in the same order, passing over them the same number
of times; every one is judged on the same held-out prompts with the same seeds, under `rejection`
with its whole block. What differs is what the papers differ in, and the wall clock, which is kept.

Each contender has a folder of its own in the work folder, so they may be made in any order, stopped
and resumed; what is done is not done again.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.core.errors import ConfigError, DataError
from dspark.core.sampling import SamplingParams
from dspark.data.anchors import anchor_candidates
from dspark.data.packing import TrainingSequence
from dspark.data.prompts import Prompt
from dspark.data.responses import ResponseFile
from dspark.recipes.bundles import LOOKUP
from dspark.recipes.draft_shape import DraftShape
from dspark.recipes.evaluate import evaluate
from dspark.recipes.llm import LLM
from dspark.recipes.one_process import one_process
from dspark.recipes.progress import Progress
from dspark.recipes.train import (
    TrainConfig,
    TrainJob,
    starting_model,
    train_drafter,
    training_of,
)
from dspark.recipes.training_data import from_responses
from dspark.targets.load import LoadedTarget


@dataclass(frozen=True, slots=True)
class Contender:
    drafter: str
    """As `dspark train --drafter` has it; or lookup."""
    objective: str = "own"


CONTENDERS = {
    "dspark": Contender("dspark"),
    "dspark-rnn": Contender("dspark-rnn"),
    "dflash": Contender("dflash"),
    "dflash-dspark-loss": Contender("dflash", "dspark"),
    "eagle3": Contender("eagle3"),
    "mtp": Contender("mtp"),
    "lookup": Contender(LOOKUP),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonConfig:
    passes: float = 1.0
    """How often every response is read."""
    anchors_per_sequence: int = 512
    """Blocks of a response in one pass, as in the released recipe: all positions of short ones."""
    anchors_per_step: int = 256
    layers: int = 3
    """Of the parallel drafters; Eagle3 and MTP have one, as in the paper."""
    taps: int = 5
    """Of all but MTP, which reads the last layer."""
    block_size: int = 7
    learning_rate: float = 6e-4
    start: str = "target"
    """target: all start from the target's layers; noise: none does, as in the paper."""
    validation_responses: int = 200
    temperatures: tuple[float, ...] = (1.0, 0.0)
    max_new_tokens: int = 256
    seed: int = 42

    def __post_init__(self) -> None:
        if self.start not in ("target", "noise"):
            raise ConfigError(f"start is {self.start!r}; it must be target or noise")
        if not self.passes > 0:
            raise ConfigError(f"passes is {self.passes}; it must be above 0")


def steps_of(sequences: Sequence[TrainingSequence], config: ComparisonConfig) -> int:
    """Training steps that make up the passes: the same for every drafter."""
    blocks = sum(
        min(len(anchor_candidates(s.supervised)), config.anchors_per_sequence) for s in sequences
    )
    return max(1, round(config.passes * blocks / config.anchors_per_step))


def train_contender(
    name: str,
    loaded: LoadedTarget,
    prompts: Sequence[Prompt],
    responses: ResponseFile,
    config: ComparisonConfig,
    work: Path,
    progress: Progress,
    *,
    max_seconds: float | None = None,
) -> bool:
    """Trains one contender, or goes on; whether it is done. The bundle is `work/<name>/bundle`."""
    contender = CONTENDERS[name]
    if contender.drafter == LOOKUP:
        return True
    data = from_responses(prompts, responses.responses)
    shape = DraftShape(
        drafter=contender.drafter,
        layers=config.layers,
        taps=config.taps,
        block_size=config.block_size,
    )
    options = training_of(contender.drafter, contender.objective)
    own = TrainConfig(
        steps=steps_of(data.train, config),
        anchors_per_step=config.anchors_per_step,
        learning_rate=config.learning_rate,
        seed=config.seed,
        start="noise" if config.start == "noise" else "target",
        max_seconds=max_seconds,
        **options | {"anchors_per_sequence": config.anchors_per_sequence},
    )
    job = TrainJob(shape=shape, train=own, validation_responses=config.validation_responses)
    folder = work / name
    with one_process(work):  # contenders with the same taps share their features
        folder.mkdir(exist_ok=True)
        _same_settings(folder, config)
        done = folder / "training.json"
        if done.exists() and json.loads(done.read_text())["finished"]:
            return True
        model = starting_model(loaded, job)
        taps = "-".join(map(str, model.config.target_layer_ids))
        result = train_drafter(
            loaded,
            model,
            data,
            job,
            folder=folder,
            bundle_folder=folder / "bundle",
            command=f"comparison: {name}, {config.passes:g} passes",
            progress=progress,
            features=work / f"features-{taps}",
        )
        _write(done, asdict(result))
    return result.finished


def evaluate_contender(
    name: str,
    target: str | None,
    prompts: Sequence[Prompt],
    config: ComparisonConfig,
    work: Path,
    progress: Progress,
    *,
    domain_of: Callable[[str], str],
    llm_options: dict[str, Any],
) -> None:
    """Decodes the held-out prompts at every temperature; what is there already stays.

    domain_of: domain of a prompt file's stem. llm_options: further arguments of `LLM`.
    """
    folder = work / name
    missing = [t for t in config.temperatures if not _result_file(folder, t).exists()]
    if not missing:
        return
    draft = LOOKUP if name == LOOKUP else folder / "bundle"
    llm = LLM(target, draft=draft, progress=progress, **llm_options)
    folder.mkdir(parents=True, exist_ok=True)
    _same_settings(folder, config)
    for temperature in missing:
        sampling = SamplingParams(
            temperature=temperature, max_new_tokens=config.max_new_tokens, verification="rejection"
        )
        result = evaluate(
            llm, prompts, sampling, seed=config.seed, domain_of=domain_of, progress=progress
        )
        # The report goes into a repository: no folders of this machine.
        _write(_result_file(folder, temperature), result.to_json() | {"drafter": name})


def gather(config: ComparisonConfig, work: Path) -> dict[str, Any]:
    """Everything that is done so far, as one document."""
    contenders: dict[str, Any] = {}
    for name in CONTENDERS:
        folder = work / name
        results = {
            f"{t:g}": json.loads(path.read_text())
            for t in config.temperatures
            if (path := _result_file(folder, t)).exists()
        }
        if results:
            training = folder / "training.json"
            contenders[name] = {
                "training": json.loads(training.read_text()) if training.exists() else None,
                "temperatures": results,
            }
    if not contenders:
        raise DataError(f"{work} holds no result yet; train and evaluate a contender first")
    return {"settings": asdict(config), "contenders": contenders}


def _same_settings(folder: Path, config: ComparisonConfig) -> None:
    """DataError where the folder was made with other settings: it would not be compared fairly."""
    path, ours = folder / "settings.json", json.loads(json.dumps(asdict(config)))
    if not path.exists():
        _write(path, ours)
    elif (theirs := json.loads(path.read_text())) != ours:
        changed = [key for key in ours if theirs.get(key) != ours[key]]
        raise DataError(
            f"{folder} was made with other settings ({', '.join(changed)}); take another work "
            f"folder"
        )


def _result_file(folder: Path, temperature: float) -> Path:
    return folder / f"temperature-{temperature:g}.json"


def _write(path: Path, value: object) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)
