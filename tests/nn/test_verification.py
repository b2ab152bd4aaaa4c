"""`verify`: single cases, mixed batches, and a chi-square test on real random streams."""

import numpy as np
import pytest
import torch
from scipy import stats

from dspark.core.random import RequestRandom
from dspark.core.sampling import SamplingParams
from dspark.nn import verification
from dspark.nn.noise import RequestNoise, Round, StepNoise, VerificationNoise
from dspark.nn.sampling import SamplingRows, probs_from_logits, race
from dspark.nn.seams import DraftBlock
from dspark.nn.verification import verify


def one_request(target_rows, tokens, draft_rows, *, accept, emit, dtype=torch.float32):
    """Verifies one request's block, drafted from rows over the whole vocabulary."""
    vocab = len(target_rows[0])
    block = DraftBlock(
        torch.tensor([tokens]),
        torch.arange(vocab).expand(1, len(tokens), vocab),
        torch.tensor([draft_rows], dtype=torch.float64),
        None,
    )
    noise = VerificationNoise(
        torch.tensor([accept], dtype=torch.float64), torch.tensor([emit]).double(), (None,)
    )
    outcome = verify(torch.tensor(target_rows, dtype=dtype), [len(tokens)], block, noise)
    return int(outcome.accepted_R), int(outcome.next_token_R)


def test_acceptance_stops_at_the_first_failure():
    rows = [[0.5, 0.5], [0.25, 0.75], [0.5, 0.5], [1.0, 0.0]]
    draft_rows = [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]
    # Slot 1 passes below 1/2; slot 2 would pass always.
    assert one_request(rows, [0, 0, 0], draft_rows, accept=[0.9, 0.4, 0.9], emit=0.0) == (3, 0)
    assert one_request(rows, [0, 0, 0], draft_rows, accept=[0.9, 0.5, 0.0], emit=0.0) == (1, 1)


def test_the_corrected_token_comes_from_the_residual_not_the_target():
    rows = [[0.4, 0.4, 0.2], [1.0, 0.0, 0.0]]
    # (target - draft)+ = (0, 0.3, 0.1)
    for emit, token in ((0.0, 1), (0.74, 1), (0.76, 2), (0.99, 2)):
        assert one_request(rows, [0], [[0.8, 0.1, 0.1]], accept=[0.6], emit=emit) == (0, token)


def test_a_token_the_target_forbids_is_never_accepted():
    rows = [[0.0, 1.0], [1.0, 0.0]]
    assert one_request(rows, [0], [[1.0, 0.0]], accept=[0.0], emit=0.3) == (0, 1)


def test_a_residual_lost_to_rounding_falls_back_to_the_target():
    below_half = float(np.nextafter(np.float32(0.5), np.float32(0)))
    rows = [[below_half, below_half], [1.0, 0.0]]
    last = float(np.nextafter(1.0, 0.0))
    assert one_request(rows, [0], [[0.5, 0.5]], accept=[last], emit=0.9) == (0, 1)
    below_half = float(np.nextafter(0.5, 0))
    rows = [[below_half, below_half], [1.0, 0.0]]
    outcome = one_request(rows, [0], [[0.5, 0.5]], accept=[last], emit=0.9, dtype=torch.float64)
    assert outcome == (0, 1)


def test_what_lies_beyond_the_admitted_slots_is_ignored():
    rows = torch.tensor([[0.3, 0.7], [0.6, 0.4]])
    noise = VerificationNoise(
        torch.tensor([[0.2]]).double(), torch.tensor([0.59]).double(), (None,)
    )
    outcomes = set()
    for beyond in (0, 1):
        block = DraftBlock(
            torch.tensor([[1, beyond]]),
            torch.tensor([[[0, 1], [1, 0]]]),
            torch.tensor([[[0.5, 0.5], [0.1 + beyond / 2, 0.9 - beyond / 2]]]).double(),
            None,
        )
        outcome = verify(rows, [1], block, noise)
        outcomes.add((int(outcome.accepted_R), int(outcome.next_token_R)))
    assert outcomes == {(1, 0)}


VOCAB, BLOCK = 5, 3


def a_step(decoders, *, admitted, seed=0):
    """One whole step over requests given as (params, random seed): draft, noise, verification."""
    tables = np.random.default_rng(seed)
    target_logits = torch.from_numpy(tables.normal(size=(BLOCK + 1, VOCAB))).float() * 1.5
    draft_logits = torch.from_numpy(tables.normal(size=(BLOCK, VOCAB))).float()
    params = [request_params for request_params, _ in decoders]
    noise = [RequestNoise(RequestRandom(random), p, VOCAB) for p, random in decoders]
    step = StepNoise([Round(request, 1, 1) for request in noise], BLOCK)
    ids = torch.tensor([3, 0, 4, 1]).expand(len(decoders), -1)
    own = SamplingRows.of(params)
    probs = [probs_from_logits(draft_logits[k, ids].double(), own) for k in range(BLOCK)]
    winners = [race(probs[k], step(k, ids)) for k in range(BLOCK)]
    tokens = torch.stack([ids.gather(1, w[:, None])[:, 0] for w in winners], dim=1)
    block = DraftBlock(tokens, ids[:, None].expand(-1, BLOCK, -1), torch.stack(probs, 1), None)
    rows = [slot for count in admitted for slot in range(count + 1)]
    owners = [r for r, count in enumerate(admitted) for _ in range(count + 1)]
    target_probs = probs_from_logits(target_logits[rows], SamplingRows.of(params, owners))
    drafted = block if any(admitted) else None
    outcome = verify(target_probs, admitted, drafted, step.verification(admitted))
    return tokens, outcome, target_logits


MIXED = [
    (SamplingParams(verification="rejection"), 1),
    (SamplingParams(verification="coupled", top_p=0.8), 2),
    (SamplingParams(temperature=0), 3),
    (SamplingParams(verification="coupled", temperature=0), 4),
    (SamplingParams(verification="rejection", top_k=2, temperature=0.5), 5),
    (SamplingParams(verification="coupled"), 6),
]


@pytest.mark.parametrize("seed", range(20))
def test_a_request_verifies_the_same_in_any_batch(seed):
    admitted = [3, 2, 3, 1, 0, 3]
    _, together, _ = a_step(MIXED, admitted=admitted, seed=seed)
    for r, request in enumerate(MIXED):
        _, alone, _ = a_step([request], admitted=[admitted[r]], seed=seed)
        assert alone.accepted_R == together.accepted_R[r]
        assert alone.next_token_R == together.next_token_R[r]


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_greedy_accepts_the_argmax_and_corrects_to_it(rule):
    for seed in range(20):
        params = SamplingParams(temperature=0, verification=rule)
        tokens, outcome, target_logits = a_step([(params, 1)], admitted=[BLOCK], seed=seed)
        best = target_logits.argmax(-1).tolist()
        accepted = int(outcome.accepted_R)
        assert tokens[0, :accepted].tolist() == best[:accepted]
        assert accepted == BLOCK or tokens[0, accepted] != best[accepted]
        assert outcome.next_token_R == best[accepted]


SAMPLES = 3000


def p_value(rule, **sampling):
    """The smaller chi-square p-value of the first and second token emitted, over SAMPLES seeds.

    A round emits a second token when it accepts the first; the second must follow its row then.
    """
    params = SamplingParams(verification=rule, **sampling)
    tokens, outcome, target_logits = a_step(
        [(params, seed) for seed in range(SAMPLES)], admitted=[2] * SAMPLES
    )
    rows = SamplingRows.of([params] * 2)
    first, second = probs_from_logits(target_logits[:2].double(), rows).numpy()
    accepted, last = outcome.accepted_R.numpy(), outcome.next_token_R.numpy()
    emitted_first = np.where(accepted > 0, tokens[:, 0].numpy(), last)
    emitted_second = np.where(accepted > 1, tokens[:, 1].numpy(), last)[accepted > 0]
    p_values = [
        stats.chisquare(
            np.bincount(emitted, minlength=VOCAB)[probs > 0], len(emitted) * probs[probs > 0]
        ).pvalue
        for emitted, probs in ((emitted_first, first), (emitted_second, second))
    ]
    assert set(emitted_first) <= set(np.flatnonzero(first))
    return min(p_values)


# The seeds are fixed, so these either pass for good or fail for good. With other seeds, correct
# code would fall below 1e-6 in one of the 6 cases with odds of 1 : 80,000 (two p-values a case).
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6}, {"top_k": 4, "top_p": 0.9}])
def test_emitted_tokens_follow_the_target(rule, sampling):
    assert p_value(rule, **sampling) > 1e-6


def test_the_chi_square_sees_a_correction_drawn_from_the_target(monkeypatch):
    monkeypatch.setattr(verification, "_final_weights", lambda target_RV, *_: target_RV)
    assert p_value("rejection") < 1e-6
