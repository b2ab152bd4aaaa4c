"""The exact law of what a whole run emits, by enumerating every draft and integrating `verify`.

`verify` is a black box here: what it accepts and emits steps at thresholds of its uniforms, and
bisection finds those to the last bit. So no formula of acceptance or residual is repeated in the
harness, and its law is that of the production code.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dspark.core.sampling import SamplingParams
from dspark.nn.noise import VerificationNoise
from dspark.nn.sampling import SamplingRows, probs_from_logits
from dspark.nn.seams import DraftBlock
from dspark.nn.verification import Verified, verify
from tests.laws.toys import Text, Toy
from tests.oracles.plain_sampling import plain_probs

Law = dict[tuple[Text, ...], float]


@dataclass(frozen=True)
class Drafted:
    """One request in one round, as an admission rule sees it."""

    request: int
    toy: Toy
    text: Text
    tokens: Text
    max_admit: int
    """What is left of the text's length; decided without looking at the draft."""

    @property
    def survival(self) -> tuple[float, ...]:
        return self.toy.survival(self.text, self.tokens)


class Admission(Protocol):
    """A policy as a pure function: state in, admitted lengths and state out."""

    def __call__(
        self, state: Hashable, drafts: tuple[Drafted, ...]
    ) -> tuple[Sequence[int], Hashable]: ...


@dataclass(frozen=True)
class Request:
    toy: Toy
    params: SamplingParams

    def target_probs(self, texts: Sequence[Text]) -> Tensor:
        """[len(texts), V] through the production transforms; the first text is emitted, the others
        stand behind drafted tokens."""
        logits = torch.stack([self.toy.target_logits(text) for text in texts])
        return probs_from_logits(logits, SamplingRows.of([self.params] * len(texts)))

    def plain_probs(self, text: Text) -> list[float]:
        """The target's law after `text`, from the plain twin of the probability transforms."""
        return plain_probs(self.toy.target_logits(text).tolist(), self.params)

    def draft_slot(self, text: Text, drafted: Text) -> tuple[Tensor, Tensor]:
        """Candidates [C] and what they are sampled with [C]."""
        candidates, logits = self.toy.draft_slot(text, drafted)
        return candidates, probs_from_logits(logits[None], SamplingRows.of([self.params]))[0]

    @cache  # noqa: B019 - a few requests live as long as a test
    def drafts(self, text: Text) -> tuple[tuple[Text, float], ...]:
        """Every block that can be drafted after a text, with its probability."""
        blocks = [((), 1.0)]
        for _ in range(self.toy.block):
            blocks = [
                ((*tokens, int(candidate)), weight * float(prob))
                for tokens, weight in blocks
                for candidate, prob in zip(*self.draft_slot(text, tokens), strict=True)
                if prob > 0
            ]
        return tuple(blocks)

    @cache  # noqa: B019
    def emitted(self, text: Text, offered: Text) -> tuple[tuple[Text, float], ...]:
        """The law of what one round emits after `text` when it verifies `offered`."""
        probe = _Probe(self, text, offered)
        thresholds = [*probe.acceptance(), 0.0]
        last_tokens = probe.last_tokens()
        law = []
        reached = 1.0
        for accepted, threshold in enumerate(thresholds):
            for token, prob in enumerate(last_tokens[accepted]):
                if reached * (1 - threshold) * prob > 0:
                    tokens = (*offered[:accepted], token)
                    law.append((tokens, reached * (1 - threshold) * float(prob)))
            reached *= threshold
        return tuple(law)


def run_law(requests: Sequence[Request], length: int, admission: Admission) -> Law:
    """The joint law of texts of `length` tokens, all requests decoded in one batch until they end.

    The first token of each is prefill's. Every round of `rejection` draws fresh numbers, so drafts
    and uniforms are independent of everything before (`tests/nn/test_noise.py` shows that they are
    fresh), and a request verifies the same in any batch (`tests/nn/test_verification.py`).
    """
    states: dict[tuple[tuple[Text, ...], Hashable], float] = {(((),) * len(requests), None): 1.0}
    finished: Law = defaultdict(float)
    prefill = True
    while states:
        following: dict[tuple[tuple[Text, ...], Hashable], float] = defaultdict(float)
        for (texts, state), weight in states.items():
            step = _round(requests, texts, state, length, admission, prefill)
            for new_texts, new_state, prob in step:
                if all(len(text) == length for text in new_texts):
                    finished[new_texts] += weight * prob
                else:
                    following[new_texts, new_state] += weight * prob
        states, prefill = following, False
    return finished


def target_law(requests: Sequence[Request], length: int) -> Law:
    """The joint law without speculation, from the plain twin of the probability transforms."""
    laws = []
    for request in requests:
        law: dict[Text, float] = {(): 1.0}
        for _ in range(length):
            law = {
                (*text, token): weight * prob
                for text, weight in law.items()
                for token, prob in enumerate(request.plain_probs(text))
                if prob > 0
            }
        laws.append(law)
    return {
        tuple(text for text, _ in joint): math.prod(prob for _, prob in joint)
        for joint in product(*(law.items() for law in laws))
    }


def distance(one: Law, other: Law) -> float:
    """The largest difference of a probability."""
    return max(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in {*one, *other})


def _round(
    requests: Sequence[Request],
    texts: tuple[Text, ...],
    state: Hashable,
    length: int,
    admission: Admission,
    prefill: bool,
) -> Iterator[tuple[tuple[Text, ...], Hashable, float]]:
    active = [r for r, text in enumerate(texts) if len(text) < length]
    blocks = [((((), 1.0),) if prefill else requests[r].drafts(texts[r])) for r in active]
    for joint in product(*blocks):
        new_state: Hashable = state
        admitted: Sequence[int] = [0] * len(active)
        if not prefill:
            drafts = tuple(
                Drafted(r, requests[r].toy, texts[r], tokens, length - len(texts[r]) - 1)
                for r, (tokens, _) in zip(active, joint, strict=True)
            )
            admitted, new_state = admission(state, drafts)
        outputs = [
            requests[r].emitted(texts[r], tokens[:count])
            for r, (tokens, _), count in zip(active, joint, admitted, strict=True)
        ]
        drawn = math.prod(weight for _, weight in joint)
        for output in product(*outputs):
            new_texts = list(texts)
            prob = drawn
            for r, (tokens, weight) in zip(active, output, strict=True):
                new_texts[r] = texts[r] + tokens
                prob *= weight
            yield tuple(new_texts), new_state, prob


class _Probe:
    """Copies of one round that differ in their uniforms, verified as one batch."""

    def __init__(self, request: Request, text: Text, offered: Text) -> None:
        self.offered, self.slots, self.vocab = offered, len(offered), request.toy.vocab
        self.target_probs = request.target_probs(
            [text + offered[:slot] for slot in range(self.slots + 1)]
        )
        self.drawn = [request.draft_slot(text, offered[:slot]) for slot in range(self.slots)]

    def acceptance(self) -> list[float]:
        """For each slot, the uniforms below which it is accepted, given that earlier ones are."""

        def accepted(uniforms: np.ndarray) -> np.ndarray:
            accept_RK = np.zeros((self.slots, self.slots))
            np.fill_diagonal(accept_RK, uniforms)
            outcome = self._verify(accept_RK, np.full(self.slots, 0.5))
            return outcome.accepted_R.numpy() > np.arange(self.slots)

        return _bisect(accepted, self.slots).tolist() if self.slots else []

    def last_tokens(self) -> np.ndarray:
        """The law [slots + 1, V] of the token after exactly 0, 1, ... accepted ones.

        Rows of counts that cannot happen are meaningless.
        """
        counts = np.repeat(np.arange(self.slots + 1), self.vocab)
        tokens = np.tile(np.arange(self.vocab), self.slots + 1)
        # Uniforms of 0 pass wherever a slot can pass, those just below 1 fail where one can fail.
        accept_RK = np.where(np.arange(self.slots) < counts[:, None], 0.0, np.nextafter(1.0, 0.0))

        def at_most(uniforms: np.ndarray) -> np.ndarray:
            return self._verify(accept_RK, uniforms).next_token_R.numpy() <= tokens

        steps = _bisect(at_most, len(tokens)).reshape(self.slots + 1, self.vocab)
        return np.diff(steps, axis=1, prepend=0.0)

    def _verify(self, accept_RK: np.ndarray, emit_R: np.ndarray) -> Verified:
        copies = len(emit_R)
        draft = None
        if self.slots:
            draft = DraftBlock(
                tokens_RK=torch.tensor(self.offered).expand(copies, -1),
                candidates_RKC=torch.stack([ids for ids, _ in self.drawn]).expand(copies, -1, -1),
                probs_RKC=torch.stack([probs for _, probs in self.drawn]).expand(copies, -1, -1),
                confidence_RK=None,
            )
        noise = VerificationNoise(
            torch.from_numpy(accept_RK), torch.from_numpy(emit_R), (None,) * copies
        )
        return verify(self.target_probs.repeat(copies, 1), [self.slots] * copies, draft, noise)


def _bisect(holds: Callable[[np.ndarray], np.ndarray], count: int) -> np.ndarray:
    """Suprema [count] of the uniforms in [0, 1) for which `holds` (true up to a point, then not).

    Exact to 2^-55: the law of a run to 1e-12 needs no more.
    """
    low, high = np.zeros(count), np.ones(count)
    possible = holds(low)
    for _ in range(55):
        middle = np.minimum((low + high) / 2, np.nextafter(1.0, 0.0))
        inside = holds(middle)
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
    return np.where(possible, high, 0.0)
