"""What goes wrong in one request ends it with an error event; no other notices."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dspark.core.errors import DSparkError
from dspark.core.guided import Guided
from dspark.core.sampling import SamplingParams
from dspark.engine import commit
from dspark.engine.constraints import sound_draft
from dspark.engine.engine import Engine
from dspark.nn.seams import DraftBlock
from dspark.scheduling.policies import FixedLength
from tests.engine.setup import BLOCK, GREEDY, PROMPTS, drafter, engine_of, plain_greedy, target

WRONG = 2
"""The prompt whose request goes wrong."""


class Letters:
    """A tokenizer for ids; `bad` ones cannot be decoded."""

    def __init__(self, bad=()):
        self.bad = bad

    def decode(self, tokens, **options):
        assert not set(self.bad) & set(tokens), "no such character"
        return "".join(chr(65 + token) for token in tokens)


def outcome(engine, params=None):
    """Tokens and last event of each prompt's request."""
    own = params or {}
    ids = [engine.add(p, own.get(index, GREEDY)) for index, p in enumerate(PROMPTS)]
    tokens, last = {i: [] for i in ids}, {}
    for event in engine.run():
        tokens[event.request] += event.tokens
        last[event.request] = event
    engine.memory.check_integrity([])
    return [tokens[i] for i in ids], [last[i] for i in ids]


def check(engine, message, params=None, *, tokens=None):
    got, last = outcome(engine, params)
    for index, expected in enumerate(plain_greedy()):
        if index == WRONG:
            assert last[index].finished == "error" and last[index].tokens == ()
            assert isinstance(last[index].error, DSparkError)
            assert message in str(last[index].error)
            if tokens is not None:
                assert len(got[index]) == tokens
        else:
            assert got[index] == expected and last[index].finished == "length"


@pytest.mark.parametrize("policy", [None, ("untrained", BLOCK)])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_logits_that_are_not_finite(policy, number, monkeypatch):
    """From its fifth token on, also where truncation would choke on them."""
    plain_greedy()  # before anything is broken
    engine = engine_of(policy)
    forward, prompt = target().forward, len(PROMPTS[WRONG])

    def broken(batch, store, **options):
        output = forward(batch, store, **options)
        owners = batch.requests_N[options["logit_rows_M"]].tolist()
        for row, r in enumerate(owners):
            state = next(s for s in engine.running if s.table is batch.tables[r])
            if state.request.prompt == tuple(PROMPTS[WRONG]):
                at = int(batch.positions_N[options["logit_rows_M"][row]])
                if at >= prompt + 3:
                    output.logits_MV[row, 5] = number
                    store.keys[0][batch.slots_N[batch.starts[r]]] = float("nan")
        return output

    monkeypatch.setattr(target(), "forward", torch.inference_mode()(broken))
    cut = SamplingParams(temperature=0.8, top_p=0.9, max_new_tokens=14, ignore_eos=True)
    check(engine, "the target's logits are not finite", {WRONG: cut})
    # Whoever gets its pages reads whole tiles of them.
    assert all(torch.isfinite(keys).all() for keys in engine.memory.store.keys)


@pytest.mark.parametrize("part", ["block_hidden", "_confidence_logits"])
def test_a_draft_that_is_not_finite(part, monkeypatch):
    """A residual of NaN has no law at all, and its draw could be any id or none."""
    own = drafter("untrained")
    engine = Engine(target(), own, FixedLength(BLOCK))
    whole = getattr(own, part)

    def broken(*args):
        values = whole(*args).clone()
        states = [state for state in engine.running if not state.prefilling]
        rows = [state.request.prompt == tuple(PROMPTS[WRONG]) for state in states]
        values[torch.tensor(rows)] = float("nan")
        return values

    monkeypatch.setattr(own, part, broken)
    if part == "block_hidden":
        monkeypatch.setattr(own, "_confidence", None)
    sampled = SamplingParams(max_new_tokens=14, ignore_eos=True)
    check(engine, "drafter's probabilities are not finite", {WRONG: sampled}, tokens=1)


@pytest.mark.parametrize("part", ["probs_RKC", "confidence_RK", "entropy_RK"])
def test_any_number_of_a_draft_that_is_none_fails_its_request_alone(part):
    block = DraftBlock(
        tokens_RK=torch.zeros(2, 2, dtype=torch.int64),
        candidates_RKC=torch.zeros(2, 2, 1, dtype=torch.int64),
        probs_RKC=torch.ones(2, 2, 1, dtype=torch.float64),
        confidence_RK=torch.zeros(2, 2),
        entropy_RK=torch.zeros(2, 2),
    )
    states = [SimpleNamespace(error=None), SimpleNamespace(error=None)]
    assert sound_draft(block, states) is block
    values = getattr(block, part).clone()
    values[1, 1] = float("nan")
    sound = sound_draft(replace(block, **{part: values}), states)
    assert states[0].error is None and "not finite" in str(states[1].error)
    assert torch.isfinite(getattr(sound, part)).all()


def test_a_detokeniser_that_raises():
    bad = plain_greedy()[WRONG][3]
    others = [token for i, text in enumerate(plain_greedy()) if i != WRONG for token in text]
    if bad in others:
        pytest.fail("the token must be this text's alone; take another prompt")
    engine = Engine(target(), drafter("untrained"), FixedLength(BLOCK), tokenizer=Letters([bad]))
    check(engine, "no such character")


class Grammar:
    def __init__(self, after):
        self.left = after

    def allowed(self, drafted):
        if self.left <= len(drafted):
            raise RuntimeError("out of fuel")
        return torch.ones(97, dtype=torch.bool)

    def commit(self, tokens):
        self.left -= len(tokens)


@pytest.mark.parametrize("policy", [None, ("untrained", BLOCK)])
def test_a_grammar_that_fails_on_the_way(policy):
    engine = engine_of(policy)
    engine.tokenizer = Letters()
    engine._grammars.compile = lambda guided: Grammar(after=5)
    params = SamplingParams(temperature=0.0, max_new_tokens=14, guided=Guided.regex("x"))
    check(engine, "RuntimeError: out of fuel", {WRONG: params})


def test_a_dead_end():
    """The grammar wants what is banned: an error, not a token that nobody allows."""

    class One(Grammar):
        def allowed(self, drafted):
            allowed_V = torch.zeros(97, dtype=torch.bool)
            allowed_V[7] = len(drafted) >= self.left
            allowed_V[8] = len(drafted) < self.left
            return allowed_V

    engine = engine_of(("untrained", BLOCK))
    engine.tokenizer = Letters()
    engine._grammars.compile = lambda guided: One(after=3)
    params = SamplingParams(
        temperature=0.0, max_new_tokens=14, guided=Guided.regex("x"), banned_token_ids=(7,)
    )
    check(engine, "no token may come next", {WRONG: params})


def test_log_probabilities_that_fail(monkeypatch):
    """What is computed beside the walk is one request's alone, too."""
    whole = commit.token_logprobs

    def broken(params, *rest):
        if params.logprobs == 3:
            raise MemoryError("no room for them")
        return whole(params, *rest)

    monkeypatch.setattr(commit, "token_logprobs", broken)
    check(
        engine_of(("untrained", BLOCK)), "no room", {WRONG: replace(GREEDY, logprobs=3)}, tokens=0
    )


@pytest.mark.parametrize("chunk", [5, 512], ids=["in its first chunk", "in its last"])
@pytest.mark.parametrize("new", [0, 14])
def test_a_prompt_that_cannot_be_scored(new, chunk, monkeypatch):
    def broken(state, logits):
        raise MemoryError("no room for them")

    monkeypatch.setattr(commit, "score_prompt", broken)
    params = SamplingParams(prompt_logprobs=1, max_new_tokens=new)
    check(engine_of(chunk_tokens=chunk), "no room for them", {WRONG: params}, tokens=0)


def test_a_step_that_fails_half_way_loses_no_last_event(monkeypatch):
    """A text that ends has left its place when the next one's turn fails: nobody else would tell
    its reader."""
    engine = engine_of()
    ended = engine.add(PROMPTS[1], replace(GREEDY, max_new_tokens=3), owner="a")
    other = engine.add(PROMPTS[1], GREEDY, owner="b")
    charge = engine.places.waiting.charge

    def broken(owner, tokens):
        if owner == "b" and [s.request.owner for s in engine.running] == ["b"]:
            raise MemoryError("our own mistake")
        charge(owner, tokens)

    monkeypatch.setattr(engine.places.waiting, "charge", broken)
    events = []
    with pytest.raises(MemoryError) as caught:
        while not engine.idle:
            events += engine.step()
    assert not any(event.finished for event in events)
    events = engine.fail_running(caught.value)
    assert [(e.request, e.finished) for e in events] == [(ended, "length"), (other, "error")]
    assert events[0].tokens == tuple(plain_greedy()[1][2:3])
    engine.memory.check_integrity([])


def run_through(engine):
    """Events by request, as a service goes on after a step that raised."""
    events = {}
    while not engine.idle:
        try:
            found = engine.step()
        except MemoryError as error:
            found = engine.fail_running(error)
        for event in found:
            events.setdefault(event.request, []).append(event)
    engine.memory.check_integrity([])
    return events


def told(events):
    """A request's tokens and how it ended."""
    return [token for event in events for token in event.tokens], events[-1].finished


def test_whoever_waits_is_not_failed_for_a_step_whose_requests_have_all_ended(monkeypatch):
    engine = engine_of(max_requests=1)
    first, second = (engine.add(PROMPTS[i], GREEDY) for i in (1, 2))
    record, raised = engine._record, []

    def broken(*args):
        record(*args)
        if not engine.running and not raised:
            raised.append(True)
            raise MemoryError("our own mistake")

    monkeypatch.setattr(engine, "_record", broken)
    events = run_through(engine)
    assert raised
    assert told(events[first]) == (plain_greedy()[1], "length")
    assert told(events[second]) == (plain_greedy()[2], "length")


@pytest.mark.parametrize("late", [False, True], ids=["without pages", "with its place"])
def test_a_request_that_cannot_be_started_fails_alone(late, monkeypatch):
    """What runs, and what waits behind it, goes on."""
    engine = engine_of()
    before = engine.add(PROMPTS[1], GREEDY)
    events = engine.step()
    wrong, after = (engine.add(PROMPTS[i], GREEDY, owner="w" * (i == WRONG)) for i in (WRONG, 4))
    admit, charge = engine.memory.admit, engine.places.waiting.charge

    def no_pages(state, *args, **options):
        if state.request.id == wrong:
            raise MemoryError("no room for it")
        return admit(state, *args, **options)

    def no_place(owner, tokens):
        if owner:
            raise MemoryError("no room for it")
        charge(owner, tokens)

    if late:
        monkeypatch.setattr(engine.places.waiting, "charge", no_place)
    else:
        monkeypatch.setattr(engine.memory, "admit", no_pages)
    found = run_through(engine)
    assert [e.finished for e in found[wrong]] == ["error"]
    assert "no room for it" in str(found[wrong][0].error)
    assert told([*events, *found[before]]) == (plain_greedy()[1], "length")
    assert told(found[after]) == (plain_greedy()[4], "length")
