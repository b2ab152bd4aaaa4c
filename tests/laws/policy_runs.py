"""The exact law of what a production policy emits: its own state, gate and memory included.

Like `harness.run_law`, with the policy object in place of an admission rule. The policy is asked
before drafting, so requests that the gate turns away draft nothing, and it is told of every step.
Its whole state is part of the state of the run, pickled.
"""

import io
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from dspark.core.records import RoundRecord, StepRecord
from dspark.scheduling.cost_model import CostModel, CurveCost, ForwardCost
from dspark.scheduling.policies import Policy, RoundView
from tests.laws.harness import Law, Request
from tests.laws.toys import Text

State = tuple[tuple[Text, ...], int, bytes]
"""Texts, the number of the next step, the policy."""


class PolicyRun:
    """`seen` counts what the policy decided, so that tests can tell that it decided anything."""

    def __init__(self, requests: Sequence[Request], length: int, *, prefill_tokens: int = 0):
        self.requests, self.length, self.prefill_tokens = requests, length, prefill_tokens
        self.seen_lengths: set[int] = set()
        self.seen_wanted: set[bool] = set()
        self.seen_drafts: set[int] = set()
        self._costs: dict[int, object] = {}

    def law(self, policy: Policy) -> Law:
        states: dict[State, float] = {(((),) * len(self.requests), 0, self._dump(policy)): 1.0}
        finished: Law = defaultdict(float)
        while states:
            following: dict[State, float] = defaultdict(float)
            for state, weight in states.items():
                for new, prob in self._step(*state):
                    if all(len(text) == self.length for text in new[0]):
                        finished[new[0]] += weight * prob
                    else:
                        following[new] += weight * prob
            states = following
        return finished

    def _step(
        self, texts: tuple[Text, ...], step: int, state: bytes
    ) -> Iterator[tuple[State, float]]:
        if step == 0:  # prefill: every request's first token
            laws = [request.emitted((), ()) for request in self.requests]
            for tokens in product(*laws):
                prob = float(np.prod([weight for _, weight in tokens]))
                yield (tuple(token for token, _ in tokens), 1, state), prob
            return
        active = [r for r, text in enumerate(texts) if len(text) < self.length]
        policy = self._load(state)
        view = self._view(texts, active, step)
        wanted = policy.wants_draft(view)
        self.seen_wanted |= {*wanted.tolist()}
        slots = 0
        if wanted.any():
            slots = policy.draft_length(view)
            self.seen_drafts.add(slots)
        asked = self._dump(policy)
        blocks = [
            _shortened(self.requests[r].drafts(texts[r]), slots if wants else 0)
            for r, wants in zip(active, wanted, strict=True)
        ]
        for drafts in product(*blocks):
            drawn = float(np.prod([weight for _, weight in drafts]))
            tokens = [tokens for tokens, _ in drafts]
            policy = self._load(asked)
            after = self._drafted(view, texts, active, tokens, slots, wanted)
            lengths = policy.admit(after).tolist()
            assert all(0 <= n <= most for n, most in zip(lengths, after.max_admit_R, strict=True))
            self.seen_lengths |= {*lengths}
            admitted = self._dump(policy)
            outputs = [
                self.requests[r].emitted(texts[r], block[:count])
                for r, block, count in zip(active, tokens, lengths, strict=True)
            ]
            for output in product(*outputs):
                policy = self._load(admitted)
                proposed = [slots * int(wants) for wants in wanted]
                policy.observe(self._record(texts, active, step, proposed, lengths, output))
                new_texts = list(texts)
                prob = drawn
                for r, (run, weight) in zip(active, output, strict=True):
                    new_texts[r] = texts[r] + run
                    prob *= weight
                yield (tuple(new_texts), step + 1, self._dump(policy)), prob

    def _view(self, texts: tuple[Text, ...], active: list[int], step: int) -> RoundView:
        block = self.requests[0].toy.block
        room = [min(block, self.length - len(texts[r]) - 1) for r in active]
        return RoundView(
            step=step,
            requests=tuple(active),
            rounds=(step,) * len(active),
            block_size=block,
            prefill_tokens=self.prefill_tokens,
            max_admit_R=np.array(room),
            context_R=np.array([len(texts[r]) for r in active]),
        )

    def _drafted(
        self,
        view: RoundView,
        texts: tuple[Text, ...],
        active: list[int],
        tokens: list[Text],
        slots: int,
        wanted: np.ndarray,
    ) -> RoundView:
        room_R = np.minimum(view.max_admit_R, slots)
        view = replace(view, max_admit_R=np.where(wanted, room_R, 0), draft_length=slots or None)
        if not wanted.any():
            return view
        confidence_RK = np.zeros((len(active), view.block_size))
        for row, (r, drafted) in enumerate(zip(active, tokens, strict=True)):
            for slot in range(len(drafted)):
                toy = self.requests[r].toy
                confidence_RK[row, slot] = toy.confidence(texts[r], drafted[:slot])
        return replace(
            view, confidence_RK=confidence_RK, survival_RK=np.cumprod(confidence_RK, axis=1)
        )

    def _record(self, texts, active, step, proposed, lengths, output) -> StepRecord:
        rounds = [
            RoundRecord(
                request=r,
                round=step,
                proposed=slots,
                admitted=count,
                accepted=len(run) - 1,
                emitted=len(run),
                ended=len(texts[r]) + len(run) == self.length,
            )
            for r, slots, count, (run, _) in zip(active, proposed, lengths, output, strict=True)
        ]
        return StepRecord(
            step=step,
            batch_tokens=len(active) + sum(lengths) + self.prefill_tokens,
            prefill_tokens=self.prefill_tokens,
            rounds=tuple(rounds),
        )

    # Cost models never change: they stand outside of the pickles.

    def _dump(self, policy: Policy) -> bytes:
        run = self

        class Pickler(pickle.Pickler):
            def persistent_id(self, value: object) -> int | None:
                if not isinstance(value, CostModel | ForwardCost | CurveCost):
                    return None
                run._costs[id(value)] = value
                return id(value)

        file = io.BytesIO()
        Pickler(file).dump(policy)
        return file.getvalue()

    def _load(self, state: bytes) -> Policy:
        run = self

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, key: int) -> object:
                return run._costs[key]

        return Unpickler(io.BytesIO(state)).load()


def _shortened(blocks: Sequence[tuple[Text, float]], slots: int) -> tuple[tuple[Text, float], ...]:
    """The law of the first `slots` tokens of drafts."""
    law: dict[Text, float] = defaultdict(float)
    for tokens, weight in blocks:
        law[tokens[:slots]] += weight
    return tuple(law.items())
