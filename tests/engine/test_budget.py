"""How large the memory of keys and values is, and who says so."""

from types import SimpleNamespace

import pytest
import torch

from dspark.core.errors import ConfigError
from dspark.core.sampling import SamplingParams
from dspark.engine import budget
from dspark.engine.budget import budget_tokens, free_bytes
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.scheduling.policies import FixedLength
from tests.engine.setup import BLOCK, drafter, engine_of, target

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with 1000 bytes free, and a folder for a container's limits."""
    memory = SimpleNamespace(available=1000)
    monkeypatch.setattr(budget.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(budget, "_CGROUP", tmp_path)
    return tmp_path


def test_free_memory_is_the_containers_if_that_is_less(machine):
    assert free_bytes(CPU) == 1000
    (machine / "memory.max").write_text("max\n")
    (machine / "memory.current").write_text("400\n")
    assert free_bytes(CPU) == 1000
    for limit, free in ((1300, 900), (3000, 1000), (300, 0)):
        (machine / "memory.max").write_text(f"{limit}\n")
        assert free_bytes(CPU) == free


def test_a_share_of_it_and_no_more_than_can_be_used(machine):
    assert budget_tokens(10, share=0.5, most_tokens=10**9, device=CPU) == 50
    assert budget_tokens(10, share=1.0, most_tokens=30, device=CPU) == 30
    with pytest.raises(ConfigError, match=r"50% of 0.0 GiB .* raise memory_share"):
        budget_tokens(501, share=0.5, most_tokens=30, device=CPU)


def test_target_and_drafter_have_one_budget():
    plain, both = engine_of(), engine_of(("untrained", BLOCK))
    own, context = target().kv_shape, drafter("untrained").kv_shape
    assert plain.memory.bytes_per_token == own.bytes_per_token(torch.float32)
    assert both.memory.bytes_per_token == plain.memory.bytes_per_token + context.bytes_per_token(
        torch.float32
    )
    assert plain.memory.tokens == 32 * 512, "all requests at the longest context fit this machine"
    assert both.memory.store.keys[0].shape[0] == both.memory.draft_store.keys[0].shape[0]
    halved = engine_of(("untrained", BLOCK), cache_dtype="bfloat16")
    assert halved.memory.bytes_per_token * 2 == both.memory.bytes_per_token


def test_it_says_what_it_takes():
    memory = engine_of(cache_tokens=1000, page_size=16).memory
    size = f"{1008 * memory.bytes_per_token / 2**30:.2f} GiB"
    assert memory.describe().startswith(f"KV memory: 1008 tokens in 63 pages of 16, {size}")


def test_a_cache_for_known_requests_has_an_extent_for_each():
    config = EngineConfig.for_requests([64, 65, 200, 300], max_requests=3, row_exact=True)
    assert config.cache_tokens == 64 * (2 + 4 + 8) and config.max_requests == 3
    block = EngineConfig.for_requests(
        [64, 65, 200, 300], max_requests=3, row_exact=True, block_size=4
    )
    assert block.cache_tokens == 64 * (2 + 4 + 8)
    alone = EngineConfig.for_requests([10], max_requests=32, row_exact=True)
    assert (alone.cache_tokens, alone.max_requests) == (64, 1)


@pytest.mark.parametrize("tokens", [60, 61, 64, 65, 128, 512])
def test_a_request_fits_the_cache_that_was_made_for_it(tokens):
    params = SamplingParams(temperature=0.0, max_new_tokens=5, ignore_eos=True)
    config = EngineConfig.for_requests(
        [tokens], max_requests=1, row_exact=True, block_size=BLOCK, prefix_cache=False
    )
    engine = Engine(target(), drafter("untrained"), FixedLength(BLOCK), config)
    engine.add([5] * (tokens - 5), params)
    assert sum(len(event.tokens) for event in engine.run()) == 5
    unstated = EngineConfig(max_requests=1)
    engine = Engine(target(), drafter("untrained"), FixedLength(BLOCK), unstated)
    engine.add([5] * (tokens - 5), params)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_that_is_none(share):
    with pytest.raises(ConfigError, match="memory_share"):
        EngineConfig(memory_share=share)
