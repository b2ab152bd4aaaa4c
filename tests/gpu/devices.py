"""Every check runs on the CPU, and once more on CUDA where there is a card."""

import pytest
import torch

on_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
