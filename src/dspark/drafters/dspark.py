"""The DSpark draft model: parallel backbone, Markov head, confidence head (paper, section 3)."""

import torch
from torch import Tensor, nn

from dspark.drafters.backbone import Backbone
from dspark.drafters.config import DSparkConfig
from dspark.drafters.heads.confidence import ConfidenceHead
from dspark.drafters.heads.markov import MarkovHead


class DSparkModel(Backbone):
    """What is trained and stored. Embedding and LM head are the target's and live in the `Binding`.

    Without a Markov head (`markov_rank` 0) this is DeepSpec's DFlash. Parameters are float32; run
    under `torch.autocast` for bf16 matrices.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = (
            MarkovHead(config.vocab_size, config.markov_rank) if config.markov_rank else None
        )
        confidence_rank = config.markov_rank if config.has_markov_confidence else 0
        self.confidence_head = (
            ConfidenceHead(config.hidden_size, confidence_rank)
            if config.enable_confidence_head
            else None
        )

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Raw confidence logits [...] of hidden states [..., D], after tokens `previous` [...]."""
        assert self.confidence_head is not None, "no confidence head"
        embedded = None
        if self.config.has_markov_confidence:
            assert self.markov_head is not None
            embedded = self.markov_head.embed(previous)
        return self.confidence_head(hidden, embedded)


@torch.no_grad()
def initialise(model: DSparkModel, generator: torch.Generator, std: float = 0.02) -> None:
    """DeepSpec's start: every matrix N(0, std^2), biases 0, norms 1."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(0.0, std, generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.zero_()
