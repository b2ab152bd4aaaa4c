"""Features wait for a draft, and none is missing when it comes (law 7, decision 11)."""

from dataclasses import dataclass, field

import numpy as np

from dspark.core.sampling import SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.draft_context import MOST_WAITING
from dspark.engine.engine import Engine
from dspark.scheduling.policies import FixedLength
from tests.engine.setup import BLOCK, GREEDY, PROMPTS, collect, drafter, plain_greedy, target

LONG = SamplingParams(temperature=0.0, max_new_tokens=2 * MOST_WAITING + 20, ignore_eos=True)


@dataclass(frozen=True)
class NowAndThen(FixedLength):
    """Drafts for every request at some steps, for none at others, as behind a gate."""

    length: int = BLOCK
    every: int = 5
    asked: list = field(default_factory=list)

    def wants_draft(self, view):
        self.asked.append(view.context_R.tolist())
        return (view.max_admit_R > 0) & ((np.array(view.rounds) + view.step) % self.every == 0)

    def fresh(self):
        return self


def gated_run(policy, params, prompts=PROMPTS, **config):
    own = drafter("teacher")  # its drafts check that every position is there, and right
    own.engine = Engine(target(), own, policy, EngineConfig(**config))
    ids = [own.engine.add(prompt, params) for prompt in prompts]
    return own, collect(own.engine, ids)


def test_a_request_that_comes_back_to_drafting_has_all_of_its_context():
    own, result = gated_run(NowAndThen(), GREEDY, max_requests=3, chunk_tokens=7, page_size=4)
    assert own.drafts > 5
    assert result.tokens == plain_greedy()
    proposed = [record.proposed for rounds in result.rounds for record in rounds]
    assert 0 < sum(count > 0 for count in proposed) < len(proposed) / 2


def test_context_of_a_request_that_never_drafts_is_made_in_batches():
    own = drafter("teacher")
    engine = own.engine = Engine(target(), own, NowAndThen(every=10**6))
    written, extend = [], own.extend_context

    def count(taps_NF, *rest):
        written.append(len(taps_NF))
        extend(taps_NF, *rest)

    own.extend_context = count
    engine.add(PROMPTS[3], LONG)
    for _ in engine.run():
        assert all(sum(map(len, s.features)) < MOST_WAITING for s in engine.running)
    assert written == [len(PROMPTS[3]), MOST_WAITING, MOST_WAITING]


def test_the_view_says_how_long_contexts_are():
    policy = NowAndThen()
    _, result = gated_run(policy, GREEDY, prompts=[PROMPTS[2]])
    lengths = [len(PROMPTS[2])]
    for record in result.rounds[0][:-1]:
        lengths.append(lengths[-1] + record.emitted)
    assert [asked[0] for asked in policy.asked if asked] == lengths


def test_an_engine_takes_a_fresh_policy():
    class Stateful(NowAndThen):
        def fresh(self):
            return Stateful()

    policy = Stateful()
    own = drafter("teacher")
    assert Engine(target(), own, policy).policy is not policy
