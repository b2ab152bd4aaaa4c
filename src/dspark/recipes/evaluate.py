"""`dspark eval`: how much of a drafter's proposals the target accepts, by domain."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.core.errors import ConfigError
from dspark.core.records import RoundRecord
from dspark.core.sampling import SamplingParams, VerificationRule
from dspark.data.prompts import Prompt
from dspark.evaluation.acceptance import Acceptance, measure_acceptance, position_counts
from dspark.evaluation.bootstrap import ratio_interval
from dspark.evaluation.repetition import repeated_share
from dspark.evaluation.timing import phase_shares
from dspark.recipes.closed_loop import LoadResult, closed_loop
from dspark.recipes.llm import LLM
from dspark.recipes.progress import Progress
from dspark.recipes.prompt_sets import Job, make_jobs


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainResult:
    acceptance: Acceptance
    ci95: tuple[float, float] | None
    """Of the accepted length, by resampling prompts; None with fewer than two."""
    conditional_ci95: tuple[tuple[float, float] | None, ...]
    """Of the acceptance at each position, in the same way."""
    prompts: int
    tokens: int
    repeated_share: float | None
    """Share of output tokens inside repeated n-grams."""

    def to_json(self) -> dict[str, Any]:
        return {
            "accepted_length": self.acceptance.accepted_length,
            "ci95": None if self.ci95 is None else [*self.ci95],
            "conditional_acceptance": [*self.acceptance.conditional],
            "conditional_ci95": [None if ci is None else [*ci] for ci in self.conditional_ci95],
            "survival": [*self.acceptance.survival],
            "acceptance_rate": self.acceptance.acceptance_rate,
            "figure5_rate": self.acceptance.figure5_rate,
            "verification_budget": self.acceptance.verification_budget,
            "repeated_share": self.repeated_share,
            "prompts": self.prompts,
            "rounds": self.acceptance.rounds,
            "tokens": self.tokens,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    domains: dict[str, DomainResult]
    target: str
    drafter: str | None
    weights: str | None
    policy: str
    verification: VerificationRule
    sampling: SamplingParams
    samples: int
    seed: int
    phases: dict[str, float]
    """Share of a decoding step's time by phase, at the batch sizes of this run."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "domains": {name: result.to_json() for name, result in self.domains.items()},
            "target": self.target,
            "drafter": self.drafter,
            "weights": self.weights,
            "policy": self.policy,
            "verification": self.verification,
            "temperature": self.sampling.temperature,
            "top_k": self.sampling.top_k,
            "top_p": self.sampling.top_p,
            "min_p": self.sampling.min_p,
            "max_new_tokens": self.sampling.max_new_tokens,
            "samples": self.samples,
            "seed": self.seed,
            "phases": self.phases,
            "seconds": self.seconds,
        }


def evaluate(
    llm: LLM,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    policy: str | None = None,
    samples: int = 1,
    seed: int = 0,
    domain_of: Callable[[str], str] = lambda stem: stem,
    progress: Progress | None = None,
) -> Evaluation:
    """Generates and measures acceptance by domain; `llm.max_requests` texts at once.

    `sampling` needs no seed: every text's is derived from (seed, file, line, sample), so a domain's
    numbers do not depend on what else is evaluated. Its rule is `rejection` if it names no other.
    policy: None is the drafter's whole block, whatever its bundle serves with.
    domain_of: the domain of a prompt file's stem; by default each is one of its own.

    Raises ConfigError without a drafter, unless `policy` is `off`.
    """
    progress = progress or Progress(quiet=True)
    if policy is None:
        if llm.drafter is None:
            raise ConfigError("there is no drafter to evaluate; give a bundle, or policy off")
        policy = f"fixed:{llm.drafter.block_size}"
    chosen = llm.policies.resolve(policy)
    jobs = make_jobs(llm, prompts, sampling, samples=samples, seed=seed, say=progress.say)
    with progress.task("texts", total=len(jobs)) as advance:
        result = closed_loop(
            llm,
            jobs,
            chosen,
            concurrency=llm.max_requests,
            on_finished=lambda job: advance(1, job.domain),
        )
    return Evaluation(
        domains=_by_domain(jobs, result, seed, domain_of),
        target=llm.loaded.name,
        drafter=llm.draft_name if chosen.drafts else None,
        weights=llm.loaded.weights,
        policy=chosen.name,
        verification=jobs[0].params.rule,
        sampling=sampling,
        samples=samples,
        seed=seed,
        phases=phase_shares(result.records),
        seconds=result.seconds,
    )


def _by_domain(
    jobs: Sequence[Job], result: LoadResult, seed: int, domain_of: Callable[[str], str]
) -> dict[str, DomainResult]:
    rounds: dict[tuple[str, int], list[RoundRecord]] = {(j.domain, j.line): [] for j in jobs}
    for step in result.records:
        for record in step.rounds:
            job = jobs[record.request]
            rounds[job.domain, job.line].append(record)
    texts: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for job, text in zip(jobs, result.texts, strict=True):
        texts[domain_of(job.domain)].append(text)
    return {
        domain: _domain_result(
            [own for (stem, _), own in rounds.items() if domain_of(stem) == domain],
            texts[domain],
            seed,
        )
        for domain in texts
    }


def _domain_result(
    by_prompt: list[list[RoundRecord]], texts: list[tuple[int, ...]], seed: int
) -> DomainResult:
    acceptance = measure_acceptance([record for own in by_prompt for record in own])
    positions = [
        [position_counts(own, k) for own in by_prompt]
        for k in range(1, len(acceptance.conditional) + 1)
    ]
    return DomainResult(
        acceptance=acceptance,
        ci95=ratio_interval(
            [sum(record.emitted for record in own) for own in by_prompt],
            [len(own) for own in by_prompt],
            seed=seed,
        ),
        conditional_ci95=tuple(
            ratio_interval([n for n, _ in counts], [d for _, d in counts], seed=seed)
            for counts in positions
        ),
        prompts=len(by_prompt),
        tokens=sum(map(len, texts)),
        repeated_share=repeated_share(texts),
    )
