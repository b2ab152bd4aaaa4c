"""Law 5 in the engine: a `coupled` request's tokens depend on its prompt and seed alone."""

import random
from functools import cache

import pytest
from torch import nn

from dspark.core.errors import ConfigError
from dspark.core.sampling import SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.nn.four_bit import GROUP
from dspark.nn.linear import check_kind
from dspark.scheduling.policies import Off
from dspark.targets.tiny import tiny_model
from tests.engine.setup import BLOCK, MODEL, PROMPTS, VOCAB, collect, engine_of, run
from tests.targets.ragged import packed_target, random_text

SAMPLING = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
]
PARAMS = [
    SamplingParams(seed=100 + index, max_new_tokens=10 + index, ignore_eos=True, **own)
    for index, own in enumerate(SAMPLING)
]


@pytest.fixture(scope="module")
def alone():
    return [run([p], [own]).tokens[0] for p, own in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize(
    ("policy", "config"),
    [
        (None, {}),
        (None, {"chunk_tokens": 9, "page_size": 2}),
        (("untrained", BLOCK), {}),
        (("untrained", 1), {"chunk_tokens": 16, "page_size": 5}),
        (("captured", BLOCK), {"chunk_tokens": 9, "page_size": 5}),
        (("rnn", BLOCK), {"chunk_tokens": 9}),
        (("eagle3", BLOCK), {"chunk_tokens": 9, "page_size": 5}),
        (("mtp", 1), {"chunk_tokens": 9, "page_size": 5}),
        (("teacher", BLOCK), {}),
        (("teacher", 2), {"max_requests": 3}),
        (("teacher", 3), {"chunk_tokens": 4, "max_requests": 5, "page_size": 1}),
        (("random", BLOCK), {"page_size": 16, "cache_tokens": 128}),  # too few pages for all
        (None, {"pipeline": True}),
        (("untrained", BLOCK), {"pipeline": True}),
        (("teacher", 3), {"pipeline": True, "chunk_tokens": 4, "max_requests": 5, "page_size": 1}),
        (("random", BLOCK), {"pipeline": True, "page_size": 16, "cache_tokens": 128}),
    ],
)
def test_same_seed_same_tokens(alone, policy, config):
    order = list(range(len(PROMPTS)))
    random.Random(str((policy, config))).shuffle(order)
    result = run([PROMPTS[i] for i in order], [PARAMS[i] for i in order], policy, **config)
    for index, tokens in zip(order, result.tokens, strict=True):
        assert tokens == alone[index], index


def test_a_late_arrival(alone):
    engine = engine_of(("teacher", BLOCK))
    ids = [engine.add(PROMPTS[i], PARAMS[i]) for i in (5, 2)]
    early = {i: [] for i in ids}
    for _ in range(3):
        for event in engine.step():
            early[event.request] += event.tokens
    ids.append(engine.add(PROMPTS[4], PARAMS[4]))
    rest = collect(engine, ids)
    got = [[*early.get(i, []), *tokens] for i, tokens in zip(ids, rest.tokens, strict=True)]
    assert got == [alone[5], alone[2], alone[4]]


def test_speculation_accepts_something_here(alone):
    """Or the comparisons above would say nothing about accepted tokens."""
    result = run(PROMPTS, PARAMS, ("teacher", BLOCK))
    assert sum(fates.count("accepted") for fates in result.fates) > 15
    assert result.tokens == alone


def test_other_seeds_and_choices_give_other_tokens(alone):
    engine = engine_of()
    params = SamplingParams(seed=100, max_new_tokens=10, ignore_eos=True)
    other = SamplingParams(seed=101, max_new_tokens=10, ignore_eos=True)
    ids = [
        engine.add(PROMPTS[0], params),
        engine.add(PROMPTS[0], params, choice=1),
        engine.add(PROMPTS[0], other),
    ]
    same, choice, seed = collect(engine, ids).tokens
    assert same == alone[0]
    assert len({tuple(same), tuple(choice), tuple(seed)}) == 3


def test_a_drawn_seed_repeats_a_run():
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    runs = [run([PROMPTS[2]], params, ("teacher", 3), seeds=[s]).tokens for s in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]
    fresh = [run([PROMPTS[2]], params).tokens for _ in range(2)]
    assert fresh[0] != fresh[1], "two drawn seeds of 63 bits were equal"


@cache
def packed_as(kind):
    """A target of these weights; a reason to skip where they do not run, or not exactly."""
    try:
        check_kind(kind)
    except ConfigError:
        return f"{kind} does not run on this machine"
    tiny = tiny_model("llama", **{**MODEL, "hidden_size": 64, "intermediate_size": 128})
    if kind == "q4":
        snap_to_grid(tiny)
    packed = packed_target(tiny, kind)
    if not packed.row_exact:
        return f"{kind} is not exact on this machine"
    assert packed.fast is not None and packed.fast.layers[0].qkv.kind == kind
    return packed


@pytest.fixture
def packed(kind):
    found = packed_as(kind)
    return pytest.skip(found) if isinstance(found, str) else found


@pytest.mark.parametrize("kind", ["q4", "int8", "bf16"])
def test_with_a_kernel_for_prompts_and_one_for_tokens(packed):
    """q4 and int8 have two kernels: a row's own kind chooses, whoever decodes or prefills beside
    it."""

    def tokens(prompts, params, **config):
        engine = Engine(packed, None, Off(), EngineConfig(page_size=4, **config))
        ids = [engine.add(p, own) for p, own in zip(prompts, params, strict=True)]
        return collect(engine, ids).tokens

    alone = [tokens([p], [own])[0] for p, own in zip(PROMPTS, PARAMS, strict=True)]
    assert tokens(PROMPTS, PARAMS) == alone
    assert tokens(PROMPTS, PARAMS, chunk_tokens=3, max_requests=3) == alone


@pytest.mark.parametrize("kind", ["q4", "int8"])
def test_a_prompts_last_token_is_the_prompts_also_where_it_comes_alone(packed):
    """Behind a full chunk, a prefix hit or a preemption it looks like a token that is decoded. Bit
    for bit: the other kernel's rounding may leave the same tokens."""
    prompt, params = (
        random_text(33, VOCAB, seed=3),
        SamplingParams(seed=7, max_new_tokens=3, ignore_eos=True, logprobs=3),
    )

    def engine(**config):
        return Engine(packed, None, Off(), EngineConfig(page_size=4, **config))

    def told(engine):
        engine.add(prompt, params)
        return [own for event in engine.run() for own in event.logprobs]

    whole = told(engine())
    assert len(whole) == 3
    assert told(engine(chunk_tokens=32)) == whole
    warm = engine()
    assert [told(warm), told(warm)] == [whole, whole]
    assert warm.stats().prefix_hit_tokens == 32
    lost = engine(chunk_tokens=32)
    lost.add(prompt, params)
    lost.step()
    (state,) = lost.running
    assert state.cached == 32 and not state.output
    lost.places.preempt(state)
    assert [own for event in lost.run() for own in event.logprobs] == whole
    assert lost.stats().preemptions == 1


def snap_to_grid(model):
    """Gives a model weights as a 4-bit GGUF holds them."""
    for module in model.get_decoder().layers.modules():
        if isinstance(module, nn.Linear):
            groups = module.weight.detach().view(len(module.weight), -1, GROUP)
            step = groups.abs().amax(-1, keepdim=True) / 8
            codes = (groups / step).round().clamp(-8, 7)
            module.weight.data.copy_((codes * step).view_as(module.weight))
