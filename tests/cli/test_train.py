"""`dspark train` end to end on a tiny target: a bundle that loads, decodes and resumes."""

import json
from pathlib import Path

import pytest

from dspark.cli.main import COMMANDS, build_app, run
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
    assert not (tmp_path / "run").exists()
    command += ["--taps", "1"]
    assert dspark(*command) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["steps"] == 3
    assert document["validation"]["accepted_length"] >= 1.0
    assert len(document["validation"]["conditional_acceptance"]) == 3
    assert "in-distribution" in (tmp_path / "bundle" / "README.md").read_text()

    weights = (tmp_path / "bundle" / "model.safetensors").read_bytes()
    assert dspark(*command) == 0  # nothing left to do
    assert (tmp_path / "bundle" / "model.safetensors").read_bytes() == weights
    capsys.readouterr()

    args = ["--target", target, "--draft", str(tmp_path / "bundle"), "--weights", "fp32"]
    assert dspark("generate", "Hi", *args, "--max-new-tokens", "8", "--compare", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["identical"] is True


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
