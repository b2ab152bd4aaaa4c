import pytest
import torch

from dspark.drafters.candidates import top_candidates


@pytest.mark.parametrize("vocab", [64, 500, 4096, 4100])
@pytest.mark.parametrize("count", [1, 5, 24])
def test_values_are_those_of_a_full_sort(vocab: int, count: int) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
    values, columns = top_candidates(logits, count)
    assert torch.equal(values, logits.sort(-1, descending=True).values[:, :count])
    assert torch.equal(logits.gather(1, columns), values)


def test_columns_are_distinct_when_every_logit_is_equal() -> None:
    _, columns = top_candidates(torch.zeros(2, 5000), 20)
    assert all(len(set(row)) == 20 and max(row) < 5000 for row in columns.tolist())


def test_padding_of_the_last_chunk_is_never_a_candidate() -> None:
    _, columns = top_candidates(torch.full((1, 4097), -torch.inf), 30)
    assert int(columns.max()) < 4097
