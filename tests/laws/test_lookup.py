"""Law 1 for prompt lookup: certain proposals through production code keep the target's law."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dspark.core.sampling import SamplingParams
from dspark.drafters.lookup import PromptLookup
from tests.laws.harness import Request, distance, run_law, target_law
from tests.laws.toys import Text, Toy

LENGTH = 4
LOOKUP = PromptLookup(3, longest=3, shortest=1)


@dataclass(frozen=True)
class LookupRequest(Request):
    """Its drafts are `PromptLookup`'s, over a prompt and the text so far."""

    prompt: Text = ()
    claimed: float = 1.0
    """The draft probability that the block says its tokens have."""

    def __hash__(self) -> int:
        return id(self)

    def block(self, text: Text) -> Text:
        whole = [*self.prompt, *text]
        block = LOOKUP.draft(
            torch.tensor([whole[-1]]), torch.tensor([len(whole) - 1]), [], None,
            texts=[whole], sampling=[self.params], noise=None,
        )  # fmt: skip
        assert torch.equal(block.probs_RKC, torch.ones_like(block.probs_RKC))
        return tuple(block.tokens_RK[0, : int(block.lengths_R[0])].tolist())

    def drafts(self, text: Text) -> tuple[tuple[Text, float], ...]:
        return ((self.block(text), 1.0),)

    def draft_slot(self, text: Text, drafted: Text) -> tuple[Tensor, Tensor]:
        token = self.block(text)[len(drafted)]
        return torch.tensor([token]), torch.tensor([self.claimed], dtype=torch.float64)


def admit_all(state, drafts):
    return [min(len(draft.tokens), draft.max_admit) for draft in drafts], None


def requests(sampling, claimed=1.0):
    first = LookupRequest(
        Toy(vocab=2, block=3, seed=3), SamplingParams(**sampling), (0, 1, 1, 0), claimed
    )
    second = LookupRequest(Toy(vocab=3, block=3, seed=4), SamplingParams(), (2, 0, 2, 1), claimed)
    return first, second


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 0.6, "top_k": 2}])
def test_lossless(sampling):
    pair = requests(sampling)
    offered = [len(tokens) for text in ((0,), (1,)) for tokens, _ in pair[0].drafts(text)]
    assert max(offered) == 3, "something must be proposed"
    assert distance(run_law(pair, LENGTH, admit_all), target_law(pair, LENGTH)) < 1e-12


def test_mutation_a_certain_token_that_claims_to_be_less_likely():
    pair = requests({}, claimed=0.5)
    assert distance(run_law(pair, LENGTH, admit_all), target_law(pair, LENGTH)) > 1e-2
