"""From the options that every sampling command has to `SamplingParams`."""

from typing import Any

from dspark.core.sampling import SamplingParams


def sampling_params(
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    max_new_tokens: int,
    verification: str | None,
    **more: Any,
) -> SamplingParams:
    """more: what only some commands have. ConfigError for a value outside its range."""
    from dspark.recipes.values import rule_value

    return SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_new_tokens=max_new_tokens,
        verification=rule_value(verification),
        **more,
    )
