"""Law 6 for the whole engine: any interleaving of add, step, cancel and failure, in too few pages.

The toy target and drafter of the law tests keep the texts they have read in their pages, so a page
that was lost, shared by mistake, moved without its content or not computed again changes tokens.
"""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dspark.core.sampling import SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.scheduling.policies import FixedLength, Off
from tests.laws.test_engine import BLOCK, HostileDrafter, ToyTarget, coupled_text, ends

PREFIXES = [(0, 1, 2, 3, 0, 1, 2, 3, 1), (3, 3, 2, 1, 0, 0, 1, 2, 2)]


class Failure(Exception):
    pass


class FailingTarget(ToyTarget):
    fails = False

    def forward(self, *args, **options):
        if self.fails:
            raise Failure
        return super().forward(*args, **options)


class Interleavings(RuleBasedStateMachine):
    @initialize(policy=st.integers(0, BLOCK), pages=st.integers(7, 14), cache=st.booleans())
    def begin(self, policy, pages, cache):
        self.target = FailingTarget()
        config = EngineConfig(
            max_requests=5, chunk_tokens=3, cache_tokens=4 * pages, page_size=4, prefix_cache=cache
        )
        drafter = HostileDrafter() if policy else None
        self.engine = Engine(self.target, drafter, FixedLength(policy) if policy else Off(), config)
        self.texts, self.expected, self.rounds = {}, {}, {}
        self.finished = set()

    @rule(
        prefix=st.sampled_from(PREFIXES),
        length=st.integers(1, 9),
        tail=st.lists(st.integers(0, 3), max_size=4),
        new=st.integers(1, 10),
        seed=st.integers(0, 2**20),
        temperature=st.sampled_from([0.0, 1.0]),
        rule_=st.sampled_from(["coupled", "rejection"]),
        priority=st.integers(0, 2),
        owner=st.sampled_from("ab"),
    )
    def add(self, prefix, length, tail, new, seed, temperature, rule_, priority, owner):
        prompt = (*prefix[:length], *tail)
        params = SamplingParams(
            temperature=temperature, max_new_tokens=new, seed=seed, verification=rule_
        )
        request = self.engine.add(prompt, params, priority=priority, owner=owner)
        self.texts[request] = ()
        exact = temperature == 0 or rule_ == "coupled"
        self.expected[request] = coupled_text(prompt, params, seed, 0) if exact else None
        self.rounds[request] = 0

    def step(self):
        before = len(self.engine.records)
        for event in self.engine.step():
            self.texts[event.request] += event.tokens
            if event.finished:
                self.finish(event.request)
        for record in self.engine.records[before:]:
            for own in record.rounds:
                assert own.round > self.rounds[own.request], "a round's number was used before"
                self.rounds[own.request] = own.round

    def finish(self, request):
        text = self.texts.pop(request)
        expected = self.expected.pop(request)
        assert expected is None or text == expected
        self.finished.add(request)

    @precondition(lambda self: self.texts)
    @rule(count=st.integers(1, 4))
    def steps(self, count):
        for _ in range(count):
            if self.texts:
                self.step()

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def cancel(self, data):
        request = data.draw(st.sampled_from(sorted(self.texts)))
        self.engine.cancel([request])
        del self.texts[request], self.expected[request]

    @precondition(lambda self: self.texts)
    @rule()
    def fail(self):
        """The step is lost, and goes on afterwards as if it had not been."""
        self.target.fails = True
        numbers = {state.request.id: state.rounds for state in self.engine.running}
        try:
            self.engine.step()
        except Failure:
            pass
        else:
            raise AssertionError("the target was not called")
        self.target.fails = False
        for state in self.engine.running:
            if not state.prefilling and state.request.id in numbers:
                assert state.rounds == numbers[state.request.id] + 1

    @invariant()
    def pages_are_free_or_used(self):
        if not hasattr(self, "engine"):
            return
        memory, running = self.engine.memory, self.engine.running
        memory.check_integrity(running)
        used = {page for state in running for page in state.table.pages}
        assert memory.pool.free_pages + len(used) == memory.pool.num_pages
        for state in running:
            assert state.cached <= state.table.capacity
            slots = state.table.slots(0, state.cached)
            text = torch.tensor(state.text[: state.cached], dtype=torch.float32)
            assert torch.equal(memory.store.keys[0][slots, 0, 0], text)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if self.engine.idle:
                break
            self.step()
        assert not self.texts, "somebody never finished"
        stats = self.engine.stats()
        assert stats.pages_free == stats.pages and stats.waiting == stats.running == 0


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_thousands_of_short_requests_leave_no_page_behind():
    engine = Engine(
        ToyTarget(),
        HostileDrafter(),
        FixedLength(BLOCK),
        EngineConfig(max_requests=24, cache_tokens=160, page_size=4),
    )
    params = [
        SamplingParams(max_new_tokens=n, seed=n, verification=own)
        for n in (1, 2, 3, 5)
        for own in ("coupled", "rejection")
    ]
    wanted = {engine.add((n % 4, 2, 1, n % 3, n % 2, 1), params[n % 8]): n for n in range(2000)}
    texts = dict.fromkeys(wanted, ())
    for event in engine.run():
        texts[event.request] += event.tokens
    for request, n in wanted.items():
        assert ends(texts[request], params[n % 8])
    stats = engine.stats()
    assert stats.pages_free == stats.pages == 40
    assert len(engine.memory.index) == stats.pages_kept > 0
    assert not engine.places.waiting._lines
    assert min(stats.prefix_hits, stats.pages_copied, stats.pages_evicted) > 0
