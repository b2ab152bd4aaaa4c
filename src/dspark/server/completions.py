"""POST /v1/completions"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from dspark.core.records import TokenLogprob
from dspark.engine.request import TokenEvent
from dspark.server.answer import Answer, ask
from dspark.server.answer_schemas import Completion
from dspark.server.asking import check_choices, check_model, encode_text, sampling_params
from dspark.server.description import streamable
from dspark.server.errors import bad_request, json_response
from dspark.server.logprobs import CompletionLogprobs
from dspark.server.logs import log
from dspark.server.schemas import CompletionBody
from dspark.server.serving import Serving
from dspark.server.streaming import EventStream, cancelled_if_client_leaves, event_bytes, merged
from dspark.server.usage import usage_of

router = APIRouter()
_DEFAULT_TOKENS = 16
"""OpenAI's."""


@router.post("/v1/completions", **streamable(Completion))
async def completions(body: CompletionBody, request: Request) -> Response:
    serving: Serving = request.app.state.serving
    check_model(serving, body.model)
    _check(serving, body)
    prompts = await asyncio.to_thread(_encode, serving, body)
    max_tokens = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    params = sampling_params(
        body,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        # Without a token to make there is something to compute only for a prompt that is scored.
        scored=body.echo and (body.logprobs is not None or max_tokens == 0),
    )
    answers: list[Answer] = []
    owner = request.state.log["key"]
    try:
        for prompt in prompts:
            answers.append(
                await ask(serving, prompt, params, owner=owner, details=body.token_details)
            )
    except BaseException:
        for answer in answers:
            answer.close()
        raise
    request.state.log.update(
        prompt_tokens=sum(len(prompt) for prompt in prompts), seed=answers[0].seed,
        stream=body.stream,
    )  # fmt: skip
    if serving.config.log_prompts:
        log("prompt", request=request.state.request_id, prompt=body.prompt)
    writing = _Writing(serving, body, answers)
    if body.stream:
        seconds = serving.config.request_timeout
        return EventStream(writing.chunks(), answers, seconds=seconds)
    with cancelled_if_client_leaves(request.receive, answers):
        return json_response(await writing.whole())


def _check(serving: Serving, body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of != body.n:
        raise bad_request("best_of: only the same as n is possible", "best_of")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: needs stream to be true", "stream_options")
    many = isinstance(body.prompt, list) and not (body.prompt and isinstance(body.prompt[0], int))
    check_choices(serving, body.n * (len(body.prompt) if many else 1))


def _encode(serving: Serving, body: CompletionBody) -> list[list[int]]:
    prompt = body.prompt
    if len(prompt) == 0:
        raise bad_request("the prompt is empty; give it some text", "prompt")
    if isinstance(prompt, str):
        return [encode_text(serving, prompt)]
    if isinstance(prompt[0], int):
        return [prompt]
    return [
        encode_text(serving, one) if isinstance(one, str) else one
        for one in cast(list[str | list[int]], prompt)
    ]


class _Writing:
    """Answers in the completions API's shapes. Choices count on from prompt to prompt."""

    def __init__(self, serving: Serving, body: CompletionBody, answers: list[Answer]) -> None:
        self._serving = serving
        self._body = body
        self._answers = answers
        self._common = {
            "id": f"cmpl-{answers[0].id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": serving.name,
        }
        self._count = len(answers) * body.n
        self._logprobs = [CompletionLogprobs(serving) for _ in range(self._count)]
        self._begun: set[int] = set()

    async def chunks(self) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        async for answer, event, details in merged(self._answers):
            choice = self._choice(answer, event, details)
            if choice["text"] or choice["finish_reason"] or len(choice) > 4 or choice["logprobs"]:
                each = options is not None and options.continuous_usage_stats
                yield self._chunk([choice], usage_of(self._answers) if each else None)
        if options is not None and options.include_usage:
            yield self._chunk([], usage_of(self._answers))

    async def whole(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [{} for _ in range(self._count)]
        async for answer, event, details in merged(self._answers):
            new = self._choice(answer, event, details)
            old = choices[new["index"]]
            choices[new["index"]] = _joined(old, new) if old else new
        return {**self._common, "choices": choices, "usage": usage_of(self._answers)}

    def _choice(self, answer: int, event: TokenEvent, details: Any) -> dict[str, Any]:
        """What one event adds to its choice; the echoed prompt comes with the first."""
        index = answer * self._body.n + event.choice
        text, tokens = event.text, [*event.tokens]
        logprobs: list[TokenLogprob | None] = [*event.logprobs]
        if self._body.echo and index not in self._begun:
            prompt = self._answers[answer].prompt
            text = self._serving.tokenizer.decode(prompt, skip_special_tokens=True) + text
            logprobs = [*event.prompt_logprobs, *logprobs]
            tokens = [*prompt, *tokens]
        self._begun.add(index)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": event.finished,
        }
        if self._body.logprobs is not None:
            choice["logprobs"] = self._logprobs[index].lists(logprobs, tokens)
        if self._body.token_details:
            choice["dspark"] = {"tokens": details}
        return choice

    def _chunk(self, choices: list[Any], usage: dict[str, Any] | None) -> bytes:
        chunk = {**self._common, "choices": choices}
        if self._body.stream_options is not None:
            chunk["usage"] = usage
        return event_bytes(chunk)


def _joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    joined = {**new, "text": old["text"] + new["text"]}
    if new["logprobs"] is not None:
        joined["logprobs"] = {
            name: old["logprobs"][name] + values for name, values in new["logprobs"].items()
        }
    if "dspark" in new:
        joined["dspark"] = {"tokens": old["dspark"]["tokens"] + new["dspark"]["tokens"]}
    return joined
