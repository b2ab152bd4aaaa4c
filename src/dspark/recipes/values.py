"""Values that commands take as text, checked by those who own them."""

import difflib
import os
from pathlib import Path
from typing import Any, cast, get_args

import torch

from dspark.core.errors import ConfigError, DataError
from dspark.core.exports import FORMATS
from dspark.core.guided import Guided
from dspark.core.sampling import RULES, VerificationRule
from dspark.data.endpoint import EndpointConfig
from dspark.evaluation.figures import check_figure
from dspark.nn.linear import KINDS, WeightKind
from dspark.scheduling.parse import check_form
from dspark.training.config import FEATURE_MODES, FeatureMode
from dspark.training.ranks import Parallel

_THREADS_A_PROCESSOR = 16
"""Beyond it, a mistyped number would take all memory for stacks before anything is said."""


def rule_value(text: str | None) -> VerificationRule | None:
    return cast(VerificationRule | None, _one_of("verification", text, RULES))


def guided_from(json_schema: str | None, regex: str | None, grammar: Path | None) -> Guided | None:
    """The one of them that is given. A schema is a file, or JSON where it begins with a brace."""
    if (json_schema, regex, grammar).count(None) < 2:
        raise ConfigError("give only one of json_schema, regex and grammar")
    if json_schema is not None:
        inline = json_schema.lstrip().startswith("{")
        return Guided.json_schema(json_schema if inline else _read(Path(json_schema)))
    if regex is not None:
        return Guided.regex(regex)
    return None if grammar is None else Guided.grammar(_read(grammar))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DataError(f"{path} cannot be read: {reason}") from error


def weights_value(text: str | None) -> WeightKind | None:
    return cast(WeightKind | None, _one_of("weights", text, KINDS))


def policy_value(text: str | None) -> str | None:
    """A policy that some drafter may have; whether this one has it is seen once it is loaded."""
    if text is not None:
        check_form(text)
    return text


def parallel_value(text: str) -> Parallel:
    return cast(Parallel, _one_of("parallel", text, get_args(Parallel)))


def endpoint_value(
    url: str | None, *, model: str | None, concurrency: int, timeout: float, tries: int
) -> EndpointConfig | None:
    """None without a URL. The key comes from the environment, so that no list of processes and no
    shell's history has it."""
    if url is None:
        if model is not None:
            raise ConfigError("endpoint_model names a model of an endpoint; give --endpoint URL")
        return None
    return EndpointConfig(
        url=url,
        model=model,
        api_key=os.environ.get("DSPARK_API_KEY") or os.environ.get("OPENAI_API_KEY"),
        concurrency=concurrency,
        timeout=timeout,
        tries=tries,
    )


def format_value(text: str | None) -> str | None:
    return _one_of("format", text, FORMATS)


def features_value(text: str) -> FeatureMode:
    return cast(FeatureMode, _one_of("features", text, FEATURE_MODES))


def check_file(file: Path, *, figure: bool = False) -> None:
    """Before the long work: ConfigError where a file cannot be written, and for a figure also what
    `check_figure` raises."""
    if figure:
        check_figure(file)
    if file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(
            f"cannot write {file}: give a file in a folder that exists and can be written to"
        )


def set_threads(threads: int | None) -> None:
    """CPU threads of this process; None leaves torch's own choice. ConfigError below 1 or for far
    more than there are processors."""
    if threads is None:
        return
    most = _THREADS_A_PROCESSOR * (os.cpu_count() or 1)
    if not 1 <= threads <= most:
        raise ConfigError(f"threads is {threads}; it must be in [1, {most}] on this machine")
    torch.set_num_threads(threads)


def _one_of(name: str, text: str | None, allowed: tuple[Any, ...]) -> str | None:
    if text is None or text in allowed:
        return text
    near = difflib.get_close_matches(text, allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{name} is {text!r}; it must be {' or '.join(allowed)}{hint}")
