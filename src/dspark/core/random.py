"""Counter-based random streams (DESIGN decision 8).

Every draw is a pure function of its key. Keys never hold a request id, a batch position or a time,
so draws do not depend on batch composition, preemption or thread timing:

* `coupled`:   (seed, choice index, generated-token index, token id), the same in every round;
* `rejection`: (seed, choice index, round number, slot, purpose), a fresh round number for every
  round, abandoned ones included. Keying these by position would let a position that was drafted,
  left unverified and drafted again reuse its noise, which biases the output (law 1 has the
  mutation).

Philox's 128-bit key holds (seed, choice and domain); its 256-bit counter holds what the domain
indexes. Uniforms have 53 bits: 24-bit ones misdraw tokens of probability 1e-7.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Purpose = Literal["draft", "accept", "emit"]
"""Why `rejection` draws: sample a draft token, accept it, sample the corrected or bonus token."""

_COUPLED, _DRAFT, _ACCEPT, _EMIT = 0, 1, 2, 3
_DOMAINS: dict[Purpose, int] = {"draft": _DRAFT, "accept": _ACCEPT, "emit": _EMIT}

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RequestRandom:
    """All the randomness of one choice of one request."""

    seed: int
    choice: int = 0

    def coupled_exponentials(self, position: int, vocab_size: int) -> FloatArray:
        """Unit exponentials [V], one a token id, of generated token `position` (0: prefill's)."""
        return _exponential(self._generator(_COUPLED, position).random(vocab_size))

    def round_exponentials(self, round_number: int, slots: int, count: int) -> FloatArray:
        """Unit exponentials [slots, count] that draw the draft tokens of a `rejection` round."""
        return _exponential(self._generator(_DRAFT, round_number).random((slots, count)))

    def round_uniforms(self, round_number: int, purpose: Purpose, count: int) -> FloatArray:
        """Uniforms in [0, 1) [count], one a slot, of a `rejection` round."""
        return self._generator(_DOMAINS[purpose], round_number).random(count)

    def _generator(self, domain: int, index: int) -> np.random.Generator:
        # numpy's Philox advances counter[0] as it draws; the other words are ours.
        return np.random.Generator(
            np.random.Philox(
                key=np.array([self.seed, self.choice * 8 + domain], dtype=np.uint64),
                counter=np.array([0, index, 0, 0], dtype=np.uint64),
            )
        )


def _exponential(uniforms: FloatArray) -> FloatArray:
    # A uniform of exactly 0 would win against every token, impossible ones included (0 / 0).
    return np.maximum(-np.log1p(-uniforms), 2.0**-60)


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^63) from parts such as (--seed, file, line, sample), on any machine."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
