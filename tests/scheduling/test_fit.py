"""From medians to a cost model, and a table to a file and back."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.core.errors import ConfigError, DataError
from dspark.scheduling.exports import export_table
from dspark.scheduling.fit import DraftCell, StepCell, fit_cost, isotonic
from dspark.scheduling.table import CostTable, differences, read_table, table_name

SIZES = [(b, r) for r in (1, 2, 4, 8) for b in range(r, 8 * r + 1, max(1, r // 2))]
HERE = {"processor": "one", "threads": "2"}


def machine(tokens: int, requests: int, context: int) -> tuple[float, float]:
    """Forward and rest of a machine with cliffs after 8 and 16 tokens."""
    tile = 0.02 + 0.01 * (tokens > 8) + 0.02 * (tokens > 16) + 0.001 * tokens
    forward = tile + 0.003 * requests + 1e-6 * requests * context + 2e-7 * tokens * context
    return forward, 0.001 * tokens


def drafting(requests: int, length: int, context: int) -> float:
    slots = requests * length
    return 0.004 + 0.0005 * requests + 0.0003 * slots + 1e-6 * requests * context


def table() -> CostTable:
    cells = [(b, r, 100) for b, r in SIZES] + [(b, r, 900) for b, r in SIZES[::5]]
    steps = []
    for b, r, c in cells:
        forward, rest = machine(b, r, c)
        steps.append(
            StepCell(batch_tokens=b, requests=r, context_length=c, forward=forward, rest=rest)
        )
    drafts = [
        DraftCell(requests=r, length=k, context_length=c, seconds=drafting(r, k, c))
        for r in (1, 2, 4, 8)
        for k in (1, 2, 7)
        for c in ((100, 900) if k == 7 else (100,))
    ]
    return CostTable(HERE, tuple(steps), tuple(drafts))


def test_a_machine_of_the_models_form_is_found_again() -> None:
    fit = table().fit()
    assert fit.worst_error < 1e-9
    for b, r, c in [(5, 1, 300), (9, 2, 2000), (16, 4, 50), (18, 4, 50), (40, 8, 700)]:
        found = fit.model.step_seconds(b, requests=r, context_tokens=r * c)
        assert found == pytest.approx(sum(machine(b, r, c)))
        for length in (1, 2, 4, 7):
            draft = fit.model.draft_seconds(r, length=length, requests=r, context_tokens=r * c)
            assert draft == pytest.approx(drafting(r, length, c))
    assert fit.model.lengths == (1, 2, 7)


def test_drafts_of_one_length_are_priced_by_requests_alone() -> None:
    """As for a drafter whose block is one token."""
    drafts = [cell for cell in table().drafts if cell.length == 7]
    model = fit_cost(table().steps, drafts).model
    assert model.lengths == (7,)
    draft = model.draft_seconds(4, length=7, requests=4, context_tokens=4 * 500)
    assert draft == pytest.approx(drafting(4, 7, 500))


def test_a_cliff_stays_where_it_is() -> None:
    tokens = table().fit().model.forward.tokens
    steps = np.diff(tokens(np.arange(1, 25)))
    assert [index + 2 for index in np.flatnonzero(steps > 0.005)] == [9, 17]


def test_sizes_between_measured_ones_cost_what_the_next_larger_does() -> None:
    tokens = table().fit().model.forward.tokens
    assert 63 not in {b for b, _ in SIZES}
    assert tokens(61) == tokens(64)


def test_beyond_the_largest_batch_cost_goes_on_rising() -> None:
    tokens = table().fit().model.forward.tokens
    assert tokens(164) - tokens(64) == pytest.approx(0.1)
    both = tokens + tokens
    assert both(np.arange(60, 70)).tolist() == (2 * tokens(np.arange(60, 70))).tolist()


def test_drafting_for_some_costs_less_than_for_all() -> None:
    model = table().fit().model
    all_of = model.draft_seconds(8, length=7, requests=8, context_tokens=8000)
    assert 0 < model.draft_seconds(2, length=7, requests=8, context_tokens=8000) < all_of
    assert model.draft_seconds(0, length=7, requests=8, context_tokens=8000) == 0


def test_a_larger_batch_is_never_faster_after_the_fit() -> None:
    noisy = np.random.default_rng(3).normal(1.0, 0.2, size=len(table().steps))
    steps = [
        replace(cell, forward=cell.forward * factor)
        for cell, factor in zip(table().steps, noisy.tolist(), strict=True)
    ]
    model = fit_cost(steps, table().drafts).model
    for part in (model.forward, model.rest, model.draft):
        assert (np.diff(part.tokens.seconds) >= 0).all()
        assert (np.diff(part.requests.seconds) >= -1e-12).all()
        assert part.per_context >= 0 and part.per_pair >= 0


@given(values=st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_isotonic_is_the_nearest_rising_sequence(values: list[int]) -> None:
    found = isotonic(np.array(values, dtype=np.float64), np.ones(len(values)))
    assert (np.diff(found) >= 0).all()
    # Optimality: residuals of every level set sum to 0, and no tail of one pulls upwards.
    residual = np.array(values) - found
    for level in np.unique(found):
        inside = residual[found == level]
        assert inside.sum() == pytest.approx(0, abs=1e-9)
        assert (np.cumsum(inside) >= -1e-9).all()
    if values == sorted(values):
        assert found.tolist() == values


def test_too_little_to_fit_is_refused() -> None:
    one = [cell for cell in table().steps if cell.batch_tokens == 8]
    with pytest.raises(ConfigError, match="1 batch size"):
        fit_cost(one, table().drafts)
    with pytest.raises(ConfigError, match="no draft"):
        fit_cost(table().steps, [])
    apart = [c for c in table().steps if (c.requests, c.batch_tokens) in {(1, 1), (1, 2), (8, 64)}]
    with pytest.raises(ConfigError, match="share neither"):
        fit_cost([*apart, replace(apart[-1], batch_tokens=60)], table().drafts)


def test_a_file_and_back(tmp_path: Path) -> None:
    file = tmp_path / table_name(HERE)
    file.write_text(json.dumps(table().to_json()))
    read = read_table(file, HERE)
    assert read.fingerprint == HERE
    assert [c.forward for c in read.steps] == pytest.approx([c.forward for c in table().steps])
    assert table_name({**HERE, "threads": "4"}) != file.name


def test_another_machines_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(json.dumps(table().to_json()))
    with pytest.raises(DataError, match=r"elsewhere \(threads 2, here 4\); run dspark profile"):
        read_table(file, {**HERE, "threads": "4"})
    assert differences(HERE, {**HERE, "versions": "x"}) == "versions -, here x"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 1}, "no cost table of format 2"),
        ({"fingerprint": None}, "no fingerprint"),
        ({"verify": []}, "no verify measurements"),
        ({"draft": None}, "no draft measurements"),
        ({"draft": [{"requests": 1, "length": 1, "context_length": 5}]}, "milliseconds None"),
        (
            {"draft": [{"requests": 0, "length": 1, "context_length": 5, "milliseconds": 1}]},
            "requests 0",
        ),
        (
            {"draft": [{"requests": 1, "length": 1, "context_length": 5, "milliseconds": 0}]},
            "positive and fin",
        ),
        (
            {"draft": [{"requests": 1, "length": 1, "context_length": 5, "milliseconds": -1}]},
            "positive and fin",
        ),
        (
            {
                "draft": [
                    {"requests": 1, "length": 1, "context_length": 5, "milliseconds": float("nan")}
                ]
            },
            "milliseconds nan; times must be positive and finite",
        ),
    ],
)
def test_broken_tables_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    file = tmp_path / "table.json"
    file.write_text(json.dumps({**table().to_json(), **change}))
    with pytest.raises(DataError) as refusal:
        read_table(file, HERE)
    assert message in str(refusal.value)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text("{")
    with pytest.raises(DataError, match="cannot read the cost table"):
        read_table(file, HERE)


def test_sglangs_shape() -> None:
    shape = export_table(table(), "sglang")
    assert {*shape} == {"sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"}
    sizes, rates = shape["sample_batch_tokens"], shape["sample_steps_per_sec"]
    assert sizes == sorted({b for b, _ in SIZES}) and shape["max_batch_tokens"] == 64
    assert rates == sorted(rates, reverse=True)
    assert 1 / rates[0] == pytest.approx(sum(machine(1, 1, 100)) + drafting(1, 7, 100))
    assert 1 / rates[-1] == pytest.approx(sum(machine(64, 8, 100)) + drafting(8, 7, 100))


def test_tensorrt_llms_shape_adds_up_to_the_step() -> None:
    shape = export_table(table(), "tensorrt-llm")
    keys = ["token_counts", "step_time_ms", "fixed_overhead_ms", "batch_sizes", "batch_overhead_ms"]
    assert [*shape] == keys
    by_tokens = dict(zip(shape["token_counts"], shape["step_time_ms"], strict=True))
    by_requests = dict(zip(shape["batch_sizes"], shape["batch_overhead_ms"], strict=True))
    for b, r in SIZES:
        milliseconds = by_tokens[b] + by_requests[r] + shape["fixed_overhead_ms"]
        assert milliseconds == pytest.approx(1000 * (sum(machine(b, r, 100)) + drafting(r, 7, 100)))


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="sglang or tensorrt-llm"):
        export_table(table(), "vllm")
    json.dumps(export_table(table(), "sglang"), allow_nan=False)
