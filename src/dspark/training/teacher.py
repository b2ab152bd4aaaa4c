"""Teacher ranks run the target, drafter ranks train (paper, section 5.1: hidden states are sent).

A teacher sends the tapped features of the context rows of a drafter's blocks and the final hidden
states at the sampled slots, each once and in bfloat16; the LM head runs where the loss is. Both
sides draw the same batches from the same seed, so that nothing but rows is sent: shapes and order
are known. While a step is trained the teachers work on the next. Rows go from host to host,
whatever either side computes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dspark.data.anchors import Int64Array
from dspark.data.packing import BatchStream, Cursor, PackedBlocks, TrainingSequence
from dspark.data.template import TokenIds
from dspark.training.batch import slot_sources
from dspark.training.features import FeatureSource
from dspark.training.interrupt import deferred_interrupt
from dspark.training.ranks import Command, Ranks
from dspark.training.schedule import validation_rounds

Rows = tuple[Tensor, Tensor]
"""bfloat16 taps [N, F] of the context rows and final states [U, D] of one sequence."""

_ROW_BYTES = 2  # of a bfloat16


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that teachers send, and what it would be with the target's logits."""

    context_token: int
    """A context row's tapped features; logits would not replace them."""
    state: int
    """A sampled position's final hidden state."""
    logits: int
    """The same position's logits in bfloat16."""

    @classmethod
    def of(cls, *, features: int, hidden_size: int, vocab_size: int) -> "Traffic":
        """Of rows of so many tapped features, final states and logits."""
        return cls(features * _ROW_BYTES, hidden_size * _ROW_BYTES, vocab_size * _ROW_BYTES)

    def __str__(self) -> str:
        return (
            f"teachers send {self.context_token:,} bytes a context token and {self.state:,} a "
            f"sampled position, where logits would be {self.logits:,} "
            f"({self.logits / self.state:.0f} times as many)"
        )


class Received:
    """The `Features` of a drafter rank: rows as the teachers send them, in the order of a batch."""

    def __init__(self, ranks: Ranks, *, features: int, hidden_size: int) -> None:
        self.ranks, self.features, self.hidden_size = ranks, features, hidden_size
        self._sequence = 0

    def context(self, token_ids: TokenIds, count: int) -> Tensor:
        return self._receive(count, self.features)

    def final(self, token_ids: TokenIds, positions_M: Int64Array) -> Tensor:
        states_MD = self._receive(len(positions_M), self.hidden_size)
        self._sequence += 1
        return states_MD

    def start_batch(self) -> None:
        """The next row is of the first sequence of a batch, which is teacher 0's."""
        self._sequence = 0

    def _receive(self, rows: int, width: int) -> Tensor:
        # As bytes: backends differ in which number types they carry.
        data = torch.empty(rows, width, dtype=torch.bfloat16)
        if rows:
            teacher = self.ranks.drafters + self._sequence % self.ranks.teachers
            dist.recv(data.view(torch.uint8), src=teacher)
        return data


class Teacher:
    """One teacher rank: does what rank 0 says until it says that the run has ended."""

    def __init__(
        self,
        ranks: Ranks,
        source: FeatureSource,
        stream: BatchStream,
        held_out: Sequence[TrainingSequence],
        validation: Sequence[PackedBlocks],
    ) -> None:
        self.ranks, self.source, self.stream = ranks, source, stream
        self.held_out, self.validation = held_out, validation

    def serve(self) -> None:
        ahead: tuple[Cursor, list[list[Rows]]] | None = None
        # Ctrl-C reaches every rank; the drafters finish their step, for which they need this one.
        with deferred_interrupt():
            while True:
                command, cursor = self.ranks.listen()
                if command == Command.END:
                    return
                if command == Command.VALIDATION:
                    for taken in validation_rounds(len(self.validation), self.ranks.drafters):
                        for drafter, index in enumerate(taken):
                            self._send(drafter, self._rows(self.validation[index], self.held_out))
                    continue
                if ahead is None or ahead[0] != cursor:
                    self.stream.cursor = cursor
                    ahead = cursor, self._next_step()
                for drafter, rows in enumerate(ahead[1]):
                    self._send(drafter, rows)
                ahead = self.stream.cursor, self._next_step()

    def _next_step(self) -> list[list[Rows]]:
        """This teacher's rows of the batch at the cursor, for each drafter."""
        whole = self.stream.next_batch()
        return [
            self._rows(self.ranks.share(whole, drafter), self.stream.sequences)
            for drafter in range(self.ranks.drafters)
        ]

    def _rows(self, packed: PackedBlocks, sequences: Sequence[TrainingSequence]) -> list[Rows]:
        """Of every `teachers`-th sequence of a drafter's batch, each read as far as it is seen."""
        first, every = self.ranks.rank - self.ranks.drafters, self.ranks.teachers
        needed = []
        for s in range(first, len(packed.sequences_S), every):
            positions_U = np.unique(slot_sources(packed, s))
            count = int(packed.context_starts[s + 1] - packed.context_starts[s])
            ids = sequences[packed.sequences_S[s]].token_ids[: positions_U[-1] + 1]
            needed.append((ids, count, positions_U))
        if not needed:
            return []
        found = self.source([ids for ids, _, _ in needed])
        rows: list[Rows] = []
        for (_, count, positions_U), (taps_TF, final_TD) in zip(needed, found, strict=True):
            sampled_U = torch.from_numpy(positions_U).to(final_TD.device)
            rows.append((_sent(taps_TF[:count]), _sent(final_TD[sampled_U])))
        return rows

    def _send(self, drafter: int, rows: Sequence[Rows]) -> None:
        for pair in rows:
            for tensor in pair:
                if len(tensor):
                    dist.send(tensor.contiguous().view(torch.uint8), dst=drafter)


def _sent(rows: Tensor) -> Tensor:
    return rows.to("cpu", torch.bfloat16)
