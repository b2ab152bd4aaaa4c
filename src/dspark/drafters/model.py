"""What training and checkpoints know of a draft model, whichever it is.

Shape legend: A blocks of K slots over N context rows; r is the width of a sequential head's latent.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from dspark.drafters.config import DraftConfig
from dspark.nn.seams import Binding


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of several sequences, packed side by side (paper, section 5.1)."""

    context_NF: Tensor
    """Tapped features of each sequence's positions 0, 1, ..., as far as its last anchor sees."""
    context_positions_N: Tensor
    context_next_N: Tensor
    """Token ids one position after the context rows."""
    visible_AN: Tensor
    """bool: rows of the anchor's own sequence strictly before it."""
    anchors_A: Tensor
    """Token ids."""
    anchor_positions_A: Tensor
    previous_AK: Tensor
    """Teacher-forced token before each slot; slot 0 has the anchor."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Draft logits of all slots are LM head(hidden) + W2 latent, left to the chunked losses."""

    hidden_AKD: Tensor
    """After the final norm."""
    latent_AKr: Tensor | None
    w2_Vr: Tensor | None
    """Both None without a sequential head."""
    confidence_AK: Tensor | None
    """Raw logits, or None without a confidence head."""


class DraftModel(nn.Module, ABC):
    """What is trained and stored. Embedding and LM head are the target's and live in the `Binding`.

    Parameters are float32; run under `torch.autocast` for bf16 matrices.
    """

    config: DraftConfig
    latent_size: int = 0
    """r; 0 without a sequential head."""

    @abstractmethod
    def forward_slots(self, binding: Binding, blocks: Blocks) -> Slots:
        """The forward of a training step."""
