"""`dspark eval` and `dspark bench`: the JSON contract, the tables, and bad input."""

import json
from pathlib import Path
from typing import Any

import pytest

from dspark.cli.bench import bench
from dspark.cli.eval import evaluate
from dspark.cli.main import COMMANDS, build_app, run
from tests.recipes.tiny import BLOCK, write_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measure")
    write_all(folder)
    return folder


def dspark(folder: Path, command: str, *args: str) -> int:
    """The exit code of the command on the tiny models."""
    models = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    options = ["--weights", "fp32", "--max-new-tokens", "6", *args]
    with pytest.raises(SystemExit) as exit_:
        run(build_app(COMMANDS), [command, *models, *options])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def last_line(out: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(out.splitlines()[-1])
    return document


def test_the_commands_are_registered() -> None:
    assert COMMANDS["eval"] is evaluate
    assert COMMANDS["bench"] is bench


def test_eval(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["--prompts", str(folder / "math.jsonl"), "--prompts", str(folder / "chat.jsonl")]
    code = dspark(
        folder, "eval", *prompts, "--split", "all", "--limit", "3", "--temperature", "0", "--json"
    )
    out = capsys.readouterr().out
    assert code == 0
    document = last_line(out)
    assert [*document["domains"]] == ["math", "chat"]
    math = document["domains"]["math"]
    assert math["prompts"] == 3
    assert math["accepted_length"] >= 1.0
    low, high = math["ci95"]
    assert low <= math["accepted_length"] <= high
    assert len(math["conditional_acceptance"]) == BLOCK
    assert (document["verification"], document["temperature"]) == ("rejection", 0.0)
    assert document["target"] == "target"
    assert document["drafter"] == str(folder / "draft")
    table = [line.split() for line in out.splitlines()]
    assert ["math", "3", str(math["rounds"]), f"{math['accepted_length']:.2f}"] in [
        row[:4] for row in table
    ]
    assert "repeated" in out, "said beside accepted lengths at temperature 0"


def test_eval_uses_validation_prompts_of_given_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = dspark(folder, "eval", "--prompts", str(folder / "math.jsonl"))
    assert code == 2
    assert "validation split" in capsys.readouterr().err.splitlines()[-1]


def test_bench(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = dspark(
        folder, "bench", "--prompts", str(folder / "math.jsonl"), "--split", "all",
        "--policy", "off", "--policy", "fixed:2", "--concurrency", "2", "--rounds", "1", "--json",
    )  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0
    document = last_line(out)
    assert [(row["policy"], row["concurrency"]) for row in document["rows"]] == [
        ("off", 2),
        ("fixed:2", 2),
    ]
    contract = {
        "policy", "concurrency", "tokens_per_second", "accepted_length", "verified_per_request",
        "ttft_ms", "tpot_ms",
    }  # fmt: skip
    assert all(contract <= row.keys() for row in document["rows"])
    assert "rejection verification" in out


@pytest.mark.parametrize("command", ["eval", "bench"])
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--verification", "typical"], "verification is 'typical'"),
        (["--policy", "fixed:9"], "block of 3 tokens"),
        (["--weights", "fp8"], "weights is 'fp8'"),
        (["--split", "test"], "split is 'test'"),
        (["--limit", "0"], "limit is 0"),
        (["--prompts", "nowhere.jsonl"], "no prompt file"),
        (["--draft", "nowhere"], "no such folder"),
        (["--max-new-tokens", "100000"], "lower max_new_tokens"),
    ],
)
def test_bad_input_is_one_line_and_2(
    folder: Path, command: str, args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dspark(folder, command, *args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert words in last
