"""Drafts whose length changes from round to round: shorter ones hold fewer proposals, and no token
is another for it."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from dspark.core.sampling import SamplingParams
from dspark.engine.blocks import lengthened, proposed_lengths, spread
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.nn.seams import DraftBlock
from dspark.scheduling.policies import FixedLength
from tests.engine.setup import BLOCK, PROMPTS, collect, drafter, run, target


@dataclass(frozen=True)
class InTurns(FixedLength):
    """Drafts 1, 2, .. BLOCK slots in turn, and verifies all of them."""

    length: int = BLOCK
    asked: list = field(default_factory=list)
    seen: list = field(default_factory=list)

    def draft_length(self, view):
        self.asked.append(1 + view.step % BLOCK)
        return self.asked[-1]

    def admit(self, view):
        assert view.draft_length in (None, 1 + view.step % BLOCK)
        self.seen.append(view.draft_length)
        return FixedLength.admit(self, view)

    def fresh(self):
        return self


@pytest.mark.parametrize("name", ["untrained", "captured", "rnn", "dflash", "eagle3"])
def test_tokens_are_the_same_and_proposals_as_many_as_asked_for(name):
    params = [
        SamplingParams(temperature=t, seed=i, max_new_tokens=20, ignore_eos=True)
        for i, t in enumerate([0.0, 1.0, 0.8])
    ]
    policy = InTurns()
    own = drafter(name)
    engine = own.engine = Engine(target(), own, policy, EngineConfig(max_requests=3))
    result = collect(engine, [engine.add(p, s) for p, s in zip(PROMPTS, params, strict=False)])
    assert result.tokens == run(PROMPTS[:3], params).tokens
    assert set(policy.asked) == {*range(1, BLOCK + 1)}
    assert {*range(1, BLOCK)} <= set(policy.seen), "None stands for a whole block"
    for step in engine.records:
        for record in step.rounds:
            assert record.proposed in (0, 1 + step.step % BLOCK)
            assert record.admitted <= record.proposed
            assert all(value < 1e-20 for value in record.survival[record.proposed :])


def test_slots_without_a_proposal_are_never_admitted():
    block = DraftBlock(
        tokens_RK=torch.tensor([[5, 6], [7, 8]]),
        candidates_RKC=torch.ones(2, 2, 3, dtype=torch.int64),
        probs_RKC=torch.full((2, 2, 3), 1 / 3, dtype=torch.float64),
        confidence_RK=torch.zeros(2, 2),
        entropy_RK=torch.ones(2, 2),
    )
    longer = lengthened(block, 4)
    assert proposed_lengths(longer) == [2, 2]
    assert longer.tokens_RK[:, :2].equal(block.tokens_RK)
    assert longer.probs_RKC[:, 2:].sum() == 0
    assert longer.confidence_RK[:, 2:].sigmoid().max() < 1e-20
    assert longer.entropy_RK.shape == (2, 4)
    assert lengthened(block, 2) is block
    assert proposed_lengths(spread(longer, np.array([2, 0]), 3)) == [2, 0, 2]
