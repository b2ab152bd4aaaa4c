"""Prompts and answers that the target writes, and what becomes of them in training."""

from pathlib import Path

import numpy as np
import pytest

from dspark.core.errors import ConfigError, DataError
from dspark.data.conversation import Message
from dspark.data.masks import mask_conversation
from dspark.data.prompts import Prompt, is_validation, read_prompts
from dspark.data.responses import Response, ResponseFile
from dspark.data.synthesis import clean_turn, likeness, user_prefix
from dspark.data.template import encode_messages, template_hash
from dspark.recipes.progress import Progress
from dspark.recipes.regenerate import RegenerateConfig, regenerate
from dspark.recipes.synthesize import SynthesizeConfig, synthesize
from dspark.recipes.training_data import from_conversations, from_responses
from dspark.targets.load import LoadedTarget

QUIET = Progress(quiet=True)


def _small(count: int, **changes: int) -> SynthesizeConfig:
    return SynthesizeConfig(count=count, max_requests=8, max_new_tokens=96, **changes)


def test_synthesis_goes_on_where_it_stopped(talker: LoadedTarget, tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    synthesize(talker, whole, _small(12), QUIET)
    prompts = read_prompts(whole)
    assert len(prompts) == 12
    assert len({likeness(prompt.turns[0]) for prompt in prompts}) == 12
    parts = tmp_path / "parts.jsonl"
    synthesize(talker, parts, _small(5), QUIET)
    with parts.open("a") as file:
        file.write('{"prompt": "torn')
    synthesize(talker, parts, _small(12), QUIET)
    assert parts.read_text() == whole.read_text()
    assert len(synthesize(talker, parts, _small(7), QUIET)) == 12, "what is there stays"
    with pytest.raises(DataError, match="with seed 0, not talker with seed 1"):
        synthesize(talker, parts, _small(20, seed=1), QUIET)
    other = tmp_path / "mine.jsonl"
    other.write_text('{"prompt": "my own"}\n')
    with pytest.raises(DataError, match="line 1: not a synthesised prompt"):
        synthesize(talker, other, _small(2), QUIET)
    other.write_text('{"prompt": 5, "target": "talker", "seed": 0, "try": 0}\n')
    with pytest.raises(DataError, match="line 1: not a synthesised prompt"):
        synthesize(talker, other, _small(2), QUIET)


def test_a_target_that_writes_nothing_usable(talker: LoadedTarget, tmp_path: Path) -> None:
    config = SynthesizeConfig(count=3, max_requests=2, max_new_tokens=1)
    with pytest.raises(DataError, match="0 usable user turns, and none in its last 16 tries"):
        synthesize(talker, tmp_path / "p.jsonl", config, QUIET)


def test_what_a_turn_is() -> None:
    assert clean_turn("  how do I cook rice?\n", ended=True) == "how do I cook rice?"
    for text, ended in (("how do I cook", False), ("hi", True), ("broken \ufffd text", True)):
        assert clean_turn(text, ended=ended) is None
    assert likeness("How do I, cook RICE?") == likeness("how do i cook rice")
    assert likeness("1 + 1?") != likeness("1 + 2?")
    assert likeness("???") != likeness("!!!")


def test_where_a_users_turn_begins(talker: LoadedTarget, tokenizer: object) -> None:
    prefix = user_prefix(talker.tokenizer)
    assert talker.tokenizer.decode(prefix.token_ids) == "<user>"
    assert prefix.stop_token_ids == (talker.tokenizer.eos_token_id,) and not prefix.stops
    plain = user_prefix(tokenizer)  # its template has no special tokens
    assert plain.stops == ("<assistant>",)


def _file(talker: LoadedTarget, path: Path) -> ResponseFile:
    return ResponseFile(
        path, target=talker.name, template_hash=template_hash(talker.tokenizer), vocab_size=200
    )


TALK = Prompt("chat", 1, ("first-one", "second"), "be-brief")
SINGLE = Prompt("chat", 2, ("just-this",))


def test_every_turn_is_answered_in_order(talker: LoadedTarget, tmp_path: Path) -> None:
    config = RegenerateConfig(max_new_tokens=6, max_requests=3)
    whole = _file(talker, tmp_path / "whole.jsonl")
    regenerate(talker, [TALK, SINGLE], whole, config, QUIET, page_size=128)
    assert sorted(r.key for r in whole.responses) == [
        ("chat", 1, 0, 0), ("chat", 1, 0, 1), ("chat", 1, 1, 0), ("chat", 1, 1, 1),
        ("chat", 2, 0, 0), ("chat", 2, 1, 0),
    ]  # fmt: skip
    first, second = whole["chat", 1, 1, 0], whole["chat", 1, 1, 1]
    said = talker.tokenizer.decode(first.response_ids, skip_special_tokens=True)
    expected = encode_messages(talker.tokenizer, TALK.conversation((said, None)))
    assert second.prompt_ids.tolist() == expected
    assert first.seed != second.seed

    parts = _file(talker, tmp_path / "parts.jsonl")
    early = RegenerateConfig(max_new_tokens=6, max_requests=3, turns=1)
    regenerate(talker, [TALK, SINGLE], parts, early, QUIET, page_size=128)
    assert len(parts) == 4
    regenerate(talker, [TALK, SINGLE], parts, config, QUIET, page_size=128)
    for response in whole.responses:
        again = parts[response.key]
        assert np.array_equal(again.response_ids, response.response_ids)
        assert np.array_equal(again.prompt_ids, response.prompt_ids)


def test_too_long_prompts_leave_out_all_that_follows(talker: LoadedTarget, tmp_path: Path) -> None:
    config = RegenerateConfig(max_new_tokens=4, max_requests=3, max_prompt_tokens=20)
    file = _file(talker, tmp_path / "r.jsonl")
    regenerate(talker, [TALK, SINGLE], file, config, QUIET, page_size=128)
    assert {r.line for r in file.responses} == {2}


def _response(prompt: list[int], said: list[int], turn: int, line: int = 1) -> Response:
    return Response(
        "chat", line, 0, 1.0, 7, "stop", np.array(prompt, np.int32), np.array(said, np.int32), turn
    )


def _prompt(validation: bool, line: int) -> Prompt:
    turn = next(t for t in map(str, range(line * 1000, 99999)) if is_validation(t) == validation)
    return Prompt("chat", line, (turn, "more"))


def test_answers_of_one_conversation_share_a_text_that_goes_on() -> None:
    prompts = [_prompt(False, 1), _prompt(True, 2), _prompt(False, 3)]
    responses = [
        _response([5, 6, 7, 8, 9], [1, 2], 1),  # its first turn was written as other tokens
        _response([5, 6], [7, 4], 0),
        _response([5], [6], 0, line=2),
        _response([8, 3, 9], [2], 1, line=3),
        _response([8], [3], 0, line=3),
    ]
    data = from_responses(prompts, responses)
    assert [s.token_ids.tolist() for s in data.train] == [
        [5, 6, 7, 4], [8, 3, 9, 2], [5, 6, 7, 8, 9, 1, 2]
    ]  # fmt: skip
    assert data.train[1].supervised.tolist() == [False, True, False, True]
    assert data.answers == 4 and data.supervised_tokens == 6 and len(data.held_out) == 1
    with pytest.raises(DataError, match="both are needed"):
        from_responses(prompts, responses[:2])
    with pytest.raises(DataError, match="line 9 has no prompt"):
        from_responses(prompts, [_response([5], [6], 0, line=9)])


def test_given_answers_have_the_masks_of_the_template(talker: LoadedTarget) -> None:
    train, held_out = _prompt(False, 1), _prompt(True, 2)
    prompts = [
        Prompt("chat", 1, train.turns, "be-brief", ("yes", "no-no")),
        Prompt("chat", 2, held_out.turns, None, ("yes", None)),
        Prompt("chat", 3, ("nobody-answers",)),
    ]
    told: list[str] = []
    data = from_conversations(
        talker.tokenizer, prompts, thinking=None, max_tokens=1000, say=told.append
    )
    (sequence,) = data.train
    messages: list[Message] = prompts[0].conversation(prompts[0].answers)
    (masked,) = mask_conversation(talker.tokenizer, messages)
    assert np.array_equal(sequence.token_ids, masked.token_ids)
    assert np.array_equal(sequence.supervised, masked.supervised)
    said = talker.tokenizer.decode(sequence.token_ids[sequence.supervised])
    assert said == "yes<eos>no-no<eos>"
    assert told == ["1 of 3 conversations are without an answer and left out"]
    cut = from_conversations(
        talker.tokenizer, prompts, thinking=None, max_tokens=len(masked.token_ids) - 2,
        say=told.append,
    )  # fmt: skip
    assert len(cut.train[0].token_ids) == len(masked.token_ids) - 2
    assert "1 texts are cut" in told[-1]
    with pytest.raises(ConfigError, match="no thinking"):
        from_conversations(talker.tokenizer, prompts, thinking=True, max_tokens=9, say=told.append)
