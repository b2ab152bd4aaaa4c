"""The `dspark` program: its commands, and what becomes of an error.

A command is a plain function in a file of its own, with options from `cli.options`. It imports
`recipes`, and with it torch, inside the function, so that `dspark --help` and a misspelt option
answer at once.
"""

import functools
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NoReturn

import typer

from dspark import __version__
from dspark.cli.bench import bench
from dspark.cli.calibrate import calibrate
from dspark.cli.chat import chat
from dspark.cli.data import inspect, regenerate, synthesize
from dspark.cli.doctor import doctor
from dspark.cli.eval import evaluate
from dspark.cli.generate import generate
from dspark.cli.output import print_error, print_note
from dspark.cli.profile import profile
from dspark.cli.ranks import is_first_rank, told_by_another
from dspark.cli.serve import serve
from dspark.cli.train import train
from dspark.core.errors import DSparkError

Command = Callable[..., None]

COMMANDS: Mapping[str, Command | Mapping[str, Command]] = {
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "data": {"synthesize": synthesize, "regenerate": regenerate, "inspect": inspect},
    "train": train,
    "calibrate": calibrate,
    "profile": profile,
    "eval": evaluate,
    "bench": bench,
    "doctor": doctor,
}
"""Command name -> function, or the commands of a group."""
_WRONG_PATH = (
    FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError,
)  # fmt: skip
_GROUPS = {"data": "Training data: the target's prompts and answers, and a look at them."}


def main() -> NoReturn:
    """The console script."""
    run(build_app(COMMANDS), sys.argv[1:])


def build_app(commands: Mapping[str, Command | Mapping[str, Command]]) -> typer.Typer:
    """The program with these commands; each function's docstring is its help."""
    # `run` shows errors, in one line each: no boxes, no tracebacks with local variables.
    app = typer.Typer(
        name="dspark",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_program)
    for name, command in commands.items():
        if isinstance(command, Mapping):
            group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=_GROUPS[name])
            for own_name, own in command.items():
                group.command(own_name)(_announced(own))
            app.add_typer(group, name=name)
        else:
            app.command(name)(_announced(command))
    return app


def _announced(command: Command) -> Command:
    """The command, with a sign of life while PyTorch is imported: many seconds on a busy machine,
    the more the first time."""

    @functools.wraps(command)
    def announced(**options: Any) -> None:
        if "torch" not in sys.modules and is_first_rank():
            print_note("starting ...")
        command(**options)

    return announced


def run(app: typer.Typer, args: Sequence[str]) -> NoReturn:
    """Runs one command line and exits: 0 done, 1 failed, 2 bad input, 130 interrupted.

    Typer itself ends with 2 on a bad command line, and with 130 on Ctrl-C once the command has
    cleaned up after itself and let `KeyboardInterrupt` pass.
    """
    debug = "--debug" in args
    try:
        app(args=list(args), prog_name="dspark")
    except DSparkError as error:
        _tell(str(error), debug)
        sys.exit(error.exit_code)
    except Exception as error:
        if isinstance(error, _WRONG_PATH) and error.filename is not None:
            _tell(f"{error.filename}: {error.strerror}; give another path", debug)
            sys.exit(2)
        hint = "" if debug else " (--debug shows where)"
        _tell(f"{type(error).__name__}: {error}{hint}", debug)
        sys.exit(1)
    raise AssertionError("typer's standalone mode always exits")


def _tell(line: str, debug: bool) -> None:
    """The error that is being handled; once, however many ranks meet it."""
    if told_by_another(line):
        return
    if debug:
        traceback.print_exc()
    print_error(line)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dspark {__version__}")
        raise typer.Exit


def _program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Lossless speculative decoding: the same tokens, sooner."""
