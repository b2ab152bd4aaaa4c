"""Law 7 with the real drafter: context K/V equal one pass over the text, however they came."""

import pytest
import torch

from dspark.core.sampling import SamplingParams
from dspark.nn.attention import KEY_TILE
from dspark.nn.kv_cache import KVStore
from dspark.nn.pages import PagePool
from tests.engine.setup import BLOCK, GREEDY, PROMPTS, engine_of, target
from tests.targets.ragged import make_batch

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=14, ignore_eos=True, seed=1)


def one_pass(drafter, text, next_token):
    """Context keys and values [layers, T, ...] of a text read at once."""
    table = PagePool(1, len(text)).allocate(len(text))
    store = KVStore(target().kv_shape, len(text), read_ahead=KEY_TILE)
    batch = make_batch([(table, 0, text)])
    output = target().forward(
        batch, store, logit_rows_M=torch.tensor([0]), tap_layers=drafter.tap_layers
    )
    context = KVStore(drafter.kv_shape, len(text), read_ahead=0)
    tokens = torch.tensor([*text[1:], next_token])
    drafter.extend_context(output.taps_NF, tokens, batch.positions_N, batch.slots_N, context)
    return context.keys, context.values


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("config", [{}, {"chunk_tokens": 6, "page_size": 4, "max_requests": 4}])
@pytest.mark.parametrize("name", ["untrained", "eagle3", "mtp"])
def test_context_is_that_of_one_pass(name, params, config):
    engine = engine_of((name, 1 if name == "mtp" else BLOCK), **config)
    drafter, store = engine.drafter, engine.memory.draft_store
    for prompt in PROMPTS:
        engine.add(prompt, params)
    compared = 0
    while not engine.idle:
        engine.step()
        for state in engine.running:
            text = state.text[: state.cached]
            if not state.prefilling:
                assert state.cached == len(state.request.prompt) + len(state.output) - 1
            if engine.records[-1].step % 4 or not text:
                continue
            compared += 1
            engine._drafting.context.write([state])  # as before its next draft
            slots = state.table.slots(0, len(text))
            keys, values = one_pass(drafter, text, state.text[state.cached])
            for layer in range(len(keys)):
                torch.testing.assert_close(store.keys[layer][slots], keys[layer], **CLOSE)
                torch.testing.assert_close(store.values[layer][slots], values[layer], **CLOSE)
    assert compared >= len(PROMPTS)
