"""Records a command's real terminal output as an SVG picture.

    python scripts/record_terminal.py docs/generate.svg dspark generate "Hello" --compare

The command runs on a pseudo-terminal, so it colours its output as it would for a person. Nothing is
edited; what is overwritten on the screen (progress bars) shows as it was left.
"""

import os
import pty
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 100


def record(command: list[str]) -> tuple[str, int]:
    """What the command wrote to its terminal, and its exit status."""
    chunks: list[bytes] = []

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 65536)
        chunks.append(data)
        return data

    os.environ["COLUMNS"] = str(WIDTH)
    status = pty.spawn(command, read)
    return b"".join(chunks).decode(errors="replace"), os.waitstatus_to_exitcode(status)


def last_writes(output: str) -> str:
    """Of every line, what stayed on the screen: carriage returns start it again."""
    lines = output.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rsplit("\r", 1)[-1] for line in lines)


def main() -> int:
    picture, command = Path(sys.argv[1]), sys.argv[2:]
    output, status = record(command)
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere)
        console.print(Text(f"$ {shlex.join(command)}", style="bold"))
        console.print(Text.from_ansi(last_writes(output)))
    picture.write_text(console.export_svg(title="dspark"))
    return status


if __name__ == "__main__":
    sys.exit(main())
