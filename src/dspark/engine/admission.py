"""What an engine refuses before anything runs."""

from collections.abc import Sequence

from dspark.core.errors import ConfigError, PromptError
from dspark.core.sampling import SamplingParams


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
