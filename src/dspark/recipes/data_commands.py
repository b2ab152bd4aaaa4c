"""The stages of training data, each as a command of its own."""

from collections.abc import Sequence
from pathlib import Path

from dspark.core.errors import ConfigError
from dspark.data.endpoint import EndpointConfig
from dspark.data.prompts import Prompt, read_prompts
from dspark.data.responses import ResponseFile
from dspark.data.template import template_hash
from dspark.nn.linear import WeightKind
from dspark.recipes.ask_endpoint import ask_endpoint
from dspark.recipes.one_process import one_process
from dspark.recipes.progress import Progress
from dspark.recipes.regenerate import RegenerateConfig, regenerate
from dspark.recipes.synthesize import SynthesizeConfig, synthesize
from dspark.recipes.values import set_threads
from dspark.targets.load import LoadedTarget, check_device, load_target
from dspark.targets.source import read_tokenizer


def run_synthesize(
    target: str | None,
    output: Path,
    config: SynthesizeConfig,
    progress: Progress,
    *,
    weights: WeightKind | None = None,
    device: str = "cpu",
    threads: int | None = None,
) -> int:
    """How many prompts the file holds at the end."""
    set_threads(threads)
    check_device(device, weights)
    loaded = _load(target, weights, device, progress)
    with one_process(output.absolute().parent):
        return len(synthesize(loaded, output, config, progress))


def run_regenerate(
    target: str | None,
    paths: Sequence[Path],
    output: Path,
    config: RegenerateConfig,
    progress: Progress,
    *,
    endpoint: EndpointConfig | None = None,
    skip_bad: bool = False,
    weights: WeightKind | None = None,
    device: str = "cpu",
    threads: int | None = None,
) -> dict[str, int]:
    """How many responses and tokens the file holds at the end. With an endpoint the target's
    weights are not loaded."""
    set_threads(threads)
    check_device(device, weights)
    if not paths:
        raise ConfigError("there is nothing to answer; give prompts (--prompts)")
    prompts = read_prompts(*paths, skip_bad=skip_bad, say=progress.say)
    with one_process(output.absolute().parent):
        if endpoint is None:
            file = _answer_here(
                _load(target, weights, device, progress), prompts, output, config, progress
            )
        else:
            tokenizer, name, vocab_size = read_tokenizer(target, say=progress.say)
            file = ResponseFile(
                output, target=name, template_hash=template_hash(tokenizer),
                vocab_size=vocab_size, thinking=config.thinking,
            )  # fmt: skip
            ask_endpoint(tokenizer, prompts, file, config, endpoint, progress)
    return {
        "responses": len(file),
        "tokens": sum(len(response.response_ids) for response in file.responses),
    }


def _load(
    target: str | None, weights: WeightKind | None, device: str, progress: Progress
) -> LoadedTarget:
    return load_target(
        target, weights=weights, device=device, template_hash=template_hash, say=progress.say
    )


def _answer_here(
    loaded: LoadedTarget,
    prompts: Sequence[Prompt],
    output: Path,
    config: RegenerateConfig,
    progress: Progress,
) -> ResponseFile:
    file = ResponseFile(
        output, target=loaded.name, template_hash=loaded.binding.chat_template_hash,
        vocab_size=loaded.target.vocab_size, thinking=config.thinking,
    )  # fmt: skip
    regenerate(loaded, prompts, file, config, progress)
    return file
