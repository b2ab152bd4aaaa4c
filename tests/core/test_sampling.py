import numpy as np
import pytest

from dspark.core.errors import ConfigError
from dspark.core.sampling import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 1.5), ("top_k", 2.5), ("max_new_tokens", 2.5), ("max_new_tokens", float("nan"))],
)
def test_counts_and_seeds_are_whole_numbers(name, value):
    """A seed of 1.5 would silently be that of 1, and a text of 2.5 tokens would never end."""
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be a whole number"):
        SamplingParams(**{name: value})


def test_whole_numbers_of_numpy_are_welcome():
    params = SamplingParams(seed=np.int64(7), top_k=np.int32(3), max_new_tokens=np.uint8(9))
    assert params.rule == "coupled"
