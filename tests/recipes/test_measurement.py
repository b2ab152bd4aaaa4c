"""The closed loop, `evaluate` and `bench` on a tiny target with an untrained drafter."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.core.errors import ConfigError
from dspark.core.sampling import SamplingParams
from dspark.data.prompts import Prompt, read_prompts
from dspark.recipes.bench import bench
from dspark.recipes.closed_loop import closed_loop
from dspark.recipes.evaluate import evaluate
from dspark.recipes.llm import LLM
from dspark.recipes.prompt_sets import Job, make_jobs
from tests.recipes.tiny import BLOCK, write_all

TOKENS = 12
SAMPLED = SamplingParams(max_new_tokens=TOKENS, verification="rejection")
COUPLED = replace(SAMPLED, verification="coupled")
GREEDY = replace(SAMPLED, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measurement")
    write_all(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder / "target"), draft=folder / "draft", weights="fp32", max_requests=4)


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return LLM(str(folder / "target"), weights="fp32")


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[Prompt]:
    return read_prompts(folder)


@pytest.fixture(scope="module")
def jobs(llm: LLM, prompts: list[Prompt]) -> list[Job]:
    return make_jobs(llm, prompts, COUPLED)


# -- the closed loop --------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 3, 16])
def test_load_changes_the_schedule_and_no_token(
    llm: LLM, jobs: list[Job], concurrency: int
) -> None:
    policy = llm.policies.resolve(None)
    finished: list[Job] = []
    result = closed_loop(llm, jobs, policy, concurrency=concurrency, on_finished=finished.append)
    expected = llm.start([job.prompt for job in jobs], [job.params for job in jobs])
    for _ in expected:
        pass
    assert result.texts == tuple(output.token_ids for output in expected.outputs())
    assert sorted(job.line for job in finished) == sorted(job.line for job in jobs)
    assert max(len(step.rounds) for step in result.records) == min(concurrency, len(jobs))
    assert result.tokens == sum(map(len, result.texts))
    assert len(result.ttft) == len(jobs)


def test_times_by_a_clock_that_counts_its_readings(llm: LLM, jobs: list[Job]) -> None:
    """Start 0, request sent 1, then one reading a step of one token."""
    clock = itertools.count().__next__
    (job,) = [replace(jobs[0], params=replace(COUPLED, max_new_tokens=5, ignore_eos=True, seed=1))]
    result = closed_loop(llm, [job], llm.policies.resolve("off"), concurrency=1, clock=clock)
    assert result.tokens == 5
    assert result.ttft == (1,)
    assert result.tpot == (1.0,)
    assert result.seconds == 6
    assert result.tokens_per_second == 5 / 6


def test_plain_decoding_takes_no_tiles(llm: LLM, jobs: list[Job], monkeypatch) -> None:
    seen: list[bool] = []
    forward = llm.loaded.target.forward

    def spy(batch, *args, **kwargs):
        seen.append(batch.exact)
        return forward(batch, *args, **kwargs)

    monkeypatch.setattr(llm.loaded.target, "forward", spy)
    closed_loop(llm, jobs[:1], llm.policies.resolve("off"), concurrency=1)
    assert set(seen) == {False}
    seen.clear()
    closed_loop(llm, jobs[:1], llm.policies.resolve("fixed:2"), concurrency=1)
    assert set(seen) == {True}


def test_records_say_what_the_sequential_head_takes(llm: LLM, jobs: list[Job]) -> None:
    result = closed_loop(llm, jobs[:2], llm.policies.resolve(None), concurrency=2)
    for step in result.records:
        drafted = any(record.proposed for record in step.rounds)
        assert (step.seconds["draft_head"] > 0) == drafted
        assert step.seconds["draft"] >= 0


# -- evaluate ---------------------------------------------------------------------------------


def test_evaluate_counts_every_token_once(llm: LLM, prompts: list[Prompt]) -> None:
    result = evaluate(llm, prompts, SAMPLED, samples=2, seed=3)
    assert {name: domain.prompts for name, domain in result.domains.items()} == {
        "chat": 4,
        "math": 6,
    }
    for domain in result.domains.values():
        acceptance = domain.acceptance
        assert acceptance.accepted_length is not None
        emitted = acceptance.accepted_length * acceptance.rounds
        assert emitted == pytest.approx(domain.tokens - 2 * domain.prompts)  # without prefill's
        assert len(acceptance.conditional) == BLOCK
        assert domain.ci95 is not None
        assert domain.ci95[0] <= acceptance.accepted_length <= domain.ci95[1]
    document = result.to_json()
    assert document["policy"] == f"fixed:{BLOCK}"
    assert document["verification"] == "rejection"
    assert document["temperature"] == 1.0
    assert document["drafter"].endswith("draft")
    assert sum(document["phases"].values()) == pytest.approx(1.0)


def test_a_domain_does_not_depend_on_the_others(llm: LLM, prompts: list[Prompt]) -> None:
    together = evaluate(llm, prompts, GREEDY)
    alone = evaluate(llm, [prompt for prompt in prompts if prompt.file == "math"], GREEDY)
    assert alone.domains == {"math": together.domains["math"]}


def test_a_drafter_that_agrees_is_accepted_whole(
    llm: LLM, prompts: list[Prompt], monkeypatch
) -> None:
    """Greedy drafts replaced by the text that the target is known to write."""
    policy = llm.policies.resolve("off")
    jobs = make_jobs(llm, prompts[:1], replace(GREEDY, ignore_eos=True))
    (text,) = closed_loop(llm, jobs, policy, concurrency=1, row_exact=True).texts
    start = len(jobs[0].prompt)
    draft = llm.drafter.draft

    def oracle(anchors_R, positions_R, *args, **kwargs):
        block = draft(anchors_R, positions_R, *args, **kwargs)
        done = int(positions_R[0]) - start + 1
        coming = [*text[done : done + BLOCK], 0, 0, 0][:BLOCK]
        return replace(block, tokens_RK=block.tokens_RK.new_tensor([coming]))

    monkeypatch.setattr(llm.drafter, "draft", oracle)
    result = evaluate(llm, prompts[:1], replace(GREEDY, ignore_eos=True))
    (domain,) = result.domains.values()
    assert domain.acceptance.acceptance_rate == 1.0
    assert domain.acceptance.conditional == (1.0,) * BLOCK
    # 11 tokens after prefill's, four a round: two whole rounds and one of what is left.
    assert domain.acceptance.rounds == 3
    assert domain.acceptance.accepted_length == (TOKENS - 1) / 3
    assert domain.ci95 is None


def test_policies(llm: LLM, plain: LLM, prompts: list[Prompt]) -> None:
    short = evaluate(llm, prompts, SAMPLED, policy="fixed:1")
    assert short.policy == "fixed:1"
    assert all(len(domain.acceptance.conditional) == 1 for domain in short.domains.values())
    with pytest.raises(ConfigError, match="no drafter"):
        evaluate(plain, prompts, SAMPLED)
    off = evaluate(plain, prompts, SAMPLED, policy="off")
    assert off.drafter is None
    assert all(domain.acceptance.accepted_length == 1.0 for domain in off.domains.values())


# -- bench ------------------------------------------------------------------------------------


def test_bench_rows(llm: LLM, prompts: list[Prompt]) -> None:
    policies = ["off", "fixed:2", "off"]
    result = bench(llm, prompts[:3], SAMPLED, policies=policies, concurrencies=[1, 2], rounds=2)
    assert [(row.policy, row.concurrency) for row in result.rows] == [
        ("off", 1),
        ("fixed:2", 1),
        ("off", 2),
        ("fixed:2", 2),
    ]
    for row in result.rows:
        assert row.tpot_ms is not None
        if row.policy == "off":
            assert row.accepted_length == row.verified_per_request == row.speedup == 1.0
        else:
            assert row.accepted_length is not None
            assert 1.0 <= row.accepted_length <= 3.0
            assert row.verified_per_request is not None
            assert 2.0 < row.verified_per_request <= 3.0
    assert (result.verification, result.rounds, result.prompts) == ("rejection", 2, 3)


def test_bench_fills_every_place_and_repeats_no_text(
    llm: LLM, prompts: list[Prompt], monkeypatch
) -> None:
    """Two prompts at concurrency 3: at least six requests, of different seeds."""
    loads: list[list[Job]] = []

    def spy(llm, jobs, policy, **kwargs):
        loads.append(list(jobs))
        return closed_loop(llm, jobs, policy, **kwargs)

    monkeypatch.setattr("dspark.recipes.bench.closed_loop", spy)
    result = bench(llm, prompts[:2], SAMPLED, policies=["fixed:1"], concurrencies=[3, 1], rounds=1)
    warm_up, wide, narrow = loads
    assert len(warm_up) == 1
    assert len(wide) == len({job.params.seed for job in wide}) == 6
    assert narrow == wide[:2]
    assert [row.speedup for row in result.rows] == [None, None]


@pytest.mark.parametrize(
    "bad",
    [
        {"rounds": 0},
        {"concurrencies": [0]},
        {"policies": ["fixd:2"]},
        {"policies": [f"fixed:{BLOCK + 1}"]},
    ],
)
def test_bench_refuses(llm: LLM, prompts: list[Prompt], bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        bench(llm, prompts, SAMPLED, **bad)  # type: ignore[arg-type]


def test_bench_without_a_drafter_is_plain_decoding(plain: LLM, prompts: list[Prompt]) -> None:
    result = bench(plain, prompts[:1], SAMPLED, concurrencies=[1], rounds=1)
    assert [row.policy for row in result.rows] == ["off"]
    assert result.drafter is None
