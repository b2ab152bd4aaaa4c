"""`dspark train` under torchrun, as a user starts it: the same run as one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.recipes.tiny import write_prompts, write_target

pytestmark = pytest.mark.slow


def train(folder: Path, name: str, *options: str, ranks: int) -> subprocess.CompletedProcess[str]:
    # Without "--" torchrun takes our --run for a misspelt --run-path of its own.
    torchrun = [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "--",
    ]  # fmt: skip
    command = [
        sys.executable, *(torchrun if ranks > 1 else ["-m"]), "dspark", "train",
        "--target", str(folder / "target"), "--weights", "fp32",
        "--prompts", str(folder / "math.jsonl"), "--output", str(folder / name / "bundle"),
        "--run", str(folder / name), "--steps", "4", "--layers", "1", "--block-size", "3",
        "--markov-rank", "4", "--max-new-tokens", "8", "--taps", "1", "--json", *options,
    ]  # fmt: skip
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def losses(folder: Path, name: str) -> list[Any]:
    lines = [json.loads(x) for x in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [x.get("loss", x.get("validation")) for x in lines]


def test_torchrun_trains_the_same_drafter(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    write_prompts(tmp_path / "math.jsonl", [f"What is {i} plus {i}?" for i in range(40)])
    found = {
        "alone": train(tmp_path, "alone", ranks=1),
        "taught": train(tmp_path, "taught", "--teacher-ranks", "1", ranks=3),
        "shared": train(tmp_path, "shared", "--parallel", "fsdp", ranks=2),
    }
    for name, process in found.items():
        assert process.returncode == 0, process.stderr
        (line,) = process.stdout.splitlines()  # of the first rank
        document = json.loads(line)
        assert document["steps"] == 4
        assert (tmp_path / name / "bundle" / "model.safetensors").exists()
    for name in ("taught", "shared"):
        one, other = losses(tmp_path, "alone"), losses(tmp_path, name)
        np.testing.assert_allclose(other[0], one[0], rtol=0, atol=2e-3)
        assert other[-1]["accepted_length"] == pytest.approx(one[-1]["accepted_length"], abs=2e-3)
    assert "2 ranks train (DDP), 1 run the target" in found["taught"].stderr
    assert "and 96 a sampled position, where logits would be 528" in found["taught"].stderr
    assert not (tmp_path / "taught" / "features").exists()
    assert "2 ranks train (FSDP2)" in found["shared"].stderr
