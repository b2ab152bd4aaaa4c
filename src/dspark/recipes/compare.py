"""The same prompt with and without speculation, in one run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from dspark.core.errors import ConfigError
from dspark.core.sampling import SamplingParams
from dspark.recipes.generation import RequestOutput, StreamPiece
from dspark.recipes.llm import LLM
from dspark.recipes.progress import Progress

_WARM_UP_TOKENS = 8
_DEFAULT_SEED = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    output: RequestOutput
    tokens_per_second: float | None
    """With speculation, prefill left out: tokens after the first, over the time they took. None for
    a text of one token."""
    plain_tokens_per_second: float | None
    """Our fastest plain decoding: no drafter, no tiles for exactness; same weights, same run."""
    identical: bool
    """Whether a separate plain run on row-exact tiles gave the same tokens."""

    @property
    def speedup(self) -> float | None:
        if self.tokens_per_second is None or self.plain_tokens_per_second is None:
            return None
        return self.tokens_per_second / self.plain_tokens_per_second


def compare(
    llm: LLM,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    repeats: int = 2,
    show: Callable[[StreamPiece], None] = lambda _piece: None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Runs speculative and plain decoding alternately, `repeats` times each; rates are medians.

    At temperature > 0 both use the `coupled` rule and one seed, without which there would be
    nothing to compare. The first speculative run is shown piece by piece; `progress` counts the
    others.

    Raises ConfigError without a drafter, and under `rejection` at temperature > 0.
    """
    params = _comparable(llm, params)
    progress = progress or Progress(quiet=True)
    warm = replace(params, max_new_tokens=min(_WARM_UP_TOKENS, params.max_new_tokens))
    for policy in (None, "off"):
        _timed(llm, prompt, warm, policy, clock, row_exact=policy is None)

    output, rate = _timed(llm, prompt, params, None, clock, show=show)
    fast, plain = [rate], []
    with progress.task("measuring", total=2 * repeats) as advance:
        for repeat in range(repeats):
            if repeat:
                fast.append(_timed(llm, prompt, params, None, clock)[1])
                advance(1, "with speculation")
            plain.append(_timed(llm, prompt, params, "off", clock, row_exact=False)[1])
            advance(1, "plain")
        exact, _ = _timed(llm, prompt, params, "off", clock)
        advance(1, "compared")
    return Comparison(output, _median(fast), _median(plain), output.token_ids == exact.token_ids)


def _comparable(llm: LLM, params: SamplingParams) -> SamplingParams:
    """The same parameters, under which both runs must give the same tokens."""
    if not llm.policy.drafts:
        raise ConfigError(
            "there is nothing to compare with policy off; give a drafter with --draft"
        )
    if params.temperature == 0:
        return params
    if params.verification == "rejection":
        raise ConfigError(
            "--compare needs the coupled rule at temperature > 0: under rejection, other random "
            "numbers are drawn with and without a draft; leave --verification out"
        )
    seed = _DEFAULT_SEED if params.seed is None else params.seed
    return replace(params, seed=seed, verification="coupled")


def _timed(
    llm: LLM,
    prompt: Sequence[int],
    params: SamplingParams,
    policy: str | None,
    clock: Callable[[], float],
    *,
    row_exact: bool = True,
    show: Callable[[StreamPiece], None] = lambda _piece: None,
) -> tuple[RequestOutput, float | None]:
    """The text, and its tokens per second after the first; None where there is only one."""
    generation = llm.start([prompt], params, policy=policy, row_exact=row_exact)
    first = last = clock()
    count = 0
    for piece in generation:
        if count == 0:
            first = clock()  # the first token is prefill's
        count += len(piece.token_ids)
        last = clock()
        show(piece)
    rate = (count - 1) / (last - first) if count > 1 else None
    return generation.checked_outputs()[0], rate


def _median(rates: list[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return median(known) if known else None
