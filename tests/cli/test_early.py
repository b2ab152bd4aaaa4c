"""A number that cannot be is told at once: before a model is loaded or a prompt answered."""

from pathlib import Path
from typing import Any

import pytest

import dspark.recipes.data_commands
import dspark.recipes.llm
import dspark.recipes.make_bundle
from dspark.cli.main import COMMANDS, build_app, run

FORMS = ("off:3", "early:forwrd", "async:foo", "marginal:forward")
MEASURES = ("eval", "bench", "calibrate")
DECODES = ("generate hello", "chat", "serve --port 0", "doctor", *MEASURES)
BAD = [
    *((c, option) for c in DECODES for option in ("--threads 0", "--weights fp8")),
    *((c, "--max-requests 0") for c in ("serve", "eval", "calibrate", "profile")),
    *((c, "--device tpu") for c in ("profile", "train", *DECODES)),
    *((c, "--draft-length 0") for c in DECODES if c not in ("doctor", "calibrate")),
    *(
        (c, f"--policy {policy}")
        for c in DECODES
        if c != "calibrate"
        for policy in ("fixed:0", "fixed:x", "threshold:2", "fixd:3", *FORMS)
    ),
    *((c, f"--temperature {t}") for c in ("generate x", "chat", *MEASURES) for t in ("-1", "nan")),
    *((c, "--max-new-tokens 0") for c in ("generate x", "chat", "doctor", "train", *MEASURES)),
    *((c, "--limit 0") for c in MEASURES),
    *((c, f"--seed {seed}") for c in MEASURES for seed in (-1, 2**63)),
    *((c, "--samples 0") for c in ("eval", "calibrate")),
    ("bench", "--rounds 0"),
    ("bench", "--concurrency 0"),
    ("doctor", "--prompts 0"),
    *(("generate x", option) for option in ("--n 0", "--logprobs 21", "--top-p 0", "--min-p 2")),
    *(("generate x", option) for option in ("--presence-penalty 3", "--repetition-penalty 0")),
    *(("serve", f"--{name} 0") for name in ("default-tokens", "max-choices", "cache-tokens")),
    *(("serve", f"--{name} 0") for name in ("request-timeout", "max-waiting", "max-body-kib")),
    *(("profile", option) for option in ("--repeats 0", "--context 0")),
    *(("train", f"--{name} 0") for name in ("steps", "layers", "block-size", "taps", "turns")),
    *(("train", f"--{name} 0") for name in ("markov-rank", "draft-vocabulary", "learning-rate")),
    *(("train", f"--{name} 0") for name in ("max-seconds", "synthesize", "threads")),
    *(("train", f"--{name} -1") for name in ("seed", "evaluation-prompts", "teacher-ranks")),
    *(
        (command, option)
        for command in ("data synthesize --output x.jsonl", "data regenerate --prompts .")
        for option in (
            "--seed -1",
            f"--seed {2**63}",
            "--temperature -1",
            "--max-new-tokens 0",
            "--device tpu",
        )
    ),
]


@pytest.fixture(scope="module")
def nothing_is_loaded() -> Any:
    def load(*args: Any, **options: Any) -> Any:
        raise AssertionError("it loads the target")

    with pytest.MonkeyPatch.context() as patch:
        for module in ("llm", "data_commands", "make_bundle"):
            patch.setattr(getattr(dspark.recipes, module), "load_target", load)
        yield


@pytest.mark.parametrize(("command", "option"), BAD)
def test_what_cannot_be_is_told_before_anything_is_loaded(
    command: str,
    option: str,
    nothing_is_loaded: None,
    bundle_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    drafted = not command.startswith(("train", "data"))
    draft = ["--draft", str(bundle_folder)] if drafted else []
    with pytest.raises(SystemExit) as exit_:
        run(build_app(COMMANDS), [*command.split(), *draft, *option.split()])
    captured = capsys.readouterr()
    assert exit_.value.code == 2, captured.err
    assert captured.out == ""
    last = captured.err.splitlines()[-1].lower().replace("_", "-")
    name, value = option.removeprefix("--").split()
    assert last.startswith("error: ") and (value in last or "input should be" in last)
    said = {"synthesize": "count", "teacher-ranks": "teacher ranks"}.get(name, name)
    assert said.rstrip("s") in last
    assert not [*tmp_path.iterdir()], "and leaves nothing behind"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--policy fixed:9", "more than the drafter's block of"),
        ("--draft lookup --policy fixed:9", "more than the drafter's block of 7 tokens"),
        ("--draft lookup --policy early", "needs a confidence head"),
        ("--draft-length 1 --policy fixed:2", "more than the drafter's block of 1 tokens"),
        ("--target nowhere --draft auto --policy fixed:3", "needs a drafter"),
        ("--draft=", "draft is an empty name"),
    ],
)
@pytest.mark.parametrize("command", ["generate hello", "chat", "serve --port 0", "eval", "bench"])
def test_what_this_drafter_cannot_do_is_told_before_the_target_is_loaded(
    command: str,
    options: str,
    message: str,
    nothing_is_loaded: None,
    bundle_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    draft = [] if "--draft " in options else ["--draft", str(bundle_folder)]
    with pytest.raises(SystemExit) as exit_:
        run(build_app(COMMANDS), [*command.split(), *draft, *options.split()])
    captured = capsys.readouterr()
    assert exit_.value.code == 2, captured.err
    assert message in captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--plot sps.txt", "must end in .png"),
        ("--plot none/sps.png", "cannot write none/sps.png: give a file in a folder that exists"),
        ("--format sglang --output none/sps.json", "cannot write none/sps.json"),
        ("--format sglang", "--format and --output go together"),
    ],
)
def test_files_that_profile_could_not_write_are_told_before_it_measures(
    options: str, message: str, nothing_is_loaded: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(build_app(COMMANDS), ["profile", *options.split()])
    captured = capsys.readouterr()
    assert exit_.value.code == 2, captured.err
    assert message in captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--draft lookup", "there is no drafter to calibrate; give a bundle with --draft"),
        ("--target nowhere", "there is no drafter to calibrate; give a bundle with --draft"),
        ("--draft=", "draft is an empty name"),
        ("--plot curves.txt", "must end in .png"),
        ("--plot .", "must end in .png"),
        ("--plot none/curves.png", "cannot write none/curves.png: give a file in a folder"),
        ("--format sglang --output .", "cannot write .: give a file in a folder that exists"),
    ],
)
def test_what_cannot_be_calibrated_is_told_before_the_target_is_loaded(
    options: str, message: str, nothing_is_loaded: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(build_app(COMMANDS), ["calibrate", *options.split()])
    captured = capsys.readouterr()
    assert exit_.value.code == 2, captured.err
    assert message in captured.err.splitlines()[-1]


@pytest.mark.parametrize("command", ["serve --port 0", "doctor", "bench", "profile"])
def test_many_requests_are_refused_where_they_would_do_nothing(
    command: str,
    nothing_is_loaded: None,
    bundle_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--draft", str(bundle_folder), "--weights", "bf16", "--many-requests"]
    with pytest.raises(SystemExit) as exit_:
        run(build_app(COMMANDS), [*command.split(), *options])
    captured = capsys.readouterr()
    assert exit_.value.code == 2, captured.err
    assert "many_requests is for q4 and int8 weights; these are bf16; leave it" in captured.err


@pytest.mark.parametrize(
    "command", ["generate hello", "chat", "serve --port 0", "eval", "bench", "profile"]
)
def test_cuda_graphs_are_refused_on_a_cpu(
    command: str,
    nothing_is_loaded: None,
    bundle_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(build_app(COMMANDS), [*command.split(), "--draft", str(bundle_folder), "--cuda-graphs"])
    captured = capsys.readouterr()
    assert exit_.value.code == 2, captured.err
    assert "cuda_graphs need a CUDA device, and the device is cpu; leave them out" in captured.err
