"""POST /v1/chat/completions"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from dspark.core.errors import PromptError
from dspark.core.sampling import SamplingParams
from dspark.engine.request import TokenEvent
from dspark.server.answer import Answer, ask
from dspark.server.answer_schemas import ChatCompletion
from dspark.server.asking import check_choices, check_model, sampling_params
from dspark.server.description import streamable
from dspark.server.errors import bad_request, json_response, unsupported
from dspark.server.logprobs import chat_logprobs
from dspark.server.logs import log
from dspark.server.schemas import ChatBody, Message
from dspark.server.serving import Serving
from dspark.server.streaming import EventStream, cancelled_if_client_leaves, event_bytes
from dspark.server.tools import ToolCalls
from dspark.server.usage import usage_of

router = APIRouter()


@router.post("/v1/chat/completions", **streamable(ChatCompletion))
async def chat_completions(body: ChatBody, request: Request) -> Response:
    serving: Serving = request.app.state.serving
    check_model(serving, body.model)
    check_choices(serving, body.n)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs: needs logprobs to be true", "top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: needs stream to be true", "stream_options")
    tools = _tools(serving, body)
    prompt = await asyncio.to_thread(encode_messages, serving, body.messages, tools)
    params = _params(serving, body, prompt)
    owner = request.state.log["key"]
    answer = await ask(serving, prompt, params, owner=owner, details=body.token_details)
    writing = _Writing(serving, body, answer, with_tools=tools is not None)
    request.state.log.update(prompt_tokens=len(prompt), seed=answer.seed, stream=body.stream)
    if serving.config.log_prompts:
        log("prompt", request=request.state.request_id, messages=body.model_dump()["messages"])
    if body.stream:
        seconds = serving.config.request_timeout
        return EventStream(writing.chunks(), [answer], seconds=seconds)
    with cancelled_if_client_leaves(request.receive, [answer]):
        return json_response(await writing.whole())


def encode_messages(
    serving: Serving, messages: list[Message], tools: list[dict[str, Any]] | None = None
) -> list[int]:
    """Token ids of a conversation, up to where the answer starts."""
    try:
        return serving.encode_chat([_plain(message) for message in messages], tools)
    except PromptError as error:
        raise bad_request(f"messages: {error}", "messages") from None


def _plain(message: Message) -> Mapping[str, Any]:
    """The message as chat templates read it: text as one string, unset fields left out."""
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    plain.setdefault("content", "")
    return plain


def _tools(serving: Serving, body: ChatBody) -> list[dict[str, Any]] | None:
    if body.parallel_tool_calls is False:
        raise unsupported("parallel_tool_calls", "the model decides; leave it out")
    if not body.tools or body.tool_choice == "none":
        return None
    if not serving.takes_tools:
        raise unsupported("tools", "the chat template of this model has no place for tools")
    return [tool.model_dump(exclude_none=True) for tool in body.tools]


def _params(serving: Serving, body: ChatBody, prompt: list[int]) -> SamplingParams:
    limit = body.max_completion_tokens or body.max_tokens
    if body.max_completion_tokens == 0 or body.max_tokens == 0:
        raise bad_request("max_tokens is 0; it must be at least 1", "max_tokens")
    if None not in (body.max_completion_tokens, body.max_tokens) and limit != body.max_tokens:
        raise bad_request(
            f"max_tokens is {body.max_tokens} and max_completion_tokens, its newer name, "
            f"{body.max_completion_tokens}; give one of them",
            "max_tokens",
        )
    if limit is None:
        room = serving.max_context - len(prompt)
        limit = max(1, min(serving.config.default_tokens, room))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_params(body, max_tokens=limit, logprobs=logprobs)


class _Writing:
    """One answer in the chat API's shapes."""

    def __init__(
        self, serving: Serving, body: ChatBody, answer: Answer, *, with_tools: bool
    ) -> None:
        self._serving = serving
        self._body = body
        self._answer = answer
        self._common = {
            "id": f"chatcmpl-{answer.id}",
            "created": int(time.time()),
            "model": serving.name,
        }
        self._tools = [ToolCalls() for _ in range(body.n)] if with_tools else None

    async def chunks(self) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        with_usage = options is not None and options.include_usage
        for index in range(self._body.n):
            yield self._chunk(self._choice(index, {"role": "assistant", "content": ""}, None))
        async for event, details in self._answer.events():
            delta, finish = self._read(event)
            extras = self._extras(event, details)
            if delta or finish is not None or extras:
                choice = {**self._choice(event.choice, delta, finish), **extras}
                each = options is not None and options.continuous_usage_stats
                yield self._chunk(choice, usage_of([self._answer]) if each else None)
        if with_usage:
            yield self._chunk(None, usage_of([self._answer]))

    async def whole(self) -> dict[str, Any]:
        contents = [""] * self._body.n
        calls: list[list[dict[str, Any]]] = [[] for _ in contents]
        finish: list[str | None] = [None] * self._body.n
        logprobs: list[list[Any]] = [[] for _ in contents]
        tokens: list[list[Any]] = [[] for _ in contents]
        async for event, details in self._answer.events():
            delta, ended = self._read(event)
            contents[event.choice] += delta.get("content", "")
            calls[event.choice] += delta.get("tool_calls", [])
            logprobs[event.choice] += event.logprobs
            tokens[event.choice] += details or []
            finish[event.choice] = ended or finish[event.choice]
        choices = []
        for index, content in enumerate(contents):
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if calls[index]:
                message["content"] = content.strip() or None
                message["tool_calls"] = [
                    {key: value for key, value in call.items() if key != "index"}
                    for call in calls[index]
                ]
            choice: dict[str, Any] = {
                "index": index,
                "message": message,
                "logprobs": None,
                "finish_reason": finish[index],
            }
            if self._body.logprobs:
                choice["logprobs"] = chat_logprobs(self._serving, logprobs[index])
            if self._body.token_details:
                choice["dspark"] = {"tokens": tokens[index]}
            choices.append(choice)
        return {
            **self._common,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_of([self._answer]),
        }

    def _read(self, event: TokenEvent) -> tuple[dict[str, Any], str | None]:
        """(delta, finish reason)"""
        finish: str | None = event.finished
        if self._tools is None:
            return ({"content": event.text} if event.text else {}), finish
        parser = self._tools[event.choice]
        content, calls = parser.push(event.text)
        if finish is not None:
            more, last = parser.finish()
            content, calls = content + more, calls + last
            if parser.count and finish == "stop":
                finish = "tool_calls"
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = calls
        return delta, finish

    def _extras(self, event: TokenEvent, details: list[dict[str, Any]] | None) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._body.logprobs and event.logprobs:
            extras["logprobs"] = chat_logprobs(self._serving, event.logprobs)
        if details:
            extras["dspark"] = {"tokens": details}
        return extras

    def _choice(self, index: int, delta: Mapping[str, Any], finish: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}

    def _chunk(self, choice: dict[str, Any] | None, usage: dict[str, Any] | None = None) -> bytes:
        chunk: dict[str, Any] = {
            **self._common,
            "object": "chat.completion.chunk",
            "choices": [] if choice is None else [choice],
        }
        if self._body.stream_options is not None:
            chunk["usage"] = usage
        return event_bytes(chunk)
