"""The seams between rooms: target, drafter, their KV cache, and the binding that joins them.

`targets` and `drafters` never name each other. `recipes` builds a `Binding` from a target, gives it
to a drafter, and hands both to `engine`, which knows only the protocols below.

Shape legend, used all over the torch rooms:
    N  rows (tokens) of one ragged step, grouped by request, positions ascending inside a request
    M  rows of the step at which logits were asked for
    R  requests of the step            K  block size: draft tokens proposed per round and request
    C  draft candidates per slot       V  vocabulary
    D  hidden size of the target       F  tapped features: len(tap_layers) * D
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import torch
from torch import Tensor

from dspark.core.sampling import SamplingParams
from dspark.nn.kv_cache import KVShape, KVStore
from dspark.nn.pages import PageTable


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The rows of one step: decode, verification of any length and prefill chunks are all the same.

    Request r owns rows `starts[r]:starts[r + 1]`, at consecutive positions that end at
    `context_lengths[r]`; its cache already holds every earlier position.
    """

    tokens_N: Tensor
    """int64 token ids."""
    positions_N: Tensor
    """int64 absolute positions."""
    requests_N: Tensor
    """int64 marker: which request a row belongs to (paper, section 5.3)."""
    slots_N: Tensor
    """int64 KV slot each row's key and value are written to."""
    starts: tuple[int, ...]
    """R + 1 row offsets."""
    context_lengths: tuple[int, ...]
    """Per request: tokens in the cache once this step's rows are written."""
    tables: tuple[PageTable, ...]
    """Per request: where its keys and values lie."""
    exact: bool = True
    """No row's result may depend on what else is in the batch (law 5): pay for the tiles."""
    prompt_from: int | None = None
    """Rows from here on are prompts, which kernels for many rows may serve; None: there are none.

    A token's row must be of the same kind whenever it is computed, or exactness ends. So pages of
    prompts are shared with other prompts only, and generated tokens that a preemption lost are
    computed again as rows before this one."""


@dataclass(frozen=True, slots=True)
class TargetOutput:
    logits_MV: Tensor
    """float32 logits at the asked rows, final scale and softcap applied."""
    taps_NF: Tensor | None
    """float32 hidden states after the tapped decoder layers, side by side in the order asked."""
    final_ND: Tensor | None
    """float32 hidden states after the final norm (what the LM head sees); only when asked for."""


class Target(Protocol):
    """A causal LM that runs one ragged step."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    kv_shape: KVShape
    device: torch.device

    def forward(
        self,
        batch: RaggedBatch,
        store: KVStore,
        *,
        logit_rows_M: Tensor,
        tap_layers: tuple[int, ...] = (),
        want_final: bool = False,
    ) -> TargetOutput:
        """Writes the rows' K/V into `store`; logits at the rows `logit_rows_M` of the batch.

        A tap is the hidden state *after* the decoder layer of that index; -1 is the embedding's.
        """
        ...


@dataclass(frozen=True, slots=True)
class Binding:
    """The little a drafter needs of its target. Frozen, shared, never stored in a bundle."""

    embedding_VD: Tensor
    """Input embedding table (float32)."""
    embedding_scale: float
    """What the target multiplies embeddings with (Gemma: sqrt(D)); 1.0 for most."""
    lm_head_VD: Tensor
    """LM head weight (float32); may be the embedding itself."""
    logit_scale: float
    """Multiplies the LM head's output; 1.0 for most."""
    logit_softcap: float | None
    """logits = softcap * tanh(logits / softcap), when set (Gemma 2)."""
    num_target_layers: int
    mask_token_id: int
    target_name: str
    embedding_hash: str
    """sha256 over the float32 bytes of a fixed sample of embedding rows (see targets.identity)."""
    chat_template_hash: str | None
    init_layers: tuple[dict[str, Tensor], ...] = field(default=(), repr=False)
    """Weights of the target's last decoder layers, to start training from; empty in serving."""

    @property
    def vocab_size(self) -> int:
        return self.embedding_VD.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.embedding_VD.shape[1]


class DraftNoise(Protocol):
    """The randomness of one draft, handed to the drafter: exponential races, see nn.sampling."""

    def __call__(self, slot: int, token_ids_RC: Tensor) -> Tensor:
        """Unit exponentials [R, C], float64, for the candidates of draft slot `slot`."""
        ...


class DraftAdjust(Protocol):
    """What requests do to their logits (`nn.logit_transforms`), handed to the drafter."""

    def __call__(self, drafted_Rk: Tensor, ids_RC: Tensor, logits_RC: Tensor) -> Tensor:
        """Logits [R, C] of the slot after the tokens drafted so far, for its candidates."""
        ...


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """One round's proposals. A token was drawn from exactly `probs_RKC` over `candidates_RKC`."""

    tokens_RK: Tensor
    """int64 proposed token ids."""
    candidates_RKC: Tensor
    """int64 token ids; distinct within a slot."""
    probs_RKC: Tensor
    """float64 draft probabilities of the candidates; any other token has probability 0."""
    confidence_RK: Tensor | None
    """float32 raw confidence logits (before calibration), or None without a confidence head."""
    entropy_RK: Tensor | None = None
    """float32 entropy, in nats, of each slot's candidates: after the sequential head and before all
    that requests ask for (bias, masks, temperature, truncation), so that greedy ones have it, too.
    It reads the tokens before its slot and never its own (law 2). There wherever confidences are.
    """
    lengths_R: Tensor | None = None
    """int64 slots that hold a proposal, a prefix of the block; None: all of them. Decided by the
    text so far and never by a token that was drawn, so that it anticipates nothing (law 2)."""
    head_seconds: float = 0.0
    """Part of the draft's wall time that its sequential head, sampling and confidences took."""

    def __post_init__(self) -> None:
        assert (self.confidence_RK is None) == (self.entropy_RK is None)


class Drafter(Protocol):
    """Proposes blocks from the text so far and the target's tapped hidden states."""

    block_size: int
    tap_layers: tuple[int, ...]
    """Empty: it keeps no context, and `extend_context` is never called."""
    kv_shape: KVShape
    """Context K/V the drafter keeps, in a store of its own that shares the target's page tables."""

    def shortened(self, block_size: int) -> Self:
        """The same drafter, weights shared, with blocks of at most `block_size` tokens: what a
        policy will never verify need not be drafted."""
        ...

    def extend_context(
        self,
        taps_NF: Tensor,
        next_tokens_N: Tensor,
        positions_N: Tensor,
        slots_N: Tensor,
        store: KVStore,
    ) -> None:
        """Features of committed positions to per-layer context K/V (paper, equation 3).

        `next_tokens_N` (int64) are the tokens one position later: what Eagle3 and MTP pair a
        feature with. The last one of a request is its next anchor.
        """
        ...

    def draft(
        self,
        anchors_R: Tensor,
        anchor_positions_R: Tensor,
        tables: Sequence[PageTable],
        store: KVStore,
        *,
        texts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        noise: DraftNoise,
        adjust: DraftAdjust | None = None,
    ) -> DraftBlock:
        """Drafts a block after each anchor (the last emitted token, whose K/V nobody has yet).

        Attends to context K/V at positions 0 .. anchor_position - 1 (strictly before the anchor).
        The tables hold `block_size` positions more, where the block's own K/V may lie meanwhile.
        `texts` are each request's tokens so far, prompt and output; the last one is its anchor.
        `adjust` keeps what a request forbids out of its draft, before sampling. A drafter may leave
        it out: then such a token is offered and rejected, which is as exact and accepts less.
        """
        ...
