"""`dspark calibrate`: the JSON contract, the table, and bad input."""

import json

import pytest

from dspark.cli.calibrate import calibrate
from dspark.cli.main import COMMANDS, build_app, run
from tests.recipes.tiny import BLOCK, write_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrate")
    write_all(folder)
    return folder


def dspark(folder, *args):
    """The exit code of the command on the tiny models."""
    options = [
        "--target", str(folder / "target"), "--draft", str(folder / "draft"), "--weights", "fp32",
        "--prompts", str(folder / "chat.jsonl"), "--split", "all",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as exit_:
        run(build_app(COMMANDS), ["calibrate", *options, *args])
    return exit_.value.code


def test_the_command_is_registered():
    assert COMMANDS["calibrate"] is calibrate


def test_calibrate(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["dspark", "calibrate", "--samples", "3"])
    plot = folder / "plot.png"
    code = dspark(
        folder, "--samples", "3", "--max-new-tokens", "30", "--format", "sglang",
        "--plot", str(plot), "--json",
    )  # fmt: skip
    captured = capsys.readouterr()
    assert code == 0, captured.err
    document = json.loads(captured.out.splitlines()[-1])
    assert [p["position"] for p in document["positions"]] == [*range(1, BLOCK + 1)]
    for position in document["positions"]:
        for key in (
            "ece_before",
            "ece_after",
            "auc",
            "brier",
            "samples",
            "ece_floor",
            "bias",
            "offset",
            "entropy_weight",
            "auc_before",
            "auc_without_entropy",
            "ece_without_entropy",
            "ece_temperature_alone",
        ):
            assert key in position
        assert 0 <= position["ece_after"] <= 1
    eces = [p["ece_after"] for p in document["positions"]]
    assert document["mean_ece_after"] == pytest.approx(sum(eces) / BLOCK)
    assert document["mean_ece_before"] >= 0
    written = json.loads((folder / "draft" / "calibration.json").read_text())
    assert written["positions"] == document["positions"]
    assert written["conditions"][0]["command"] == "dspark calibrate --samples 3"
    sglang = json.loads((folder / "draft" / "calibration.sglang.json").read_text())
    assert sglang["temperatures"] == document["temperatures_alone"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = [line.split() for line in captured.out.splitlines()]
    first = document["positions"][0]
    assert ["1", str(first["samples"])] in [row[:2] for row in rows]
    parts = next(row for row in rows if row[:3] == ["position", "ECE", "raw"])
    assert parts[-2:] == ["Brier", "all"]
    assert "note: position" in captured.out, "few rounds are said"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--format", "vllm"], "format is 'vllm'; it must be sglang or tensorrt-llm"),
        (["--output", "x.json"], "--output is where --format writes"),
        (["--max-new-tokens", "4"], "verified rounds"),
        (["--limit", "1", "--max-new-tokens", "30"], "one prompt cannot be split"),
    ],
)
def test_bad_input(folder, args, message, capsys):
    assert dspark(folder, *args) == 2
    err = capsys.readouterr().err.splitlines()
    assert message in err[-1]


def test_the_diagram_needs_an_extra_and_says_so_first(folder, monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert dspark(folder, "--plot", str(folder / "x.png")) == 2
    err = capsys.readouterr().err
    assert "pip install 'dspark[plots]'" in err
    assert "texts" not in err
