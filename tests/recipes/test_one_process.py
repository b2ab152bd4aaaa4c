"""Two processes never write the same run folder."""

import subprocess
import sys

import pytest

from dspark.core.errors import DataError
from dspark.recipes.one_process import one_process

HOLD = """
import pathlib, sys
from dspark.recipes.one_process import one_process
with one_process(pathlib.Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


def test_another_process_is_kept_out_until_it_ends(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"in\n"
        with (
            pytest.raises(DataError, match="another process works in") as caught,
            one_process(folder),
        ):
            pass
        assert caught.value.exit_code == 2
        other.kill()  # leaves no lock behind
    with one_process(folder):
        pass
    with one_process(folder):
        pass
