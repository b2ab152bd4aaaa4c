"""Metrics of speculation against records that are known."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from dspark.core.records import EngineStats, RoundRecord, StepRecord
from dspark.server.live import LiveView
from dspark.server.metrics import ServerMetrics
from dspark.server.reliability import Reliability

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
STATS = EngineStats(
    running=1, waiting=2, waiting_tokens=3, pages=10, pages_free=4, pages_kept=1, page_size=64,
    preemptions=5, refused=6, prompt_tokens=7, prefix_hits=8, prefix_hit_tokens=9, pages_copied=0,
    pages_evicted=11, rebuilt_positions=12,
)  # fmt: skip


def round_record(admitted, accepted, *, ended=False, emitted=None, survival=()):
    return RoundRecord(
        request=0, round=1, proposed=4, admitted=admitted, accepted=accepted,
        emitted=accepted + 1 if emitted is None else emitted, ended=ended, survival=survival,
    )  # fmt: skip


RECORD = StepRecord(
    step=0,
    batch_tokens=20,
    prefill_tokens=8,
    rounds=(
        round_record(4, 2, survival=(0.9, 0.72, 0.072, 0.05)),
        round_record(4, 4),
        round_record(2, 1, ended=True, emitted=1),  # the text ended with its first draft token
        round_record(0, 0),
    ),
    seconds={"draft": 0.25, "verify": 0.5},
)


def samples(metrics):
    lines = [line for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_counts():
    metrics = ServerMetrics()
    metrics.watch(lambda: STATS)
    metrics.observe(RECORD)
    found = samples(metrics)
    expected = {
        "rounds_total": 4, "drafted_tokens_total": 16, "verified_tokens_total": 10,
        "accepted_tokens_total": 7, "emitted_tokens_total": 10, "prefill_tokens_total": 8,
        'position_verified_tokens_total{position="1"}': 3,
        'position_verified_tokens_total{position="4"}': 2,
        'position_accepted_tokens_total{position="2"}': 2,
        "accepted_length_sum": 9, "accepted_length_count": 3, "verification_budget_sum": 14,
        'step_seconds_total{phase="verify"}': 0.5, "preemptions_total": 5, "refused_total": 6,
        "pages_free": 4, "rebuilt_positions_total": 12,
    }  # fmt: skip
    for name, value in expected.items():
        assert found[f"dspark_{name}"] == value, name


def test_calibration_as_served():
    metrics = ServerMetrics()
    metrics.watch(lambda: STATS)
    assert "dspark_calibration_error{" not in metrics.text().decode(), "nothing is known yet"
    metrics.observe(RECORD)
    metrics.observe(dataclasses.replace(RECORD, calibration=3))
    found = samples(metrics)
    errors = [found[f'dspark_calibration_error{{position="{k}"}}'] for k in (1, 2, 3, 4)]
    # Survival against the two accepted tokens of the one round that had any, twice the same.
    assert errors == pytest.approx([0.1, 0.28, 0.072, 0.05])
    assert found["dspark_calibration_refits"] == 3


def test_reliability_forgets():
    reliability = Reliability()
    for _ in range(20_000):
        reliability.add(0.5, False)
    assert reliability.error() == pytest.approx(0.5)
    for number in range(100_000):
        reliability.add(0.5, number % 2 == 0)
    assert reliability.error() < 0.02
    assert sum(row["count"] for row in reliability.rows()) <= 20_000


def test_the_live_page_counts_what_was_decided():
    live = LiveView(clock=lambda: 3.0)
    live.observe(RECORD)
    document = live.document()
    # Position 3 of the first round was rejected, its 4th never decided; after an end nothing is.
    offered = [position["offered"] for position in document["positions"]]
    accepted = [position["accepted"] for position in document["positions"]]
    assert (offered, accepted) == ([3, 2, 2, 1], [3, 2, 1, 1])
    assert document["lengths"] == [0, 1, 1, 0, 1]
    bins = document["reliability"]
    assert sum(bin_["count"] for bin_ in bins) == 3
    assert bins[0]["accepted"] == 0 and bins[-1]["accepted"] == 1
    # Of each position given those before it: 0.9, 0.72 / 0.9 and 0.072 / 0.72.
    assert [bin_["confidence"] for bin_ in bins] == pytest.approx([0.1, 0.8, 0.9])
    assert json.dumps(document)


def test_the_dashboard_and_the_alerts_name_metrics_that_exist():
    metrics = ServerMetrics()
    metrics.watch(lambda: STATS)
    known = set(re.findall(r"# TYPE (\S+)", metrics.text().decode()))
    known |= {f"{name}_{end}" for name in known for end in ("bucket", "sum", "count")}
    dashboard = json.loads((DEPLOY / "grafana" / "dspark.json").read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    assert len(expressions) > 20
    text = " ".join(expressions) + (DEPLOY / "prometheus" / "alerts.yml").read_text()
    assert set(re.findall(r"\bdspark_\w+", text)) <= known


def test_example_settings_are_real(monkeypatch, tmp_path):
    import tomllib

    from dspark.cli.main import COMMANDS

    settings = tomllib.loads((DEPLOY / "systemd" / "serve.toml").read_text())
    parameters = COMMANDS["serve"].__annotations__
    assert {key.replace("-", "_") for key in settings} <= set(parameters)
