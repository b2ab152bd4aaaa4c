"""Too few pages for everybody: who gives way, that it does not matter to the tokens, and that it
does not depend on a draft."""

import pytest

from dspark.core.sampling import SamplingParams
from tests.engine.setup import BLOCK, PROMPTS, drafter, engine_of, run
from tests.engine.test_same_seed import PARAMS

TIGHT = {"page_size": 4, "cache_tokens": 29 * 4, "chunk_tokens": 16}
LONG = [
    SamplingParams(
        temperature=own.temperature, top_k=own.top_k, top_p=own.top_p, min_p=own.min_p,
        seed=own.seed, max_new_tokens=30, ignore_eos=True,
    )
    for own in PARAMS
]  # fmt: skip


@pytest.fixture(scope="module")
def alone():
    return [run([p], [own]).tokens[0] for p, own in zip(PROMPTS, LONG, strict=True)]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("policy", [None, ("untrained", BLOCK), ("teacher", BLOCK)])
def test_same_tokens_after_preemption(alone, policy, cache):
    """The teacher checks in every draft that its context K/V are whole and right (law 7)."""
    result = run(PROMPTS, LONG, policy, prefix_cache=cache, **TIGHT)
    assert result.tokens == alone
    stats = result.engine.stats()
    assert stats.preemptions > 1 and stats.rebuilt_positions > 0
    assert stats.pages_free == stats.pages


def test_records_and_rounds_go_on_after_preemption():
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, verification="rejection", seed=1)
    result = run(PROMPTS, params, ("teacher", BLOCK), **TIGHT)
    assert result.engine.stats().preemptions > 1
    for rounds, tokens in zip(result.rounds, result.tokens, strict=True):
        assert [own.round for own in rounds] == list(range(1, len(rounds) + 1))
        assert 1 + sum(own.emitted for own in rounds) == len(tokens) == 30


def test_rebuilt_positions_are_those_that_were_lost():
    engine = engine_of(("untrained", BLOCK), prefix_cache=False, **TIGHT)
    lost = []
    preempt = engine.places.preempt

    def watched(state):
        lost.append(state.cached)
        preempt(state)

    engine.places.preempt = watched
    run(PROMPTS, LONG, engine=engine)
    assert len(lost) == engine.stats().preemptions > 1
    assert engine.stats().rebuilt_positions == sum(lost)


class TestWhoGivesWay:
    def preempted(self, priorities, **config):
        engine = engine_of(("untrained", BLOCK), **{**TIGHT, **config})
        order = []
        preempt = engine.places.preempt

        def watched(state):
            order.append(state.request.id)
            preempt(state)

        engine.places.preempt = watched
        params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
        ids = [engine.add([5, 6, 7, 8 + p], params, priority=p) for p in priorities]
        list(engine.run())
        return ids, order

    def test_the_youngest(self):
        ids, order = self.preempted([0, 0, 0, 0])
        assert order and ids[0] not in order and order[0] == ids[-1]

    def test_the_lowest_priority_first(self):
        ids, order = self.preempted([0, 3, 3, 3])
        assert order[0] == ids[0] and ids[1] not in order

    def test_a_newcomer_of_higher_priority_takes_a_place(self):
        _, order = self.preempted([0, 0, 1], max_requests=2, cache_tokens=400)
        assert order == []  # it came in time: it is first in the queue
        engine = engine_of(max_requests=2)
        params = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
        low = [engine.add([5, 6, n], params) for n in (7, 8)]
        engine.step()
        high = engine.add([5, 6, 9], params, priority=1)
        engine.step()
        assert [s.request.id for s in engine.running if s.request.priority] == [high]
        assert low[0] in [s.request.id for s in engine.running]
        finished = [event.request for event in engine.run() if event.finished]
        assert sorted(finished) == [*low, high] and engine.stats().preemptions == 1


class Spy:
    """What a drafter saw, and how many pages each of its requests had."""

    def __init__(self, inner, kept):
        self.inner, self.kept = inner, kept

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def shortened(self, block_size):
        return self

    def draft(self, anchors_R, positions_R, tables, store, **options):
        for position, table in zip(positions_R.tolist(), tables, strict=True):
            self.kept.append((position, table.capacity))
        return self.inner.draft(anchors_R, positions_R, tables, store, **options)


def test_pages_of_whole_blocks_are_there_before_anything_is_drafted():
    """So no draft is ever cut, or its round given up, for want of a page (law 2)."""
    kept = []
    engine = engine_of((Spy(drafter("untrained"), kept), BLOCK), **TIGHT)
    engine.drafter.inner.engine = engine
    params = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)
    result = run(PROMPTS, params, engine=engine)
    assert result.engine.stats().preemptions > 1 and len(kept) > 50
    longest = {len(prompt) + 30 for prompt in PROMPTS}
    for position, capacity in kept:
        # Or to the end of the text, whose last token is never written.
        end = min(most for most in longest if most > position) - 1
        assert capacity >= min(position + 1 + BLOCK, end)
    drafted = [own for rounds in result.rounds for own in rounds]
    left = {}
    for rounds in result.rounds:
        emitted = 1
        for own in rounds:
            left[own.request, own.round] = 30 - emitted
            emitted += own.emitted
    for own in drafted:
        assert own.admitted == min(BLOCK, left[own.request, own.round] - 1), "a draft was cut"


def test_who_runs_does_not_depend_on_the_draft():
    """Two drafters whose tokens differ at every slot: until one of them has a token accepted, both
    engines give the same requests the same pages."""
    traces = []
    for name in ("never right", "random"):
        engine = engine_of((name, BLOCK), **TIGHT)
        params = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)
        for prompt in PROMPTS:
            engine.add(prompt, params)
        trace = []
        for _ in range(60):
            if engine.idle or any(own.accepted for step in engine.records for own in step.rounds):
                break
            engine.step()
            trace.append(
                (
                    [s.request.id for s in engine.running],
                    engine.stats().preemptions,
                    [tuple(s.table.pages) for s in engine.running],
                )
            )
        traces.append(trace)
    shared = min(map(len, traces))
    assert traces[0][: shared - 1] == traces[1][: shared - 1]
    assert traces[0][shared - 2][1] > 0, "there was no pressure to speak of"
