"""Every trained drafter can learn one text by heart: then every round accepts its whole block.

From features through the production trainer and objective to the serving form inside the engine, so
a slot, a position or a state that is off by one anywhere keeps this from happening.
"""

from functools import cache

import numpy as np
import pytest

from dspark.core.sampling import SamplingParams
from dspark.data.packing import TrainingSequence
from dspark.recipes.features import FeatureExtractor
from dspark.training.config import TrainConfig
from dspark.training.features import FeatureStore
from dspark.training.objective import CROSS_ENTROPY
from dspark.training.trainer import Trainer
from tests.engine.setup import BLOCK, PROMPTS, UNTRAINED, binding, run, served, target, untrained

PROMPT = PROMPTS[3]
LENGTH = 16
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=LENGTH, ignore_eos=True)
STEPS = 80


@cache
def text() -> tuple[int, ...]:
    return (*PROMPT, *run([PROMPT], PARAMS).tokens[0])


@pytest.mark.parametrize("name", UNTRAINED)
def test_one_text_by_heart(name, tmp_path):
    network = untrained(name, std=0.05)
    config = network.config
    ids = np.array(text(), dtype=np.int32)
    supervised = np.arange(len(ids)) >= len(PROMPT)
    store = FeatureStore(
        tmp_path / "f",
        target="tiny",
        tap_layers=config.target_layer_ids,
        hidden_size=config.hidden_size,
    )
    store.fill([ids], FeatureExtractor(target(), config.target_layer_ids))
    # Cross-entropy on the tokens is what learns a text by heart soonest: a text of a target with
    # random weights is far from certain, and other losses settle the last ties slowly.
    train = TrainConfig(
        objective=CROSS_ENTROPY, anchors_per_step=LENGTH, anchors_per_sequence=LENGTH, steps=STEPS,
        learning_rate=1e-2, compute_dtype="float32", start="noise", validate_every=1000,
    )  # fmt: skip
    sequence = TrainingSequence(ids, supervised)
    Trainer(network, binding(), store, [sequence], [], train, tmp_path / "run").run()

    block = 1 if name == "mtp" else BLOCK
    result = run([PROMPT], PARAMS, (served(network.eval()), block))
    assert (*PROMPT, *result.tokens[0]) == text()
    whole = [record for record in result.rounds[0] if record.admitted == block and not record.ended]
    assert len(whole) >= (LENGTH - 1) // (block + 1) - 1
    assert {record.emitted for record in whole} == {block + 1}
