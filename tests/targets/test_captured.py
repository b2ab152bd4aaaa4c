"""Captured steps of a target against eager ones. A recorder stands in for CUDA graphs: it replays
the operators of one run on the memory of that run, so nothing of a later step can be read on the
way. Both run transformers' own layers, as on a GPU."""

import gc
import weakref

import pytest
import torch

from dspark.nn.graphs import Captured, Graphed
from dspark.nn.pages import PagePool
from dspark.nn.recorder import Recorder
from dspark.nn.seams import TargetOutput
from dspark.targets import captured
from dspark.targets.captured import CapturedTarget, why_eager
from dspark.targets.hf import HFTarget
from dspark.targets.tiny import TINY_ARCHITECTURES, tiny_model
from tests.targets.ragged import garbage_store, make_batch, random_text, scattered
from tests.targets.test_logits import VARIANTS, model_of

VOCAB, PAGE, TAPS = 97, 4, (1, -1)
CAPTURED = [
    name for name, (kind, _) in VARIANTS.items() if kind in ("llama", "mistral", "qwen2", "qwen3")
]
LENGTHS = [23, 9, 40, 14, 3]


class Counting(Recorder):
    def __init__(self):
        self.graphs = self.replays = 0

    def __call__(self, function):
        self.graphs += 1
        recorded = super().__call__(function)

        def replay():
            self.replays += 1
            recorded.replay()

        return Captured(replay, recorded.outputs)


class Texts:
    """Texts in the pages of two stores, read alike; one for the eager target, one for the captured
    one."""

    def __init__(self, model, lengths=LENGTHS, *, scatter=False):
        self.capture = Counting()
        self.eager, self.own = HFTarget(model), CapturedTarget(model, capture=self.capture)
        self.pool = PagePool(256, PAGE)
        random = torch.Generator().manual_seed(1)
        self.tables = [
            scattered(self.pool, n + 24, random) if scatter else self.pool.allocate(n + 24)
            for n in lengths
        ]
        self.lengths = list(lengths)
        self.store, self.other = (garbage_store(self.eager.kv_shape, 1024) for _ in range(2))
        runs = [
            (table, 0, random_text(n, VOCAB, seed=n))
            for table, n in zip(self.tables, lengths, strict=True)
        ]
        for store in (self.store, self.other):
            self.eager.forward(make_batch(runs), store, logit_rows_M=torch.tensor([0]))

    def batch(self, counts, seed=0, **options):
        """`counts`: how many tokens the requests in it bring."""
        runs = [
            (self.tables[r], self.lengths[r], random_text(n, VOCAB, seed=seed + 7 * r))
            for r, n in counts.items()
        ]
        return make_batch(runs, **{"exact": False, **options})

    def step(self, target, store, batch, rows=None, **options) -> TargetOutput:
        rows = torch.arange(len(batch.tokens_N)) if rows is None else torch.tensor(rows)
        options = {"tap_layers": TAPS, **options}
        return target.forward(batch, store, logit_rows_M=rows, **options)

    def check(self, counts, seed=0, rows=None, **options):
        """One step of each target, compared; then the texts are as much longer."""
        batch = self.batch(counts, seed)
        expected = self.step(self.eager, self.store, batch, rows, **options)
        check_equal(self.step(self.own, self.other, batch, rows, **options), expected)
        for r, n in counts.items():
            slots = self.tables[r].slots(0, self.lengths[r] + n)
            for mine, theirs in zip(memories(self.other), memories(self.store), strict=True):
                torch.testing.assert_close(mine[slots], theirs[slots], atol=2e-5, rtol=2e-5)
            self.lengths[r] += n


def memories(store):
    return (*store.keys, *store.values)


def check_equal(got, expected):
    torch.testing.assert_close(got.logits_MV, expected.logits_MV, atol=5e-5, rtol=0)
    assert torch.equal(got.logits_MV.argmax(-1), expected.logits_MV.argmax(-1))
    assert (got.taps_NF is None) == (expected.taps_NF is None)
    if expected.taps_NF is not None:
        torch.testing.assert_close(got.taps_NF, expected.taps_NF, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("scatter", [False, True], ids=["neighbours", "scattered"])
@pytest.mark.parametrize("variant", CAPTURED)
def test_equals_eager_steps_in_turn(variant, scatter):
    """Plain decoding, verification of one length and of several, larger and smaller batches,
    growing texts across sliding windows of 5; logits at some rows."""
    texts = Texts(model_of(variant), scatter=scatter)
    texts.check(dict.fromkeys(range(5), 1))
    texts.check({0: 4, 1: 4, 2: 4}, seed=1)
    texts.check({2: 1}, seed=2)
    texts.check({3: 1, 0: 4, 1: 2}, seed=3)
    texts.check({4: 3, 1: 1, 2: 4, 3: 2}, seed=4, rows=[9, 0, 4])
    texts.check({0: 1, 4: 1, 3: 1, 2: 1, 1: 1}, seed=5, tap_layers=())
    sizes = [(requests, rows, len(taps)) for requests, rows, _, _, taps in graphs_of(texts)]
    assert sizes == [(8, 1, 2), (4, 4, 2), (1, 1, 2), (8, 1, 0)]
    assert texts.capture.graphs == 4 and texts.capture.replays == 6


def graphs_of(texts):
    return texts.own._graphs.get(texts.other, {})


def test_only_the_rows_own_slots_are_written():
    """By shorter runs beside a longer one, by three requests after five; else only the last slot of
    all, where no attention reads."""
    texts = Texts(tiny_model("llama"))
    texts.check(dict.fromkeys(range(5), 3))
    for counts in ({0: 3, 3: 1, 2: 2}, {0: 3, 1: 1, 2: 2, 3: 1}):
        batch = texts.batch(counts, seed=3)
        before = []
        for memory in memories(texts.other):
            memory.normal_()  # no trace of what was written before
            before.append(memory.clone())
        texts.step(texts.own, texts.other, batch)
        for old, memory in zip(before, memories(texts.other), strict=True):
            changed = (old != memory).flatten(1).any(1).nonzero()[:, 0].tolist()
            assert changed == [*sorted(batch.slots_N.tolist()), len(memory) - 1]
    assert texts.capture.graphs == 2


def test_a_request_whose_numbers_are_none_spoils_its_own_rows_only():
    texts = Texts(tiny_model("llama"))
    for store in (texts.store, texts.other):
        store.values[0][texts.tables[1].slots(0, 1)] = float("nan")
    for seed in (0, 1):
        # The last one of the batch, so that nobody overwrites what its padding rows write.
        batch = texts.batch({0: 3, 2: 2, 3: 1, 1: 1}, seed)
        expected = texts.step(texts.eager, texts.store, batch)
        got = texts.step(texts.own, texts.other, batch)
        assert got.logits_MV[6].isnan().all() and expected.logits_MV[6].isnan().all()
        torch.testing.assert_close(got.logits_MV[:6], expected.logits_MV[:6], atol=5e-5, rtol=0)
    inside = [memory[:-1] for memory in memories(texts.other)]
    spoilt = {s for m in inside for s in m.isnan().flatten(1).any(1).nonzero()[:, 0].tolist()}
    assert spoilt == {*texts.tables[1].slots(0, 1).tolist(), *texts.batch({1: 1}).slots_N.tolist()}


def test_what_is_not_captured_runs_eagerly(monkeypatch):
    texts = Texts(tiny_model("qwen3"))
    steps = [
        (texts.batch({0: 1, 1: 1}, exact=True), {}),
        (texts.batch({0: 1, 1: 5}, prompt_from=1), {}),
        (texts.batch({0: 2, 1: 2}), {"want_final": True}),
        (texts.batch({0: 18}), {}),
    ]
    for batch, options in steps:
        expected = texts.step(texts.eager, texts.store, batch, **options)
        got = texts.step(texts.own, texts.other, batch, **options)
        assert torch.equal(got.logits_MV, expected.logits_MV)
        assert (got.final_ND is None) == (expected.final_ND is None)
    assert texts.capture.graphs == 0
    for name, bound in (("MOST_ROWS", 7), ("MOST_KEYS", 3 * 256)):
        with monkeypatch.context() as patch:
            patch.setattr(captured, name, bound)
            texts.check({0: 2, 1: 2, 2: 1}, seed=1)
        assert texts.capture.graphs == 0, name


def test_no_more_graphs_than_told(monkeypatch):
    monkeypatch.setattr(captured, "MOST_GRAPHS", 2)
    texts = Texts(tiny_model("llama"))
    for seed, count in enumerate([1, 2, 3, 1, 3]):
        texts.check({0: count}, seed)
    assert [rows for _, rows, *_ in graphs_of(texts)] == [1, 2]
    assert texts.capture.replays == 3


def test_a_capture_that_fails_leaves_no_graph():
    texts = Texts(tiny_model("llama"))

    def reads(module, args, output):
        assert output.sum() < 1e9

    texts.own.decoder.norm.register_forward_hook(reads)
    with pytest.raises(ValueError, match="must not call"):
        texts.check({0: 1})
    assert graphs_of(texts) == {}


def test_graphs_go_with_their_store():
    texts = Texts(tiny_model("llama"))
    texts.check({0: 1})
    [graph] = [weakref.ref(graph) for graph in graphs_of(texts).values()]
    memory = weakref.ref(texts.other.keys[0])
    assert isinstance(graph(), Graphed)
    texts.other = None
    gc.collect()
    assert graph() is None and memory() is None and not texts.own._graphs


OWN_ROPE = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8, "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def test_which_targets_are_captured():
    captured_ones = {kind for kind in TINY_ARCHITECTURES if why_eager(tiny_model(kind)) is None}
    assert captured_ones == {"llama", "mistral", "qwen2", "qwen3"}
    assert "its layers are not those of Llama" in (why_eager(tiny_model("gemma2")) or "")
    for rope, parameters in OWN_ROPE.items():
        model = tiny_model("llama", rope_parameters=parameters)
        assert f"its RoPE ({rope}) depends on" in (why_eager(model) or "")
