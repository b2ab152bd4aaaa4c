"""How a request comes in: what an engine refuses before anything runs, and what it begins with."""

from collections.abc import Sequence
from typing import Any

from dspark.core.errors import ConfigError, PromptError
from dspark.core.random import RequestRandom
from dspark.core.sampling import SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.constraints import logit_state
from dspark.engine.memory import KVMemory
from dspark.engine.request import Request, RequestState
from dspark.engine.text import OutputText
from dspark.nn.noise import RequestNoise
from dspark.nn.pages import PageTable
from dspark.nn.seams import Target


def check_request(
    prompt: Sequence[int],
    params: SamplingParams,
    vocab_size: int,
    limit: int,
    has_tokenizer: bool,
) -> None:
    """Raises PromptError or ConfigError for a request that can never run.

    limit: tokens that prompt and output may have together.
    """
    if not prompt:
        raise PromptError("the prompt is empty; give it some text")
    if len(prompt) + params.max_new_tokens > limit:
        raise PromptError(
            f"the prompt has {len(prompt)} tokens and max_new_tokens is "
            f"{params.max_new_tokens}; together they must fit the context of {limit} tokens"
        )
    if not all(0 <= token < vocab_size for token in prompt):
        raise PromptError(f"prompt token ids must be in [0, {vocab_size})")
    for name in ("stop_token_ids", "banned_token_ids", "logit_bias"):
        for token in getattr(params, name):
            if token >= vocab_size:
                raise ConfigError(
                    f"{name} has token {token}; the target's token ids are in [0, {vocab_size})"
                )
    if len(set(params.banned_token_ids)) == vocab_size:
        raise ConfigError("banned_token_ids has every token of the target; leave some to generate")
    if not has_tokenizer:
        for what, asked in (
            ("stop strings need", params.stops),
            ("guided decoding needs", params.guided),
        ):
            if asked:
                raise ConfigError(f"{what} a tokenizer; this engine knows token ids only")


def fresh_state(
    request: Request, target: Target, memory: KVMemory, config: EngineConfig, tokenizer: Any
) -> RequestState:
    """Of a request that has not run yet; without a tokenizer it writes no text."""
    params, V = request.params, target.vocab_size
    writer = None
    if tokenizer is not None:
        writer = OutputText(tokenizer, params.stops, include_stop=params.include_stop)
    return RequestState(
        request,
        RequestNoise(RequestRandom(request.seed, request.choice), params, V, target.device),
        PageTable([], config.page_size),
        digests=memory.digests(request.prompt),
        logits=logit_state(request, V, frozenset(target.eos_token_ids), target.device),
        writer=writer,
    )
