"""Prometheus metrics. Every number about speculation comes from the engine's step records."""

from collections import Counter as Tally
from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dspark.core.records import EngineStats, RoundRecord, StepRecord
from dspark.server.reliability import Reliability

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


_GAUGES = {
    "running": "Choices that decode or whose prompt is being computed",
    "waiting": "Choices in the queue",
    "waiting_tokens": "Prompt and most new tokens of the waiting choices",
    "pages": "Pages of keys and values",
    "pages_free": "Pages that no request holds",
    "pages_kept": "Free pages that the prefix cache keeps until they are needed",
}
_COUNTERS = {
    "preemptions": "Requests that gave their pages to others, to be resumed",
    "refused": "Requests not taken because too much was waiting",
    "prefix_hits": "Prompts that began with pages of the prefix cache",
    "prefix_hit_tokens": "Prompt tokens that the prefix cache had",
    "pages_evicted": "Pages taken from the prefix cache",
    "rebuilt_positions": "Positions whose keys, the drafter's included, were computed again",
}


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, meaning in _GAUGES.items():
            yield GaugeMetricFamily(f"dspark_{name}", meaning, value=getattr(stats, name))
        for name, meaning in _COUNTERS.items():
            yield CounterMetricFamily(f"dspark_{name}", meaning, value=getattr(stats, name))


def _error(reliability: Reliability) -> float:
    return reliability.error() or 0.0


class ServerMetrics:
    """One server's metrics, in a registry of their own: two servers can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        count, spread = self._counter, self._histogram
        self._answers = count("http_requests", "HTTP answers", "route", "status")
        self._finished = count("requests_finished", "Ended completions", "reason")
        self._prompt_tokens = count("prompt_tokens", "Prompt tokens of ended completions")
        self._ttft = spread("time_to_first_token_seconds", "Arrival to first token", _SECONDS)
        self._inter_token = spread(
            "inter_token_seconds", "Time a token after the first, mean of a step", _TOKEN_SECONDS
        )
        self._end_to_end = spread("request_seconds", "Arrival to last token", _SECONDS)

        self._steps = count("steps", "Steps of the engine")
        self._phases = count("step_seconds", "Time of steps by phase", "phase")
        self._batch = spread("batch_tokens", "Rows of the target's forward in a step", _TOKENS)
        self._prefill = count("prefill_tokens", "Prompt tokens computed")
        self._rounds = count("rounds", "Rounds of decoding requests: one a request and step")
        self._drafted = count("drafted_tokens", "Draft tokens made")
        self._verified = count("verified_tokens", "Draft tokens offered to verification")
        self._accepted = count("accepted_tokens", "Draft tokens accepted")
        self._emitted = count("emitted_tokens", "Tokens that reached an output, the first excluded")
        self._position_verified = count(
            "position_verified_tokens", "Draft tokens offered, by position", "position"
        )
        self._position_accepted = count(
            "position_accepted_tokens", "Draft tokens accepted, by position", "position"
        )
        self._accepted_length = spread(
            "accepted_length", "Accepted draft tokens + 1, a round that verified some", _LENGTHS
        )
        self._budget = spread("verification_budget", "1 + admitted draft tokens a round", _LENGTHS)
        self._calibration = Gauge(
            "dspark_calibration_error",
            "Expected calibration error of survival as served, by position",
            ("position",),
            registry=self.registry,
        )
        self._refits = Gauge(
            "dspark_calibration_refits",
            "Recalibrations of the confidences while serving",
            registry=self.registry,
        )
        self._reliability: list[Reliability] = []

    def watch(self, stats: Callable[[], EngineStats]) -> None:
        """Adds what the engine counts itself; `stats` is asked whenever metrics are read."""
        self.registry.register(_EngineCollector(stats))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    # -- requests ---------------------------------------------------------------------------------

    def answered(self, route: str, status: int) -> None:
        self._answers.labels(route, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """`tokens` more came `seconds` after the ones before."""
        self._inter_token.observe(seconds / tokens)

    def finished(self, reason: str, prompt_tokens: int, seconds: float) -> None:
        self._finished.labels(reason).inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._end_to_end.observe(seconds)

    # -- steps ------------------------------------------------------------------------------------

    def observe(self, record: StepRecord) -> None:
        """Called on the engine's thread, once a step: sums first, then one increment a metric."""
        self._steps.inc()
        self._batch.observe(record.batch_tokens)
        self._prefill.inc(record.prefill_tokens)
        for phase, seconds in record.seconds.items():
            self._phases.labels(phase).inc(max(0.0, seconds))
        rounds = record.rounds
        self._rounds.inc(len(rounds))
        self._drafted.inc(sum(r.proposed for r in rounds))
        self._verified.inc(sum(r.admitted for r in rounds))
        self._accepted.inc(sum(r.accepted for r in rounds))
        self._emitted.inc(sum(r.emitted for r in rounds))
        verified: Tally[int] = Tally(k for r in rounds for k in range(r.admitted))
        accepted: Tally[int] = Tally(k for r in rounds for k in range(r.accepted))
        for position, times in verified.items():
            self._position_verified.labels(str(position + 1)).inc(times)
        for position, times in accepted.items():
            self._position_accepted.labels(str(position + 1)).inc(times)
        for r in rounds:
            self._budget.observe(1 + r.admitted)
            if r.admitted:
                self._accepted_length.observe(r.emitted)
            self._judge(r)
        self._refits.set(record.calibration)

    def _judge(self, one: RoundRecord) -> None:
        """Survival of every position that was verified, against what came of it."""
        judged = min(one.judged, len(one.survival))
        while len(self._reliability) < judged:
            own = Reliability()
            self._reliability.append(own)
            # Asked for when metrics are read; there is no gauge before the first prediction.
            gauge = self._calibration.labels(str(len(self._reliability)))
            gauge.set_function(partial(_error, own))
        for position in range(judged):
            self._reliability[position].add(one.survival[position], position < one.accepted)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"dspark_{name}", help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"dspark_{name}", help, buckets=buckets, registry=self.registry)
