"""The random numbers of one serving step, for drafting and for verification (DESIGN decision 8).

A draw depends on its request's own key and on nothing else in the batch. Under `coupled` the noise
of a generated-token index is the same in every round; under `rejection` every round has fresh
noise. Greedy requests need none, and get constants.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.core.random import FloatArray, RequestRandom
from dspark.core.sampling import SamplingParams

_GREEDY_UNIFORM = 0.5


class RequestNoise:
    """The noise of one choice of one request; the engine keeps one as long as the request lives.

    A `coupled` position is drafted in several rounds before it is verified, so its row is kept: at
    most block size + 1 rows of V float64.
    """

    def __init__(
        self,
        random: RequestRandom,
        params: SamplingParams,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.random = random
        self.greedy = params.temperature == 0
        self.coupled = params.rule == "coupled" and not self.greedy
        self.vocab_size = vocab_size
        self.device = device
        self._rows: dict[int, Tensor] = {}

    def at(self, position: int) -> Tensor:
        """Unit exponentials [V], float64, of the `position`-th generated token."""
        if position not in self._rows:
            self._rows[position] = self._tensor(
                self.random.coupled_exponentials(position, self.vocab_size)
            )
        return self._rows[position]

    def forget_before(self, position: int) -> None:
        """Drops the rows of tokens that are already emitted."""
        for old in [kept for kept in self._rows if kept < position]:
            del self._rows[old]

    def draft_exponentials(self, round_number: int, slots: int, count: int) -> Tensor:
        """Unit exponentials [slots, count], float64, of a `rejection` round's draft."""
        return self._tensor(self.random.round_exponentials(round_number, slots, count))

    def accept_uniforms(self, round_number: int, slots: int) -> FloatArray:
        return self.random.round_uniforms(round_number, "accept", slots)

    def emit_uniform(self, round_number: int) -> float:
        return float(self.random.round_uniforms(round_number, "emit", 1)[0])

    def _tensor(self, values: FloatArray) -> Tensor:
        return torch.from_numpy(values).to(self.device)


@dataclass(frozen=True, slots=True)
class Round:
    """One request's place in the step."""

    noise: RequestNoise
    number: int
    """Counts the request's rounds, abandoned ones included; prefill's first token is round 0."""
    index: int
    """Generated-token index of the first token this round emits; 0 is prefill's first token."""


@dataclass(frozen=True, slots=True)
class VerificationNoise:
    """What `nn.verification.verify` draws with."""

    accept_RK: Tensor
    """float64 uniforms in [0, 1), one an offered slot; not read for `coupled` requests."""
    emit_R: Tensor
    """float64 uniforms in [0, 1) of the last token; not read for `coupled` requests."""
    races: tuple[tuple[Tensor, ...] | None, ...]
    """Per request: None for `rejection` and greedy ones, else one row of exponentials [V] for each
    of its admitted + 1 rows of target probabilities."""


class StepNoise:
    """The noise of all requests of one step. It is the `DraftNoise` of their draft, too."""

    def __init__(self, rounds: Sequence[Round], block_size: int = 0) -> None:
        """`block_size` slots may be drafted; 0 for prefill and plain decoding."""
        self.rounds = tuple(rounds)
        self.block_size = block_size
        self._draft: list[Tensor | None] = [None] * len(self.rounds)
        for round_ in self.rounds:
            round_.noise.forget_before(round_.index)

    def __call__(self, slot: int, token_ids_RC: Tensor) -> Tensor:
        """Unit exponentials [R, C], float64, for the candidates of draft slot `slot`."""
        assert 0 <= slot < self.block_size, (slot, self.block_size)
        noise_RC = torch.ones(token_ids_RC.shape, dtype=torch.float64, device=token_ids_RC.device)
        for r, round_ in enumerate(self.rounds):
            if round_.noise.coupled:
                noise_RC[r] = round_.noise.at(round_.index + slot)[token_ids_RC[r]]
            elif not round_.noise.greedy:
                noise_RC[r] = self._draft_rows(r, token_ids_RC.shape[1])[slot]
        return noise_RC

    def verification(self, admitted: Sequence[int]) -> VerificationNoise:
        """Noise for verifying `admitted[r]` draft tokens of each request and emitting one more."""
        slots = max(admitted, default=0)
        accept_RK = torch.full((len(self.rounds), slots), _GREEDY_UNIFORM, dtype=torch.float64)
        emit_R = torch.full((len(self.rounds),), _GREEDY_UNIFORM, dtype=torch.float64)
        races: list[tuple[Tensor, ...] | None] = [None] * len(self.rounds)
        for r, (round_, count) in enumerate(zip(self.rounds, admitted, strict=True)):
            noise = round_.noise
            if noise.coupled:
                races[r] = tuple(noise.at(round_.index + slot) for slot in range(count + 1))
            elif not noise.greedy:
                emit_R[r] = noise.emit_uniform(round_.number)
                if count:
                    uniforms = noise.accept_uniforms(round_.number, count)
                    accept_RK[r, :count] = torch.from_numpy(uniforms)
        device = self.rounds[0].noise.device if self.rounds else "cpu"
        return VerificationNoise(accept_RK.to(device), emit_R.to(device), tuple(races))

    def _draft_rows(self, r: int, count: int) -> Tensor:
        rows = self._draft[r]
        if rows is None:
            round_ = self.rounds[r]
            rows = round_.noise.draft_exponentials(round_.number, self.block_size, count)
            self._draft[r] = rows
        # Another width would cut the round's stream elsewhere, and slots would share numbers.
        assert rows.shape[1] == count, "every slot of a round has the same number of candidates"
        return rows
