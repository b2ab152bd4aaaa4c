import pytest
import torch

from dspark.core.errors import ConfigError
from dspark.recipes.values import set_threads


@pytest.mark.parametrize("threads", [0, -2, 100_000])
def test_threads_that_no_machine_has(threads):
    """Each thread takes memory for its stack: a mistyped number must not be tried."""
    before = torch.get_num_threads()
    with pytest.raises(ConfigError, match=f"threads is {threads}; it must be in"):
        set_threads(threads)
    assert torch.get_num_threads() == before


def test_threads():
    before = torch.get_num_threads()
    try:
        set_threads(2)
        assert torch.get_num_threads() == 2
        set_threads(None)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
