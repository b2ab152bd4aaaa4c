"""Law 1 for what requests do to their logits: penalties, bias, bans, min_tokens and a grammar.

Exactly, in float64, through the production transforms at every row of a block. What is forbidden
is masked out of the draft before sampling, or offered and rejected; never dropped.
"""

from dataclasses import dataclass

import pytest
import torch

from dspark.core.guided import Guided
from dspark.core.sampling import SamplingParams
from dspark.nn.logit_transforms import LogitState, transform_logits
from dspark.nn.sampling import SamplingRows, probs_from_logits
from tests.laws.harness import Request
from tests.laws.test_losslessness import EXACT, OTHER, fixed, lagged, worst
from tests.laws.toys import Toy
from tests.oracles.plain_constraints import plain_logits
from tests.oracles.plain_sampling import plain_probs

PROMPT = (1, 1)
END = 2
"""Ends a text, were it not for the harness, which runs to a fixed length."""


class ToyGrammar:
    def __init__(self, vocab, text):
        self.vocab, self.text = vocab, text

    def allowed(self, drafted):
        for slot, token in enumerate(drafted):
            if token in forbidden(self.text + drafted[:slot], self.vocab):
                return None
        allowed_V = torch.ones(self.vocab, dtype=torch.bool)
        allowed_V[forbidden(self.text + drafted, self.vocab)] = False
        return allowed_V


def forbidden(text, vocab):
    return [(sum(text) + len(text)) % vocab]


@dataclass(frozen=True)
class Constrained(Request):
    masks: bool = True
    """The drafter keeps what is forbidden out of its draft."""
    blind: bool = False
    """Mutation: every row of a block is taken for the one after the text."""

    def state(self, text):
        vocab = self.toy.vocab
        state = LogitState(
            self.params,
            PROMPT,
            vocab,
            end_token_ids=(END,),
            grammar=None if self.params.guided is None else ToyGrammar(vocab, text),
        )
        state.generated = len(text)
        for token in text:
            state.counts_V[token] += 1
        return state

    def target_probs(self, texts):
        state, start = self.state(texts[0]), len(texts[0])
        rows = [state.row(() if self.blind else text[start:]) for text in texts]
        logits = torch.stack([self.toy.target_logits(text) for text in texts])
        changed, dead = transform_logits(logits, rows)
        assert not dead.any()
        return probs_from_logits(changed, SamplingRows.of([self.params] * len(texts)))

    def draft_slot(self, text, drafted):
        candidates, logits = self.toy.draft_slot(text, drafted)
        if self.masks:
            row = self.state(text).row(drafted)
            logits = transform_logits(logits[None], [row], candidates[None])[0][0]
        return candidates, probs_from_logits(logits[None], SamplingRows.of([self.params]))[0]

    def plain_probs(self, text):
        logits = self.toy.target_logits(text).tolist()
        denied = forbidden(text, self.toy.vocab) if self.params.guided else ()
        changed = plain_logits(logits, PROMPT, text, self.params, (END,), denied)
        return plain_probs(changed, self.params)


KINDS = {
    "penalties": {
        "presence_penalty": 1.1, "frequency_penalty": 0.6, "repetition_penalty": 1.7,
    },
    "rewards": {"presence_penalty": -0.8, "frequency_penalty": -1.3, "repetition_penalty": 0.6},
    "greedy penalties": {"frequency_penalty": 1.5, "temperature": 0.0},
    "bias and ban": {"logit_bias": {0: 1.5, 1: -2.0}, "banned_token_ids": (2,), "top_k": 2},
    "min_tokens": {"min_tokens": 3},
    "grammar": {"guided": Guided.regex("a toy")},
    "all": {
        "frequency_penalty": 0.9, "logit_bias": {1: 1.0}, "temperature": 1.4, "top_p": 0.9,
        "guided": Guided.regex("a toy"),
    },
}  # fmt: skip


def request(kind, **changes):
    toy = Toy(vocab=3, block=2, seed=21, candidates=2)
    return Constrained(toy, SamplingParams(**KINDS[kind]), **changes)


@pytest.mark.parametrize("masks", [True, False], ids=["masked", "offered"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_is_the_targets(kind, masks):
    assert worst((request(kind, masks=masks),), fixed(2)) < EXACT


def test_beside_a_plain_request_under_a_scheduler():
    plain = Request(Toy(vocab=3, block=2, seed=4), OTHER)
    assert worst((request("all"), plain), lagged(1)) < EXACT


@pytest.mark.parametrize("kind", ["penalties", "rewards", "min_tokens"])
def test_mutation_rows_that_ignore_the_draft(kind):
    """Penalties that count the text alone, as engines have had it, are seen."""
    assert worst((request(kind, blind=True),), fixed(2)) > 1e-2


@pytest.mark.parametrize("kind", ["grammar", "min_tokens", "bias and ban"])
def test_mutation_drafts_cut_at_what_is_forbidden(kind):
    """The draft is drawn without a mask, and what the target forbids dropped from it."""
    own = request(kind, masks=False)

    def cut(state, drafts):
        lengths = []
        for draft in drafts:
            legal = 0
            for slot, token in enumerate(draft.tokens):
                if own.plain_probs(draft.text + draft.tokens[:slot])[token] == 0:
                    break
                legal = slot + 1
            lengths.append(min(legal, draft.max_admit))
        return lengths, None

    assert worst((own,), cut) > 1e-3
