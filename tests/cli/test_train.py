"""`dspark train` end to end on a tiny target: a bundle that loads, decodes and resumes."""

import json
import shutil
from inspect import signature
from pathlib import Path

import pytest

from dspark.checkpoints.native import read_config
from dspark.cli.main import COMMANDS, build_app, run
from dspark.cli.train import train
from dspark.core.errors import ConfigError
from dspark.recipes.draft_shape import DraftShape
from tests.recipes.tiny import write_prompts, write_target


def dspark(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        run(build_app(COMMANDS), [*args])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_prompts_to_bundle_to_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(write_target(tmp_path / "target"))
    # Among 40 prompts about four are held out by the split rule.
    prompts = write_prompts(tmp_path / "math.jsonl", [f"What is {i} plus {i}?" for i in range(40)])
    command = [
        "train", "--target", target, "--weights", "fp32", "--prompts", str(prompts),
        "--output", str(tmp_path / "bundle"), "--run", str(tmp_path / "run"),
        "--steps", "3", "--layers", "1", "--block-size", "3", "--markov-rank", "4",
        "--max-new-tokens", "8", "--json",
    ]  # fmt: skip
    # A target of two layers has no room for five taps, which is told before it writes responses.
    assert dspark(*command) == 2
    assert "--taps" in capsys.readouterr().err
    # Nor has a context of 256 tokens for answers of as many.
    assert dspark(*command, "--taps", "1", "--max-new-tokens", "256") == 2
    assert "has to hold a prompt as well" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    command += ["--taps", "1"]
    assert dspark(*command) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["steps"] == 3
    assert document["validation"]["accepted_length"] >= 1.0
    assert len(document["validation"]["conditional_acceptance"]) == 3
    assert document["evaluation"]["domains"]["math"]["accepted_length"] >= 1.0
    assert "in-distribution" in (tmp_path / "bundle" / "README.md").read_text()

    weights = (tmp_path / "bundle" / "model.safetensors").read_bytes()
    assert dspark(*command) == 0  # nothing left to do
    assert (tmp_path / "bundle" / "model.safetensors").read_bytes() == weights
    capsys.readouterr()

    args = ["--target", target, "--draft", str(tmp_path / "bundle"), "--weights", "fp32"]
    assert dspark("generate", "Hi", *args, "--max-new-tokens", "8", "--compare", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["identical"] is True


def test_candidates_are_as_many_as_python_takes() -> None:
    assert signature(train).parameters["candidates"].default == DraftShape().candidates
    with pytest.raises(ConfigError, match="candidates is -1; it must be at least 0"):
        DraftShape(candidates=-1)


def test_too_few_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(write_target(tmp_path / "target"))
    prompts = write_prompts(tmp_path / "math.jsonl", ["What is 1 plus 1?"])
    args = ["--target", target, "--weights", "fp32", "--prompts", str(prompts)]
    args += ["--output", str(tmp_path / "bundle"), "--run", str(tmp_path / "run")]
    args += ["--max-new-tokens", "4", "--steps", "1", "--taps", "1"]
    assert dspark("train", *args, "--layers", "3") == 2
    assert "cannot start from 2 layers" in capsys.readouterr().err
    assert dspark("train", *args, "--layers", "3", "--from-noise") == 2
    assert "both are needed" in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()


def test_a_wrong_output_is_told_before_anything_is_generated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "math.jsonl", ["What is 1 plus 1?"])
    args = ["--target", "no-such-target", "--prompts", str(prompts), "--output", str(tmp_path)]
    assert dspark("train", *args, "--run", str(tmp_path / "run")) == 2
    assert "it holds math.jsonl, which no bundle has" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_nothing_but_a_target(
    tmp_path: Path,
    talker_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    small = [
        "--weights", "fp32", "--taps", "1", "--layers", "1", "--block-size", "3",
        "--markov-rank", "4", "--steps", "2", "--synthesize", "30", "--max-new-tokens", "8",
        "--draft-vocabulary", "60",
    ]  # fmt: skip
    command = ["train", "--target", str(talker_folder), *small, "--json"]
    assert dspark(*command, "--plan") == 0
    captured = capsys.readouterr()
    assert "plan: 30 prompts, 60 responses to write" in captured.err
    assert "device: cpu, matrix products in " in captured.err
    plan = json.loads(captured.out.splitlines()[-1])["plan"]
    assert plan["device"] == "cpu" and plan["memory_bytes"] > 0
    assert plan["feature_bytes_per_token"] == 2 * 2 * 48
    assert plan["work"]["response_tokens"] == 30 * 2 * 8
    assert min(plan["speeds"].values()) > 0 and plan["seconds"]["training"] > 0
    assert not [*tmp_path.iterdir()], "a plan writes nothing"

    assert dspark(*command) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["bundle"] == "talker-dspark"
    assert (
        len((tmp_path / "talker-dspark-run" / "synthesised.jsonl").read_text().splitlines()) == 30
    )
    assert document["evaluation"]["domains"]["synthesised"]["accepted_length"] >= 1.0
    card = (tmp_path / "talker-dspark" / "README.md").read_text()
    assert "that the target itself wrote (temperature 1 and 0)" in card
    assert "| synthesised |" in card
    weights = (tmp_path / "talker-dspark" / "model.safetensors").read_bytes()

    assert dspark(*command) == 0
    captured = capsys.readouterr()
    assert "plan:" not in captured.err, "a run that has begun is resumed"
    assert (tmp_path / "talker-dspark" / "model.safetensors").read_bytes() == weights

    online = [*command, "--output", "online", "--features", "none", "--evaluation-prompts", "0"]
    shutil.copytree("talker-dspark-run", "online-run", ignore=shutil.ignore_patterns("s*e*.*ors"))
    shutil.rmtree("online-run/features")
    assert dspark(*online) == 0
    assert (tmp_path / "online" / "model.safetensors").read_bytes() == weights
    assert not (tmp_path / "online-run" / "features").exists()


def test_given_answers(
    tmp_path: Path, talker_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"what-is-{i}"},
                {"role": "assistant", "content": f"it-is-{i}"},
                {"role": "user", "content": "and?"},
                {"role": "assistant", "content": "that-is-all"},
            ]
        }
        for i in range(30)
    ]
    prompts = tmp_path / "talk.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"prompt": "hm-hm"}]))
    command = [
        "train", "--target", str(talker_folder), "--weights", "fp32", "--prompts", str(prompts),
        "--output", str(tmp_path / "bundle"), "--run", str(tmp_path / "run"), "--steps", "1",
        "--layers", "1", "--block-size", "3", "--markov-rank", "4", "--taps", "1",
        "--given-answers", "--evaluation-prompts", "0", "--tensorboard", "--candidates", "0",
        "--features", "int8",
    ]  # fmt: skip
    assert dspark(*command) == 0
    err = capsys.readouterr().err
    assert "1 of 31 conversations are without an answer and left out" in err
    assert "0 responses to write" in err
    assert not (tmp_path / "run" / "responses.jsonl").exists()
    assert "written by others (off-policy)" in (tmp_path / "bundle" / "README.md").read_text()
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    assert read_config(tmp_path / "bundle")[1].candidates == 0
    assert dspark("train", "--target", str(talker_folder), "--given-answers") == 2
    assert "--prompts" in capsys.readouterr().err
    assert dspark(*command[:-1], "int") == 2
    assert "did you mean 'int8'" in capsys.readouterr().err
