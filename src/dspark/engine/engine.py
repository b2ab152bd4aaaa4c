"""The serving engine. One step is: draft, schedule, batch, verify, commit, record."""

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from dspark.calibration.serving import Calibration, Snapshot, Uncalibrated
from dspark.core.errors import ConfigError
from dspark.core.records import EngineStats, RoundRecord, StepRecord
from dspark.core.sampling import SamplingParams
from dspark.engine.admission import check_request, fresh_state
from dspark.engine.alarm import AcceptanceAlarm
from dspark.engine.batch import StepBatch, build_batch
from dspark.engine.commit import Commit
from dspark.engine.config import EngineConfig
from dspark.engine.drafting import Drafting
from dspark.engine.guided import GrammarCompiler
from dspark.engine.logprobs import share_rows
from dspark.engine.memory import KVMemory
from dspark.engine.places import Places
from dspark.engine.request import Request, RequestState, TokenEvent
from dspark.engine.verifying import verify_step
from dspark.engine.view import engine_stats, round_view
from dspark.engine.writing import Unwritten, Writing, error_event
from dspark.nn.seams import DraftBlock, Drafter, Target
from dspark.scheduling.policies import Policy, RoundView, check_rule

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
        self.config = (config or EngineConfig()).on(target.device.type)
        self.tokenizer = tokenizer
        self.clock = clock
        self.records: list[StepRecord] = []
        self.alarm = AcceptanceAlarm()
        self._eos = frozenset(target.eos_token_ids)
        self._grammars = GrammarCompiler(tokenizer, target.vocab_size, target.eos_token_ids)
        self._ids = itertools.count()
        self._step = 0
        self.memory = KVMemory(target, self.drafter, self.config)
        self._block_size = self.drafter.block_size if self.drafter is not None else 0
        self.places = Places(self.config, self.memory, self._block_size)
        self.writing = Writing(pipelined=self.config.pipeline)
        self._commit = Commit(self.places, self.memory, self._eos)
        self._drafting: Drafting | None = None
        if self.drafter is not None and self.memory.draft_store is not None:
            self._drafting = Drafting(self.drafter, self.memory.draft_store, target.device)
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
        if self.policy.reads_survival:
            self.calibration.expect(request.params)
        state = fresh_state(request, self.target, self.memory, self.config, self.tokenizer)
        self.places.waiting.push(state)

    def cancel(self, request_ids: Iterable[int] | None = None) -> list[TokenEvent]:
        """Drops requests wherever they are and frees their pages; all of them by default.

        Returns the "cancelled" event of each that was still there, behind what was written before.
        """
        events = self.writing.collect()
        gone = self.places.remove(None if request_ids is None else set(request_ids))
        for state in gone:
            own = state.request
            events.append(TokenEvent(own.id, (), (), "cancelled", own.choice))
        return events

    def fail_running(self, error: Exception) -> list[TokenEvent]:
        """Ends what a step that raised was about: the request that it could not start, or else all
        that run, which is nobody where they had ended by then. What only waits is not touched."""
        events = self.writing.collect()
        if (state := self.places.drop_starting()) is not None:
            return [*events, error_event(state.request, error)]
        return events + [self._commit.fail(state, error) for state in list(self.running)]

    def flush(self) -> list[TokenEvent]:
        """Events of a pipelined engine that no step has returned yet."""
        return self.writing.collect()

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is being written."""
        return self._empty and not self.writing.behind

    @property
    def _empty(self) -> bool:
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
        """One forward of the target over everything that is running.

        Pipelined, the events are those of steps before.
        """
        clock, seconds = self.clock, {}
        started = clock()
        self.places.prepare_step()
        if not self.running:
            return self.writing.collect()
        decoding = [state for state in self.running if not state.prefilling]
        prefilling = share_rows(
            [state for state in self.running if state.prefilling], self.config.chunk_tokens
        )
        for state in decoding:
            state.rounds += 1  # before it drafts: an abandoned round has used its number up
        snapshot = self.calibration.snapshot()  # one for the whole round

        view = self._view(decoding, prefilling)
        wanted = self.policy.wants_draft(view) & (view.max_admit_R > 0)
        draft = None
        if self._drafting is not None and wanted.any():
            length = self.policy.draft_length(view)
            draft = self._drafting.blocks(decoding, wanted, length)
        head = draft.head_seconds if draft is not None else 0.0
        seconds["draft"] = -started + (started := clock()) - head
        seconds["draft_head"] = head

        drafted = wanted if draft is not None else np.zeros_like(wanted)
        view = self._view(decoding, prefilling, drafted, draft, snapshot)
        admitted = self.policy.admit(view).tolist()
        batch = build_batch(
            decoding, prefilling, draft, admitted,
            chunk_tokens=self.config.chunk_tokens, row_exact=self.config.row_exact,
            device=self.target.device,
        )  # fmt: skip
        seconds["schedule"] = -started + (started := clock())

        output = self.target.forward(
            batch.ragged, self.memory.store, logit_rows_M=batch.logit_rows_M, tap_layers=self._taps
        )
        seconds["verify"] = -started + (started := clock())

        verified = verify_step(batch, draft, output)
        seconds["sample"] = -started + (started := clock())

        self.writing.settle()
        unwritten: list[Unwritten] = []
        try:
            rounds = self._commit.step(batch, view, drafted, draft, verified, output, unwritten)
        finally:
            self.writing.put(unwritten)
        if self._drafting is not None:
            self._drafting.extend(batch, verified, output)
        self._publish(batch)
        seconds["commit"] = clock() - started
        self._record(batch, rounds, seconds, snapshot)
        return self.writing.take()

    # -- bookkeeping ------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """What an operator watches."""
        return engine_stats(self.places, self.memory, self._commit.rebuilt)

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
        tokens = sum(len(state.chunk(self.config.chunk_tokens)) for state in prefilling)
        return round_view(
            self._step, decoding, tokens, self._block_size,
            drafted=drafted, draft=draft, snapshot=snapshot,
        )  # fmt: skip

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
        if self._empty:
            self.memory.check_integrity([])
