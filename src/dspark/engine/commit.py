"""What a step's results do to its requests: tokens, ends, failures, and the places of who is done.

Everything here feeds the next round. What does not (texts) is left to `engine.writing`.
"""

from collections.abc import Collection

import numpy as np

from dspark.core.records import RoundRecord, TokenFate
from dspark.engine.batch import StepBatch
from dspark.engine.blocks import confidence_rows, proposed_lengths
from dspark.engine.ending import walk
from dspark.engine.logprobs import draft_probs, score_prompt, token_logprobs
from dspark.engine.memory import KVMemory
from dspark.engine.places import Places
from dspark.engine.request import RequestState, TokenEvent
from dspark.engine.writing import Unwritten, error_event
from dspark.nn.seams import DraftBlock, TargetOutput
from dspark.nn.verification import Verified
from dspark.scheduling.policies import RoundView


class Commit:
    def __init__(self, places: Places, memory: KVMemory, eos: Collection[int]) -> None:
        self.rebuilt = 0
        """Positions that were computed again."""
        self._places = places
        self._memory = memory
        self._eos = eos

    def step(
        self,
        batch: StepBatch,
        view: RoundView,
        drafted: np.ndarray,
        draft: DraftBlock | None,
        verified: Verified | None,
        output: TargetOutput,
        events: list[Unwritten],
    ) -> list[RoundRecord]:
        """Walks each request's new tokens in order; whatever ends the text ends it there.

        `drafted` [R]: which decoding requests have a draft.
        `events` is added to, so that those before an exception are not lost: who has ended is in no
        place any more, and would never hear of it.
        """
        for state, count in batch.prefill:
            self.rebuilt += max(0, min(state.cached + count, state.computed) - state.cached)
            state.cached += count
        self._score(batch, output, events)
        rounds: list[RoundRecord] = []
        if verified is None:
            return rounds
        proposals = draft.tokens_RK.tolist() if draft is not None else []
        lengths = proposed_lengths(draft)
        confidences = confidence_rows(draft)
        survivals = [] if view.survival_RK is None else view.survival_RK.tolist()
        accepted_counts, next_tokens = verified.accepted_R.tolist(), verified.next_token_R.tolist()
        for r, state in enumerate(batch.sampled):
            own, first = state.request, not state.output
            admitted, accepted = batch.admitted[r], accepted_counts[r]
            proposed = not first and bool(drafted[r])
            run = [*(proposals[r][:accepted] if accepted else []), next_tokens[r]]
            try:
                walked = walk(state, run, self._eos)
                tokens, finished = walked.tokens, walked.finished
                event = TokenEvent(
                    own.id,
                    tokens,
                    _fates(admitted, accepted)[: len(tokens)],
                    finished,
                    choice=own.choice,
                    texts=walked.texts,
                    logprobs=token_logprobs(
                        own.params, output.logits_MV, batch.first_rows[r], tokens
                    ),
                    prompt_logprobs=tuple(state.prompt_logprobs) if first else (),
                    draft_probs=draft_probs(own.params, draft, r, lengths[r], tokens)
                    if proposed and draft is not None
                    else (),
                    stopped_by=walked.stopped_by,
                )
            except Exception as error:  # a detokeniser's or a grammar's, say: this request's alone
                events.append((state, self.fail(state, error)))
                continue
            state.emit(tokens)
            self._places.waiting.charge(own.owner, len(tokens))
            if not first:
                known = proposed and confidences
                confidence, entropy = confidences[r] if known else ((), ())
                state.cached += 1 + accepted  # the anchor and the accepted tokens have K/V now
                rounds.append(
                    RoundRecord(
                        request=own.id,
                        round=state.rounds,
                        proposed=lengths[r] if proposed else 0,
                        admitted=admitted,
                        accepted=min(accepted, len(tokens)),
                        emitted=len(tokens),
                        ended=finished is not None,
                        confidence=confidence,
                        entropy=entropy,
                        survival=tuple(survivals[r]) if proposed and survivals else (),
                    )
                )
            events.append((state, event))
            if finished is not None:
                self._places.retire(state)
        return rounds

    def fail(self, state: RequestState, error: Exception) -> TokenEvent:
        """Ends one request with an error; the others go on."""
        self._memory.scrub(state)
        self._places.retire(state)
        return error_event(state.request, error)

    def _score(self, batch: StepBatch, output: TargetOutput, events: list[Unwritten]) -> None:
        """Prompts' log-probabilities; ends what has all of them and wants no token."""
        for (state, _), rows in zip(batch.prefill, batch.scored, strict=True):
            own = state.request
            if own.params.prompt_logprobs is None:
                continue
            try:
                score_prompt(state, output.logits_MV[rows])
            except Exception as error:
                state.error = error
            if state.error is not None and state not in batch.sampled:
                events.append((state, self.fail(state, state.error)))
            elif own.scores_only and not state.prefilling:
                scores = tuple(state.prompt_logprobs)
                event = TokenEvent(own.id, (), (), "length", own.choice, prompt_logprobs=scores)
                events.append((state, event))
                self._places.retire(state)


def _fates(admitted: int, accepted: int) -> tuple[TokenFate, ...]:
    fates: list[TokenFate] = ["accepted"] * accepted
    if admitted == 0:
        fates.append("plain")
    else:
        fates.append("bonus" if accepted == admitted else "corrected")
    return tuple(fates)
