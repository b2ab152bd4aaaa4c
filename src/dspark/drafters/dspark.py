"""The DSpark draft model: parallel backbone, Markov head, confidence head (paper, section 3)."""

import torch
from torch import Tensor, nn

from dspark.drafters.backbone import Backbone
from dspark.drafters.config import DSparkConfig
from dspark.drafters.heads.confidence import ConfidenceHead
from dspark.drafters.heads.markov import make_head
from dspark.drafters.model import Blocks, Slots
from dspark.nn.seams import Binding


class DSparkModel(Backbone):
    """The backbone with its heads. Without a Markov head (`markov_rank` 0) this is DFlash."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.latent_size = config.markov_rank
        self.markov_head = (
            make_head(
                config.markov_head_type, config.vocab_size, config.markov_rank, config.hidden_size
            )
            if config.markov_rank
            else None
        )
        confidence_rank = config.markov_rank if config.has_markov_confidence else 0
        self.confidence_head = (
            ConfidenceHead(config.hidden_size, confidence_rank)
            if config.enable_confidence_head
            else None
        )

    def forward_slots(self, binding: Binding, blocks: Blocks) -> Slots:
        hidden_AKD = self.forward_blocks(
            binding,
            blocks.anchors_A,
            blocks.anchor_positions_A,
            blocks.context_NF,
            blocks.context_positions_N,
            blocks.visible_AN,
        )
        latent_AKr = w2_Vr = confidence_AK = None
        if self.markov_head is not None:
            latent_AKr = self.markov_head.latents(hidden_AKD, blocks.previous_AK)
            w2_Vr = self.markov_head.markov_w2.weight
        if self.confidence_head is not None:
            confidence_AK = self.confidence(hidden_AKD, blocks.previous_AK)
        return Slots(hidden_AKD, latent_AKr, w2_Vr, confidence_AK)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Raw confidence logits [...] of hidden states [..., D], after tokens `previous` [...]."""
        assert self.confidence_head is not None, "no confidence head"
        embedded = None
        if self.config.has_markov_confidence:
            assert self.markov_head is not None
            embedded = self.markov_head.embed(previous)
        return self.confidence_head(hidden, embedded)


@torch.no_grad()
def initialise(model: nn.Module, generator: torch.Generator, std: float = 0.02) -> None:
    """DeepSpec's start: every matrix N(0, std^2), biases 0, norms 1."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(0.0, std, generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.zero_()
