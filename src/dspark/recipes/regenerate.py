"""On-policy responses: the target answers the prompts that a drafter is trained on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.core.random import derive_seed
from dspark.core.records import FinishReason
from dspark.core.sampling import SamplingParams
from dspark.data.prompts import Prompt
from dspark.data.responses import Response, ResponseFile
from dspark.data.template import encode_prompt
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.recipes.progress import Progress
from dspark.scheduling.policies import Off
from dspark.targets.load import LoadedTarget


@dataclass(frozen=True, kw_only=True, slots=True)
class RegenerateConfig:
    temperatures: Sequence[float] = (1.0, 0.0)
    """One response a prompt at each; the index is the sample number."""
    max_prompt_tokens: int = 768
    """Longer prompts are left out, and said."""
    max_new_tokens: int = 256
    max_requests: int = 64
    seed: int = 0


def regenerate(
    loaded: LoadedTarget,
    prompts: Iterable[Prompt],
    output: ResponseFile,
    config: RegenerateConfig,
    progress: Progress,
    *,
    page_size: int = 1024,
) -> None:
    """Answers every (prompt, temperature) that `output` lacks; may be stopped and run again.

    Each response's seed is derived from (config.seed, file, line, sample). So a response does not
    depend on its batch or on earlier runs, but for the rounding of the target's forward.
    """
    longest = min(config.max_prompt_tokens, loaded.target.max_context - config.max_new_tokens)
    engine = Engine(
        loaded.target,
        None,
        Off(),
        EngineConfig(
            max_requests=config.max_requests,
            # A page per ordinary request: then a whole batch is one strided view of the cache.
            page_size=page_size,
            cache_tokens=(config.max_requests + 8) * page_size,
            cache_dtype="bfloat16",
            row_exact=False,
        ),
    )
    jobs: dict[int, tuple[Prompt, int, SamplingParams, list[int]]] = {}
    too_long = 0
    for prompt in prompts:
        ids = encode_prompt(loaded.tokenizer, prompt.turns[0], prompt.system).tolist()
        for sample, temperature in enumerate(config.temperatures):
            if (prompt.file, prompt.line, sample) in output:
                continue
            if len(ids) > longest:
                too_long += 1
            else:
                params = SamplingParams(
                    temperature=temperature,
                    max_new_tokens=config.max_new_tokens,
                    seed=derive_seed(config.seed, prompt.file, prompt.line, sample),
                    verification="rejection",
                )
                jobs[engine.add(ids, params)] = (prompt, sample, params, ids)

    if too_long:
        progress.say(f"{too_long} responses to prompts of more than {longest} tokens are left out")
    texts: dict[int, list[int]] = {request: [] for request in jobs}
    tokens = 0
    with progress.task("responses", total=len(jobs)) as advance:
        while not engine.idle:
            finished: list[Response] = []
            for event in engine.step():
                if event.error is not None:
                    raise event.error
                texts[event.request] += event.tokens
                tokens += len(event.tokens)
                if event.finished is not None:
                    finished.append(
                        _response(jobs[event.request], texts.pop(event.request), event.finished)
                    )
            engine.records.clear()
            output.append(finished)
            advance(len(finished), f"{tokens:,} tokens")


def _response(
    job: tuple[Prompt, int, SamplingParams, list[int]], tokens: list[int], reason: FinishReason
) -> Response:
    prompt, sample, params, ids = job
    assert params.seed is not None
    return Response(
        file=prompt.file,
        line=prompt.line,
        sample=sample,
        temperature=params.temperature,
        seed=params.seed,
        finish_reason=reason,
        prompt_ids=np.asarray(ids, dtype=np.int32),
        response_ids=np.asarray(tokens, dtype=np.int32),
    )
