"""Log-probabilities of a prompt's own tokens: the target's, whatever the prompt's way was."""

from functools import cache

import pytest
import torch

from dspark.core.errors import ConfigError
from dspark.core.sampling import SamplingParams
from tests.engine.setup import (
    BLOCK,
    GREEDY,
    PROMPTS,
    VOCAB,
    collect,
    engine_of,
    plain_greedy,
    reference,
    run,
    target,
)
from tests.targets.ragged import random_text

LONG = random_text(45, VOCAB, seed=5)
SCORE = SamplingParams(temperature=0.0, max_new_tokens=0, prompt_logprobs=3)
POLICIES = [None, ("untrained", BLOCK), ("teacher", BLOCK)]


def scores(engine, prompts, params=SCORE, **options):
    """Each prompt's log-probabilities, and all events."""
    ids = [engine.add(prompt, params, **options) for prompt in prompts]
    events = list(engine.run())
    engine.memory.check_integrity([])
    found = []
    for own in ids:
        mine = [event for event in events if event.request == own]
        assert all(event.prompt_logprobs == () for event in mine[1:]), "with the first event only"
        found.append(mine[0].prompt_logprobs)
    return found, events


@cache
def alone(prompt):
    return scores(engine_of(), [prompt])[0][0]


@pytest.mark.parametrize("prompt", [*PROMPTS, LONG], ids=len)
def test_they_are_the_targets_own(prompt):
    """Of the tokens that follow, before anything that the request does to its logits."""
    with torch.inference_mode():
        expected = reference()(torch.tensor([prompt])).logits[0].log_softmax(-1)
    changed = SamplingParams(
        max_new_tokens=0, prompt_logprobs=3, temperature=0.3, top_k=2, logit_bias={5: 9.0},
        banned_token_ids=(prompt[-1],), repetition_penalty=2.0,
    )  # fmt: skip
    for params in (SCORE, changed):
        (got,), _ = scores(engine_of(("untrained", BLOCK)), [prompt], params)
        assert got[0] is None and len(got) == len(prompt)
        for token, own, row in zip(prompt[1:], got[1:], expected, strict=False):
            assert own.token == token
            assert own.logprob == pytest.approx(float(row[token]), abs=1e-4)
            values, ids = row.topk(3)
            assert [token for token, _ in own.top] == ids.tolist()
            assert [value for _, value in own.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_chunks_and_company_do_not_matter(policy, chunk):
    """Bit for bit, and the tokens that others generate meanwhile are the same ones."""
    engine = engine_of(policy, chunk_tokens=chunk, page_size=8)
    others = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    found, events = scores(engine, [*PROMPTS, LONG])
    assert found == [alone(tuple(prompt)) for prompt in [*PROMPTS, LONG]]
    for own, tokens in zip(others, plain_greedy(), strict=True):
        assert [t for event in events if event.request == own for t in event.tokens] == tokens


def test_scoring_alone_brings_no_token():
    _, events = scores(engine_of(("untrained", BLOCK)), PROMPTS)
    assert len(events) == len(PROMPTS)
    assert all(event.tokens == event.texts == event.fates == () for event in events)
    assert {event.finished for event in events} == {"length"}


@pytest.mark.parametrize("policy", POLICIES)
def test_with_tokens_they_come_with_the_first(policy):
    params = SamplingParams(
        temperature=0.0, max_new_tokens=14, ignore_eos=True, prompt_logprobs=3, logprobs=1
    )
    engine = engine_of(policy)
    found, events = scores(engine, PROMPTS, params)
    assert found == [alone(tuple(prompt)) for prompt in PROMPTS]
    tokens = {event.request: [] for event in events}
    for event in events:
        tokens[event.request] += event.tokens
        assert [own.token for own in event.logprobs] == list(event.tokens)
    assert [*tokens.values()] == plain_greedy()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_prefix_cache_loses_none(policy):
    engine = engine_of(policy, page_size=8)
    run([LONG], GREEDY, engine=engine)
    found, _ = scores(engine, [LONG, LONG])
    assert found == [alone(tuple(LONG))] * 2
    assert engine.stats().prefix_hits == 0
    # What they computed serves others.
    fresh = engine_of(policy, page_size=8)
    params = SamplingParams(temperature=0.0, max_new_tokens=2, prompt_logprobs=0)
    scores(fresh, [LONG], params)
    assert run([LONG], GREEDY, engine=fresh).tokens == run([LONG], GREEDY).tokens
    assert fresh.stats().prefix_hits == 1


@pytest.mark.parametrize("cache_on", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_preemption_loses_none(policy, cache_on):
    """In the middle of a prompt, where another with the same prompt goes on and shares its pages;
    and no row is scored twice."""
    engine = engine_of(policy, page_size=4, chunk_tokens=8, prefix_cache=cache_on)
    first = engine.add(LONG, SCORE)
    for _ in range(2):
        engine.step()
    (state,) = engine.running
    assert len(state.prompt_logprobs) == 17
    engine.places.preempt(state)
    other = engine.add(LONG, GREEDY, priority=1)
    events = list(engine.run())
    (mine,) = [event for event in events if event.request == first]
    assert mine.prompt_logprobs == alone(tuple(LONG))
    tokens = [token for event in events if event.request == other for token in event.tokens]
    assert tokens == run([LONG], GREEDY).tokens[0]
    assert engine.stats().prefix_hit_tokens == (16 + 16 if cache_on else 0)


def test_few_pages():
    params = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True, prompt_logprobs=3)
    engine = engine_of(("untrained", BLOCK), page_size=4, cache_tokens=29 * 4, chunk_tokens=16)
    found, events = scores(engine, PROMPTS, params)
    assert engine.stats().preemptions > 1
    assert found == [alone(tuple(prompt)) for prompt in PROMPTS]
    # Who gave way while it wrote reads its prompt once more, and nothing of that is scored.
    ends = [event.finished for event in events if event.finished is not None]
    assert ends == ["length"] * len(PROMPTS)
    tokens = {event.request: [] for event in events}
    for event in events:
        tokens[event.request] += event.tokens
    assert [
        own[: len(plain)]
        for own, plain in zip([tokens[i] for i in sorted(tokens)], plain_greedy(), strict=True)
    ] == plain_greedy()


def test_scored_rows_of_a_step_are_bounded(monkeypatch):
    engine = engine_of(None, chunk_tokens=16)
    rows, forward = [], target().forward

    def watched(batch, store, **options):
        rows.append(len(options["logit_rows_M"]))
        return forward(batch, store, **options)

    monkeypatch.setattr(target(), "forward", watched)
    others = [engine.add(PROMPTS[4], GREEDY) for _ in range(3)]
    found, _ = scores(engine, [LONG] * 5)
    assert max(rows) <= 16 + len(others)
    assert found == [alone(tuple(LONG))] * 5


@pytest.mark.parametrize("tokens", [0, 5])
def test_logits_that_are_not_finite(monkeypatch, tokens):
    """In the middle of a prompt: that request fails, and only that one."""
    expected = plain_greedy()[2], alone(tuple(PROMPTS[4]))
    engine = engine_of(("untrained", BLOCK), chunk_tokens=8)
    forward, bad = target().forward, tuple(LONG)

    def broken(batch, store, **options):
        output = forward(batch, store, **options)
        for row, at in enumerate(options["logit_rows_M"].tolist()):
            table = batch.tables[int(batch.requests_N[at])]
            state = next(state for state in engine.running if state.table is table)
            if state.request.prompt == bad and int(batch.positions_N[at]) == 20:
                output.logits_MV[row, 5] = float("nan")
        return output

    monkeypatch.setattr(target(), "forward", torch.inference_mode()(broken))
    params = SamplingParams(max_new_tokens=tokens, prompt_logprobs=3, ignore_eos=True)
    wrong = engine.add(LONG, params)
    writes, scored = engine.add(PROMPTS[2], GREEDY), engine.add(PROMPTS[4], SCORE)
    events = list(engine.run())
    (failed,) = [event for event in events if event.request == wrong]
    assert failed.finished == "error" and "not finite" in str(failed.error)
    assert [t for event in events if event.request == writes for t in event.tokens] == expected[0]
    assert [e.prompt_logprobs for e in events if e.request == scored] == [expected[1]]
    engine.memory.check_integrity([])


def test_a_prompt_as_long_as_the_context():
    prompt = random_text(target().max_context, VOCAB, seed=1)
    (found,), _ = scores(engine_of(("untrained", BLOCK)), [prompt])
    assert len(found) == target().max_context


def test_nothing_to_do_is_refused():
    with pytest.raises(ConfigError, match="max_new_tokens is 0; it must be at least 1, or 0 with"):
        SamplingParams(max_new_tokens=0)


def test_requests_without_them_have_none():
    engine = engine_of()
    own = engine.add(PROMPTS[2], GREEDY)
    assert all(event.prompt_logprobs == () for event in engine.run() if event.request == own)
    assert collect(engine, []).tokens == []
