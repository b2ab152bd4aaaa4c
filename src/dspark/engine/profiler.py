"""Measures what steps cost, by running real ones (paper, section 3.2.2: SPS(B)).

Every measured step is the engine's own: draft, ragged batch, target forward, verification, commit,
context capture. A scripted policy says how much is verified, and after each step its requests are
wound back, so that a cell is always the same step. All cells are visited in turn, in another order
each time, so that a machine that drifts slows all alike; the first visits warm up and do not count.
"""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from dspark.core.errors import ConfigError
from dspark.core.records import StepRecord
from dspark.core.sampling import RULES, SamplingParams, VerificationRule
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.nn.seams import Drafter, Target
from dspark.scheduling.arrays import BoolArray, IntArray
from dspark.scheduling.fit import DraftCell, StepCell
from dspark.scheduling.policies import Off, Policy, RoundView

_TILE = 16
"""Kernels are likely to step after multiples of it, so both sides of some are measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    max_requests: int = 32
    """Powers of two up to it are measured."""
    contexts: tuple[int, ...] = (128, 512)
    """Cached tokens of each request: all shapes at the first, a few at the others."""
    repeats: int = 5
    """Visits of every cell that count; medians are kept."""

    def __post_init__(self) -> None:
        for name in ("max_requests", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.contexts or min(self.contexts) < 1:
            raise ConfigError(f"contexts are {list(self.contexts)}; they must be at least 1 token")

    @property
    def request_counts(self) -> list[int]:
        return [2**k for k in range(self.max_requests.bit_length()) if 2**k <= self.max_requests]


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureCell:
    """What being able to draft costs a step in which nobody does."""

    requests: int
    plain: float
    """Seconds of a step without a drafter."""
    captured: float
    """Seconds of a step that captures features and makes context of them in batches."""


@dataclass(frozen=True, slots=True)
class Profile:
    steps: tuple[StepCell, ...]
    drafts: tuple[DraftCell, ...]
    capture: tuple[CaptureCell, ...]


def draft_lengths(block_size: int) -> list[int]:
    """Slots of the drafts to measure: short ones, doubled ones, a whole block."""
    return sorted({length for length in (1, 2, 3, 4, 8, 16, block_size) if length <= block_size})


def shapes(config: ProfileConfig, block_size: int) -> list[tuple[int, int, int]]:
    """The (batch tokens, requests, context length) to measure."""
    found = []
    for requests in config.request_counts:
        most = requests * (1 + block_size)
        stride = 1 if requests <= 4 else requests // 2 if requests <= 8 else requests
        sizes = {*range(requests, most + 1, stride), most}
        sizes |= {size for k in range(1, 5) if requests <= (size := k * _TILE + 1) <= most}
        found += [(size, requests, config.contexts[0]) for size in sorted(sizes)]
        if requests in (1, 4, 16):
            half = requests * (1 + block_size // 2)
            found += [
                (size, requests, context)
                for context in config.contexts[1:]
                for size in sorted({requests, half, most})
            ]
    return found


def profile(
    target: Target,
    drafter: Drafter,
    config: ProfileConfig,
    *,
    exact: bool = False,
    clock: Callable[[], float],
    advance: Callable[[int, str], None] = lambda _done, _note: None,
) -> Profile:
    """Seconds by shape. `advance` hears of every pass, see `passes`.

    exact: of requests that promise equal tokens, greedy and seeded ones; else of any others.

    Raises ConfigError where a context does not fit the target.
    """
    longest = max(config.contexts) + 2 * drafter.block_size + 4
    if longest > target.max_context:
        raise ConfigError(
            f"a context of {max(config.contexts)} tokens and two blocks do not fit the target's "
            f"{target.max_context}; give shorter ones (dspark profile --context)"
        )
    cells = shapes(config, drafter.block_size)
    groups = {
        key: _Group(target, drafter, *key, exact, clock) for key in {(r, c) for _, r, c in cells}
    }
    first = config.contexts[0]
    plain = {
        requests: _Group(target, None, requests, first, exact, clock)
        for requests in config.request_counts
    }
    whole = drafter.block_size
    jobs = [_Job("verify", *cell, whole) for cell in cells]
    for requests in config.request_counts:
        jobs += [
            _Job("draft", requests, requests, first, length)
            for length in draft_lengths(whole)
            if length < whole
        ]
        jobs += [_Job(kind, requests, requests, first, 0) for kind in ("plain", "captured")]
    measured: dict[_Job, list[StepRecord]] = {job: [] for job in jobs}
    order = random.Random(0)
    for number in range(passes(config)):
        order.shuffle(jobs)
        for job in jobs:
            shape = job.requests, job.context
            group = plain[job.requests] if job.kind == "plain" else groups[shape]
            record = group.step(job.tokens, draft_length=job.draft_length)
            if number:
                measured[job].append(record)
        advance(1, f"pass {number + 1}")
    return _medians(measured, config)


def passes(config: ProfileConfig) -> int:
    """Passes over all cells: one to warm up, then those that count."""
    return 1 + config.repeats


class _Job(NamedTuple):
    """A step to measure."""

    kind: Literal["verify", "draft", "plain", "captured"]
    tokens: int
    requests: int
    context: int
    draft_length: int
    """0: nobody drafts."""


def _medians(measured: dict[_Job, list[StepRecord]], config: ProfileConfig) -> Profile:
    steps = []
    drafts: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    by_kind: dict[str, dict[int, float]] = {"plain": {}, "captured": {}}
    for job, records in measured.items():
        if job.kind == "verify":
            steps.append(
                StepCell(
                    batch_tokens=job.tokens,
                    requests=job.requests,
                    context_length=job.context,
                    forward=median(record.seconds["verify"] for record in records),
                    rest=median(map(_rest, records)),
                )
            )
        if job.draft_length:
            drafts[job.requests, job.draft_length, job.context] += map(_draft, records)
        else:
            whole = median(sum(record.seconds.values()) for record in records)
            by_kind[job.kind][job.requests] = whole
    return Profile(
        steps=tuple(steps),
        drafts=tuple(
            DraftCell(requests=requests, length=length, context_length=context, seconds=median(own))
            for (requests, length, context), own in drafts.items()
        ),
        capture=tuple(
            CaptureCell(
                requests=requests,
                plain=by_kind["plain"][requests],
                captured=by_kind["captured"][requests],
            )
            for requests in config.request_counts
        ),
    )


def _draft(record: StepRecord) -> float:
    return record.seconds["draft"] + record.seconds["draft_head"]


def _rest(record: StepRecord) -> float:
    return sum(record.seconds.values()) - _draft(record) - record.seconds["verify"]


class _Group:
    """Requests of one context length in an engine of their own."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        requests: int,
        context: int,
        exact: bool,
        clock: Callable[[], float],
    ) -> None:
        self._script = _Script()
        block_size = 0 if drafter is None else drafter.block_size
        params = SamplingParams(
            max_new_tokens=2 * block_size + 4,
            ignore_eos=True,
            verification="coupled" if exact else "rejection",
        )
        most = context + params.max_new_tokens
        self._engine = Engine(
            target,
            drafter,
            Off() if drafter is None else self._script,
            # Twice the room, so that nobody waits for a page that another might come to need.
            EngineConfig.for_requests(
                [most] * 2 * requests,
                max_requests=2 * requests,
                row_exact=drafter is not None,
                prefix_cache=False,
            ),
            clock=clock,
        )
        random_tokens = random.Random(requests)
        for number in range(requests):
            prompt = [random_tokens.randrange(target.vocab_size) for _ in range(context)]
            self._engine.add(prompt, params, seed=number)
        for _ in range(requests * context + 1):
            self._engine.step()
            self._rewind()
            if sum(bool(state.output) for state in self._engine.running) == requests:
                return
        raise AssertionError("a prompt was not read")

    def step(self, tokens: int, *, draft_length: int) -> StepRecord:
        """One step of `tokens` rows, with drafts of so many slots; the engine's record of it."""
        requests = len(self._engine.running)
        share, extra = divmod(tokens - requests, requests)
        self._script.lengths = [share + (r < extra) for r in range(requests)]
        self._script.draft = draft_length
        self._engine.step()
        self._rewind()
        [record] = self._engine.records
        self._engine.records.clear()
        assert record.batch_tokens == tokens, (record.batch_tokens, tokens)
        return record

    def _rewind(self) -> None:
        for state in self._engine.running:
            if state.output:
                state.take_back(1)
        self._engine.records[:-1] = []


class _Script:
    """Admits what it is told to."""

    name: ClassVar[str] = "script"
    drafts: ClassVar[bool] = True
    longest: ClassVar[int | None] = None
    rules: ClassVar[frozenset[VerificationRule]] = frozenset(RULES)
    reads_survival: ClassVar[bool] = False

    def __init__(self) -> None:
        self.lengths: list[int] = []
        """Of every request; empty: nothing is verified."""
        self.draft = 0
        """Slots to draft; 0: nobody drafts."""

    def wants_draft(self, view: RoundView) -> BoolArray:
        return np.full(len(view.requests), self.draft > 0)

    def draft_length(self, view: RoundView) -> int:
        return self.draft

    def admit(self, view: RoundView) -> IntArray:
        nothing = np.zeros(len(view.requests), dtype=np.int64)
        return np.array(self.lengths, dtype=np.int64) if self.lengths else nothing

    def observe(self, record: StepRecord) -> None:
        """Keeps no state."""

    def fresh(self) -> Policy:
        return self  # the profiler tells it what to do
