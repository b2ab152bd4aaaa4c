"""The frame: which exit code and which words become of an error."""

import subprocess
import sys
from collections.abc import Callable
from typing import Annotated

import pytest
import typer

from dspark.cli import options
from dspark.cli.main import COMMANDS, build_app, run
from dspark.cli.sampling import sampling_params
from dspark.core.errors import ConfigError, DSparkError, MissingExtraError
from dspark.core.sampling import SamplingParams


def outcome(command: Callable[..., None], *args: str) -> int:
    """The exit code of `dspark cmd ARGS`."""
    with pytest.raises(SystemExit) as exit_:
        run(build_app({"cmd": command}), ["cmd", *args])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def raising(error: BaseException) -> Callable[..., None]:
    def command(debug: options.Debug = False) -> None:
        """Fails."""
        raise error

    return command


def test_a_sign_of_life_before_torch_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(temperature: options.Temperature = 0.0) -> None:
        """Prints."""
        print(temperature)

    monkeypatch.delitem(sys.modules, "torch")
    assert outcome(command) == 0
    assert capsys.readouterr().err == "starting ...\n"
    assert outcome(command, "--help") == 0
    assert capsys.readouterr().err == ""


def test_done_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    def command(temperature: options.Temperature = 0.0) -> None:
        """Prints."""
        print(temperature)

    assert outcome(command, "--temperature", "0.5") == 0
    assert capsys.readouterr().out == "0.5\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("top_p is 2;\nit must be in (0, 1]"), 2, "top_p is 2; it must be in (0, 1]"),
        (
            MissingExtraError("matplotlib", "plots"),
            2,
            "matplotlib is not installed; run: pip install 'dspark[plots]'",
        ),
        (DSparkError("the run diverged"), 1, "the run diverged"),
        (ValueError("oops"), 1, "ValueError: oops (--debug shows where)"),
    ],
)
def test_an_error_is_one_line_and_its_code(
    error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome(raising(error)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: {line}\n"


@pytest.mark.parametrize("error", [ConfigError("bad"), KeyError("bug")])
def test_debug_shows_the_traceback(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(raising(error), "--debug") in (1, 2)
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-1].startswith("error: ")


def test_ctrl_c_is_130() -> None:
    assert outcome(raising(KeyboardInterrupt())) == 130


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--temprature", "0"), "--temperature"),  # the nearest option, not only the wrong one
        (("--temperature", "warm"), "--temperature"),
        (("stray",), "stray"),
    ],
)
def test_a_bad_command_line_is_2(
    args: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(temperature: options.Temperature = 0.0) -> None:
        """Never runs."""
        raise AssertionError

    assert outcome(command, *args) == 2
    assert named in capsys.readouterr().err


def test_shared_options_have_the_documented_names() -> None:
    def command(
        prompt: Annotated[str, typer.Argument()],
        target: options.Target = None,
        draft: options.Draft = "auto",
        policy: options.Policy = None,
        verification: options.Verification = None,
        temperature: options.Temperature = 0.0,
        top_k: options.TopK = 0,
        top_p: options.TopP = 1.0,
        min_p: options.MinP = 0.0,
        seed: options.Seed = None,
        max_new_tokens: options.MaxNewTokens = 256,
        prompts: options.Prompts = None,
        weights: options.Weights = None,
        threads: options.Threads = None,
        json: options.Json = False,
        debug: options.Debug = False,
    ) -> None:
        """Everything."""
        assert (top_k, top_p, min_p, seed, max_new_tokens) == (5, 0.9, 0.1, 7, 3)
        assert (target, draft, policy, verification) == ("t", "d", "fixed:4", "coupled")
        assert prompts is not None and [path.name for path in prompts] == ["a.jsonl", "b.jsonl"]
        assert (weights, threads, json, debug, temperature) == ("fp32", 2, True, True, 1.0)

    line = (
        "hello --target t --draft d --policy fixed:4 --verification coupled --temperature 1 "
        "--top-k 5 --top-p 0.9 --min-p 0.1 --seed 7 --max-new-tokens 3 "
        "--prompts a.jsonl --prompts b.jsonl --weights fp32 --threads 2 --json --debug"
    )
    assert outcome(command, *line.split()) == 0


def test_help_needs_no_torch() -> None:
    """Torch and transformers take seconds to import; the rest is quick."""
    script = (
        "import sys; from dspark.cli import main as cli\n"
        "for name in [None, *cli.COMMANDS]:\n"
        "    try: cli.run(cli.build_app(cli.COMMANDS), [*([name] if name else []), '--help'])\n"
        "    except SystemExit as done: assert done.code == 0, name\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), name\n"
        "print('done')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: dspark") == 1 + len(COMMANDS)
    assert done.stdout.splitlines()[-1] == "done"


def test_sampling_options_go_by_name() -> None:
    plain = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "max_new_tokens": 3}
    given = sampling_params(**plain, verification="coupled", seed=7)
    assert given == SamplingParams(**plain, verification="coupled", seed=7)
    with pytest.raises(TypeError):  # top_p and min_p are two floats that one could swap
        sampling_params(0.5, 5, 0.9, 0.1, 3, "coupled")  # type: ignore[misc]
    with pytest.raises(ConfigError, match="did you mean 'coupled'"):
        sampling_params(**plain, verification="cuopled")
