"""One run of an LLM over a list of prompts: pieces as they come, outputs at the end."""

import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.calibration.serving import Calibration
from dspark.core.errors import DSparkError
from dspark.core.records import FinishReason, RoundRecord, StepRecord, TokenFate, TokenLogprob
from dspark.core.sampling import SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.engine.request import TokenEvent
from dspark.nn.seams import Drafter, Target
from dspark.scheduling.policies import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One text for a prompt."""

    index: int
    token_ids: tuple[int, ...]
    """With "stop", the last one is what ended the text, or completed its stop string."""
    text: str
    """Without what ended it, unless `include_stop` asks for that."""
    fates: tuple[TokenFate, ...]
    """How each token came about."""
    logprobs: tuple[TokenLogprob, ...]
    """One a token where they were asked for, under the target itself: before bias, penalties,
    masks, temperature and truncation."""
    finish_reason: FinishReason | None
    """None: interrupted."""
    stopped_by: int | str | None
    """With "stop": the token id or stop string that ended the text."""
    error: DSparkError | None
    """With "error": why."""
    rounds: int
    """Rounds after prefill: forwards of the target that this text took part in."""
    accepted_length: float | None
    """(accepted + 1) a round, no bonus counted after an end inside a run; None without a round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """What one prompt came to. Without `n`, its only choice is what the properties speak of."""

    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...]
    """One a prompt token where they were asked for, under the target itself; None for the first,
    which nothing comes before."""
    seed: int
    """The seed that repeats these tokens (under `rejection`: only under the same schedule)."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def fates(self) -> tuple[TokenFate, ...]:
        return self.choices[0].fates

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason

    @property
    def rounds(self) -> int:
        return self.choices[0].rounds

    @property
    def accepted_length(self) -> float | None:
        return self.choices[0].accepted_length


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """What one step added to one choice of one prompt's output."""

    index: int
    """Which prompt."""
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    """What each token adds to the text: nothing while a character is not whole, or while it may be
    the beginning of a stop string."""
    fates: tuple[TokenFate, ...]
    """How each token came about."""
    finish_reason: FinishReason | None
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """With a choice's first piece, where they are asked for."""
    error: DSparkError | None = None
    """With "error": why it ended. `Generation.run` raises it; who iterates looks here."""

    @property
    def text(self) -> str:
        return "".join(self.texts)


class RequestFailedError(DSparkError):
    """A request failed while others went on; `outputs` has what all of them came to."""

    def __init__(self, error: DSparkError, outputs: list[RequestOutput]) -> None:
        super().__init__(str(error))
        self.outputs = outputs


@dataclass(slots=True)
class _Written:
    """One choice so far."""

    prompt: int
    choice: int
    events: list[TokenEvent] = field(default_factory=list)


class Generation:
    """Iterate it for pieces, then ask for `outputs()`; or `run()`.

    Leaving the iteration early (an exception, Ctrl-C) keeps what was generated so far.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: Policy,
        tokenizer: Any,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        calibration: Calibration,
        max_requests: int,
        row_exact: bool,
        pipeline: bool = False,
    ) -> None:
        self._prompts = [tuple(prompt) for prompt in prompts]
        # Drawn here, so that the result can say it; a request's rule still goes by its own seed.
        self._seeds = [p.seed if p.seed is not None else secrets.randbits(63) for p in params]
        jobs = list(zip(self._prompts, params, self._seeds, strict=True))
        config = EngineConfig.for_requests(
            (len(prompt) + own.max_new_tokens for prompt, own, _ in jobs for _ in range(own.n)),
            max_requests=max_requests,
            block_size=drafter.block_size if drafter is not None else 0,
            row_exact=row_exact,
            pipeline=pipeline,
        )
        self.engine = Engine(
            target, drafter, policy, config, calibration=calibration, tokenizer=tokenizer
        )
        self._written: dict[int, _Written] = {}
        for index, (prompt, own, seed) in enumerate(jobs):
            for choice in range(own.n):
                request = self.engine.add(prompt, own, seed=seed, choice=choice)
                self._written[request] = _Written(index, choice)
        self._pieces: deque[StreamPiece] = deque()

    def __iter__(self) -> Iterator[StreamPiece]:
        while self._pieces or not self.engine.idle:
            if not self._pieces:
                # A step's tokens are kept before any is handed out: whoever leaves in the middle
                # of a step loses none, and may go on later.
                self._pieces.extend([self._keep(event) for event in self.engine.step()])
            while self._pieces:
                yield self._pieces.popleft()

    def _keep(self, event: TokenEvent) -> StreamPiece:
        written = self._written[event.request]
        written.events.append(event)
        return StreamPiece(
            written.prompt,
            event.tokens,
            event.texts,
            event.fates,
            event.finished,
            event.choice,
            event.logprobs,
            event.prompt_logprobs,
            event.error,
        )

    @property
    def records(self) -> list[StepRecord]:
        return self.engine.records

    def run(self) -> list[RequestOutput]:
        """Iterates to the end. Raises RequestFailedError, then, if one of the requests failed."""
        for _ in self:
            pass
        return self.checked_outputs()

    def checked_outputs(self) -> list[RequestOutput]:
        """As `outputs`; raises RequestFailedError if one of the requests failed."""
        outputs = self.outputs()
        for output in outputs:
            for choice in output.choices:
                if choice.error is not None:
                    raise RequestFailedError(choice.error, outputs) from choice.error
        return outputs

    def outputs(self) -> list[RequestOutput]:
        """What each prompt has come to so far, in their order."""
        self._pieces.extend([self._keep(event) for event in self.engine.flush()])
        rounds: dict[int, list[RoundRecord]] = {request: [] for request in self._written}
        for step in self.records:
            for record in step.rounds:
                rounds[record.request].append(record)
        choices: list[list[Choice]] = [[] for _ in self._prompts]
        for request, written in self._written.items():
            choices[written.prompt].append(_choice(written, rounds[request]))
        scores: list[tuple[TokenLogprob | None, ...]] = [()] * len(self._prompts)
        for written in self._written.values():
            for event in written.events[:1]:  # the same in every choice
                scores[written.prompt] = event.prompt_logprobs or scores[written.prompt]
        return [
            RequestOutput(
                prompt_token_ids=prompt, choices=tuple(own), prompt_logprobs=known, seed=seed
            )
            for prompt, own, known, seed in zip(
                self._prompts, choices, scores, self._seeds, strict=True
            )
        ]


def _choice(written: _Written, rounds: list[RoundRecord]) -> Choice:
    events = written.events
    last = events[-1] if events else None
    return Choice(
        index=written.choice,
        token_ids=tuple(token for event in events for token in event.tokens),
        text="".join(event.text for event in events),
        fates=tuple(fate for event in events for fate in event.fates),
        logprobs=tuple(own for event in events for own in event.logprobs),
        finish_reason=None if last is None else last.finished,
        stopped_by=None if last is None else last.stopped_by,
        error=None if last is None else last.error,
        rounds=len(rounds),
        accepted_length=sum(r.emitted for r in rounds) / len(rounds) if rounds else None,
    )
