"""The entropy beside each confidence: of what, and of which tokens it knows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.core.sampling import SamplingParams
from dspark.drafters import proposals, serving
from dspark.drafters.captured import CapturedDrafter
from dspark.drafters.serving import DSparkDrafter
from dspark.nn.recorder import Recorder
from dspark.nn.seams import DraftBlock
from tests.drafters.tiny import Served, features, tiny_binding, tiny_config, tiny_model
from tests.drafters.tiny import uniform_noise as likeliest

BINDING = tiny_binding(tiny_config())
CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 2e-5}
PLAIN = SamplingParams(temperature=1.0)
KINDS = ["vanilla", "gated", "rnn"]


def eager(kind: str, **options: Any) -> DSparkDrafter:
    model = tiny_model(tiny_config(markov_head_type=kind))
    return DSparkDrafter(model, BINDING, **{"candidates": 8, **options})


def captured(kind: str) -> DSparkDrafter:
    model = tiny_model(tiny_config(markov_head_type=kind))
    return CapturedDrafter(model, BINDING, capture=Recorder(), candidates=8)


def draft(
    drafter: DSparkDrafter,
    sampling: SamplingParams = PLAIN,
    noise: Callable[[int, Tensor], Tensor] = likeliest,
    adjust: Any = None,
) -> DraftBlock:
    served = Served.of(drafter)
    table = served.admit(features(drafter.config, 9))
    return drafter.draft(
        torch.tensor([7]), torch.tensor([9]), [table], served.store,
        texts=[[0] * 9 + [7]], sampling=[sampling], noise=noise, adjust=adjust,
    )  # fmt: skip


def entropies(block: DraftBlock) -> Tensor:
    assert block.entropy_RK is not None and block.entropy_RK.dtype == torch.float32
    return block.entropy_RK[0]


@pytest.mark.parametrize("candidates", [0, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_that_of_what_the_drafter_draws_from_at_temperature_1(
    kind: str, candidates: int
) -> None:
    block = draft(eager(kind, candidates=candidates))
    for slot, probs_C in enumerate(block.probs_RKC[0]):
        plain = -sum(p * torch.tensor(p).double().log().item() for p in probs_C.tolist())
        assert float(entropies(block)[slot]) == pytest.approx(plain, abs=1e-5)
    assert len({round(value, 4) for value in entropies(block).tolist()}) == len(entropies(block))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.3),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.5, min_p=0.3),
    ],
    ids=["greedy", "cold", "top-k", "top-p"],
)
@pytest.mark.parametrize("make", [eager, captured])
def test_temperature_and_truncation_change_nothing(
    make: Callable[..., DSparkDrafter], sampling: SamplingParams
) -> None:
    """The likeliest token is drawn each time, so that the tokens are the same."""
    expected, block = draft(eager("vanilla")), draft(make("vanilla"), sampling)
    assert torch.equal(block.tokens_RK, expected.tokens_RK)
    assert not torch.allclose(block.probs_RKC, expected.probs_RKC)
    torch.testing.assert_close(entropies(block), entropies(expected), **CLOSE)


def test_what_a_request_forbids_is_not_in_it() -> None:
    """As little as in the confidence: both are the drafter's own."""

    def first_only(drafted_Rk: Tensor, ids_RC: Tensor, logits_RC: Tensor) -> Tensor:
        masked_RC = torch.full_like(logits_RC, -torch.inf)
        masked_RC[:, 0] = logits_RC[:, 0]
        return masked_RC if drafted_Rk.shape[1] == 0 else logits_RC

    block = draft(eager("vanilla"), adjust=first_only)
    assert block.probs_RKC[0, 0].tolist() == [1.0] + [0.0] * 7
    torch.testing.assert_close(entropies(block)[0], entropies(draft(eager("vanilla")))[0], **CLOSE)


def test_a_certain_slot_has_none_and_an_even_one_has_all() -> None:
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf], [1.0, 1.0, 1.0]])
    assert proposals.entropy(logits).tolist() == pytest.approx([0.0, 1.0986123])


def test_there_is_none_without_a_confidence_head() -> None:
    config = tiny_config(enable_confidence_head=False, confidence_head_with_markov=False)
    block = draft(DSparkDrafter(tiny_model(config), BINDING, candidates=8))
    assert block.confidence_RK is None and block.entropy_RK is None


def knows_its_own_token(drafter: DSparkDrafter) -> bool:
    """Whether an entropy, or a confidence, changes with what is drawn at its slot or after it."""
    first = draft(drafter)
    assert first.confidence_RK is not None
    K, seen = drafter.block_size, 0
    for slot in range(K):

        def other(at: int, ids_RC: Tensor, slot: int = slot) -> Tensor:
            noise = likeliest(at, ids_RC)
            if at >= slot:  # the token that won loses
                noise[:, first.candidates_RKC[0, at] == first.tokens_RK[0, at]] = 1e9
            return noise

        block = draft(drafter, noise=other)
        assert torch.equal(block.tokens_RK[:, :slot], first.tokens_RK[:, :slot])
        assert block.tokens_RK[0, slot] != first.tokens_RK[0, slot]
        assert block.confidence_RK is not None
        for own, old in (
            (entropies(block), entropies(first)),
            (block.confidence_RK[0], first.confidence_RK[0]),
        ):
            if not torch.equal(own[: slot + 1], old[: slot + 1]):
                return True
            seen += not torch.equal(own[slot + 1 :], old[slot + 1 :])
    assert seen == 2 * (K - 1), "later slots must have seen the token"
    return False


@pytest.mark.parametrize("make", [eager, captured])
@pytest.mark.parametrize("kind", KINDS)
def test_it_reads_the_tokens_before_its_slot_and_no_other(
    kind: str, make: Callable[..., DSparkDrafter]
) -> None:
    assert not knows_its_own_token(make(kind))


@pytest.mark.parametrize("make", [eager, captured])
def test_mutation_the_entropy_of_the_slot_after(
    make: Callable[..., DSparkDrafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "entropy", lambda logits: proposals.entropy(logits.roll(-1, 1)))
    assert knows_its_own_token(make("vanilla"))
