"""Stop strings: text, tokens, log-probabilities and usage end in one place."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core.sampling import SamplingParams
from dspark.engine.text import OutputText
from tests.engine.setup import BLOCK, PROMPTS, engine_of, plain_greedy
from tests.targets.ragged import random_text


class Letters:
    """A letter an id."""

    def decode(self, tokens, **options):
        return "".join(chr(65 + token) for token in tokens)


def ended(text, stops):
    """Where `text`, read letter by letter, ends: (start, end of the stop string), or None."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end - len(max(found, key=len)), end
    return None


WORDS = st.text("ab", min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab", max_size=14), stops=st.lists(WORDS, max_size=3), include=st.booleans())
def test_text_ends_before_the_first_complete_stop_string(text, stops, include):
    output = OutputText(Letters(), stops, include_stop=include)
    shown, stopped = "", None
    where = ended(text, stops)
    final = text if where is None else text[: where[1] if include else where[0]]
    for index, letter in enumerate(text):
        piece, stopped = output.push(ord(letter) - 65)
        shown += piece
        assert final.startswith(shown)
        assert (stopped is not None) == (where is not None and where[1] == index + 1)
        if stopped:
            break
    if not stopped:
        held = len(text) - len(shown)
        starts = {stop[:n] for stop in stops for n in range(len(stop))}
        assert text[len(text) - held :] in starts | {""}, "only a beginning is held back"
        shown += output.finish()
    assert shown == final


def run(params, policy):
    engine = engine_of(policy)
    engine.tokenizer = Letters()
    engine.add(PROMPTS[4], params)
    return list(engine.run()), engine


@pytest.mark.parametrize("policy", [None, ("perfect", BLOCK), ("untrained", 2)])
@pytest.mark.parametrize("start", [1, 2, 4])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_inside_an_accepted_run(policy, start, include):
    whole = Letters().decode(plain_greedy()[4])
    stop = whole[start : start + 3]
    params = SamplingParams(
        temperature=0.0, max_new_tokens=14, ignore_eos=True, stop=stop, include_stop=include,
        logprobs=2,
    )  # fmt: skip
    events, engine = run(params, policy)
    begin, end = ended(whole, [stop])
    tokens = list(itertools.chain(*(event.tokens for event in events)))
    assert tokens == plain_greedy()[4][:end]
    assert "".join(event.text for event in events) == whole[: end if include else begin]
    assert sum(len(event.logprobs) for event in events) == len(tokens)
    assert all(len(event.texts) == len(event.tokens) == len(event.fates) for event in events)
    assert events[-1].finished == "stop" and events[-1].stopped_by == stop
    rounds = [record for step in engine.records for record in step.rounds]
    assert 1 + sum(record.emitted for record in rounds) == len(tokens)


def test_min_tokens_hold_stop_strings_off():
    whole = Letters().decode(plain_greedy()[4])
    params = SamplingParams(
        temperature=0.0, max_new_tokens=14, ignore_eos=True, stop=tuple(whole), min_tokens=6
    )
    events, _ = run(params, ("perfect", BLOCK))
    assert sum(len(event.tokens) for event in events) == 7


def test_the_end_comes_before_the_limit():
    """An end at the very last token is an end: "stop", not "length"."""
    whole = Letters().decode(plain_greedy()[4])
    params = SamplingParams(
        temperature=0.0, max_new_tokens=5, ignore_eos=True, stop=whole[2:5]
    )  # fmt: skip
    events, _ = run(params, None)
    assert events[-1].finished == "stop"


def test_log_probabilities_are_the_targets_own():
    """Before bias, penalties, masks and temperature; at every token of an accepted run."""
    from tests.engine.setup import reference

    prompt = random_text(9, 97, seed=1)
    params = SamplingParams(
        seed=3, temperature=0.7, top_k=5, max_new_tokens=10, ignore_eos=True, logprobs=3,
        frequency_penalty=0.5, logit_bias={5: 3.0},
    )  # fmt: skip
    engine = engine_of(("teacher", BLOCK))
    engine.add(prompt, params)
    events = list(engine.run())
    got = [own for event in events for own in event.logprobs]
    tokens = [token for event in events for token in event.tokens]
    assert [own.token for own in got] == tokens and len(tokens) == 10
    with torch.inference_mode():
        logits = reference()(torch.tensor([[*prompt, *tokens]])).logits[0]
    expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
    for own, row in zip(got, expected, strict=True):
        assert own.logprob == pytest.approx(float(row[own.token]), abs=1e-4)
        values, ids = row.topk(3)
        assert [token for token, _ in own.top] == ids.tolist()
        assert [value for _, value in own.top] == pytest.approx(values.tolist(), abs=1e-4)
