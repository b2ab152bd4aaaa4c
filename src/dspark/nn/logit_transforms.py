"""What a request does to its logits before temperature and truncation, at every row of a block.

In this order, that of vLLM: logit bias; repetition, frequency and presence penalties; then what is
forbidden (bans, ends before `min_tokens`, a grammar) at minus infinity. A row stands behind drafted
tokens, so penalties count them, and a grammar follows them. Drafter and verifier call the same
function, one on candidates, one on the whole vocabulary; a request that asks for none of this has
no `LogitState`, and a batch of such requests never comes here.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark.core.sampling import SamplingParams


class Grammar(Protocol):
    """Follows one request's text, and looks ahead along drafts."""

    def allowed(self, drafted: tuple[int, ...]) -> Tensor | None:
        """bool [V], what may follow the text and then `drafted`; None: `drafted` itself may not."""
        ...

    def commit(self, tokens: Sequence[int]) -> None:
        """`tokens` now belong to the text."""
        ...


@dataclass(frozen=True, slots=True)
class LogitRow:
    """One row of logits: whose it is, and what lies between its text and the row."""

    state: "LogitState"
    drafted: tuple[int, ...]
    allowed_V: Tensor | None
    """What the grammar allows; None without one, and behind a draft that it forbids, where no text
    ever gets to."""


class LogitState:
    """What one request asks for, and what it remembers of its text for that."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        *,
        end_token_ids: Collection[int],
        grammar: Grammar | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """`end_token_ids` end the text; they are forbidden before `params.min_tokens`."""

        def mark(tokens: Collection[int]) -> Tensor:
            marks_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            marks_V[torch.tensor(list(tokens), dtype=torch.int64, device=device)] = True
            return marks_V

        self.params = params
        self.grammar = grammar
        self.generated = 0
        self.penalised = _penalised(params)
        self.counts_V = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self.prompt_V = mark(prompt)
        self.banned_V = mark(params.banned_token_ids)
        self.ends_V = mark(end_token_ids)
        self.bias_V = torch.zeros(vocab_size, dtype=torch.float64, device=device)
        for token, bias in params.logit_bias.items():
            self.bias_V[token] = bias

    @staticmethod
    def wanted_by(params: SamplingParams) -> bool:
        return bool(
            params.logit_bias
            or params.banned_token_ids
            or params.min_tokens
            or params.guided is not None
            or _penalised(params)
        )

    def row(self, drafted: Sequence[int] = ()) -> LogitRow:
        """The row behind `drafted`. Whatever the grammar raises comes out here."""
        ahead = tuple(drafted)
        return LogitRow(self, ahead, None if self.grammar is None else self.grammar.allowed(ahead))

    def commit(self, tokens: Sequence[int]) -> None:
        """`tokens` were generated; the text goes on after them."""
        self.generated += len(tokens)
        if self.penalised:
            index = torch.tensor(tokens, device=self.counts_V.device)
            self.counts_V.index_add_(0, index, torch.ones_like(index, dtype=torch.int32))
        if self.grammar is not None:
            self.grammar.commit(tokens)


def transform_logits(
    logits_MX: Tensor, rows: Sequence[LogitRow | None], ids_MX: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Changed logits [M, X], and which rows have nothing left that is allowed: bool [M].

    Columns are all token ids, or those of `ids_MX`. Rows that are None stay as they are, and so do
    those with nothing left, so that they have a distribution: of a drafter's candidates any may be
    offered and is rejected; a target's row is an error if a text gets there. The given tensor is
    not changed. A row's result does not depend on the others.
    """
    dead_M = torch.zeros(len(rows), dtype=torch.bool, device=logits_MX.device)
    own = [(m, row) for m, row in enumerate(rows) if row is not None]
    if not own:
        return logits_MX, dead_M
    index_P = torch.tensor([m for m, _ in own], device=logits_MX.device)
    columns = _Columns([row for _, row in own], None if ids_MX is None else ids_MX[index_P])
    given_PX = logits_MX[index_P]
    forbidden_PX = columns.forbidden()
    dead_P1 = forbidden_PX.all(-1, keepdim=True)
    changed_PX = columns.penalised(columns.biased(given_PX)).masked_fill(forbidden_PX, -torch.inf)
    changed_PX = torch.where(dead_P1, given_PX, changed_PX)
    dead_M[index_P] = dead_P1[:, 0]
    return logits_MX.index_copy(0, index_P, changed_PX), dead_M


class _Columns:
    """Per-token tables of P rows, at all columns or at given token ids."""

    def __init__(self, rows: Sequence[LogitRow], ids_PX: Tensor | None) -> None:
        self.rows = rows
        self.states = list(dict.fromkeys(row.state for row in rows))
        places = {id(state): index for index, state in enumerate(self.states)}
        device = rows[0].state.counts_V.device
        self.owner_P = torch.tensor([places[id(row.state)] for row in rows], device=device)
        self.ids_PX = ids_PX

    def biased(self, logits_PX: Tensor) -> Tensor:
        if not any(state.params.logit_bias for state in self.states):
            return logits_PX
        bias_PX = self._at([state.bias_V for state in self.states])
        return logits_PX + bias_PX.to(logits_PX.dtype)

    def penalised(self, logits_PX: Tensor) -> Tensor:
        if not any(state.penalised for state in self.states):
            return logits_PX

        def column(name: str) -> Tensor:
            values = [getattr(row.state.params, name) for row in self.rows]
            return logits_PX.new_tensor(values)[:, None]

        counts_PX = self._at([state.counts_V for state in self.states]) + self._drafted()
        prompt_PX = self._at([state.prompt_V for state in self.states])
        counts_PX = counts_PX.to(logits_PX.dtype)
        factor_P1 = column("repetition_penalty")
        repeated_PX = torch.where(logits_PX > 0, logits_PX / factor_P1, logits_PX * factor_P1)
        logits_PX = torch.where(prompt_PX | (counts_PX > 0), repeated_PX, logits_PX)
        logits_PX = logits_PX - column("frequency_penalty") * counts_PX
        return logits_PX - column("presence_penalty") * (counts_PX > 0)

    def forbidden(self) -> Tensor:
        forbidden_PX = self._at([state.banned_V for state in self.states])
        early_P1 = torch.tensor(
            [
                [row.state.generated + len(row.drafted) < row.state.params.min_tokens]
                for row in self.rows
            ],
            device=forbidden_PX.device,
        )
        if early_P1.any():
            forbidden_PX = forbidden_PX | (self._at([s.ends_V for s in self.states]) & early_P1)
        if any(row.allowed_V is not None for row in self.rows):
            everything = torch.ones_like(self.states[0].banned_V)
            allowed_PV = torch.stack(
                [everything if row.allowed_V is None else row.allowed_V for row in self.rows]
            )
            allowed_PX = allowed_PV if self.ids_PX is None else allowed_PV.gather(1, self.ids_PX)
            forbidden_PX = forbidden_PX | ~allowed_PX
        return forbidden_PX

    def _at(self, tables: list[Tensor]) -> Tensor:
        """[P, X] of one table [V] a state."""
        table_UV = torch.stack(tables)
        if self.ids_PX is None:
            return table_UV[self.owner_P]
        return table_UV[self.owner_P[:, None], self.ids_PX]

    def _drafted(self) -> Tensor:
        """How often [P, X] each token stands in its row's drafted tokens: int32."""
        pairs = [(p, token) for p, row in enumerate(self.rows) for token in row.drafted]
        vocab, device = len(self.states[0].counts_V), self.owner_P.device
        counts_PV = torch.zeros(len(self.rows), vocab, dtype=torch.int32, device=device)
        if pairs:
            p, tokens = torch.tensor(pairs, device=device).T
            ones = torch.ones(len(pairs), dtype=torch.int32, device=device)
            counts_PV.index_put_((p, tokens), ones, accumulate=True)
        return counts_PV if self.ids_PX is None else counts_PV.gather(1, self.ids_PX)


def _penalised(params: SamplingParams) -> bool:
    return (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
    )
