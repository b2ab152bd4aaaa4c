"""What `/openapi.json` says beyond what FastAPI reads off the handlers."""

from typing import Any

from fastapi import FastAPI

from dspark.server.answer_schemas import ErrorAnswer
from dspark.server.schemas import TOKEN_ID
from dspark.server.serving import Serving

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "Refused: the message says why, param names what"},
    "5XX": {"model": ErrorAnswer, "description": "Failed, shutting down (503) or too slow (504)"},
}


def described(answer: Any) -> dict[str, Any]:
    """Arguments of a route whose answer is a JSON document of the model `answer`."""
    return {"response_model": answer, "responses": _ERRORS}


def streamable(answer: Any) -> dict[str, Any]:
    """The same where `stream: true` turns the answer into server-sent events."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    stream = {"text/event-stream": {"schema": event}}
    return {"response_model": answer, "responses": {**_ERRORS, 200: {"content": stream}}}


def plain_text() -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    return {"response_model": None, "responses": {**_ERRORS, 200: {"content": content}}}


def describe_server(app: FastAPI, serving: Serving, guarded: tuple[str, ...]) -> None:
    """Adds what only this server knows: its model, its limits, and whether keys are needed.

    guarded: how the paths begin that need an API key where there are any.
    """
    document = app.openapi()  # kept by FastAPI and answered from then on
    parts = document["components"]
    limits: dict[str, dict[str, Any]] = {
        "model": {"enum": [serving.name]},
        "max_tokens": {"maximum": serving.max_context},
        "max_completion_tokens": {"maximum": serving.max_context},
        "n": {"maximum": serving.config.max_choices},
        "best_of": {"minimum": 1, "maximum": serving.config.max_choices},
    }
    for name, schema in parts["schemas"].items():
        if name.endswith("Body"):
            for field, limit in limits.items():
                if field in schema.get("properties", {}):
                    described = schema["properties"][field]
                    described.get("anyOf", [described])[0].update(limit)
            _limit_token_ids(schema, serving.last_token)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                parameter["schema"]["enum"] = [serving.name]
            if serving.keys and path.startswith(guarded):
                operation["security"] = [{"key": []}]
    if serving.keys:
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}


def _limit_token_ids(schema: Any, last: int) -> None:
    if isinstance(schema, dict):
        if schema.get("items") == TOKEN_ID:
            schema["items"] = {**TOKEN_ID, "maximum": last}
        for part in schema.values():
            _limit_token_ids(part, last)
    elif isinstance(schema, list):
        for part in schema:
            _limit_token_ids(part, last)
