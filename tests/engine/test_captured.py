"""The engine with a captured draft or target (replayed by a recorder) and with eager ones."""

from types import SimpleNamespace

import pytest
import torch

from dspark.core.sampling import SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.nn.recorder import Recorder
from dspark.scheduling.policies import FixedLength, Off, Threshold
from dspark.targets.captured import CapturedTarget
from dspark.targets.hf import HFTarget
from dspark.targets.tiny import tiny_model
from tests.engine.setup import BLOCK, MODEL, PROMPTS, drafter, run, target

MIXED = [
    SamplingParams(verification="rejection", seed=1, max_new_tokens=12, ignore_eos=True),
    SamplingParams(verification="rejection", temperature=0.6, top_k=7, max_new_tokens=3,
                   ignore_eos=True),
    SamplingParams(verification="rejection", temperature=1.4, top_p=0.9, max_new_tokens=9,
                   ignore_eos=True),
    SamplingParams(temperature=0.0, max_new_tokens=14, ignore_eos=True),
    SamplingParams(seed=4, min_p=0.02, max_new_tokens=6, ignore_eos=True),
    SamplingParams(verification="rejection", max_new_tokens=20, ignore_eos=True),
]  # fmt: skip
SEEDS = list(range(20, 20 + len(PROMPTS)))


@pytest.mark.parametrize("config", [{}, {"page_size": 5, "max_requests": 4, "chunk_tokens": 9}],
                         ids=["all at once", "waiting"])  # fmt: skip
@pytest.mark.parametrize("biased", [False, True])
def test_the_same_tokens_accepted_alike(config, biased):
    """Requests come and go, so batches of all sizes are drafted; under `rejection` every drafted
    token shows in what is emitted."""
    params = list(MIXED)
    if biased:  # from slot to slot the host is needed for this one, so for its rounds' loops
        params[2] = SamplingParams(
            verification="rejection", logit_bias={5: 3.0}, presence_penalty=0.4, max_new_tokens=5,
            ignore_eos=True,
        )  # fmt: skip
    eager, captured = (
        run(PROMPTS, params, (name, BLOCK), SEEDS, **config) for name in ("untrained", "captured")
    )
    assert captured.tokens == eager.tokens and captured.fates == eager.fates
    assert sum(fates.count("accepted") for fates in eager.fates) > 0
    own = captured.engine.drafter
    assert len({requests for requests, _ in own._loops}) > 1
    assert len(own._backbones[captured.engine.memory.draft_store]) > 1


def test_a_shorter_policy_drafts_shorter_blocks():
    engine = Engine(target(), drafter("captured"), FixedLength(2), EngineConfig())
    result = run(PROMPTS[:2], MIXED[0], engine=engine, seeds=SEEDS[:2])
    assert engine.drafter.block_size == 2 and engine.drafter._loops
    other = run(PROMPTS[:2], MIXED[0], ("untrained", 2), SEEDS[:2])
    assert result.tokens == other.tokens


@pytest.mark.parametrize("config", [{}, {"page_size": 5, "max_requests": 4, "chunk_tokens": 9}],
                         ids=["all at once", "waiting"])  # fmt: skip
@pytest.mark.parametrize("policy", [None, FixedLength(BLOCK), Threshold(0.4)], ids=str)
def test_a_captured_target_gives_the_same_tokens(policy, config):
    """Off, whole blocks, and as many as seem likely: runs of several lengths in one step. Prompts
    are read in between."""
    model = tiny_model("mistral", **MODEL, sliding_window=9)
    owns = HFTarget(model), CapturedTarget(model, capture=Recorder())
    eager, captured = (
        run(PROMPTS, MIXED, seeds=SEEDS, engine=Engine(
            own, drafter("captured") if policy else None, policy or Off(),
            EngineConfig(row_exact=False, **config),
        )) for own in owns
    )  # fmt: skip
    assert captured.tokens == eager.tokens and captured.fates == eager.fates
    sizes = [*owns[1]._graphs[captured.engine.memory.store]]
    assert len({requests for requests, *_ in sizes}) > 1
    lengths = {rows for _, rows, *_ in sizes}
    assert lengths == {1} if policy is None else len(lengths) > 1 and max(lengths) == BLOCK + 1


def test_an_engine_off_the_cpu_has_no_exact_steps():
    """They run eagerly, and would promise nothing."""
    config = EngineConfig(cache_tokens=256)
    assert Engine(target(), None, Off(), config).config.row_exact
    own = target()
    there = SimpleNamespace(
        device=torch.device("meta"), kv_shape=own.kv_shape, max_context=own.max_context,
        vocab_size=own.vocab_size, eos_token_ids=own.eos_token_ids,
    )  # fmt: skip
    assert not Engine(there, None, Off(), config).config.row_exact
