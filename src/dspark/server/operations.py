"""What operators and the live page ask: health, metrics, the model, tokens."""

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from dspark.server.answer_schemas import (
    ModelList,
    ServedModel,
    Stats,
    Status,
    Text,
    Tokens,
    Version,
)
from dspark.server.asking import check_model, encode_text
from dspark.server.chat import encode_messages
from dspark.server.description import described, plain_text
from dspark.server.errors import ApiError, bad_request, draining, json_response
from dspark.server.schemas import DetokenizeBody, TokenizeBody
from dspark.server.serving import Serving

router = APIRouter()


def _serving(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving


@router.get("/health", **described(Status))
async def health(request: Request) -> Response:
    """The process is alive and its engine's thread runs."""
    if not _serving(request).engine.alive:
        raise ApiError(500, "the engine has stopped; restart the server", type="server_error")
    return json_response({"status": "ok"})


@router.get("/ready", **described(Status))
async def ready(request: Request) -> Response:
    """New requests are taken."""
    serving = _serving(request)
    if serving.draining or not serving.engine.alive:
        raise draining()
    return json_response({"status": "ready"})


@router.get("/version", **described(Version))
async def version(request: Request) -> Response:
    return json_response({"version": _serving(request).about["version"]})


@router.get("/metrics", response_class=PlainTextResponse, **plain_text())
async def metrics(request: Request) -> Response:
    text = _serving(request).metrics.text()
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/stats", **described(Stats))
async def stats(request: Request) -> Response:
    """The live page's data: see `dspark.server.live`."""
    serving = _serving(request)
    document = serving.live.document()
    server = {"model": serving.name, "draining": serving.draining, **serving.about}
    return json_response({**document, "engine": asdict(serving.stats()), "server": server})


@router.get("/v1/models", **described(ModelList))
async def models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model(_serving(request))]})


@router.get("/v1/models/{name:path}", **described(ServedModel))
async def model(name: str, request: Request) -> Response:
    check_model(_serving(request), name)
    return json_response(_model(_serving(request)))


def _model(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.name,
        "object": "model",
        "created": serving.created,
        "owned_by": "dspark",
        "max_model_len": serving.max_context,
    }


@router.post("/tokenize", **described(Tokens))
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    serving = _serving(request)
    check_model(serving, body.model)
    if body.messages is not None and body.prompt is None:
        tokens = await asyncio.to_thread(encode_messages, serving, body.messages)
    elif body.prompt is not None and body.messages is None:
        tokens = await asyncio.to_thread(
            encode_text, serving, body.prompt, add_special_tokens=body.add_special_tokens
        )
    else:
        raise bad_request("give either prompt or messages")
    return json_response(
        {"tokens": tokens, "count": len(tokens), "max_model_len": serving.max_context}
    )


@router.post("/detokenize", **described(Text))
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    serving = _serving(request)
    check_model(serving, body.model)
    last = serving.last_token
    if not all(0 <= token <= last for token in body.tokens):
        raise bad_request(f"tokens: ids must be in [0, {last}]", "tokens")
    text = await asyncio.to_thread(
        serving.tokenizer.decode, body.tokens, clean_up_tokenization_spaces=False
    )
    return json_response({"prompt": text})
