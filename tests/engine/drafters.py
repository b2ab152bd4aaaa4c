"""Drafters for tests of the engine: one that knows the target, one that knows nothing."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from dspark.drafters.proposals import entropy
from dspark.nn.kv_cache import KVShape, KVStore
from dspark.nn.pages import PageTable
from dspark.nn.sampling import SamplingRows, probs_from_logits, race
from dspark.nn.seams import DraftBlock


class _Drafter:
    """Checks law 7 in every draft: each position before the anchor has exactly one context entry,
    made of the right token's features.

    It taps the embedding, and keeps (position, next token, first feature) as its context K/V.
    Which text a table belongs to it looks up in the engine, which real drafters cannot.
    """

    kv_shape = KVShape((1,), (2,), (1,))
    tap_layers = (-1,)

    def __init__(self, block_size: int, embedding_VD: Tensor) -> None:
        self.block_size = block_size
        self.embedding_VD = embedding_VD
        self.engine = None
        self.drafts = 0
        self.extended = 0

    def shortened(self, block_size):
        return self  # a longer block than the policy verifies is as right

    def extend_context(
        self,
        taps_NF: Tensor,
        next_tokens_N: Tensor,
        positions_N: Tensor,
        slots_N: Tensor,
        store: KVStore,
    ) -> None:
        assert taps_NF.shape == (len(positions_N), self.embedding_VD.shape[1])
        self.extended += len(positions_N)
        # 1 is added so that an entry nobody wrote, or of another position, cannot look right.
        entries = torch.stack([positions_N + 1.0, next_tokens_N.float()], 1)
        store.write(0, slots_N, entries[:, None], taps_NF[:, :1, None])

    def text(self, table: PageTable) -> list[int]:
        state = next(state for state in self.engine.running if state.table is table)
        return [*state.request.prompt, *state.output]

    def draft(
        self,
        anchors_R: Tensor,
        anchor_positions_R: Tensor,
        tables: Sequence[PageTable],
        store: KVStore,
        *,
        texts,
        sampling,
        noise,
        adjust=None,
    ) -> DraftBlock:
        self.drafts += 1
        assert list(map(list, texts)) == [self.text(table) for table in tables]
        for r, (text, table) in enumerate(zip(texts, tables, strict=True)):
            length = int(anchor_positions_R[r])
            assert length == len(text) - 1 and int(anchors_R[r]) == text[-1]
            keys, values = store.read(0, table, length, length)
            assert torch.equal(keys[:, 0, 0], torch.arange(length) + 1.0)
            assert keys[:, 0, 1].tolist() == text[1:]
            assert torch.equal(values[:, 0, 0], self.embedding_VD[text[:-1], 0])
        vocab = len(self.embedding_VD)
        candidates = torch.arange(vocab).expand(len(texts), vocab)
        rows = SamplingRows.of(sampling)
        tokens, probs, entropies = [], [], []
        for slot in range(self.block_size):
            logits_RC = self.logits(texts).double()
            entropies.append(entropy(logits_RC))
            if adjust is not None:
                drafted = torch.stack(tokens, 1) if tokens else torch.empty(len(texts), 0).long()
                logits_RC = adjust(drafted, candidates, logits_RC)
            probs_RC = probs_from_logits(logits_RC, rows)
            drawn = candidates.gather(1, race(probs_RC, noise(slot, candidates))[:, None])[:, 0]
            texts = [[*text, token] for text, token in zip(texts, drawn.tolist(), strict=True)]
            tokens.append(drawn)
            probs.append(self.said(probs_RC))
        block = torch.stack(probs, 1)
        return DraftBlock(
            tokens_RK=torch.stack(tokens, 1),
            candidates_RKC=candidates[:, None].expand(-1, self.block_size, -1),
            probs_RKC=block,
            confidence_RK=block.amax(-1).logit(eps=1e-6).float(),
            entropy_RK=torch.stack(entropies, 1),
        )

    def logits(self, texts: list[list[int]]) -> Tensor:
        """Draft logits [R, V] after each text."""
        raise NotImplementedError

    def said(self, probs_RC: Tensor) -> Tensor:
        """The probabilities the block claims its tokens were drawn from."""
        return probs_RC


class RandomDrafter(_Drafter):
    """Logits that have nothing to do with the target; `lies` claims other probabilities."""

    def __init__(self, *args, lies: bool = False) -> None:
        super().__init__(*args)
        self.lies = lies

    def logits(self, texts: list[list[int]]) -> Tensor:
        vocab = len(self.embedding_VD)
        rows = [np.random.default_rng([7, *text]).normal(size=vocab) for text in texts]
        return 1.5 * torch.from_numpy(np.stack(rows))

    def said(self, probs_RC: Tensor) -> Tensor:
        return torch.full_like(probs_RC, 1.0 / probs_RC.shape[1]) if self.lies else probs_RC


class TeacherDrafter(_Drafter):
    """The target's own logits, spoilt at a share `errors` of the positions."""

    def __init__(self, *args, model, errors: float) -> None:
        super().__init__(*args)
        self.model = model
        self.errors = errors

    def logits(self, texts: list[list[int]]) -> Tensor:
        rows = [next_logits(self.model, tuple(text)) for text in texts]
        for index, text in enumerate(texts):
            if np.random.default_rng([8, *text]).random() < self.errors:
                rows[index] = rows[index].roll(1)
        return torch.stack(rows)


@cache
def next_logits(model, text: tuple[int, ...]) -> Tensor:
    """The model's own logits [V] after `text`; most tests read the same texts."""
    with torch.inference_mode():
        return model(torch.tensor([text]), logits_to_keep=1).logits[0, -1]


class NeverRight(_Drafter):
    """Proposes, with certainty, a token that greedy decoding never emits."""

    def logits(self, texts: list[list[int]]) -> Tensor:
        logits = torch.full((len(texts), len(self.embedding_VD)), -50.0)
        logits[:, 0] = 50.0
        return logits
