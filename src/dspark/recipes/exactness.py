"""Does the same seed give the same tokens on this machine, however they are served (law 5)?"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dspark.core.records import EngineStats
from dspark.core.sampling import SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.recipes.llm import LLM
from dspark.recipes.progress import Progress
from dspark.scheduling.policies import Off, Policy

_PAGE = 16
"""Small pages: short prompts share some, and a preemption is soon needed."""
_STEPS_TO_PREEMPTION = 4
"""One request is preempted so often, as if there were too few pages."""

Job = tuple[tuple[int, ...], SamplingParams]
"""A prompt and how it is sampled: greedy or `coupled`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way of serving the same requests, held against each of them alone without speculation."""

    name: str
    tokens: int
    """Compared."""
    differing: int
    """Tokens that are not those of the request alone; all after the first are likely to differ."""
    requests: int
    """That differ."""
    exercised: int
    """How often what gives the way its name took place: requests beside each other at most, draft
    tokens accepted, steps written behind, preemptions, prompt tokens found in the prefix cache.
    0 shows nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exactness:
    row_exact_kernels: bool
    """Whether this machine has row-exact kernels for every product of the target."""
    ways: tuple[Way, ...]

    @property
    def holds(self) -> bool:
        return self.row_exact_kernels and not any(way.differing for way in self.ways)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def check_exactness(
    llm: LLM, jobs: Sequence[Job], *, batch: int = 32, progress: Progress | None = None
) -> Exactness:
    """Generates every job alone, then in each other way, and counts the tokens that differ.

    `llm.policy` is what "speculation" means; without a drafter those ways are left out.
    """
    progress = progress or Progress(quiet=True)
    ways = list(_ways(llm, jobs, batch))
    with progress.task("texts", total=len(jobs) * (1 + len(ways))) as advance:
        alone, _ = _generate(llm, jobs, Off(), _config(jobs, 1), advance)
        results = []
        for name, policy, config, exercised in ways:
            texts, engine = _generate(
                llm, jobs, policy, config, advance,
                warm=jobs if name == "prefix hit" else (), preempt=name == "preempted",
            )  # fmt: skip
            results.append(_compare(name, alone, texts, exercised(engine)))
    return Exactness(row_exact_kernels=llm.loaded.target.row_exact, ways=tuple(results))


_WayOf = tuple[str, Policy, EngineConfig, Callable[[Engine], int]]


def _ways(llm: LLM, jobs: Sequence[Job], batch: int) -> Iterator[_WayOf]:
    yield f"batch of {batch}", Off(), _config(jobs, batch), _largest_batch
    policy = llm.policy
    if policy.drafts:
        yield "speculation alone", policy, _config(jobs, 1), _accepted
        yield f"speculation in a batch of {batch}", policy, _config(jobs, batch), _accepted
    yield "pipelined", policy, _config(jobs, batch, pipeline=True), _written_behind
    yield "preempted", policy, _config(jobs, batch), _count("preemptions")
    yield "prefix hit", policy, _config(jobs, batch, cache=True), _count("prefix_hit_tokens")


def _config(
    jobs: Sequence[Job], requests: int, *, cache: bool = False, pipeline: bool = False
) -> EngineConfig:
    # Twice what all can need, so that a prompt's pages stay for a second run.
    tokens = 2 * sum(len(prompt) + own.max_new_tokens + _PAGE for prompt, own in jobs)
    return EngineConfig(
        max_requests=requests,
        cache_tokens=tokens,
        page_size=_PAGE,
        prefix_cache=cache,
        pipeline=pipeline,
    )


def _generate(
    llm: LLM,
    jobs: Sequence[Job],
    policy: Policy,
    config: EngineConfig,
    advance: Callable[[int, str], None],
    *,
    warm: Sequence[Job] = (),
    preempt: bool = False,
) -> tuple[list[tuple[int, ...]], Engine]:
    engine = Engine(llm.loaded.target, llm.drafter, policy, config)
    for prompt, params in warm:
        engine.add(prompt, params)
        for _ in engine.run():
            engine.cancel()  # the first token says that the prompt's pages are there
    ids = [engine.add(prompt, params) for prompt, params in jobs]
    texts: dict[int, tuple[int, ...]] = dict.fromkeys(ids, ())
    while not engine.idle:
        if preempt and engine.running and len(engine.records) % _STEPS_TO_PREEMPTION == 0:
            engine.places.preempt(max(engine.running, key=lambda state: state.rank))
        for event in engine.step():
            if event.error is not None:
                raise event.error
            texts[event.request] += event.tokens
            if event.finished is not None:
                advance(1, policy.name)
    return [texts[request] for request in ids], engine


def _compare(
    name: str, alone: list[tuple[int, ...]], texts: list[tuple[int, ...]], exercised: int
) -> Way:
    differing = [
        sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))
        for one, other in zip(alone, texts, strict=True)
    ]
    return Way(
        name=name,
        tokens=sum(map(len, alone)),
        differing=sum(differing),
        requests=sum(count > 0 for count in differing),
        exercised=exercised,
    )


def _largest_batch(engine: Engine) -> int:
    return max(len(record.rounds) for record in engine.records)


def _accepted(engine: Engine) -> int:
    return sum(own.accepted for record in engine.records for own in record.rounds)


def _written_behind(engine: Engine) -> int:
    return engine.writing.steps_behind


def _count(name: str) -> Callable[[Engine], int]:
    def count(engine: Engine) -> int:
        stats: EngineStats = engine.stats()
        return int(getattr(stats, name))

    return count
