"""Who is next, and who is not taken at all."""

import pytest

from dspark.core.errors import OverloadedError, UserError
from dspark.core.sampling import SamplingParams
from dspark.engine.request import Request, RequestState
from dspark.engine.waiting import WaitingRequests
from dspark.nn.pages import PageTable
from tests.engine.setup import GREEDY, engine_of

PARAMS = SamplingParams(temperature=0.0, max_new_tokens=6)


def state(number, owner="", priority=0, prompt=4):
    request = Request(number, (1,) * prompt, PARAMS, 0, 0, priority, owner)
    return RequestState(request, None, PageTable([], 4))


def order(waiting, tokens=10):
    """The ids as they go, each charged `tokens` to its owner when it goes."""
    ids = []
    while (found := waiting.first()) is not None:
        taken = waiting.pop(found[0])
        assert taken is found[1]
        waiting.charge(taken.request.owner, tokens)
        ids.append(taken.request.id)
    assert not waiting and waiting.tokens == 0
    return ids


def filled(*states):
    waiting = WaitingRequests()
    for own in states:
        waiting.push(own)
    return waiting


def test_one_owner_is_served_in_order_of_arrival():
    assert order(filled(*(state(n) for n in (3, 1, 2)))) == [1, 2, 3]


def test_a_higher_priority_goes_first():
    assert order(filled(state(1), state(2, priority=5), state(3, priority=-1))) == [2, 1, 3]


def test_owners_take_turns_however_many_requests_each_has():
    many = [state(n, "a") for n in range(6)]
    few = [state(n, "b") for n in (10, 11)]
    assert order(filled(*many, *few)) == [0, 10, 1, 11, 2, 3, 4, 5]


def test_turns_are_weighed_by_tokens():
    waiting = filled(*(state(n, "a") for n in range(4)), *(state(n, "b") for n in range(10, 14)))
    waiting.charge("a", 25)
    assert order(waiting) == [10, 11, 12, 0, 13, 1, 2, 3]


def test_nobody_saves_up_service_by_staying_idle():
    waiting = WaitingRequests()
    for number in range(5):
        waiting.push(state(number, "a"))
        waiting.charge(waiting.pop(waiting.first()[0]).request.owner, 100)
    for number in (10, 11, 12):
        waiting.push(state(number, "a"))
        waiting.push(state(number + 10, "b"))
    assert order(waiting, 100) == [20, 10, 21, 11, 22, 12]


def test_served_counts_of_those_who_left_are_forgotten():
    waiting = WaitingRequests()
    for number in range(200):
        waiting.push(state(number, f"owner {number}"))
        waiting.charge(waiting.pop(waiting.first()[0]).request.owner, 1)
        waiting.push(state(number, "steady"))
        waiting.charge(waiting.pop(waiting.first()[0]).request.owner, 50)
    assert len(waiting._served) < 60


def test_passed_lines_and_removal():
    waiting = filled(state(1, "a"), state(2, "a"), state(3, "b"))
    assert waiting.first({(0, "a")})[1].request.id == 3
    assert waiting.first({(0, "a"), (0, "b")}) is None
    assert [own.request.id for own in waiting.remove({2, 99})] == [2]
    assert order(waiting) == [1, 3]
    waiting.push(state(4))
    assert len(waiting.remove()) == 1 and len(waiting) == 0


def test_an_engine_refuses_what_is_too_much_and_takes_it_later():
    engine = engine_of(max_requests=1, max_waiting=2)
    for _ in range(3):  # one has a place, two may wait
        engine.add([1, 2], GREEDY)
    with pytest.raises(OverloadedError, match=r"3 requests are waiting, the limit is 2; try again"):
        engine.add([1, 2], GREEDY)
    engine.step()
    with pytest.raises(OverloadedError, match="2 requests are waiting") as caught:
        engine.add([1, 2], GREEDY)
    assert not isinstance(caught.value, UserError) and "\n" not in str(caught.value)
    while engine.stats().waiting == 2:
        engine.step()
    engine.add([1, 2], GREEDY)
    assert (engine.stats().refused, engine.stats().waiting, engine.stats().running) == (2, 2, 1)
    list(engine.run())
    assert engine.stats().waiting_tokens == 0


def test_a_limit_on_tokens():
    engine = engine_of(max_requests=1, max_waiting_tokens=40)
    engine.add([1] * 60, GREEDY)  # nothing waits: nothing is too much
    engine.step()
    engine.add([1, 2], GREEDY)
    with pytest.raises(OverloadedError, match=r"16 tokens and this one 25, the limit is 40"):
        engine.add([1] * 11, GREEDY)
    engine.add([1] * 10, GREEDY)
    assert engine.stats().waiting_tokens == 40
    engine.cancel()
    assert engine.stats().waiting_tokens == 0


@pytest.mark.parametrize("owners", [("a", "b"), ("b", "a")])
def test_a_crowd_of_one_owner_does_not_keep_another_out(owners):
    engine = engine_of(max_requests=2)
    crowd = [engine.add([1, 2, 3], GREEDY, owner=owners[0]) for _ in range(8)]
    late = engine.add([1, 2, 3], GREEDY, owner=owners[1])
    finished = [event.request for event in engine.run() if event.finished]
    assert finished.index(late) <= 2 and sorted(finished) == [*crowd, late]
