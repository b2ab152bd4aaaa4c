"""A pipelined engine writes texts while it computes: the same events, none lost, none twice."""

import threading

import pytest

from dspark.core.sampling import SamplingParams
from dspark.engine.service import EngineService
from tests.engine.setup import BLOCK, GREEDY, PROMPTS, engine_of, plain_greedy, target
from tests.engine.test_service import WAIT

POLICIES = [None, ("untrained", BLOCK), ("teacher", BLOCK)]


class Letters:
    """A tokenizer for ids; `bad` ones cannot be decoded."""

    def __init__(self, bad=()):
        self.bad = bad

    def decode(self, tokens, **options):
        assert not set(self.bad) & set(tokens), "no such character"
        return "".join(chr(65 + token) for token in tokens)


def engine(policy, *, pipeline, tokenizer=None, **config):
    own = engine_of(policy, pipeline=pipeline, **config)
    own.tokenizer = tokenizer or Letters()
    return own


def by_request(events):
    found = {}
    for event in events:
        found.setdefault(event.request, []).append(event)
    return found


def tokens_of(events):
    return [token for event in events for token in event.tokens]


def asked():
    """One of everything: plain ends, stop tokens and strings inside accepted runs, scores."""
    greedy = plain_greedy()
    text = Letters().decode(greedy[4])
    common = {"temperature": 0.0, "max_new_tokens": 14, "ignore_eos": True}
    return [
        (PROMPTS[0], GREEDY),
        (PROMPTS[1], SamplingParams(**common, logprobs=2)),
        (PROMPTS[2], SamplingParams(**common, stop_token_ids=(greedy[2][5],))),
        (PROMPTS[2], SamplingParams(**common, stop_token_ids=(greedy[2][5],), include_stop=True)),
        (PROMPTS[3], SamplingParams(**common, prompt_logprobs=1)),
        (PROMPTS[4], SamplingParams(**common, stop=text[4:7], logprobs=1)),
        (PROMPTS[4], SamplingParams(**common, stop=text[4:7], include_stop=True)),
        (PROMPTS[5], SamplingParams(temperature=0.0, max_new_tokens=0, prompt_logprobs=1)),
        (PROMPTS[5], SamplingParams(seed=4, max_new_tokens=9, ignore_eos=True, n=1)),
        (PROMPTS[5], SamplingParams(verification="rejection", seed=4, max_new_tokens=9)),
    ]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("config", [{}, {"max_requests": 3, "page_size": 4, "chunk_tokens": 8}])
def test_the_same_events_and_records(policy, config):
    """Step by step: nothing that is written later decides about a round."""
    ran = []
    for pipeline in (False, True):
        own = engine(policy, pipeline=pipeline, **config)
        for prompt, params in asked():
            own.add(prompt, params)
        events = by_request(own.run())
        records = [(record.batch_tokens, record.rounds) for record in own.records]
        ran.append((events, records))
        assert own.idle and own.flush() == []
        own.memory.check_integrity([])
        assert (own.writing.steps_behind > 5) == pipeline
    assert ran[0] == ran[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_it_writes_while_the_next_step_computes(policy, monkeypatch):
    """Here a step's text cannot be written before the forward of the next one has begun."""
    begun, over = threading.Semaphore(0), threading.Event()
    seen = 0

    class Late(Letters):
        def decode(self, tokens, **options):
            nonlocal seen
            if own.writing.steps_behind > seen and not over.is_set():
                seen += 1
                assert begun.acquire(timeout=WAIT), "no forward began"
            return super().decode(tokens, **options)

    forward = target().forward
    own = engine(policy, pipeline=True, tokenizer=Late())

    def watched(*args, **options):
        if own.writing.behind:
            begun.release()
        return forward(*args, **options)

    monkeypatch.setattr(target(), "forward", watched)
    own.add(PROMPTS[4], GREEDY)
    events = []
    while own.running or own.places.waiting:
        events += own.step()
    over.set()  # no forward follows the last step
    begun.release()
    events += own.flush()
    assert seen > 2
    assert tokens_of(events) == plain_greedy()[4]
    assert "".join(event.text for event in events) == Letters().decode(plain_greedy()[4])


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("places", [range(1), range(1, 13), range(13, 14)])
def test_a_detokeniser_that_raises(pipeline, places):
    """At a first, a middle or a last token: an error in the place of what cannot be written."""
    texts = plain_greedy()
    wrong, place = next(
        (i, place)
        for i, text in enumerate(texts)
        for place in places
        if text[place] not in text[:place] and sum(text[place] in other for other in texts) < 4
    )
    bad = texts[wrong][place]
    asked = [wrong, *(i for i, text in enumerate(texts) if bad not in text)]
    assert len(asked) > 2
    own = engine(("untrained", BLOCK), pipeline=pipeline, tokenizer=Letters([bad]))
    ids = [own.add(PROMPTS[i], GREEDY) for i in asked]
    events = by_request(own.run())
    for request, i in list(zip(ids, asked, strict=True))[1:]:
        assert tokens_of(events[request]) == texts[i]
        assert events[request][-1].finished == "length"
    *before, last = events[ids[0]]
    assert last.finished == "error" and "no such character" in str(last.error)
    got = tokens_of(before)
    assert got == texts[wrong][: len(got)] and len(got) <= place
    own.memory.check_integrity([])


@pytest.mark.parametrize("policy", POLICIES)
def test_cancelling_loses_no_token(policy):
    own = engine(policy, pipeline=True)
    ids = [own.add(PROMPTS[i], GREEDY) for i in (2, 4)]
    events = own.step() + own.step()
    outputs = {state.request.id: list(state.output) for state in own.running}
    assert own.writing.behind and outputs[ids[0]]
    events += own.cancel([ids[0]])
    mine = by_request(events)[ids[0]]
    assert mine[-1].finished == "cancelled" and tokens_of(mine) == outputs[ids[0]]
    rest = by_request([*events, *own.run()])[ids[1]]
    assert tokens_of(rest) == plain_greedy()[4]


def test_a_step_that_fails_loses_nothing_written_before(monkeypatch):
    own = engine(("untrained", BLOCK), pipeline=True)
    own.add(PROMPTS[2], GREEDY)
    events = own.step() + own.step()
    output = list(own.running[0].output)
    error = RuntimeError("out of memory")
    monkeypatch.setattr(own.target, "forward", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        own.step()
    events += own.fail_running(error)
    assert tokens_of(events) == output and events[-1].finished == "error"
    assert own.idle


@pytest.mark.parametrize("pipeline", [False, True])
def test_a_step_that_fails_after_its_tokens_loses_none(pipeline, monkeypatch):
    """Or whoever ended in it would never hear of it."""
    own = engine(("untrained", BLOCK), pipeline=pipeline)
    short = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)
    ended, other = own.add(PROMPTS[2], short), own.add(PROMPTS[4], GREEDY)
    publish = own._publish

    def fails(batch):
        publish(batch)
        if len(own.running) == 1:
            raise MemoryError("no memory")

    monkeypatch.setattr(own, "_publish", fails)
    events = []
    with pytest.raises(MemoryError):
        while not own.idle:
            events += own.step()
    events = by_request([*events, *own.fail_running(MemoryError("no memory"))])
    assert tokens_of(events[ended]) == plain_greedy()[2][:3]
    assert [event.finished for event in events[ended]][-1] == "length"
    got = tokens_of(events[other])
    assert len(got) >= 3 and got == plain_greedy()[4][: len(got)]
    assert events[other][-1].finished == "error"
    assert own.idle


class TestService:
    def test_events_come_from_the_writing_thread(self):
        with EngineService(engine(("untrained", BLOCK), pipeline=True)) as service:
            threads, hand_out = set(), service.engine.writing.deliver

            def watched(events):
                if any(event.tokens for event in events):
                    threads.add(threading.current_thread().name)
                hand_out(events)

            service.engine.writing.deliver = watched
            streams = [service.submit(prompt, params) for prompt, params in asked()]
            got = [list(stream) for stream in streams]
            assert service.drain(WAIT)
        assert all(name.startswith("dspark-writing") for name in threads) and threads
        plain = engine(("untrained", BLOCK), pipeline=False)
        # The last one repeats under the same schedule only.
        ids = [plain.add(prompt, params) for prompt, params in asked()[:-1]]
        events = by_request(plain.run())
        for mine, theirs in zip(got, [events[i] for i in ids], strict=False):
            assert tokens_of(mine) == tokens_of(theirs)
            assert "".join(e.text for e in mine) == "".join(e.text for e in theirs)
            assert [e.finished for e in mine if e.finished] == [theirs[-1].finished]
            assert [p for e in mine for p in e.logprobs] == [p for e in theirs for p in e.logprobs]

    def test_cancelling_and_closing(self):
        endless = SamplingParams(temperature=0.0, max_new_tokens=400, ignore_eos=True)
        service = EngineService(engine(("untrained", BLOCK), pipeline=True))
        first, second = (service.submit(PROMPTS[i], endless) for i in (1, 2))
        assert next(first).tokens
        first.cancel()
        assert [event.finished for event in first][-1] == "cancelled"
        service.close()
        assert [event.finished for event in second][-1] == "cancelled"
        assert service.open_choices == 0
