"""What is published names nobody's folders."""

from pathlib import Path

import pytest

import dspark
from dspark.cli.command_line import recorded_command

BUNDLES = Path(dspark.__file__).parent / "bundles"
MACHINE = (b"/work/", b"/tmp/", b"/root/", b"/home/")


def test_absolute_paths_are_cut_to_their_last_part(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "dspark calibrate --run /home/me/run --plot=/home/me/a_b.png --prompts data/x.jsonl -1"
    monkeypatch.setattr("sys.argv", line.split())
    assert recorded_command() == (
        "dspark calibrate --run run --plot=a_b.png --prompts data/x.jsonl -1"
    )


def test_what_the_shell_would_split_stays_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["dspark", "train", "--output", "/home/me/my bundle"])
    assert recorded_command() == "dspark train --output 'my bundle'"


def test_no_shipped_file_names_a_machine_s_folders() -> None:
    files = [
        path for path in BUNDLES.rglob("*") if path.is_file() and path.suffix != ".safetensors"
    ]
    assert files
    named = {str(path) for path in files for part in MACHINE if part in path.read_bytes()}
    assert not named
