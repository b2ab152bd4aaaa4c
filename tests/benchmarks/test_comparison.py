"""The comparison on a tiny target: in pieces, resumed, and refused with other settings."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark.core.errors import DataError
from tests.cli.test_train import dspark
from tests.recipes.tiny import write_prompts, write_target


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The script imports `common` from its own folder, as it does when it is run."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent.parent / "benchmarks"))
    yield
    for name in ("common", "comparison"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, prompts, and the responses a short training run wrote to them."""
    folder = tmp_path_factory.mktemp("comparison")
    write_target(folder / "target")
    write_prompts(folder / "math.jsonl", [f"What is {i} plus {i}?" for i in range(40)])
    assert dspark(
        "train", "--target", str(folder / "target"), "--weights", "fp32",
        "--prompts", str(folder / "math.jsonl"), "--output", str(folder / "bundle"),
        "--run", str(folder / "run"), "--steps", "1", "--layers", "1", "--taps", "1",
        "--block-size", "3", "--max-new-tokens", "8",
    ) == 0  # fmt: skip
    return folder


def compare(folder: Path, *more: str) -> dict[str, Any]:
    import comparison

    result: dict[str, Any] = comparison.main(
        ["--target", str(folder / "target"), "--weights", "fp32", "--threads", "1",
         "--prompts", str(folder / "math.jsonl"),
         "--responses", str(folder / "run" / "responses.jsonl"),
         "--work", str(folder / "work"), "--output", str(folder / "results"), "--limit", "2",
         "--layers", "1", "--taps", "1", "--block-size", "3", "--max-new-tokens", "6",
         "--anchors-per-step", "32", "--passes", "0.1", *more]
    )  # fmt: skip
    return result


def test_in_pieces(folder: Path) -> None:
    result = compare(folder, "--only", "lookup", "eagle3")
    assert result["contenders"] == ["eagle3", "lookup"]
    weights = (folder / "work/eagle3/bundle/model.safetensors").read_bytes()
    stamp = (folder / "work/eagle3/temperature-1.json").stat().st_mtime_ns

    result = compare(folder)
    names = ["dspark", "dspark-rnn", "dflash", "dflash-dspark-loss", "eagle3", "mtp", "lookup"]
    assert result["contenders"] == names
    assert (folder / "work/eagle3/bundle/model.safetensors").read_bytes() == weights
    assert (folder / "work/eagle3/temperature-1.json").stat().st_mtime_ns == stamp

    document = json.loads((folder / "results/comparison.json").read_text())
    trained = [own["training"] for own in document["contenders"].values() if own["training"]]
    assert len({run["steps"] for run in trained}) == 1 and len(trained) == 6
    for name, own in document["contenders"].items():
        for temperature in ("0", "1"):
            measured = own["temperatures"][temperature]
            assert measured["verification"] == "rejection"
            block = {"mtp": 1, "lookup": 7}.get(name, 3)
            assert measured["policy"] == f"fixed:{block}"
            math = measured["domains"]["math"]
            assert 1.0 <= math["accepted_length"] <= block + 1
            assert len(math["conditional_ci95"]) == len(math["conditional_acceptance"])
    text = (folder / "results/comparison.md").read_text()
    assert "| dflash-dspark-loss |" in text
    assert "## Temperature 0, math: conditional acceptance" in text


def test_other_settings_are_no_fair_comparison(folder: Path) -> None:
    compare(folder, "--only", "mtp")
    with pytest.raises(DataError, match=r"other settings \(seed\)"):
        compare(folder, "--only", "mtp", "--seed", "7")
