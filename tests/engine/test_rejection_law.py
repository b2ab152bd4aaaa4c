"""Under `rejection` the engine's tokens follow the target's law: chi-square over many requests.

The requests differ in their seed alone, so they are independent draws of the first tokens after one
prompt. False alarms: each test fails by chance with probability 1e-6 (the seeds are fixed, so it
fails always or never).
"""

from collections import Counter
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from dspark.core.sampling import SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.nn.sampling import SamplingRows, probs_from_logits
from dspark.scheduling.policies import FixedLength, Off
from dspark.targets.tiny import tiny_model
from tests.engine.drafters import RandomDrafter, TeacherDrafter
from tests.targets.ragged import packed_target

VOCAB, LENGTH, COUNT, FALSE_ALARM = 7, 3, 1200, 1e-6
PROMPT = (3, 5, 4)


@cache
def model():
    return tiny_model("llama", vocab_size=VOCAB, num_hidden_layers=1, eos_token_id=2)


@cache
def target():
    return packed_target(tiny_model("llama", vocab_size=VOCAB, num_hidden_layers=1, eos_token_id=2))


def law(params):
    """Probability of every text of LENGTH tokens after the prompt."""
    texts = list(product(range(VOCAB), repeat=LENGTH))
    with torch.inference_mode():
        logits = model()(torch.tensor([[*PROMPT, *text] for text in texts])).logits.double()
    at = logits[:, len(PROMPT) - 1 : -1].reshape(-1, VOCAB)
    probs = probs_from_logits(at, SamplingRows.of([params] * len(at)))
    drawn = probs.gather(1, torch.tensor(texts).reshape(-1, 1)).view(len(texts), LENGTH)
    return dict(zip(texts, drawn.prod(1).tolist(), strict=True))


def sample(params, drafter, block):
    if drafter is None:
        engine = Engine(target(), None, Off(), EngineConfig(max_requests=512, page_size=8))
    else:
        config = EngineConfig(max_requests=512, page_size=8)
        engine = Engine(target(), drafter, FixedLength(block), config)
        drafter.engine = engine
    texts = [[] for _ in range(COUNT)]
    for index in range(COUNT):
        engine.add(PROMPT, params, seed=index)
    for event in engine.run():
        texts[event.request] += event.tokens
    return Counter(map(tuple, texts)), engine.records


def tail(observed, expected):
    """Probability of a chi-square this large if the law is right; rare texts share a cell."""
    large = [text for text, probability in expected.items() if probability * COUNT >= 8]
    cells = [(observed[text], expected[text] * COUNT) for text in large]
    rest = COUNT - sum(want for _, want in cells)
    if rest > 1e-6:
        cells.append((COUNT - sum(got for got, _ in cells), rest))
    got, want = np.array(cells).T
    assert len(cells) > 5, "too few cells to say anything"
    return chi2.sf(((got - want) ** 2 / want).sum(), df=len(cells) - 1)


SAMPLING = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "truncated": {"temperature": 1.5, "top_k": 5, "top_p": 0.95},
}


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        ("random", "plain"),
        ("random", "truncated"),
        ("teacher", "cold"),
        (None, "truncated"),
    ],
)
def test_tokens_follow_the_targets_law(kind, sampling):
    params = SamplingParams(
        max_new_tokens=LENGTH, ignore_eos=True, verification="rejection", **SAMPLING[sampling]
    )
    embedding = model().get_input_embeddings().weight.detach()
    drafter = {
        "random": lambda: RandomDrafter(2, embedding),
        "teacher": lambda: TeacherDrafter(2, embedding, model=model(), errors=0.5),
        None: lambda: None,
    }[kind]()
    observed, records = sample(params, drafter, 2)
    assert tail(observed, law(params)) > FALSE_ALARM
    rounds = [record for step in records for record in step.rounds]
    if kind is not None:
        # Both outcomes must happen often, or the test would be one of plain decoding.
        accepted = sum(record.accepted for record in rounds)
        assert 0.1 < accepted / sum(record.admitted for record in rounds) < 0.95


def test_a_drafter_that_lies_about_its_probabilities_is_seen():
    """The same statistic fails where losslessness really breaks."""
    params = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True, verification="rejection")
    embedding = model().get_input_embeddings().weight.detach()
    observed, _ = sample(params, RandomDrafter(2, embedding, lies=True), 2)
    assert tail(observed, law(params)) < FALSE_ALARM
