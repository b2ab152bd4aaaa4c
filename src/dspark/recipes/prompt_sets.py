"""Which prompts a measurement uses, as token ids with their sampling parameters."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dspark.core.errors import ConfigError, DataError
from dspark.core.random import derive_seed
from dspark.core.sampling import SamplingParams
from dspark.data.prompts import Prompt, read_prompts
from dspark.data.template import encode_prompt
from dspark.recipes.llm import LLM

SPLITS = ("validation", "all")


@dataclass(frozen=True, slots=True)
class Job:
    """One text to generate."""

    domain: str
    line: int
    sample: int
    prompt: tuple[int, ...]
    params: SamplingParams

    def with_sampling(self, sampling: SamplingParams) -> "Job":
        """The same text to be, under other parameters; the seed stays."""
        return replace(self, params=replace(sampling, seed=self.params.seed))


def shipped_prompts() -> Path:
    """The folder of ten prompts per domain that comes with the package."""
    return Path(__file__).parent.parent / "prompts"


def gather_prompts(
    paths: Sequence[Path] | None = None,
    *,
    split: str | None = None,
    limit: int | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> list[Prompt]:
    """Prompts of files and folders; the shipped ones by default.

    split: None is `validation` for given files, some of which a drafter may have been trained on,
    and `all` for the shipped ones, which none was.
    limit: the first so many of each domain; None is all.
    say: is told of domains that the split leaves empty.

    Raises ConfigError for a bad option, DataError for bad files or when nothing is left.
    """
    if split is None:
        split = "validation" if paths else "all"
    if split not in SPLITS:
        raise ConfigError(f"split is {split!r}; it must be {' or '.join(SPLITS)}")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; it must be at least 1")
    everything = read_prompts(*(paths or [shipped_prompts()]))
    kept = []
    for domain, group in itertools.groupby(everything, key=lambda prompt: prompt.file):
        own = [prompt for prompt in group if split == "all" or prompt.is_validation]
        if not own:
            say(f"{domain}: none of its prompts is in the validation split; left out")
        kept += own[:limit]
    if not kept:
        raise DataError(
            "no prompt of these files is in the validation split; add prompts, or use the split all"
        )
    return kept


def make_jobs(
    llm: LLM,
    prompts: Iterable[Prompt],
    sampling: SamplingParams,
    *,
    samples: int = 1,
    seed: int = 0,
    say: Callable[[str], None] = lambda _line: None,
) -> list[Job]:
    """`samples` jobs a prompt (its first user turn), seeds derived from (seed, file, line, sample).

    Prompts that do not fit the target's context together with `max_new_tokens` are left out and
    said; DataError when that leaves none. Without a rule of its own `sampling` gets `rejection`.
    """
    if samples < 1:
        raise ConfigError(f"samples is {samples}; it must be at least 1")
    if seed < 0:
        raise ConfigError(f"seed is {seed}; it must be at least 0")
    limit = llm.loaded.target.max_context - sampling.max_new_tokens
    jobs: list[Job] = []
    too_long = 0
    for prompt in prompts:
        ids = tuple(encode_prompt(llm.tokenizer, prompt.turns[0], prompt.system).tolist())
        if len(ids) > limit:
            too_long += 1
            continue
        for sample in range(samples):
            params = replace(
                sampling,
                seed=derive_seed(seed, prompt.file, prompt.line, sample),
                verification=sampling.verification or "rejection",
            )
            jobs.append(Job(prompt.file, prompt.line, sample, ids, params))
    if too_long:
        say(f"{too_long} prompts have more than {limit} tokens and are left out")
    if not jobs:
        raise DataError(
            f"every prompt has more than {limit} tokens, what max_new_tokens "
            f"{sampling.max_new_tokens} leaves of the target's context; lower max_new_tokens"
        )
    return jobs
