"""The self-test of law 5: it passes here, and fails where a row depends on its batch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.cli.main import COMMANDS, build_app, run
from dspark.core.errors import ConfigError
from dspark.recipes.doctor import diagnose, exactness_jobs
from dspark.recipes.exactness import check_exactness
from dspark.recipes.llm import LLM
from tests.recipes.tiny import write_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exactness")
    write_all(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder / "target"), draft=folder / "draft", weights="fp32")


def test_every_way_gives_the_tokens_of_each_request_alone(llm: LLM) -> None:
    jobs = exactness_jobs(llm, prompts=2, max_new_tokens=12)
    assert {own.temperature for _, own in jobs} == {0.0, 1.0}
    assert len({own.seed for _, own in jobs}) == len(jobs)
    result = check_exactness(llm, jobs, batch=4)
    names = [way.name for way in result.ways]
    assert names == [
        "batch of 4", "speculation alone", "speculation in a batch of 4", "pipelined",
        "preempted", "prefix hit",
    ]  # fmt: skip
    for way in result.ways:
        assert way.tokens == 12 * len(jobs), way
        assert way.differing == way.requests == 0, way
        if not way.name.startswith("speculation"):  # an untrained drafter is seldom right
            assert way.exercised > 1, way
    assert result.holds == result.row_exact_kernels


def test_a_target_whose_rows_depend_on_the_batch_is_found(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = llm.loaded.target
    forward = target.forward

    def sloppy(batch: Any, *args: Any, **options: Any) -> Any:
        output = forward(batch, *args, **options)
        slope = torch.linspace(0.0, 3.0, output.logits_MV.shape[1])
        return replace(output, logits_MV=output.logits_MV + slope * (len(batch.tables) - 1))

    monkeypatch.setattr(target, "forward", sloppy)
    result = check_exactness(llm, exactness_jobs(llm, prompts=1, max_new_tokens=12), batch=3)
    differing = {way.name: way.differing for way in result.ways}
    assert differing["batch of 3"] > 0 and differing["speculation alone"] == 0
    assert not result.holds and result.to_json()["holds"] is False


def test_bad_sizes(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        diagnose(llm, prompts=0)


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    sizes = ["--weights", "fp32", "--prompts", "1", "--max-new-tokens", "6", "--json"]
    with pytest.raises(SystemExit) as exit_:
        run(build_app(COMMANDS), ["doctor", *models, *sizes])
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    exactness = document["exactness"]
    assert exit_.value.code == (0 if exactness["holds"] else 1)
    assert document["weights"]["fp32"] is None and document["versions"]["torch"]
    assert document["threads"] == torch.get_num_threads()
    assert "KV memory" in document["kv_memory"] and len(exactness["ways"]) == 6
    verdict = "holds" if exactness["holds"] else "DOES NOT HOLD"
    assert f"same seed, same tokens: {verdict} on this machine" in out
    idle = [way["name"] for way in exactness["ways"] if not way["exercised"]]
    assert ("not exercised" in out) == bool(idle)
