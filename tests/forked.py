"""Processes that are forked off one that has imported torch: importing it is what takes long.

Each is as good as one started from a shell: it gets signals, can be killed, and has an exit code.
"""

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

FORKED = "forkserver"
CONTEXT = multiprocessing.get_context(FORKED)
CONTEXT.set_forkserver_preload(["tests.training.rank_process", "tests.imported_for_serving"])


class Command:
    """`dspark ARGS` in a process of its own; what it writes to standard error is in a file."""

    def __init__(self, args: list[str], errors: Path) -> None:
        errors.touch()
        self._errors = errors
        self._process: ForkServerProcess = CONTEXT.Process(target=_dspark, args=(args, errors))
        self._process.start()
        self.kill, self.terminate = self._process.kill, self._process.terminate

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join(timeout=300)
        assert self._process.exitcode is not None, "it does not end"
        return self._process.exitcode

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def lines(self) -> Iterator[str]:
        """Lines of standard error as they come, until the process ends."""
        count = 0
        while True:
            alive = self._process.is_alive()
            whole = self.errors.split("\n")[:-1]
            yield from whole[count:]
            count = len(whole)
            if not alive:
                return
            time.sleep(0.02)


@contextlib.contextmanager
def dspark(args: list[str], errors: Path) -> Iterator[Command]:
    """The command, which does not outlive the block."""
    command = Command(args, errors)
    try:
        yield command
    finally:
        command.kill()
        command.wait()


def _dspark(args: list[str], errors: Path) -> None:
    descriptor = os.open(errors, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 2)
    sys.argv = ["dspark", *args]
    from dspark.cli.main import main

    main()
