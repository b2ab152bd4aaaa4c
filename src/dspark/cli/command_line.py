"""How a command was asked for, as results keep it."""

import shlex
import sys
from pathlib import Path


def recorded_command() -> str:
    """This command line with absolute paths cut to their last part: where files lay on one machine
    tells nobody anything, and what is kept with a bundle is published."""
    return shlex.join(["dspark", *(_shortened(word) for word in sys.argv[1:])])


def _shortened(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    path = Path(value)
    return f"{option}{equals}{path.name}" if path.is_absolute() else word
