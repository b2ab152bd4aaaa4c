"""Law 5, functionally: a `coupled` token is a function of the target, the seed and its position.

Draw by draw, on a vocabulary above two: the emitted token is argmax(log target_probs + noise), with
the Gumbel noise -log(exponentials), whatever was drafted, admitted, batched or preempted.
"""

import math

import numpy as np
import pytest
import torch

from dspark.core.random import RequestRandom
from dspark.core.sampling import SamplingParams
from dspark.nn.noise import RequestNoise, Round, StepNoise
from dspark.nn.sampling import SamplingRows, probs_from_logits, race
from dspark.nn.seams import DraftBlock
from dspark.nn.verification import verify
from dspark.scheduling.cost import SpsCurve
from dspark.scheduling.search import unconstrained_search
from tests.laws.toys import Toy
from tests.oracles.plain_sampling import plain_probs

VOCAB, BLOCK, LENGTH = 6, 3, 24
SPS = SpsCurve.from_points([1, 2, 3, 4], [1.0, 0.7, 0.5, 0.45])

SAMPLING = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "truncated": {"temperature": 1.2, "top_k": 4, "top_p": 0.9, "min_p": 0.02},
    "greedy": {"temperature": 0.0},
}


class Decoder:
    """One request on its way, decoded with the production pieces."""

    def __init__(self, seed, choice=0, rule="coupled", **sampling):
        self.toy = Toy(vocab=VOCAB, block=BLOCK, seed=11, candidates=4)
        self.params = SamplingParams(verification=rule, **sampling)
        self.random = RequestRandom(seed, choice)
        self.text = ()
        self.rounds = 0
        self.preempt()

    def preempt(self):
        """Everything but the text, the seed and the round number is lost."""
        self.noise = RequestNoise(self.random, self.params, VOCAB)

    def next_round(self):
        self.rounds += 1
        return Round(self.noise, number=self.rounds, index=len(self.text))

    def expected(self):
        """The text by the definition of `coupled`, token by token."""
        text = ()
        while len(text) < LENGTH:
            exponentials = self.random.coupled_exponentials(len(text), VOCAB)
            probs = plain_probs(self.toy.target_logits(text).tolist(), self.params)
            scores = [
                math.log(prob) - math.log(e) if prob else -math.inf
                for prob, e in zip(probs, exponentials, strict=True)
            ]
            text = (*text, int(np.argmax(scores)))
        return text


def drafted(decoders, step):
    """Blocks from the toy drafters, coupled to the target's noise where the rule says so."""
    sampling = SamplingRows.of([decoder.params for decoder in decoders])
    tokens = [() for _ in decoders]
    slots = []
    for slot in range(BLOCK):
        drawn = [d.toy.draft_slot(d.text, t) for d, t in zip(decoders, tokens, strict=True)]
        candidates_RC = torch.stack([ids for ids, _ in drawn])
        probs_RC = probs_from_logits(torch.stack([logits for _, logits in drawn]), sampling)
        winners_R = race(probs_RC, step(slot, candidates_RC))
        chosen_R = candidates_RC.gather(1, winners_R[:, None])[:, 0].tolist()
        tokens = [(*t, token) for t, token in zip(tokens, chosen_R, strict=True)]
        slots.append((candidates_RC, probs_RC))
    return DraftBlock(
        torch.tensor(tokens),
        torch.stack([candidates for candidates, _ in slots], dim=1),
        torch.stack([probs for _, probs in slots], dim=1),
        None,
    )


def decode(decoders, admit, tamper=lambda block: block, preempt=False):
    """Decodes all requests in one batch until each has LENGTH tokens; returns their texts."""
    while any(len(decoder.text) < LENGTH for decoder in decoders):
        if preempt:
            decoders[0].preempt()
        step = StepNoise([decoder.next_round() for decoder in decoders], BLOCK)
        block = tamper(drafted(decoders, step))
        admitted = [
            admit(d, tuple(t)) for d, t in zip(decoders, block.tokens_RK.tolist(), strict=True)
        ]
        rows = [
            (r, decoder.text + tuple(block.tokens_RK[r, :slot].tolist()))
            for r, decoder in enumerate(decoders)
            for slot in range(admitted[r] + 1)
        ]
        logits_MV = torch.stack([decoders[r].toy.target_logits(text) for r, text in rows])
        sampling = SamplingRows.of([d.params for d in decoders], [r for r, _ in rows])
        outcome = verify(
            probs_from_logits(logits_MV, sampling), admitted, block, step.verification(admitted)
        )
        for r, decoder in enumerate(decoders):
            accepted = block.tokens_RK[r, : outcome.accepted_R[r]].tolist()
            decoder.text += (*accepted, int(outcome.next_token_R[r]))
    return [decoder.text[:LENGTH] for decoder in decoders]


def fixed(length):
    return lambda decoder, tokens: length


def same_step_global(decoder, tokens):
    survival_RK = np.array([decoder.toy.survival(decoder.text, tokens)])
    return int(unconstrained_search(survival_RK, SPS)[0])


def only_while_token_zero(decoder, tokens):
    """As anticipating as can be."""
    return next((slot for slot, token in enumerate(tokens) if token), BLOCK)


POLICIES = {
    "off": fixed(0),
    "fixed:1": fixed(1),
    "fixed:3": fixed(3),
    "global": same_step_global,
    "reads the draft": only_while_token_zero,
}


@pytest.mark.parametrize("admit", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
def test_every_policy_emits_the_defined_token(admit, sampling):
    decoders = [Decoder(seed, **sampling) for seed in (5, 6)]
    assert decode(decoders, admit) == [decoder.expected() for decoder in decoders]


def test_any_draft_at_all():
    """Tokens that no drafter drew change how many are accepted, never which are emitted."""
    random = torch.Generator().manual_seed(1)

    def scramble(block):
        tokens_RK = torch.randint(VOCAB, block.tokens_RK.shape, generator=random)
        return DraftBlock(tokens_RK, block.candidates_RKC, block.probs_RKC, None)

    decoders = [Decoder(seed) for seed in range(8)]
    assert decode(decoders, fixed(3), scramble) == [decoder.expected() for decoder in decoders]


def test_preemption_loses_no_noise():
    decoder = Decoder(9)
    assert decode([decoder], fixed(2), preempt=True) == [decoder.expected()]


def test_batch_composition_changes_no_token():
    """Of no rule: a `rejection` request repeats itself under the same schedule, too."""
    crowd = [
        Decoder(seed, rule=rule, **sampling)
        for seed, (rule, sampling) in enumerate(
            (rule, sampling) for rule in ("coupled", "rejection") for sampling in SAMPLING.values()
        )
    ]
    together = decode(crowd, fixed(2))
    alone = [
        decode([Decoder(d.random.seed, rule=d.params.rule, **_sampling(d.params))], fixed(2))[0]
        for d in crowd
    ]
    assert together == alone


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_choices_and_seeds_differ(rule):
    decoders = [Decoder(seed, choice, rule) for seed in (1, 2) for choice in (0, 1)]
    assert len(set(decode(decoders, fixed(2)))) == 4


def test_drafting_with_the_targets_noise_is_what_gets_accepted():
    """The coupling works: drafts drawn with the noise of other requests pass less often."""

    def rounds(*, coupled):
        decoders = [Decoder(seed) for seed in range(40)]
        strangers = [Decoder(seed + 1000) for seed in range(40)]

        def foreign(block):
            step = StepNoise(
                [Round(s.noise, 1, len(d.text)) for s, d in zip(strangers, decoders, strict=True)],
                BLOCK,
            )
            return drafted(decoders, step)

        decode(decoders, fixed(3), (lambda block: block) if coupled else foreign)
        return sum(decoder.rounds for decoder in decoders)

    assert rounds(coupled=True) < 0.9 * rounds(coupled=False)


def _sampling(params):
    return {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
