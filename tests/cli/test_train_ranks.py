"""`dspark train` under torchrun, as a user starts it: the same run as one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.cli.main import COMMANDS, build_app, run
from tests.recipes.tiny import write_prompts, write_target

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent.parent


def arguments(folder: Path, name: str, *options: str) -> list[str]:
    return [
        "train", "--target", str(folder / "target"), "--weights", "fp32",
        "--prompts", str(folder / "math.jsonl"), "--output", str(folder / name / "bundle"),
        "--run", str(folder / name), "--steps", "4", "--layers", "1", "--block-size", "3",
        "--markov-rank", "4", "--max-new-tokens", "8", "--taps", "1", "--json", *options,
    ]  # fmt: skip


def losses(folder: Path, name: str) -> list[Any]:
    lines = [json.loads(x) for x in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [x.get("loss", x.get("validation")) for x in lines]


def test_torchrun_trains_the_same_drafter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_target(tmp_path / "target")
    write_prompts(tmp_path / "math.jsonl", [f"What is {i} plus {i}?" for i in range(40)])
    # Without "--" torchrun takes our --run for a misspelt --run-path of its own.
    process = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "--", "tests.cli.rank_runs",
            *arguments(tmp_path, "taught", "--teacher-ranks", "1"),
            "--then", "2", *arguments(tmp_path, "shared", "--parallel", "fsdp"),
            "--then", "2", *arguments(tmp_path, "copied"),
        ],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        run(build_app(COMMANDS), arguments(tmp_path, "alone"))
    assert exit_.value.code == 0
    documents = [*process.stdout.splitlines(), *capsys.readouterr().out.splitlines()]
    assert len(documents) == 4  # each of its first rank
    for name, line in zip(("taught", "shared", "copied", "alone"), documents, strict=True):
        assert json.loads(line)["steps"] == 4
        assert (tmp_path / name / "bundle" / "model.safetensors").exists()
    for name in ("taught", "shared", "copied"):
        one, other = losses(tmp_path, "alone"), losses(tmp_path, name)
        np.testing.assert_allclose(other[0], one[0], rtol=0, atol=2e-3)
        assert other[-1]["accepted_length"] == pytest.approx(one[-1]["accepted_length"], abs=2e-3)
    said = process.stderr
    assert said.count("starting ...") == 1
    assert "1 rank trains, 1 run the target" in said
    assert "and 96 a sampled position, where logits would be 528" in said
    assert not (tmp_path / "taught" / "features").exists()
    assert "2 ranks train (FSDP2)" in said and "2 ranks train (DDP)" in said
