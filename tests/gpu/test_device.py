"""What must hold on every device, run on the CPU here and on CUDA where there is one.

The exact laws (tests/laws) call the same functions in float64 on a CPU. Here their pieces are held
equal across devices, and the engine runs on layers that are transformers' own, as on a GPU.
"""

import pytest
import torch

from dspark.core.random import RequestRandom
from dspark.core.sampling import SamplingParams
from dspark.drafters.captured import CapturedDrafter
from dspark.drafters.fused import bf16_linear, plain_linear
from dspark.drafters.serving import DSparkDrafter
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.nn.attention import KEY_TILE, plain_attention, ragged_attention
from dspark.nn.attention_plan import AttentionPlan
from dspark.nn.graphs import CudaCapture
from dspark.nn.kv_cache import KVShape, KVStore
from dspark.nn.noise import RequestNoise, Round, StepNoise
from dspark.nn.pages import PageTable
from dspark.nn.recorder import Recorder
from dspark.nn.sampling import SamplingRows, probs_from_logits, race, truncates
from dspark.nn.seams import Binding, DraftBlock, RaggedBatch
from dspark.nn.verification import verify
from dspark.scheduling.policies import FixedLength, Off
from dspark.targets.captured import CapturedTarget
from dspark.targets.hf import HFTarget
from dspark.targets.load import in_dtype
from dspark.targets.tiny import tiny_model
from tests.engine.setup import BLOCK, MODEL, PROMPTS, VOCAB, untrained
from tests.gpu.devices import every_device

DTYPES = [torch.float32, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])

SAMPLING = [
    SamplingParams(seed=3),
    SamplingParams(seed=3, temperature=0.7, top_k=5),
    SamplingParams(seed=4, verification="rejection", temperature=1.2, top_p=0.9),
    SamplingParams(seed=5, verification="rejection", min_p=0.05),
    SamplingParams(temperature=0.0),
]


@every_device
def test_random_numbers_have_the_same_bits(device):
    ids = torch.randint(VOCAB, (len(SAMPLING), 7), generator=torch.Generator().manual_seed(0))

    def drawn(where):
        noises = [RequestNoise(RequestRandom(p.seed or 0), p, VOCAB, where) for p in SAMPLING]
        step = StepNoise([Round(noise, 2, 5) for noise in noises], 2)
        check = step.verification([1] * len(noises))
        races = [torch.stack(rows) for rows in check.races if rows is not None]
        return [step(0, ids.to(where)), step(1, ids.to(where)), check.accept_RK, check.emit_R,
                *races]  # fmt: skip

    for there, here in zip(drawn(device), drawn("cpu"), strict=True):
        assert there.device.type == device and torch.equal(there.cpu(), here)


@every_device
def test_verification_decides_alike(device):
    """float64, both rules and greedy, accepted and rejected drafts."""
    random = torch.Generator().manual_seed(1)
    R, K, C = len(SAMPLING), 3, 6
    accepted = 0
    for trial in range(20):
        logits_MV = torch.randn(R * (K + 1), VOCAB, generator=random, dtype=torch.float64)
        candidates = torch.stack(
            [torch.randperm(VOCAB, generator=random)[:C] for _ in range(R * K)]
        ).view(R, K, C)
        probs = torch.randn(R, K, C, generator=random, dtype=torch.float64).softmax(-1)
        tokens = candidates[:, :, 0]
        for r in range(R):  # likely ones, so that some are accepted
            logits_MV[r * (K + 1), tokens[r, 0]] += 8.0

        def decided(where, trial=trial, given=(logits_MV, tokens, candidates, probs)):
            logits, *block = (tensor.to(where) for tensor in given)
            rows = SamplingRows.of(SAMPLING, [m // (K + 1) for m in range(len(logits))], where)
            noises = [RequestNoise(RequestRandom(p.seed or 0), p, VOCAB, where) for p in SAMPLING]
            step = StepNoise([Round(noise, trial, trial) for noise in noises], K)
            done = verify(
                probs_from_logits(logits, rows), [K] * R, DraftBlock(*block, None),
                step.verification([K] * R),
            )  # fmt: skip
            return done.accepted_R.tolist(), done.next_token_R.tolist()

        assert decided(device) == decided("cpu")
        accepted += sum(decided("cpu")[0])
    assert accepted > 20


@every_device
@every_dtype
@pytest.mark.parametrize("exact", [True, False])
def test_attention_equals_its_slow_twin(device, dtype, exact):
    random = torch.Generator().manual_seed(2)
    shape, page = KVShape.uniform(1, 2, 16), 8
    store = KVStore(shape, 96 * page, read_ahead=KEY_TILE, dtype=dtype, device=device)
    for memory in (*store.keys, *store.values):
        memory.copy_(torch.randn(memory.shape, generator=random))
    tables = [PageTable(pages, page) for pages in ([0, 1], [2, 3], [40, 9, 60, 61])]
    lengths, queries = [12, 12, 30], [1, 1, 4]
    spans = [(length - count, length) for length, count in zip(lengths, queries, strict=True)]
    batch = RaggedBatch(
        tokens_N=torch.zeros(6, dtype=torch.int64, device=device),
        positions_N=torch.cat([torch.arange(*span) for span in spans]).to(device),
        requests_N=torch.tensor([0, 1, 2, 2, 2, 2], device=device),
        slots_N=torch.cat([t.slots(*span) for t, span in zip(tables, spans, strict=True)]).to(
            device
        ),
        starts=(0, 1, 2, 6),
        context_lengths=tuple(lengths),
        tables=tuple(tables),
        exact=exact,
    )
    query = torch.randn(6, 4, 16, generator=random).to(device)
    plan = AttentionPlan.build(batch)
    fast = ragged_attention(query, plan, store, 0, scale=0.25)
    slow = plain_attention(query, plan, store, 0, scale=0.25)
    assert fast.device.type == device
    torch.testing.assert_close(fast, slow, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0)


def capture_on(device):
    """CUDA graphs, or the recorder that stands in for them."""
    return CudaCapture(torch.device(device)) if device == "cuda" else Recorder()


def engine(device, dtype, policy, *, captured=False):
    model = in_dtype(tiny_model("llama", **MODEL).to(device), dtype)
    capture = capture_on(device) if captured else None
    target = CapturedTarget(model, capture=capture) if captured else HFTarget(model)
    drafter = None
    if policy.drafts:
        embedding = model.get_input_embeddings().weight.detach().float()
        binding = Binding(
            embedding_VD=embedding, embedding_scale=1.0,
            lm_head_VD=model.lm_head.weight.detach().float(),
            logit_scale=1.0, logit_softcap=None, num_target_layers=2, mask_token_id=0,
            target_name="tiny", embedding_hash="", chat_template_hash=None,
        )  # fmt: skip
        linear = bf16_linear if dtype == torch.bfloat16 else plain_linear
        options = {"candidates": 16, "linear_factory": linear}
        if captured:
            options["capture"] = capture
        serving = CapturedDrafter if captured else DSparkDrafter
        drafter = serving(untrained("untrained").to(device), binding, **options)
    name = "bfloat16" if dtype == torch.bfloat16 else "float32"
    config = EngineConfig(
        page_size=8, chunk_tokens=16, cache_dtype=name, cache_tokens=1024, row_exact=not captured
    )
    return Engine(target, drafter, policy, config), model


@every_device
@every_dtype
@pytest.mark.parametrize(
    ("policy", "captured"),
    [(Off(), False), (Off(), True), (FixedLength(BLOCK), False), (FixedLength(BLOCK), True)],
    ids=["off", "off, captured", "eager", "captured"],
)
def test_the_engine_generates_what_the_target_says(device, dtype, policy, captured):
    """Greedy tokens are the likeliest ones of one pass over the whole text, but for rounding."""
    own, model = engine(device, dtype, policy, captured=captured)
    params = SamplingParams(temperature=0.0, max_new_tokens=10, ignore_eos=True, logprobs=0)
    ids = [own.add(prompt, params) for prompt in PROMPTS]
    events = list(own.run())
    model.set_attn_implementation("eager")
    for request, prompt in zip(ids, PROMPTS, strict=True):
        mine = [event for event in events if event.request == request]
        tokens = [token for event in mine for token in event.tokens]
        scores = [one.logprob for event in mine for one in event.logprobs]
        assert len(tokens) == 10
        with torch.inference_mode():
            text = torch.tensor([[*prompt, *tokens]], device=device)
            logits = model(text, use_cache=False).logits[0].float()
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
        near = 0.3 if dtype == torch.bfloat16 else 1e-3
        for row, token, score in zip(expected, tokens, scores, strict=True):
            assert float(row.max() - row[token]) < near
            assert abs(float(row[token]) - score) < near
    own.memory.check_integrity([])
    if captured:
        assert own.target._graphs[own.memory.store]


@every_device
@every_dtype
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_captured_step_equals_an_eager_one(device, dtype, kind):
    """Plain decoding and verification, of equal and of different lengths, each replayed twice."""
    random = torch.Generator().manual_seed(4)
    model = in_dtype(tiny_model(kind, **MODEL).to(device), dtype)
    eager, captured = HFTarget(model), CapturedTarget(model, capture=capture_on(device))
    page = 8
    stores = [
        KVStore(eager.kv_shape, 96 * page, read_ahead=KEY_TILE, dtype=dtype, device=device)
        for _ in range(2)
    ]
    for memories in zip(*((*store.keys, *store.values) for store in stores), strict=True):
        numbers = torch.randn(memories[0].shape, generator=random)
        for memory in memories:
            memory.copy_(numbers)
    tables = [PageTable(pages, page) for pages in ([0, 1], [2, 3], [40, 9, 60, 61], [5], [7, 8])]
    lengths = [9, 12, 26, 0, 3]
    near = 0.3 if dtype == torch.bfloat16 else 1e-3
    steps = [{0: 1, 1: 1, 2: 1, 4: 1}, {3: 4}, {2: 4, 4: 1, 1: 3}, {0: 4, 2: 4, 4: 4}]
    for counts in steps * 2:
        spans = [(lengths[r], lengths[r] + n) for r, n in counts.items()]
        starts = [sum([*counts.values()][:i]) for i in range(len(counts) + 1)]
        batch = RaggedBatch(
            tokens_N=torch.randint(3, VOCAB, (starts[-1],), generator=random).to(device),
            positions_N=torch.cat([torch.arange(*span) for span in spans]).to(device),
            requests_N=torch.arange(len(counts)).repeat_interleave(
                torch.tensor([*counts.values()])
            ).to(device),
            slots_N=torch.cat(
                [tables[r].slots(*span) for r, span in zip(counts, spans, strict=True)]
            ).to(device),
            starts=tuple(starts),
            context_lengths=tuple(end for _, end in spans),
            tables=tuple(tables[r] for r in counts),
            exact=False,
        )  # fmt: skip
        rows = torch.arange(starts[-1], device=device)
        one, other = (
            own.forward(batch, store, logit_rows_M=rows, tap_layers=(1, -1))
            for own, store in zip((captured, eager), stores, strict=True)
        )
        assert one.logits_MV.device.type == device
        torch.testing.assert_close(
            one.logits_MV.log_softmax(-1), other.logits_MV.log_softmax(-1), atol=near, rtol=0
        )
        torch.testing.assert_close(one.taps_NF, other.taps_NF, atol=near, rtol=near)
    assert len(captured._graphs[stores[0]]) == 3  # as padded, two batches are of one size


KINDS = ["untrained", "gated", "rnn", "dflash"]


@every_device
@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_draft_equals_an_eager_one(device, dtype, kind):
    """Batches of different sizes and contexts in turn, each replayed twice.

    The first slot's probabilities are equal but for rounding, and so are a later slot's where the
    tokens before it are. Every token wins the race over exactly the probabilities it comes with.
    """
    random = torch.Generator().manual_seed(3)
    embedding = torch.randn(VOCAB, 48, generator=random).to(device)
    network = untrained(kind).to(device)
    embedding = embedding[:, : network.config.hidden_size].contiguous()
    binding = Binding(
        embedding_VD=embedding, embedding_scale=1.0, lm_head_VD=embedding, logit_scale=1.0,
        logit_softcap=None, num_target_layers=2, mask_token_id=0, target_name="tiny",
        embedding_hash="", chat_template_hash=None,
    )  # fmt: skip
    linear = bf16_linear if dtype == torch.bfloat16 else plain_linear
    options = {"candidates": 16, "linear_factory": linear}
    eager = DSparkDrafter(network, binding, **options)
    captured = CapturedDrafter(network, binding, capture=capture_on(device), **options)
    page = 8
    store = KVStore(eager.kv_shape, 96 * page, read_ahead=KEY_TILE, dtype=dtype, device=device)
    for memory in (*store.keys, *store.values):
        memory.copy_(torch.randn(memory.shape, generator=random))
    tables = [PageTable(pages, page) for pages in ([0, 1], [2, 3], [40, 9, 60, 61], [5], [7, 8])]
    lengths = [9, 12, 26, 0, 3]
    near = 5e-2 if dtype == torch.bfloat16 else 1e-4
    compared = 0
    for number, chosen in enumerate([[0, 1, 2, 3], [4], [2, 4, 1], [4, 3, 2, 1, 0], [3, 0]] * 2):
        params = [SAMPLING[(r + number) % len(SAMPLING)] for r in chosen]

        def drafted(drafter, asked, number=number, chosen=chosen, params=params):
            noises = [RequestNoise(RequestRandom(p.seed or 0), p, VOCAB, device) for p in params]
            noise = StepNoise([Round(noise, number, number) for noise in noises], BLOCK)

            def keeping(slot, ids_RC):
                asked.append(noise(slot, ids_RC))
                return asked[-1]

            return drafter.draft(
                torch.tensor(chosen, device=device) + 5,
                torch.tensor([lengths[r] for r in chosen], device=device),
                [tables[r] for r in chosen],
                store,
                texts=[[0]] * len(chosen),
                sampling=params,
                noise=keeping,
            )

        asked = []
        one, other = drafted(captured, asked), drafted(eager, [])
        assert one.tokens_RK.device.type == device
        winners = race(one.probs_RKC, torch.stack(asked, 1))[:, :, None]
        assert torch.equal(one.candidates_RKC.gather(2, winners)[:, :, 0], one.tokens_RK)
        dense = [
            block.probs_RKC.new_zeros(*block.tokens_RK.shape, VOCAB).scatter_(
                2, block.candidates_RKC, block.probs_RKC
            )
            for block in (one, other)
        ]
        differ = (one.tokens_RK != other.tokens_RK).cumsum(1) > 0
        same_before = torch.cat([torch.zeros_like(differ[:, :1]), differ[:, :-1]], 1) == 0
        for r, own in enumerate(params):
            # At the margin of a truncation, and of an argmax, rounding decides on everything.
            if own.temperature > 0 and not truncates(own):
                mine, theirs = (probs[r][same_before[r]] for probs in dense)
                torch.testing.assert_close(mine, theirs, atol=near, rtol=0)
                compared += len(mine)
        if dtype == torch.float32:
            assert torch.equal(one.tokens_RK, other.tokens_RK)
    assert compared > 20
