"""On-policy responses: the target answers the prompts that a drafter is trained on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.core.errors import ConfigError
from dspark.core.records import FinishReason
from dspark.core.sampling import SamplingParams
from dspark.data.dialogues import Question, open_questions
from dspark.data.prompts import Prompt
from dspark.data.responses import Response, ResponseFile
from dspark.data.template import encode_messages
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.recipes.progress import Progress
from dspark.scheduling.policies import Off
from dspark.targets.load import LoadedTarget


@dataclass(frozen=True, kw_only=True, slots=True)
class RegenerateConfig:
    temperatures: Sequence[float] = (1.0, 0.0)
    """One response a prompt at each; the index is the sample number."""
    turns: int | None = None
    """At most so many answers a conversation; None is all."""
    thinking: bool | None = None
    """`enable_thinking` of the chat template; None is its own default."""
    max_prompt_tokens: int = 768
    """Longer prompts are left out, and said."""
    max_new_tokens: int = 256
    max_requests: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("turns", "max_prompt_tokens", "max_new_tokens", "max_requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        for temperature in self.temperatures:
            # ConfigError for one outside its range.
            SamplingParams(temperature=temperature, seed=self.seed)


def longest_prompt(context: int, config: RegenerateConfig) -> int:
    """Tokens of the longest prompt that is answered; ConfigError where there is room for none."""
    longest = min(config.max_prompt_tokens, context - config.max_new_tokens)
    if longest < 1:
        raise ConfigError(
            f"max_new_tokens is {config.max_new_tokens}, and the target's context of {context} "
            "tokens has to hold a prompt as well; ask for fewer (--max-new-tokens)"
        )
    return longest


def regenerate(
    loaded: LoadedTarget,
    prompts: Iterable[Prompt],
    output: ResponseFile,
    config: RegenerateConfig,
    progress: Progress,
    *,
    page_size: int = 1024,
) -> None:
    """Answers every turn of every (prompt, temperature) that `output` lacks; may be stopped and run
    again.

    Each response's seed is derived from (config.seed, file, line, sample). So a response does not
    depend on its batch or on earlier runs, but for the rounding of the target's forward.
    """
    longest = longest_prompt(loaded.target.max_context, config)
    engine = answering_engine(loaded, config.max_requests, page_size)
    jobs: dict[int, tuple[Question, SamplingParams, list[int]]] = {}
    too_long = 0

    def ask(question: Question) -> int:
        """How many answers there will be: none to a prompt that is too long."""
        nonlocal too_long
        ids = encode_messages(loaded.tokenizer, question.messages, thinking=config.thinking)
        if len(ids) > longest:
            too_long += question.left
            return 0
        params = SamplingParams(
            temperature=config.temperatures[question.sample],
            max_new_tokens=config.max_new_tokens,
            seed=question.seed(config.seed),
            verification="rejection",
        )
        jobs[engine.add(ids, params)] = question, params, ids
        return question.left

    total = sum(map(ask, unanswered(loaded.tokenizer, prompts, output, config)))
    texts: dict[int, list[int]] = {request: [] for request in jobs}
    tokens = 0
    with progress.task("responses", total=total) as advance:
        while not engine.idle:
            finished: list[Response] = []
            gone = 0
            for event in engine.step():
                if event.error is not None:
                    raise event.error
                texts.setdefault(event.request, []).extend(event.tokens)
                tokens += len(event.tokens)
                if event.finished is None:
                    continue
                question, params, ids = jobs.pop(event.request)
                response = make_response(
                    question, params, ids, texts.pop(event.request), event.finished
                )
                finished.append(response)
                following = question.then(answer_text(loaded.tokenizer, response))
                # Answers that a conversation will not reach move the bar, too.
                gone += question.left - (0 if following is None else ask(following))
            engine.records.clear()
            output.append(finished)
            advance(gone, f"{tokens:,} tokens")
    if too_long:
        progress.say(f"{too_long} responses to prompts of more than {longest} tokens are left out")


def answering_engine(
    loaded: LoadedTarget, max_requests: int, page_size: int = 1024, *, stop_strings: bool = False
) -> Engine:
    """For many short texts at once, whose tokens are promised to nobody."""
    return Engine(
        loaded.target,
        None,
        Off(),
        EngineConfig(
            max_requests=max_requests,
            # A page per ordinary request: then a whole batch is one strided view of the cache.
            page_size=page_size,
            cache_tokens=(max_requests + 8) * page_size,
            cache_dtype="bfloat16",
            row_exact=False,
        ),
        tokenizer=loaded.tokenizer if stop_strings else None,
    )


def unanswered(
    tokenizer: object,
    prompts: Iterable[Prompt],
    output: ResponseFile | None,
    config: RegenerateConfig,
) -> Iterable[Question]:
    """The next answer of every conversation that lacks some; of all of them without a file."""
    return open_questions(
        prompts,
        {} if output is None else output,
        samples=len(config.temperatures),
        turns=config.turns,
        text_of=lambda response: answer_text(tokenizer, response),
    )


def answer_text(tokenizer: object, response: Response) -> str:
    """What the conversation goes on with."""
    text: str = tokenizer.decode(response.response_ids, skip_special_tokens=True)  # type: ignore[attr-defined]
    return text


def make_response(
    question: Question,
    params: SamplingParams,
    prompt_ids: Sequence[int] | np.ndarray,
    response_ids: Sequence[int] | np.ndarray,
    reason: FinishReason,
) -> Response:
    assert params.seed is not None
    return Response(
        file=question.prompt.file,
        line=question.prompt.line,
        sample=question.sample,
        turn=question.turn,
        temperature=params.temperature,
        seed=params.seed,
        finish_reason=reason,
        prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
        response_ids=np.asarray(response_ids, dtype=np.int32),
    )
