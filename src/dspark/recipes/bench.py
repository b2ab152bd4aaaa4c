"""`dspark bench`: throughput and latency of policies under load, measured side by side."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from dspark.core.errors import ConfigError
from dspark.core.records import StepRecord
from dspark.core.sampling import SamplingParams, VerificationRule
from dspark.data.prompts import Prompt
from dspark.evaluation.acceptance import measure_acceptance
from dspark.recipes.closed_loop import LoadResult, closed_loop
from dspark.recipes.llm import LLM
from dspark.recipes.profile import ensure_costs
from dspark.recipes.progress import Progress
from dspark.recipes.prompt_sets import Job, make_jobs
from dspark.scheduling.cost_model import CostModel
from dspark.scheduling.policies import Policy, check_rule

_WARM_UP_TOKENS = 16
_TYPICAL_CONTEXT = 128.0
"""Tokens a request, for modelled time: the context that most of a cost table is measured at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRow:
    """Medians over the rounds of the benchmark."""

    policy: str
    concurrency: int
    tokens_per_second: float
    """Output tokens of all requests over the wall time, prefill included."""
    speedup: float | None
    """Throughput over that of `off` in the same round; None when `off` was not measured."""
    accepted_length: float | None
    verified_per_request: float | None
    """Mean verification budget."""
    ttft_ms: float
    """Median over requests: sent to first token."""
    tpot_ms: float | None
    """Median over requests: per token after the first."""
    modelled: float | None = None
    """Throughput over that of `off` in seconds of the cost table instead of the clock, decoding
    steps alone: what the policy decided, whatever the machine did meanwhile. None without a table
    or without `off`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    rows: tuple[BenchRow, ...]
    target: str
    drafter: str | None
    weights: str | None
    verification: VerificationRule
    temperature: float
    max_new_tokens: int
    rounds: int
    prompts: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def bench(
    llm: LLM,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    policies: Sequence[str] | None = None,
    concurrencies: Sequence[int] = (1, 8),
    rounds: int = 3,
    seed: int = 0,
    progress: Progress | None = None,
) -> Bench:
    """Measures every policy at every concurrency, `rounds` times over.

    Each round visits all of them, starting at another one, so that a machine that drifts slows all
    alike; ratios are taken within a round. Requests repeat the prompts (with other seeds) until
    there are at least two for every place. `off` is our fastest plain path: no drafter in the
    engine and no tiles that only speculation needs.

    policies: None is `off` and what this LLM uses by default. Where one needs a cost table and none
        fits, this machine is profiled first.
    sampling: its rule holds for all rows; without one it is `rejection` where every policy is
        lossless under it, else `coupled`.
    Raises ConfigError for a policy that does not exist or is not lossless under the rule.
    """
    progress = progress or Progress(quiet=True)
    if rounds < 1:
        raise ConfigError(f"rounds is {rounds}; it must be at least 1")
    for concurrency in concurrencies:
        if concurrency < 1:
            raise ConfigError(f"concurrency is {concurrency}; it must be at least 1")
    names = policies or ["off", llm.policies.default]
    ensure_costs(llm, names, progress)
    cost = llm.policies.cost_model()  # before the runs: a broken table is told at once
    chosen = [llm.policies.resolve(name) for name in dict.fromkeys(names)]
    rule = sampling.verification or _common_rule(chosen)
    for policy in chosen:
        check_rule(policy, rule)
    sampling = replace(sampling, verification=rule)
    copies = {count: max(1, -(-2 * count // len(prompts))) for count in concurrencies}
    jobs = make_jobs(
        llm, prompts, sampling, samples=max(copies.values()), seed=seed, say=progress.say
    )
    jobs.sort(key=lambda job: job.sample)
    loads = {
        concurrency: [job for job in jobs if job.sample < samples]
        for concurrency, samples in copies.items()
    }

    cells = [(policy, concurrency) for concurrency in loads for policy in chosen]
    results: dict[tuple[str, int], list[LoadResult]] = {(p.name, c): [] for p, c in cells}
    with progress.task("runs", total=rounds * len(cells)) as advance:
        for policy in chosen:
            closed_loop(llm, _short(jobs[:1]), policy, concurrency=1)
        for number in range(rounds):
            for policy, concurrency in _rotated(cells, number):
                result = closed_loop(llm, loads[concurrency], policy, concurrency=concurrency)
                results[policy.name, concurrency].append(result)
                advance(1, f"{policy.name} at {concurrency}")
    return Bench(
        rows=tuple(
            _row(
                policy.name,
                concurrency,
                results[policy.name, concurrency],
                results.get(("off", concurrency)),
                cost,
            )
            for policy, concurrency in cells
        ),
        target=llm.loaded.name,
        drafter=llm.draft_name if any(policy.drafts for policy in chosen) else None,
        weights=llm.loaded.weights,
        verification=rule,
        temperature=sampling.temperature,
        max_new_tokens=sampling.max_new_tokens,
        rounds=rounds,
        prompts=len(prompts),
    )


def _common_rule(policies: Sequence[Policy]) -> VerificationRule:
    return "rejection" if all("rejection" in policy.rules for policy in policies) else "coupled"


def _row(
    policy: str,
    concurrency: int,
    runs: list[LoadResult],
    plain: list[LoadResult] | None,
    cost: CostModel | None,
) -> BenchRow:
    acceptance = measure_acceptance(
        [record for run in runs for step in run.records for record in step.rounds]
    )
    tpot = [median(run.tpot) for run in runs if run.tpot]
    return BenchRow(
        policy=policy,
        concurrency=concurrency,
        tokens_per_second=median(run.tokens_per_second for run in runs),
        speedup=None
        if plain is None
        else median(
            run.tokens_per_second / off.tokens_per_second
            for run, off in zip(runs, plain, strict=True)
        ),
        accepted_length=acceptance.accepted_length,
        verified_per_request=acceptance.verification_budget,
        ttft_ms=1000 * median(median(run.ttft) for run in runs),
        tpot_ms=1000 * median(tpot) if tpot else None,
        modelled=None if plain is None or cost is None else _modelled(runs, plain, cost),
    )


def _modelled(runs: list[LoadResult], plain: list[LoadResult], cost: CostModel) -> float | None:
    """Tokens a second of the cost table over those of `plain`; None where every step read a prompt,
    whose time the table does not know."""
    rates = []
    for own in (runs, plain):
        steps = [s for run in own for s in run.records if s.rounds and not s.prefill_tokens]
        seconds = sum(_modelled_seconds(step, cost) for step in steps)
        if not seconds:
            return None
        rates.append(sum(round_.emitted for step in steps for round_ in step.rounds) / seconds)
    return rates[0] / rates[1]


def _modelled_seconds(step: StepRecord, cost: CostModel) -> float:
    requests, context = len(step.rounds), len(step.rounds) * _TYPICAL_CONTEXT
    drafting = sum(round_.proposed > 0 for round_ in step.rounds)
    length = max(round_.proposed for round_ in step.rounds)
    own = cost.step_seconds(step.batch_tokens, requests=requests, context_tokens=context)
    return float(own) + cost.draft_seconds(
        drafting, length=length, requests=requests, context_tokens=context
    )


def _short(jobs: Sequence[Job]) -> list[Job]:
    """The same jobs cut to a few tokens, to warm caches and allocators up."""
    return [
        replace(
            job,
            params=replace(
                job.params, max_new_tokens=min(_WARM_UP_TOKENS, job.params.max_new_tokens)
            ),
        )
        for job in jobs
    ]


def _rotated(cells: list[tuple[Policy, int]], number: int) -> list[tuple[Policy, int]]:
    start = number % len(cells)
    return cells[start:] + cells[:start]
