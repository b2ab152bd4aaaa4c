"""A draft bundle in memory, and the `dspark` block that says what DeepSpec's dialect leaves out."""

import difflib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.core.errors import CheckpointError
from dspark.drafters.build import build_model
from dspark.drafters.config import DraftConfig
from dspark.drafters.model import DraftModel

FORMAT_VERSION = 1
SLOT_CONVENTION = "anchor-first"
"""Slot 0 is the anchor and predicts the token after it; `block_size` slots are `block_size`
proposals. Mixing this up with DFlash's other convention leaves an accepted length of about 1."""


CANDIDATES = 256
"""Tokens per slot that are sampled from, unless a bundle says otherwise. Fewer cost acceptance at
temperature 1 (64 a tenth of the first slot's, docs/log.md) and save nothing to be seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleInfo:
    """The `dspark` block of `config.json`."""

    target: str
    """Name of the target the drafter was trained for."""
    embedding_hash: str
    """The target's, as in `Binding.embedding_hash`."""
    target_revision: str | None = None
    chat_template_hash: str | None = None
    candidates: int = CANDIDATES
    """Draft candidates per slot to serve with; 0 is the full (draft) vocabulary."""
    draft_vocabulary: int | None = None
    """Number of token ids in `draft_tokens.safetensors`; None when all may be proposed."""
    policy: str | None = None
    """Policy to serve with where nothing better is known, as a user would write it."""
    training: dict[str, Any] = field(default_factory=dict)
    """Free-form summary of the training run."""
    slot_convention: str = SLOT_CONVENTION
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise CheckpointError(
                f"bundle format {self.format_version!r}; this version reads format {FORMAT_VERSION}"
            )
        if self.slot_convention != SLOT_CONVENTION:
            raise CheckpointError(
                f"slot convention {self.slot_convention!r}; only {SLOT_CONVENTION!r} can be served"
            )
        for name in ("target", "embedding_hash"):
            if not isinstance(getattr(self, name), str):
                raise CheckpointError(
                    f"dspark.{name} is {getattr(self, name)!r}; it must be a string"
                )
        for name in ("target_revision", "chat_template_hash", "policy"):
            if not isinstance(getattr(self, name), str | None):
                raise CheckpointError(
                    f"dspark.{name} is {getattr(self, name)!r}; it must be a string or null"
                )
        if type(self.candidates) is not int or self.candidates < 0:
            raise CheckpointError(f"dspark.candidates is {self.candidates!r}; it must be 0 or more")
        if not isinstance(self.training, dict):
            raise CheckpointError(f"dspark.training is {self.training!r}; it must be an object")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, block: object) -> "BundleInfo":
        if not isinstance(block, dict):
            raise CheckpointError("the dspark block must be an object")
        own = [item.name for item in fields(cls)]
        for key in block:
            if key not in own:
                near = difflib.get_close_matches(key, own, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise CheckpointError(f"unknown key {key!r} in the dspark block{hint}")
        for key in ("target", "embedding_hash", "slot_convention", "format_version"):
            if key not in block:
                raise CheckpointError(f"the dspark block has no {key}")
        return cls(**block)


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a bundle folder holds, checked."""

    path: Path
    config: DraftConfig
    info: BundleInfo | None
    """None for a folder that DeepSpec wrote."""
    tensors: dict[str, Tensor]
    """As stored (bit-equal), without copies of the target's tables."""
    target_copies: dict[str, Tensor]
    """DeepSpec's copies of the target's embedding and LM head, if the folder has them."""
    draft_token_ids: Tensor | None
    """int64, ascending: the draft vocabulary."""

    @property
    def candidates(self) -> int:
        return CANDIDATES if self.info is None else self.info.candidates

    def model(self) -> DraftModel:
        """A float32 model with these weights."""
        with torch.device("meta"):
            model = build_model(self.config)
        # Copies: training the model must not write into the bundle.
        weights = {
            name: tensor.to(torch.float32, copy=True) for name, tensor in self.tensors.items()
        }
        model.load_state_dict(weights, strict=True, assign=True)
        return model
