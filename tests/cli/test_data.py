"""`dspark data`: the stages as commands, and a look at what they made."""

import json
from pathlib import Path

import pytest

from dspark.cli.main import COMMANDS, build_app, run


def dspark(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        run(build_app(COMMANDS), [*args])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_synthesise_answer_look(
    tmp_path: Path, talker_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ["--target", str(talker_folder)]
    prompts, responses = str(tmp_path / "own.jsonl"), str(tmp_path / "responses.jsonl")
    here = [*target, "--weights", "fp32", "--json"]
    assert dspark("data", "synthesize", *here, "--output", prompts, "--count", "5") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["prompts"] == 5
    answer = ["data", "regenerate", *here, "--prompts", prompts, "--output", responses]
    answer += ["--max-new-tokens", "5", "--temperature", "0.7", "--max-requests", "4"]
    assert dspark(*answer) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["responses"] == 5 and 5 <= document["tokens"] <= 25
    assert dspark("data", "inspect", responses, *target, "--samples", "1", "--json") == 0
    out = capsys.readouterr().out
    shown, counts = out.splitlines()[:-1], json.loads(out.splitlines()[-1])
    assert shown[0].startswith("own, line ") and shown[0].endswith("temperature 0.7")
    assert "<assistant>[[" in shown[1]
    assert counts["domains"]["own"]["trained_tokens_in_all"] == document["tokens"]
    assert counts["bad_lines"] == 0


def test_a_look_at_conversations(
    tmp_path: Path, talker_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = {
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "good-day"},
            {"role": "user", "content": "bye"},
            {"role": "assistant", "content": "so-long"},
        ]
    }
    lines = [json.dumps(talk), '{"prompt": "Hello!"}', '{"prompt": ""}', "not json"]
    file = tmp_path / "talk.jsonl"
    file.write_text("\n".join(lines) + "\n")
    target = ["--target", str(talker_folder)]
    assert dspark("data", "inspect", str(file), *target, "--json") == 0
    out = capsys.readouterr().out
    assert "<user>hello<eos><assistant>[[good-day<eos>]]<user>bye<eos>" in out
    assert "[[so-long<eos>]]" in out
    assert "1 prompts are like one before" in out
    assert "2 bad lines: 1 every turn must be text and not empty, 1 not JSON" in out
    counts = json.loads(out.splitlines()[-1])
    assert counts["texts"] == 2 and counts["bad_lines"] == 2 and counts["repeated_prompts"] == 1


def test_a_look_changes_no_file(
    tmp_path: Path, talker_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last line may be half written: by a process that was killed, or by one that writes."""
    target, prompts = ["--target", str(talker_folder)], tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "Hello!"}\n{"prompt": "Bye!"}\n')
    file = tmp_path / "responses.jsonl"
    answer = ["--prompts", str(prompts), "--output", str(file), "--max-new-tokens", "4"]
    assert dspark("data", "regenerate", *target, *answer, "--temperature", "1") == 0
    torn = file.read_bytes()[:-9]
    file.write_bytes(torn)
    capsys.readouterr()
    assert dspark("data", "inspect", str(file), *target, "--samples", "0") == 0
    assert "p: 1 texts" in capsys.readouterr().out
    assert file.read_bytes() == torn
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"format": "dspark-responses/1", "x\n')
    assert dspark("data", "inspect", str(broken), *target, "--json") == 2, "no line is good"
    out, err = capsys.readouterr()
    assert "1 bad line: 1 not JSON" in out
    assert json.loads(out.splitlines()[-1])["bad_lines"] == 1
    assert err.splitlines()[-1].startswith("error: no line of these files can be used")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["regenerate"], "--prompts"),
        (["regenerate", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["regenerate", "--endpoint-model", "m"], "give --endpoint URL"),
        (["regenerate", "--endpoint", "localhost:1"], "http://"),
        (["synthesize", "--output", "x.jsonl", "--count", "0"], "count is 0"),
        (["regenerate", "--prompts", ".", "--turns", "0"], "turns is 0"),
        (["regenerate", "--prompts", ".", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["regenerate", "--prompts", ".", "--max-prompt-tokens", "-5"], "max_prompt_tokens is -5"),
        (["regenerate", "--prompts", ".", "--temperature", "-1"], "temperature is -1"),
        (["synthesize", "--output", "."], "Is a directory; give another path"),
        (["inspect", "nowhere"], "nowhere"),
        (["inspect", "nowhere", "--seed", "-1"], "seed is -1"),
    ],
)
def test_bad_input(
    args: list[str],
    message: str,
    talker_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert dspark("data", *args, "--target", str(talker_folder)) == 2
    assert message in capsys.readouterr().err
