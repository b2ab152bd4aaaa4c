"""Which prompts are measured, and with which seeds."""

from pathlib import Path
from typing import cast

import pytest

from dspark.core.errors import ConfigError, DataError
from dspark.core.random import derive_seed
from dspark.core.sampling import SamplingParams
from dspark.data.prompts import is_validation
from dspark.recipes.llm import LLM
from dspark.recipes.prompt_sets import gather_prompts, make_jobs
from tests.recipes.tiny import write_prompts, write_target

TURNS = [f"question {i}" for i in range(60)]
HELD_OUT = [turn for turn in TURNS if is_validation(turn)]
TRAINED_ON = [turn for turn in TURNS if not is_validation(turn)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_target(tmp_path_factory.mktemp("target"), max_context=64)
    return LLM(str(folder), weights="fp32")


def test_given_files_give_their_validation_prompts(tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "a.jsonl", TURNS)
    assert 2 < len(HELD_OUT) < 30, "the split rule leaves some of both"
    assert [p.turns[0] for p in gather_prompts([file])] == HELD_OUT
    assert [p.turns[0] for p in gather_prompts([file], split="all")] == TURNS


def test_the_shipped_prompts_are_used_whole() -> None:
    domains = [prompt.file for prompt in gather_prompts()]
    assert sorted(set(domains)) == ["chat", "code", "math"]
    assert len(domains) == 30


def test_the_limit_is_per_domain_and_after_the_split(tmp_path: Path) -> None:
    write_prompts(tmp_path / "a.jsonl", TURNS)
    write_prompts(tmp_path / "b.jsonl", TURNS[::-1])
    kept = gather_prompts([tmp_path], limit=2)
    assert [(p.file, p.turns[0]) for p in kept] == [
        ("a", HELD_OUT[0]),
        ("a", HELD_OUT[1]),
        ("b", HELD_OUT[-1]),
        ("b", HELD_OUT[-2]),
    ]


def test_a_domain_without_validation_prompts_is_left_out_aloud(tmp_path: Path) -> None:
    full = write_prompts(tmp_path / "full.jsonl", HELD_OUT)
    bare = write_prompts(tmp_path / "bare.jsonl", TRAINED_ON)
    said: list[str] = []
    assert {p.file for p in gather_prompts([full, bare], say=said.append)} == {"full"}
    assert said == ["bare: none of its prompts is in the validation split; left out"]
    with pytest.raises(DataError, match="validation split"):
        gather_prompts([bare])


@pytest.mark.parametrize("bad", [{"split": "test"}, {"limit": 0}])
def test_bad_options(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        gather_prompts(**bad)  # type: ignore[arg-type]


def test_seeds_come_from_seed_file_line_and_sample(llm: LLM, tmp_path: Path) -> None:
    prompts = gather_prompts([write_prompts(tmp_path / "a.jsonl", ["one", "two"])], split="all")
    jobs = make_jobs(llm, prompts, SamplingParams(max_new_tokens=8), samples=2, seed=5)
    assert [(job.line, job.sample) for job in jobs] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [job.params.seed for job in jobs] == [
        derive_seed(5, "a", job.line, job.sample) for job in jobs
    ]
    assert {job.params.rule for job in jobs} == {"rejection"}, "a seed alone would mean coupled"
    coupled = SamplingParams(max_new_tokens=8, verification="coupled")
    assert {job.params.rule for job in make_jobs(llm, prompts, coupled)} == {"coupled"}
    with pytest.raises(ConfigError, match="samples is 0"):
        make_jobs(llm, prompts, coupled, samples=0)


def test_prompts_beyond_the_context_are_left_out_aloud(llm: LLM, tmp_path: Path) -> None:
    """The tiny tokenizer's tokens are bytes, its target's context is 64."""
    turns = ["x" * 56, "x" * 57]
    prompts = gather_prompts([write_prompts(tmp_path / "a.jsonl", turns)], split="all")
    said: list[str] = []
    jobs = make_jobs(llm, prompts, SamplingParams(max_new_tokens=8), say=said.append)
    assert [job.line for job in jobs] == [1]
    assert said == ["1 prompts have more than 56 tokens and are left out"]
    with pytest.raises(DataError, match="lower max_new_tokens"):
        make_jobs(llm, prompts, SamplingParams(max_new_tokens=9))


def test_other_sampling_keeps_prompt_and_seed(llm: LLM, tmp_path: Path) -> None:
    prompts = gather_prompts([write_prompts(tmp_path / "a.jsonl", ["one"])], split="all")
    (job,) = make_jobs(llm, prompts, SamplingParams(max_new_tokens=8, temperature=0.0))
    other = job.with_sampling(SamplingParams(temperature=0.7, max_new_tokens=3))
    assert (other.prompt, other.params.seed) == (job.prompt, cast(int, job.params.seed))
    assert (other.params.temperature, other.params.max_new_tokens) == (0.7, 3)
