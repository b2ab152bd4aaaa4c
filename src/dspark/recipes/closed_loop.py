"""A closed loop: a fixed number of requests in flight, the next one sent when one is done."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dspark.core.errors import ConfigError
from dspark.core.records import StepRecord
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.evaluation.timing import time_per_token
from dspark.recipes.llm import LLM
from dspark.recipes.prompt_sets import Job
from dspark.scheduling.policies import Policy


@dataclass(frozen=True, slots=True)
class LoadResult:
    seconds: float
    """From the first request sent to the last token."""
    texts: tuple[tuple[int, ...], ...]
    """Output tokens per job, the end-of-sequence token included."""
    ttft: tuple[float, ...]
    """Seconds from sending a request to its first token, per job."""
    tpot: tuple[float, ...]
    """Seconds per token after the first, per job of two tokens or more."""
    records: tuple[StepRecord, ...]
    """`RoundRecord.request` is the job's index."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def closed_loop(
    llm: LLM,
    jobs: Sequence[Job],
    policy: Policy,
    *,
    concurrency: int,
    row_exact: bool | None = None,
    on_finished: Callable[[Job], None] = lambda _job: None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadResult:
    """Runs all jobs, at most `concurrency` at once.

    row_exact: None is True where the policy drafts and False for `off`, our fastest plain path:
    plain decoding pays for no tiles that only speculation needs.
    """
    if concurrency < 1:
        raise ConfigError(f"concurrency is {concurrency}; it must be at least 1")
    config = EngineConfig.for_requests(
        (len(job.prompt) + job.params.max_new_tokens for job in jobs),
        max_requests=concurrency,
        block_size=llm.drafter.block_size if llm.drafter is not None else 0,
        row_exact=policy.drafts if row_exact is None else row_exact,
        prefix_cache=False,  # jobs repeat prompts, and every one is to be read
    )
    engine = Engine(llm.loaded.target, llm.drafter, policy, config, calibration=llm.calibration)
    texts: list[list[int]] = [[] for _ in jobs]
    sent, first, last = ([0.0] * len(jobs) for _ in range(3))
    following = 0
    started = clock()

    def send() -> None:
        nonlocal following
        if following < len(jobs):
            sent[following] = clock()
            request = engine.add(jobs[following].prompt, jobs[following].params)
            assert request == following, "ids of a fresh engine count from 0"
            following += 1

    for _ in range(concurrency):
        send()
    while not engine.idle:
        events = engine.step()
        now = clock()
        for event in events:
            if event.error is not None:
                raise event.error
            index = event.request
            if not texts[index]:
                first[index] = now
            last[index] = now
            texts[index] += event.tokens
            if event.finished is not None:
                on_finished(jobs[index])
                send()
    per_token = (time_per_token(*span) for span in zip(first, last, map(len, texts), strict=True))
    return LoadResult(
        seconds=max(last) - started,
        texts=tuple(map(tuple, texts)),
        ttft=tuple(begin - start for begin, start in zip(first, sent, strict=True)),
        tpot=tuple(seconds for seconds in per_token if seconds is not None),
        records=tuple(engine.records),
    )
