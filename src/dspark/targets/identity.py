"""What a target is recognised by: hashes that a drafter's bundle stores and a loader compares."""

import hashlib

import torch
from torch import Tensor

_SAMPLED_ROWS = 256


def embedding_hash(embedding_VD: Tensor) -> str:
    """sha256 over up to 256 evenly spaced rows of the embedding, as float16 bytes, and its shape.

    Rows are enough to tell models apart and cheap at any size; float16 so that the same model
    stored in bfloat16, float16 or float32 (rounded from either) usually keeps its name.
    """
    # In whole numbers: how torch.linspace rounds depends on the processor.
    rows = (torch.arange(_SAMPLED_ROWS) * (len(embedding_VD) - 1) // (_SAMPLED_ROWS - 1)).unique()
    sample = embedding_VD.detach()[rows].to("cpu", torch.float16).contiguous()
    digest = hashlib.sha256(str(tuple(embedding_VD.shape)).encode())
    digest.update(sample.numpy().tobytes())
    return digest.hexdigest()
