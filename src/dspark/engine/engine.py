"""The serving engine. One step is: draft, schedule, batch, verify, commit, record."""

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dspark.calibration.confidence import conditional_confidence
from dspark.calibration.serving import Calibration, Snapshot, Uncalibrated
from dspark.core.errors import ConfigError, DSparkError
from dspark.core.random import RequestRandom
from dspark.core.records import EngineStats, RoundRecord, StepRecord, TokenFate
from dspark.core.sampling import SamplingParams
from dspark.engine.admission import check_request
from dspark.engine.alarm import AcceptanceAlarm
from dspark.engine.batch import StepBatch, build_batch
from dspark.engine.config import EngineConfig
from dspark.engine.constraints import (
    blame_dead_ends,
    draft_adjust,
    logit_state,
    sound_draft,
    target_logits,
)
from dspark.engine.draft_context import DraftContext
from dspark.engine.ending import walk
from dspark.engine.guided import GrammarCompiler
from dspark.engine.logprobs import draft_probs, score_prompt, share_rows, token_logprobs
from dspark.engine.memory import KVMemory
from dspark.engine.places import Places
from dspark.engine.request import Request, RequestState, TokenEvent
from dspark.engine.text import OutputText
from dspark.nn.noise import RequestNoise, StepNoise
from dspark.nn.pages import PageTable
from dspark.nn.sampling import SamplingRows, probs_from_logits
from dspark.nn.seams import DraftBlock, Drafter, Target, TargetOutput
from dspark.nn.verification import Verified, verify
from dspark.scheduling.policies import Policy, RoundView, check_rule
from dspark.scheduling.survival import survival_probabilities

logger = logging.getLogger(__name__)


class Engine:
    """Generates for many requests at once. Owns their pages, their state and nothing else.

    `records` receives a StepRecord a step; `clock` is only read for them. Survival comes from
    `calibration`, by default from confidences as the head gives them. `tokenizer` is transformers'
    own: without one, events have no text and stop strings are refused.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: Policy,
        config: EngineConfig | None = None,
        *,
        calibration: Calibration | None = None,
        tokenizer: Any = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if policy.drafts and drafter is None:
            raise ConfigError(f"policy {policy.name!r} needs a drafter; give one, or use off")
        self.target = target
        self.drafter = drafter if policy.drafts else None
        longest = policy.longest
        if self.drafter is not None and longest is not None and longest < self.drafter.block_size:
            self.drafter = self.drafter.shortened(longest)
        self.policy = policy.fresh()
        self.calibration: Calibration = calibration or Uncalibrated()
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        self.clock = clock
        self.records: list[StepRecord] = []
        self.alarm = AcceptanceAlarm()
        self._eos = frozenset(target.eos_token_ids)
        self._grammars = GrammarCompiler(tokenizer, target.vocab_size, target.eos_token_ids)
        self._ids = itertools.count()
        self._step = 0
        self._rebuilt = 0
        self.memory = KVMemory(target, self.drafter, self.config)
        self._block_size = self.drafter.block_size if self.drafter is not None else 0
        self.places = Places(self.config, self.memory, self._block_size)
        self._context: DraftContext | None = None
        if self.drafter is not None and self.memory.draft_store is not None and self._taps:
            self._context = DraftContext(self.drafter, self.memory.draft_store)
        logger.info(self.memory.describe())

    # -- requests ---------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        choice: int = 0,
        seed: int | None = None,
        priority: int = 0,
        owner: str = "",
    ) -> int:
        """Queues one choice of a request and returns its id; `params.n` choices are n calls.

        seed: what to draw with where `params` has none; drawn afresh by default.
        priority, owner: as in `Request`.

        Raises PromptError or ConfigError if it can never run, OverloadedError if too much waits.
        """
        request = self.prepare(
            prompt, params, choice=choice, seed=seed, priority=priority, owner=owner
        )
        self.check_load([request])
        self.enqueue(request)
        return request.id

    def prepare(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        choice: int = 0,
        seed: int | None = None,
        priority: int = 0,
        owner: str = "",
    ) -> Request:
        """The first part of `add`: checks everything, changes nothing, may run in any thread."""
        limit = min(self.target.max_context, self.memory.tokens - self.memory.beyond)
        check_request(prompt, params, self.target.vocab_size, limit, self.tokenizer is not None)
        if params.temperature > 0:
            check_rule(self.policy, params.rule)
        if params.seed is not None:
            seed = params.seed
        elif seed is None:
            seed = secrets.randbits(63)
        grammar = None if params.guided is None else self._grammars.compile(params.guided)
        return Request(
            next(self._ids), tuple(prompt), params, seed, choice, priority, owner, grammar
        )

    def check_load(self, requests: Sequence[Request]) -> None:
        """Raises OverloadedError if so much more must not wait. May run in any thread."""
        self.places.check_load(requests)

    def enqueue(self, request: Request) -> None:
        """The last part of `add`."""
        self.calibration.expect(request.params)
        noise = RequestNoise(
            RequestRandom(request.seed, request.choice),
            request.params, self.target.vocab_size, self.target.device,
        )  # fmt: skip
        state = RequestState(
            request,
            noise,
            PageTable([], self.config.page_size),
            digests=self.memory.digests(request.prompt),
            logits=logit_state(request, self.target.vocab_size, self._eos, self.target.device),
            writer=self._writer(request),
        )
        self.places.waiting.push(state)

    def cancel(self, request_ids: Iterable[int] | None = None) -> list[TokenEvent]:
        """Drops requests wherever they are and frees their pages; all of them by default.

        Returns the "cancelled" event of each that was still there.
        """
        gone = self.places.remove(None if request_ids is None else set(request_ids))
        return [TokenEvent(s.request.id, (), (), "cancelled", s.request.choice) for s in gone]

    def fail_running(self, error: Exception) -> list[TokenEvent]:
        """Ends everything that runs, after a step that raised; what waits is not touched, unless
        nothing ran: then the first that waits cannot be started."""
        if not self.running and (found := self.places.waiting.first()) is not None:
            return [_error_event(self.places.waiting.pop(found[0]).request, error)]
        return [self._fail(state, error) for state in list(self.running)]

    @property
    def idle(self) -> bool:
        return not self.places.waiting and not self.places.running

    @property
    def running(self) -> list[RequestState]:
        """What takes part in steps, in the order of the batch."""
        return self.places.running

    def run(self) -> Iterator[TokenEvent]:
        """Steps until every request is done."""
        while not self.idle:
            yield from self.step()

    # -- one step ---------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """One forward of the target over everything that is running."""
        clock, seconds = self.clock, {}
        started = clock()
        self.places.prepare_step()
        decoding = [state for state in self.running if not state.prefilling]
        prefilling = share_rows(
            [state for state in self.running if state.prefilling], self.config.chunk_tokens
        )
        for state in decoding:
            state.rounds += 1  # before it drafts: an abandoned round has used its number up
        snapshot = self.calibration.snapshot()  # one for the whole round

        view = self._view(decoding, prefilling)
        wanted = self.policy.wants_draft(view) & (view.max_admit_R > 0)
        draft = self._draft(decoding, wanted)
        head = draft.head_seconds if draft is not None else 0.0
        seconds["draft"] = -started + (started := clock()) - head
        seconds["draft_head"] = head

        drafted = wanted if draft is not None else np.zeros_like(wanted)
        view = self._view(decoding, prefilling, drafted, draft, snapshot)
        admitted = self.policy.admit(view).tolist()
        batch = build_batch(
            decoding, prefilling, draft, admitted,
            chunk_tokens=self.config.chunk_tokens, row_exact=self.config.row_exact,
        )  # fmt: skip
        seconds["schedule"] = -started + (started := clock())

        output = self.target.forward(
            batch.ragged, self.memory.store, logit_rows_M=batch.logit_rows_M, tap_layers=self._taps
        )
        seconds["verify"] = -started + (started := clock())

        verified = self._verify(batch, draft, output)
        seconds["sample"] = -started + (started := clock())

        events, rounds = self._commit(batch, view, drafted, draft, verified, output)
        self._extend_draft_context(batch, verified, output)
        self._publish(batch)
        seconds["commit"] = clock() - started
        self._record(batch, rounds, seconds, snapshot)
        return events

    def _draft(self, decoding: list[RequestState], wanted: np.ndarray) -> DraftBlock | None:
        """Blocks of the decoding requests that want one, a row a request; None when none does."""
        chosen = np.flatnonzero(wanted)
        store = self.memory.draft_store
        if self.drafter is None or store is None or len(chosen) == 0:
            return None
        states = [decoding[r] for r in chosen]
        if self._context is not None:
            self._context.write(states)
        rounds = [state.peek_round() for state in states]
        block = self.drafter.draft(
            torch.tensor([state.anchor for state in states]),
            torch.tensor([state.cached for state in states]),
            [state.table for state in states],
            store,
            texts=[state.text for state in states],
            sampling=[state.request.params for state in states],
            noise=StepNoise(rounds, self.drafter.block_size),
            adjust=draft_adjust(states),
        )
        block = sound_draft(block, states)
        return block if len(states) == len(decoding) else _spread(block, chosen, len(decoding))

    def _verify(
        self, batch: StepBatch, draft: DraftBlock | None, output: TargetOutput
    ) -> Verified | None:
        if not batch.sampled:
            return None
        logits_MV = output.logits_MV[: len(batch.row_params)]
        logits_MV, dead_M = target_logits(batch, draft, logits_MV)
        params = [state.request.params for state in batch.sampled]
        probs_MV = probs_from_logits(
            logits_MV, SamplingRows.of(params, batch.row_params, logits_MV.device)
        )
        noise = StepNoise([state.peek_round() for state in batch.sampled])
        if draft is not None and len(batch.sampled) > draft.tokens_RK.shape[0]:
            rows = np.arange(draft.tokens_RK.shape[0])
            draft = _spread(draft, rows, len(batch.sampled))  # finished prompts have no draft
        verified = verify(probs_MV, batch.admitted, draft, noise.verification(batch.admitted))
        if dead_M is not None:
            blame_dead_ends(batch, verified.accepted_R, dead_M)
        return verified

    def _commit(
        self,
        batch: StepBatch,
        view: RoundView,
        drafted: np.ndarray,
        draft: DraftBlock | None,
        verified: Verified | None,
        output: TargetOutput,
    ) -> tuple[list[TokenEvent], list[RoundRecord]]:
        """Walks each request's new tokens in order; whatever ends the text ends it there."""
        for state, count in batch.prefill:
            self._rebuilt += max(0, min(state.cached + count, state.computed) - state.cached)
            state.cached += count
        events = self._score(batch, output)
        rounds: list[RoundRecord] = []
        if verified is None:
            return events, rounds
        proposals = draft.tokens_RK.tolist() if draft is not None else []
        lengths = _lengths(draft)
        confidences = _confidence_rows(draft)
        survivals = [] if view.survival_RK is None else view.survival_RK.tolist()
        accepted_counts, next_tokens = verified.accepted_R.tolist(), verified.next_token_R.tolist()
        for r, state in enumerate(batch.sampled):
            first = not state.output
            admitted, accepted = batch.admitted[r], accepted_counts[r]
            run = [*(proposals[r][:accepted] if accepted else []), next_tokens[r]]
            try:
                walked = walk(state, run, self._eos)
            except Exception as error:  # a detokeniser's or a grammar's: this request's alone
                events.append(self._fail(state, error))
                continue
            tokens, finished = walked.tokens, walked.finished
            fates = _fates(admitted, accepted)[: len(tokens)]
            state.output += tokens
            self.places.waiting.charge(state.request.owner, len(tokens))
            proposed = not first and self.drafter is not None and bool(drafted[r])
            if not first:
                state.cached += 1 + accepted  # the anchor and the accepted tokens have K/V now
                rounds.append(
                    RoundRecord(
                        request=state.request.id,
                        round=state.rounds,
                        proposed=lengths[r] if proposed else 0,
                        admitted=admitted,
                        accepted=min(accepted, len(tokens)),
                        emitted=len(tokens),
                        ended=finished is not None,
                        confidence=confidences[r] if proposed and confidences else (),
                        survival=tuple(survivals[r]) if proposed and survivals else (),
                    )
                )
            events.append(
                TokenEvent(
                    state.request.id,
                    tokens,
                    fates,
                    finished,
                    choice=state.request.choice,
                    texts=walked.texts,
                    logprobs=token_logprobs(
                        state.request.params, output.logits_MV, batch.first_rows[r], tokens
                    ),
                    prompt_logprobs=tuple(state.prompt_logprobs) if first else (),
                    draft_probs=draft_probs(state.request.params, draft, r, lengths[r], tokens)
                    if proposed and draft is not None
                    else (),
                    stopped_by=walked.stopped_by,
                )
            )
            if finished is not None:
                self.places.retire(state)
        return events, rounds

    def _score(self, batch: StepBatch, output: TargetOutput) -> list[TokenEvent]:
        """Prompts' log-probabilities; ends what has all of them and wants no token."""
        events = []
        for (state, _), rows in zip(batch.prefill, batch.scored, strict=True):
            own = state.request
            if own.params.prompt_logprobs is None or state.output:
                continue
            score_prompt(state, output.logits_MV[rows])
            if state.error is not None and state not in batch.sampled:
                events.append(self._fail(state, state.error))
            elif own.scores_only and not state.prefilling:
                scores = tuple(state.prompt_logprobs)
                events.append(
                    TokenEvent(own.id, (), (), "length", own.choice, prompt_logprobs=scores)
                )
                self.places.retire(state)
        return events

    def _extend_draft_context(
        self, batch: StepBatch, verified: Verified | None, output: TargetOutput
    ) -> None:
        """Every committed position's features become context K/V, before a draft reads them
        (law 7)."""
        if self._context is None:
            return
        assert output.taps_NF is not None
        starts = batch.ragged.starts
        accepted = verified.accepted_R.tolist() if verified is not None else []
        decoding = len(batch.ragged.tables) - len(batch.prefill)
        prefilled = [state for state, _ in batch.prefill]
        for r, state in enumerate([*batch.sampled[:decoding], *prefilled]):
            end = starts[r] + 1 + accepted[r] if r < decoding else starts[r + 1]
            if state.table.pages:  # finished requests have given theirs back
                self._context.keep(state, output.taps_NF[starts[r] : end])
        self._context.write(state for state in prefilled if state.table.pages)
        self._context.write_full(state for state in batch.sampled[:decoding] if state.table.pages)

    # -- bookkeeping ------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """What an operator watches."""
        pool, counts = self.memory.pool, self.memory.counts
        return EngineStats(
            running=len(self.running),
            waiting=len(self.places.waiting),
            waiting_tokens=self.places.waiting.tokens,
            pages=pool.num_pages,
            pages_free=pool.free_pages,
            pages_kept=pool.kept_pages,
            page_size=pool.page_size,
            preemptions=self.places.preemptions,
            refused=self.places.refused,
            prompt_tokens=counts.prompt_tokens,
            prefix_hits=counts.prefix_hits,
            prefix_hit_tokens=counts.prefix_hit_tokens,
            pages_copied=counts.copied_pages,
            pages_evicted=counts.evicted_pages,
            rebuilt_positions=self._rebuilt,
        )

    @property
    def _taps(self) -> tuple[int, ...]:
        return self.drafter.tap_layers if self.drafter is not None else ()

    def _publish(self, batch: StepBatch) -> None:
        """Pages of prompts, in both stores by now, become others' to share."""
        for state, _ in batch.prefill:
            if state.table.pages:
                self.memory.publish(state, exact=batch.ragged.exact)

    def _view(
        self,
        decoding: list[RequestState],
        prefilling: list[RequestState],
        drafted: np.ndarray | None = None,
        draft: DraftBlock | None = None,
        snapshot: Snapshot | None = None,
    ) -> RoundView:
        """What the policy may know; `drafted` [R] says, after drafting, who has a draft."""
        block_size = self._block_size
        room = np.array([state.room(block_size) for state in decoding], dtype=np.int64)
        if drafted is not None:
            room = np.where(drafted, room, 0)
        if draft is not None and draft.lengths_R is not None:
            room = np.minimum(room, draft.lengths_R.numpy())
        confidence = survival = None
        if draft is not None and draft.confidence_RK is not None:
            logits_RK = draft.confidence_RK.double().numpy()
            confidence = conditional_confidence(logits_RK)
            assert snapshot is not None
            sampling = [state.request.params for state in decoding]
            survival = survival_probabilities(snapshot.confidence(logits_RK, sampling))
        return RoundView(
            step=self._step,
            requests=tuple(state.request.id for state in decoding),
            rounds=tuple(state.rounds for state in decoding),
            block_size=block_size,
            prefill_tokens=sum(len(state.chunk(self.config.chunk_tokens)) for state in prefilling),
            max_admit_R=room,
            context_R=np.array([state.cached for state in decoding], dtype=np.int64),
            confidence_RK=confidence,
            survival_RK=survival,
        )

    def _record(
        self,
        batch: StepBatch,
        rounds: list[RoundRecord],
        seconds: dict[str, float],
        snapshot: Snapshot,
    ) -> None:
        record = StepRecord(
            step=self._step,
            batch_tokens=len(batch.ragged.tokens_N),
            prefill_tokens=sum(count for _, count in batch.prefill),
            rounds=tuple(rounds),
            seconds=seconds,
            calibration=snapshot.number,
        )
        self._step += 1
        self.records.append(record)
        self.policy.observe(record)
        sampling = {state.request.id: state.request.params for state in batch.sampled}
        self.calibration.observe(record, sampling)
        # A drafter without taps was trained for nothing that could be wrong.
        if self._taps and (warning := self.alarm.observe(record)) is not None:
            logger.warning(warning)
        if self.idle:
            self.memory.check_integrity([])

    def _writer(self, request: Request) -> OutputText | None:
        if self.tokenizer is None:
            return None
        params = request.params
        return OutputText(self.tokenizer, params.stops, include_stop=params.include_stop)

    def _fail(self, state: RequestState, error: Exception) -> TokenEvent:
        """Ends one request with an error; the others go on."""
        self.memory.scrub(state)
        self.places.retire(state)
        return _error_event(state.request, error)


def _spread(block: DraftBlock, rows: np.ndarray, count: int) -> DraftBlock:
    """The same block with row i at `rows[i]` of `count`; the other rows are never admitted."""
    index = torch.from_numpy(rows)

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(count, *values.shape[1:]).index_copy_(0, index, values)

    return DraftBlock(
        spread(block.tokens_RK),
        spread(block.candidates_RKC),
        spread(block.probs_RKC),
        None if block.confidence_RK is None else spread(block.confidence_RK),
        None if block.lengths_R is None else spread(block.lengths_R),
        block.head_seconds,
    )


def _error_event(request: Request, error: Exception) -> TokenEvent:
    if not isinstance(error, DSparkError):
        logger.error("request %d failed", request.id, exc_info=error)
        error = DSparkError(f"the request failed: {type(error).__name__}: {error}")
    return TokenEvent(request.id, (), (), "error", request.choice, error=error)


def _fates(admitted: int, accepted: int) -> tuple[TokenFate, ...]:
    fates: list[TokenFate] = ["accepted"] * accepted
    if admitted == 0:
        fates.append("plain")
    else:
        fates.append("bonus" if accepted == admitted else "corrected")
    return tuple(fates)


def _lengths(draft: DraftBlock | None) -> list[int]:
    if draft is None:
        return []
    if draft.lengths_R is not None:
        return draft.lengths_R.tolist()
    return [draft.tokens_RK.shape[1]] * draft.tokens_RK.shape[0]


def _confidence_rows(draft: DraftBlock | None) -> list[tuple[float, ...]]:
    if draft is None or draft.confidence_RK is None:
        return []
    return [tuple(row) for row in draft.confidence_RK.tolist()]
