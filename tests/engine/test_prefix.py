"""The prefix cache: what is shared, what is not, and that nobody can tell from the tokens."""

import pytest
import torch

from dspark.core.sampling import SamplingParams
from dspark.engine.prefix import PrefixIndex, page_digests
from tests.engine.setup import BLOCK, GREEDY, VOCAB, collect, drafter, engine_of, run, target
from tests.engine.test_context import one_pass
from tests.targets.ragged import random_text

PAGE = 8
LONG = random_text(45, VOCAB, seed=5)
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=14, ignore_eos=True, seed=3)


def test_digests_cover_everything_before_them():
    a, b = page_digests(LONG, PAGE), page_digests([LONG[0] + 1, *LONG[1:]], PAGE)
    assert len(a) == 5 and not set(a) & set(b)
    changed = page_digests([*LONG[:20], LONG[20] + 1, *LONG[21:]], PAGE)
    assert [x == y for x, y in zip(a, changed, strict=True)] == [True, True, False, False, False]
    assert page_digests(LONG[:41], PAGE) == a and page_digests(LONG[:40], PAGE) == a[:4]
    assert page_digests(LONG[:8], PAGE) == ()


def test_an_index_keeps_exact_pages_apart():
    index = PrefixIndex()
    digests = [b"a", b"b", b"c"]
    assert index.add(b"a", 0, exact=True) and index.add(b"b", 1, exact=False)
    assert not index.add(b"a", 5, exact=True), "one page is enough"
    assert index.find(digests, exact=True) == ([0], True)
    assert index.find(digests, exact=False) == ([0, 1], False)
    assert index.find(digests[:1], exact=False) == ([0], True)
    assert index.find([b"b"], exact=True) == ([], True)
    index.forget(1)
    assert index.find(digests, exact=False) == ([0], True) and len(index) == 1


def continued(policy, params, **config):
    """(tokens, engine): a prompt read in full, then after requests that left their pages."""
    alone = [run([p], params, policy).tokens[0] for p in (LONG, LONG[:40], [*LONG, *LONG[:9]])]
    engine = engine_of(policy, page_size=PAGE, **config)
    warm = run([LONG], params, engine=engine).tokens
    hits = run([LONG, LONG[:40], [*LONG, *LONG[:9]]], params, engine=engine).tokens
    assert [warm[0], *hits] == [alone[0], *alone]
    return engine


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", [None, ("untrained", BLOCK), ("teacher", 3)])
def test_same_tokens_after_a_hit(policy, params):
    """The test drafters check that their context is whole and right at every draft (law 7)."""
    stats = continued(policy, params).stats()
    # Of 45, of 40 (the last token's logits are wanted) and of 54.
    assert (stats.prefix_hits, stats.prefix_hit_tokens) == (3, 40 + 32 + 40)
    assert stats.rebuilt_positions == 0


@pytest.mark.parametrize("tokens", [39, 40, 41, 45])
def test_logits_after_a_hit_are_bit_equal(tokens):
    engine = engine_of(("untrained", BLOCK), page_size=PAGE)
    kept = []
    inner = engine.target

    class Watched:
        def __getattr__(self, name):
            return getattr(inner, name)

        def forward(self, *args, **options):
            kept.append(inner.forward(*args, **options))
            return kept[-1]

    engine.target = Watched()
    first = run([LONG[:tokens]], GREEDY, engine=engine).tokens
    cold, kept[:] = list(kept), []
    assert run([LONG[:tokens]], GREEDY, engine=engine).tokens == first
    assert engine.stats().prefix_hits == 1
    assert len(kept) == len(cold)
    for a, b in zip(cold, kept, strict=True):
        assert torch.equal(a.logits_MV, b.logits_MV)


def test_shared_pages_hold_the_drafters_context_too():
    engine = engine_of(("untrained", BLOCK), page_size=PAGE)
    run([LONG], GREEDY, engine=engine)
    engine.add(LONG, GREEDY)
    engine.step()
    (state,) = engine.running
    assert engine.stats().prefix_hit_tokens == 40
    keys, values = one_pass(engine.drafter, LONG, state.output[0])
    slots = state.table.slots(0, len(LONG))
    store = engine.memory.draft_store
    for layer in range(len(keys)):
        torch.testing.assert_close(store.keys[layer][slots], keys[layer])
        torch.testing.assert_close(store.values[layer][slots], values[layer])
    engine.cancel()


def test_pages_are_shared_while_they_are_in_use():
    engine = engine_of(page_size=PAGE, cache_tokens=12 * PAGE)
    engine.add(LONG, GREEDY)
    engine.step()
    engine.add([*LONG[:41], 7, 8], GREEDY)
    engine.step()
    pages = [set(state.table.pages) for state in engine.running]
    # Six pages each are too many for twelve and a page of room for everybody: five are shared.
    assert len(pages) == 2 and len(pages[0] & pages[1]) == 5
    engine.memory.check_integrity(engine.running)
    list(engine.run())


def test_roomy_memory_gives_a_hit_an_extent_of_its_own():
    """A copy of a page costs next to nothing; a table in pieces costs every step."""
    engine = engine_of(page_size=PAGE, cache_tokens=64 * PAGE, max_requests=4)
    engine.add(LONG, GREEDY)
    engine.step()
    engine.add([*LONG[:41], 7, 8], GREEDY)
    engine.step()
    assert all(state.table.first_slot is not None for state in engine.running)
    assert engine.stats().pages_copied == 5
    list(engine.run())


def test_a_chat_goes_on_behind_its_own_pages():
    """The last request left its prompt's pages where they were; nothing needs to move."""
    engine = engine_of(page_size=PAGE)
    tokens = run([LONG], GREEDY, engine=engine).tokens[0]
    engine.add([*LONG, *tokens, 5, 6], GREEDY)
    engine.step()
    (state,) = engine.running
    assert state.table.pages == list(range(len(state.table.pages)))
    assert engine.stats().prefix_hit_tokens == 40 and engine.stats().pages_copied == 0
    list(engine.run())


def test_equal_prompts_that_arrive_together_are_read_once():
    engine = engine_of(("untrained", BLOCK), page_size=PAGE, chunk_tokens=10)
    params = [SamplingParams(seed=s, max_new_tokens=9, ignore_eos=True) for s in range(4)]
    result = run([LONG] * 4, params, engine=engine)
    assert engine.stats().prefix_hit_tokens == 3 * 40
    alone = [run([LONG], own, ("untrained", BLOCK)).tokens[0] for own in params]
    assert result.tokens == alone
    assert sum(step.prefill_tokens for step in engine.records) == 45 + 3 * 5


def test_generated_tokens_are_nobodys_prefix():
    """They may have been computed by another kernel than a prompt would be."""
    engine = engine_of(page_size=PAGE)
    params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    tokens = run([LONG[:9]], params, engine=engine).tokens[0]
    run([[*LONG[:9], *tokens, 3]], GREEDY, engine=engine)
    assert engine.stats().prefix_hit_tokens == 8


def test_pages_of_steps_that_were_not_exact_serve_no_promise():
    engine = engine_of(page_size=PAGE)
    rejection = SamplingParams(max_new_tokens=4, ignore_eos=True, verification="rejection")
    run([LONG], rejection, engine=engine)
    run([LONG], rejection, engine=engine)
    assert engine.stats().prefix_hits == 1
    run([LONG], GREEDY, engine=engine)
    assert engine.stats().prefix_hits == 1, "greedy decoding is promised to be exact"
    run([LONG], GREEDY, engine=engine)
    run([LONG], rejection, engine=engine)
    assert engine.stats().prefix_hits == 3


def test_the_token_behind_a_page_belongs_to_it():
    """The test drafters keep it in their context K/V, as Eagle3's and MTP's do."""
    engine = engine_of(("teacher", BLOCK), page_size=PAGE)
    run([LONG], GREEDY, engine=engine)
    other = [*LONG[:24], LONG[24] % 90 + 3, *LONG[25:]]
    assert run([other], GREEDY, engine=engine).tokens == run([other], GREEDY).tokens
    assert engine.stats().prefix_hit_tokens == 16


def test_eviction_ends_a_prefix():
    engine = engine_of(page_size=PAGE, cache_tokens=9 * PAGE)
    run([LONG], GREEDY, engine=engine)
    run([random_text(50, VOCAB, seed=9)], GREEDY, engine=engine)
    stats = engine.stats()
    assert stats.pages_evicted >= 3 and stats.pages_free == stats.pages
    assert run([LONG], GREEDY, engine=engine).tokens == run([LONG], GREEDY).tokens


def test_without_a_cache_nothing_is_kept():
    engine = engine_of(page_size=PAGE, prefix_cache=False)
    for _ in range(2):
        run([LONG], GREEDY, engine=engine)
    stats = engine.stats()
    assert stats.prefix_hits == stats.pages_kept == 0


def test_a_cancelled_prefill_leaves_what_it_finished():
    engine = engine_of(("teacher", BLOCK), page_size=PAGE, chunk_tokens=10)
    engine.add(LONG, GREEDY)
    for _ in range(2):
        engine.step()
    engine.cancel()
    engine.memory.check_integrity([])
    result = collect(engine, [engine.add(LONG, GREEDY)])
    assert engine.stats().prefix_hit_tokens == 16
    assert result.tokens[0] == run([LONG], GREEDY).tokens[0]


def test_drafter_and_target_are_the_tests_own():
    """The drafter that checks its context has to be the one that ran."""
    own = drafter("teacher")
    engine = engine_of((own, BLOCK), page_size=PAGE)
    run([LONG], GREEDY, engine=engine)
    run([LONG], GREEDY, engine=engine)
    assert own.drafts > 2 and engine.target is target()
