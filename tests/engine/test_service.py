"""The engine's thread: streams at any pace, cancelling, draining, and one failure at a time."""

import asyncio
import threading

import pytest

from dspark.core.errors import DSparkError, PromptError
from dspark.core.sampling import SamplingParams
from dspark.engine.service import ClosedError, EngineService
from tests.engine.setup import BLOCK, GREEDY, PROMPTS, engine_of, plain_greedy

LONG = SamplingParams(temperature=0.0, max_new_tokens=200, ignore_eos=True)
WAIT = 60.0
"""Seconds after which a test gives up; nothing here takes as long."""


@pytest.fixture
def service():
    with EngineService(engine_of(("untrained", BLOCK))) as running:
        yield running


def tokens_of(stream):
    return [token for event in stream for token in event.tokens]


def test_streams_give_what_the_engine_gives(service):
    streams = [service.submit(prompt, GREEDY) for prompt in PROMPTS]
    assert [tokens_of(stream) for stream in streams] == plain_greedy()
    assert all(stream.done for stream in streams) and service.open_choices == 0
    assert list(streams[0]) == [], "an ended stream stays ended"


def test_many_threads_submit(service):
    got = {}

    def ask(index):
        got[index] = tokens_of(service.submit(PROMPTS[index], GREEDY))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert [got[index] for index in range(len(PROMPTS))] == plain_greedy()


def test_asyncio(service):
    async def ask(index):
        stream = service.submit(PROMPTS[index], GREEDY)
        return [token async for event in stream for token in event.tokens]

    async def both():
        return await asyncio.gather(ask(0), ask(3), ask(4))

    expected = plain_greedy()
    assert asyncio.run(both()) == [expected[0], expected[3], expected[4]]


def test_choices_share_a_stream_and_differ(service):
    params = SamplingParams(n=3, seed=5, max_new_tokens=9, ignore_eos=True)
    stream = service.submit(PROMPTS[2], params)
    texts = {0: [], 1: [], 2: []}
    ended = []
    for event in stream:
        texts[event.choice] += event.tokens
        ended += [event.choice] if event.finished else []
    assert sorted(ended) == [0, 1, 2] and len({tuple(text) for text in texts.values()}) == 3
    again = service.submit(PROMPTS[2], SamplingParams(seed=5, max_new_tokens=9, ignore_eos=True))
    assert tokens_of(again) == texts[0]


def test_a_slow_reader_blocks_nobody(service):
    slow = service.submit(PROMPTS[1], LONG)
    assert tokens_of(service.submit(PROMPTS[0], GREEDY)) == plain_greedy()[0]
    assert service.drain(WAIT), "nobody has read a single event of the other one"
    assert len(tokens_of(slow)) == 200


def test_cancel(service):
    stream = service.submit(PROMPTS[1], LONG)
    other = service.submit(PROMPTS[0], GREEDY)
    next(stream)
    stream.cancel()
    stream.cancel()
    *_, last = stream
    assert last.finished == "cancelled" and last.tokens == ()
    assert tokens_of(other) == plain_greedy()[0]
    other.cancel()  # after its end: nothing happens
    assert service.drain(WAIT)
    service.engine.memory.check_integrity([])


def test_what_cannot_run_is_refused_at_once(service):
    with pytest.raises(PromptError, match="empty"):
        service.submit([], GREEDY)
    assert service.open_choices == 0


def test_drain_finishes_what_is_open_and_refuses_the_rest(service):
    stream = service.submit(PROMPTS[0], GREEDY)
    assert service.drain(WAIT)
    with pytest.raises(ClosedError, match="shutting down"):
        service.submit(PROMPTS[0], GREEDY)
    assert tokens_of(stream) == plain_greedy()[0]


def test_drain_gives_up_after_its_time(service):
    service.submit(PROMPTS[0], LONG)
    assert not service.drain(0.0)


def test_close_cancels():
    service = EngineService(engine_of(max_requests=1))
    streams = [service.submit(PROMPTS[0], LONG) for _ in range(2)]
    service.close()
    service.close()
    assert [list(stream)[-1].finished for stream in streams] == ["cancelled"] * 2
    assert service.engine.idle
    service.engine.memory.check_integrity([])


def test_records_go_to_the_observer_and_are_not_kept():
    records = []

    def observe(record):
        records.append(record)
        if len(records) == 2:
            raise ValueError("a bad observer")

    with EngineService(engine_of(), on_record=observe) as service:
        assert tokens_of(service.submit(PROMPTS[0], GREEDY)) == plain_greedy()[0]
    assert len(records) == len(plain_greedy()[0]) and service.engine.records == []


def test_a_step_that_fails_ends_what_ran_and_the_service_goes_on(monkeypatch):
    engine = engine_of(max_requests=2)
    forward, calls = engine.target.forward, []

    def fails_once(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine.target, "forward", fails_once)
    with EngineService(engine) as service:
        streams = [service.submit(prompt, GREEDY) for prompt in PROMPTS[:3]]
        events = [list(stream) for stream in streams]
        for last in (events[0][-1], events[1][-1]):
            assert last.finished == "error" and isinstance(last.error, DSparkError)
            assert "MemoryError: no memory" in str(last.error)
        assert [t for event in events[2] for t in event.tokens] == plain_greedy()[2]
        engine.memory.check_integrity([])
