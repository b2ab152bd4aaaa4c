"""`probs_from_logits` against its plain twin, in batches that mix every kind of row."""

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dspark.core.sampling import SamplingParams
from dspark.nn import sampling
from dspark.nn.sampling import SamplingRows, probs_from_logits
from tests.oracles.plain_sampling import BorderlineError, plain_probs

VOCAB = 12

# Coarse logits make ties common; -inf is what a grammar leaves of a forbidden token.
logits_rows = st.lists(
    st.one_of(st.integers(-3, 3).map(float), st.floats(-20, 20), st.just(-torch.inf)),
    min_size=VOCAB,
    max_size=VOCAB,
).filter(lambda row: max(row) > -torch.inf)

sampling_params = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.05, 5.0)),
    top_k=st.one_of(st.just(0), st.integers(1, VOCAB + 3)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(logits_rows, sampling_params), min_size=1, max_size=5), st.integers(1, 9))
def test_probabilities_equal_the_plain_twin(rows, nucleus_guess):
    logits_MV = torch.tensor([logits for logits, _ in rows], dtype=torch.float64)
    params = [row_params for _, row_params in rows]
    try:
        expected_MV = torch.tensor(
            [plain_probs(logits, row_params) for logits, row_params in rows], dtype=torch.float64
        )
    except BorderlineError:
        assume(False)
    # A small guess makes nuclei outgrow it, which a vocabulary of 12 would never do otherwise.
    usual, sampling._NUCLEUS_GUESS = sampling._NUCLEUS_GUESS, nucleus_guess
    try:
        probs_MV = probs_from_logits(logits_MV, SamplingRows.of(params))
    finally:
        sampling._NUCLEUS_GUESS = usual
    torch.testing.assert_close(probs_MV, expected_MV, rtol=1e-9, atol=1e-12)
    assert torch.equal(probs_MV > 0, expected_MV > 0)


@settings(deadline=None, max_examples=100)
@given(st.lists(sampling_params, min_size=1, max_size=6), st.integers(0, 2**32))
def test_a_row_does_not_depend_on_its_batch(params, seed):
    logits_MV = 3 * torch.randn(
        len(params), 4000, generator=torch.Generator().manual_seed(seed), dtype=torch.float32
    )
    together_MV = probs_from_logits(logits_MV, SamplingRows.of(params))
    for m, row_params in enumerate(params):
        alone_1V = probs_from_logits(logits_MV[m : m + 1].clone(), SamplingRows.of([row_params]))
        assert torch.equal(together_MV[m], alone_1V[0])
