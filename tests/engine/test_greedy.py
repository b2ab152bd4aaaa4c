"""Greedy speculative decoding gives the tokens of greedy decoding."""

import pytest
import torch

from tests.engine.setup import BLOCK, GREEDY, PROMPTS, drafter, plain_greedy, reference, run


def test_plain_decoding_is_the_models_own():
    for prompt, tokens in zip(PROMPTS, plain_greedy(), strict=True):
        text = [*prompt, *tokens]
        with torch.inference_mode():
            logits = reference()(torch.tensor([text])).logits[0]
        assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == tokens


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("untrained", 1),
        ("untrained", BLOCK),
        ("random", 3),
        ("teacher", 2),
        ("teacher", BLOCK),
        ("gated", BLOCK),
        ("rnn", BLOCK),
        ("dflash", 3),
        ("eagle3", BLOCK),
        ("mtp", 1),
    ],
)
def test_same_tokens_in_a_batch(name, length):
    result = run(PROMPTS, GREEDY, (name, length))
    assert result.tokens == plain_greedy()
    assert set(result.finished) == {"length"}


@pytest.mark.parametrize("index", [0, 5])
def test_same_tokens_alone(index):
    result = run(PROMPTS[index : index + 1], GREEDY, ("teacher", BLOCK))
    assert result.tokens[0] == plain_greedy()[index]


@pytest.mark.parametrize("config", [{"chunk_tokens": 5}, {"page_size": 3}, {"max_requests": 3}])
@pytest.mark.parametrize("name", ["untrained", "teacher"])
def test_same_tokens_however_the_engine_is_set_up(name, config):
    assert run(PROMPTS, GREEDY, (name, BLOCK), **config).tokens == plain_greedy()


def test_a_good_drafter_needs_few_rounds():
    perfect = run(PROMPTS, GREEDY, ("perfect", BLOCK))
    # 14 tokens: one from prefill, then two rounds of 5 and one of what is left.
    assert {len(own) for own in perfect.rounds} == {3}
    spoilt = run(PROMPTS, GREEDY, ("teacher", BLOCK))
    accepted = sum(record.accepted for own in spoilt.rounds for record in own)
    offered = sum(record.admitted for own in spoilt.rounds for record in own)
    assert 0.3 < accepted / offered < 0.95


def test_context_is_extended_once_for_each_committed_position():
    own = drafter("teacher")  # its drafts check that every position is there, and right
    result = run(PROMPTS, GREEDY, (own, BLOCK), chunk_tokens=7)
    assert own.drafts > 5
    # All positions that the last draft of a text could see; what came after it waits in vain.
    seen = 0
    for prompt, own_rounds in zip(PROMPTS, result.rounds, strict=True):
        last = max(index for index, record in enumerate(own_rounds) if record.proposed)
        seen += len(prompt) + sum(record.emitted for record in own_rounds[:last])
    assert own.extended == seen
