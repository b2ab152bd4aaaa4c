"""`dspark profile`: the JSON contract, what is printed, and bad input."""

import json
from pathlib import Path

import pytest

from dspark.cli.main import COMMANDS, build_app, run
from tests.recipes.tiny import write_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    write_all(folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))


def dspark(folder: Path, *args: str) -> int:
    models = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    with pytest.raises(SystemExit) as exit_:
        run(build_app(COMMANDS), ["profile", *models, "--weights", "fp32", *args])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_profile(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-requests", "2", "--context", "20", "--repeats", "1", "--json"]
    export = ["--format", "tensorrt-llm", "--output", str(tmp_path / "table.json")]
    assert dspark(folder, *options, *export, "--plot", str(tmp_path / "sps.png")) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert {*document} >= {"verify", "draft", "fingerprint"}
    assert {*document["verify"][0]} >= {
        "batch_tokens", "requests", "context_length", "milliseconds"
    }  # fmt: skip
    assert {*document["draft"][0]} >= {"requests", "context_length", "milliseconds"}
    assert Path(document["table"]).is_relative_to(tmp_path / "cache")
    assert out.splitlines()[0].split()[:2] == ["requests", "tokens"]
    assert "batch_overhead_ms" in json.loads((tmp_path / "table.json").read_text())
    assert (tmp_path / "sps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "sglan", "--output", "x"], "did you mean 'sglang'?"),
        (["--format", "sglang"], "--format and --output go together"),
        (["--format", "sglang", "--output", "no/such/folder/x"], "folder that exists"),
        (["--repeats", "0"], "repeats is 0"),
        (["--plot", "x.txt"], "must end in .png"),
        (["--context", "255"], "do not fit the target's 256"),
    ],
)
def test_bad_input(
    folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dspark(folder, *options) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error:") and message in error
