"""The same prompt with and without speculation, in one run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from dspark.core.errors import ConfigError
from dspark.core.sampling import SamplingParams
from dspark.recipes.llm import LLM, RequestOutput, StreamPiece

_WARM_UP_TOKENS = 8
_DEFAULT_SEED = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    output: RequestOutput
    tokens_per_second: float
    """With speculation, prefill left out: tokens after the first, over the time they took."""
    plain_tokens_per_second: float
    """Our fastest plain decoding: no drafter, no tiles for exactness; same weights, same run."""
    identical: bool
    """Whether a separate plain run on row-exact tiles gave the same tokens."""

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second


def compare(
    llm: LLM,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    repeats: int = 2,
    show: Callable[[StreamPiece], None] = lambda _piece: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Runs speculative and plain decoding alternately, `repeats` times each; rates are medians.

    At temperature > 0 both use the `coupled` rule and one seed, without which there would be
    nothing to compare. The first speculative run is shown piece by piece.
    """
    if not llm.policy.drafts:
        raise ConfigError(
            "there is nothing to compare with policy off; give a drafter with --draft"
        )
    if params.temperature > 0:
        if params.verification == "rejection":
            raise ConfigError(
                "--compare needs the coupled rule at temperature > 0: under rejection, other "
                "random "
                "numbers are drawn with and without a draft; leave --verification out"
            )
        seed = _DEFAULT_SEED if params.seed is None else params.seed
        params = replace(params, seed=seed, verification="coupled")

    warm = replace(params, max_new_tokens=min(_WARM_UP_TOKENS, params.max_new_tokens))
    for policy in (None, "off"):
        _timed(llm, prompt, warm, policy, clock, row_exact=policy is None)
    fast, plain = [], []
    shown: RequestOutput | None = None
    for repeat in range(repeats):
        output, rate = _timed(llm, prompt, params, None, clock, show=None if repeat else show)
        shown = shown or output
        fast.append(rate)
        plain.append(_timed(llm, prompt, params, "off", clock, row_exact=False)[1])
    exact, _ = _timed(llm, prompt, params, "off", clock)
    assert shown is not None
    return Comparison(shown, median(fast), median(plain), shown.token_ids == exact.token_ids)


def _timed(
    llm: LLM,
    prompt: Sequence[int],
    params: SamplingParams,
    policy: str | None,
    clock: Callable[[], float],
    *,
    row_exact: bool = True,
    show: Callable[[StreamPiece], None] | None = None,
) -> tuple[RequestOutput, float]:
    generation = llm.start([prompt], params, policy=policy, row_exact=row_exact)
    first = last = clock()
    count = 0
    for piece in generation:
        if count == 0:
            first = clock()  # the first token is prefill's
        count += len(piece.token_ids)
        last = clock()
        if show is not None:
            show(piece)
    seconds = last - first
    return generation.outputs()[0], (count - 1) / seconds if seconds > 0 else float("nan")
