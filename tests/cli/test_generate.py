"""`dspark generate`: the JSON contract, the comparison, bad input and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark.cli.generate import _show
from dspark.cli.main import COMMANDS, build_app, run
from dspark.recipes.generation import StreamPiece
from tests.recipes.tiny import write_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    write_all(folder)
    return folder


def generate(folder: Path, prompt: str, *args: str, draft: str = "draft") -> int:
    models = ["--target", str(folder / "target"), "--draft", str(folder / draft)]
    with pytest.raises(SystemExit) as exit_:
        run(build_app(COMMANDS), ["generate", prompt, *models, "--weights", "fp32", *args])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def document(out: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(out.splitlines()[-1])
    return parsed


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_compare(folder: Path, capsys: pytest.CaptureFixture[str], temperature: str) -> None:
    args = ["--compare", "--json", "--max-new-tokens", "12", "--temperature", temperature]
    assert generate(folder, "Hello", *args) == 0
    captured = capsys.readouterr()
    result = document(captured.out)
    assert result["identical"] is True
    assert 1 <= result["output_tokens"] <= 12
    assert result["accepted_length"] >= 1.0
    ratio = result["tokens_per_second"] / result["plain_tokens_per_second"]
    assert result["speedup"] == pytest.approx(ratio)
    assert "the tokens are identical" in captured.err
    # What was streamed is what the document says.
    assert captured.out.startswith(result["text"].split("\n")[0])


def test_nothing_to_time_in_a_text_of_one_token(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, "Hello", "--compare", "--json", "--max-new-tokens", "1") == 0
    result = document(capsys.readouterr().out)
    assert result["output_tokens"] == 1
    assert result["identical"] is True
    assert result["speedup"] is result["tokens_per_second"] is result["accepted_length"] is None


def test_every_token_has_its_own_colour() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.seen: list[tuple[str, str]] = []

        def token(self, text: str, fate: str) -> None:
            self.seen.append((text, fate))

        def end_line(self) -> None:
            self.seen.append(("", "end"))

    screen = Recorder()
    piece = StreamPiece(0, (5, 6, 7), ("a", "b", "c"), ("accepted", "accepted", "bonus"), "length")
    _show(piece, screen)  # type: ignore[arg-type]
    assert screen.seen == [("a", "accepted"), ("b", "accepted"), ("c", "bonus"), ("", "end")]
    assert piece.text == "abc"


def test_the_same_seed_gives_the_same_text(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for seed in ("5", "5", "6"):
        args = ["--temperature", "1", "--seed", seed, "--max-new-tokens", "12", "--json"]
        assert generate(folder, "Hello", *args) == 0
        texts.append(document(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "1.5"], "top_p is 1.5"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--max-new-tokens", "100000"], "must fit the target's context of 256 tokens"),
        (["--policy", "fixed:9"], "block of 3 tokens"),
        (["--policy", "fxied:2"], "did you mean 'fixed'"),
        (["--verification", "rejcetion"], "did you mean 'rejection'"),
        (["--weights", "fp8"], "weights is 'fp8'"),
        (["--threads", "0"], "threads is 0"),
        (["--compare", "--policy", "off"], "nothing to compare"),
        (["--compare", "--temperature", "1", "--verification", "rejection"], "coupled rule"),
        (["--target", "./no/such/folder"], "no/such/folder"),
        (["--draft", "no/such/bundle"], "no/such/bundle"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    folder: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    assert generate(folder, "Hello", *args) == 2
    err = capsys.readouterr().err
    [line] = [line for line in err.splitlines() if line.startswith("error:")]
    assert said in line
    assert "Traceback" not in err


def test_an_empty_prompt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, "  ") == 2
    assert "error: the prompt is empty" in capsys.readouterr().err


def test_a_bundle_of_another_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((folder / "draft" / "config.json").read_text())
    config["dspark"]["embedding_hash"] = "0" * 64
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config))
    (other / "model.safetensors").write_bytes((folder / "draft/model.safetensors").read_bytes())
    assert generate(folder, "Hello", draft=str(other)) == 2
    assert "does not fit the target" in capsys.readouterr().err


def test_ctrl_c_keeps_the_partial_text(folder: Path, tmp_path: Path) -> None:
    """A real process, interrupted after its first output."""
    command = [
        sys.executable, "-c", "from dspark.cli.main import main; main()", "generate", "Hello",
        "--target", str(folder / "target"), "--draft", str(folder / "draft"), "--weights", "fp32",
        "--temperature", "1", "--seed", "2", "--max-new-tokens", "200",
    ]  # fmt: skip
    # Every step waits a little, so that there is something to interrupt.
    slow = tmp_path / "sitecustomize.py"
    slow.write_text(
        "import time\n"
        "import dspark.engine.engine as e\n"
        "step = e.Engine.step\n"
        "e.Engine.step = lambda self: (time.sleep(0.2), step(self))[1]\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, bufsize=0
    ) as process:  # unbuffered: `communicate` would not see what `read` took and kept
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert first
    assert (first + out).endswith(b"\n")
    assert b"Traceback" not in err
