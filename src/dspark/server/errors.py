"""What goes wrong with a request, in the words and the shape that OpenAI's clients read.

`{"error": {"message", "type", "param", "code"}}`, always JSON, never a traceback.
"""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dspark.core.errors import DSparkError

_MOST_NAMED = 5
"""Problems of one body that a message lists; the rest are counted."""


class ApiError(DSparkError):
    """A request that is answered with an error status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"message": message, "type": type, "param": param, "code": code}
        self.headers: dict[str, str] = {}
        if retry_after is not None:  # whole seconds, rounded up: an early retry is refused again
            self.headers["Retry-After"] = str(max(1, -int(-retry_after // 1)))

    def to_json(self) -> dict[str, Any]:
        return {"error": self.body}


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def unsupported(param: str, why: str) -> ApiError:
    """For what the API knows by name and cannot do: refused, never ignored."""
    return ApiError(400, f"{param}: {why}", param=param, code="unsupported_parameter")


def too_busy(message: str, retry_after: float) -> ApiError:
    return ApiError(
        429, message, type="rate_limit_error", code="rate_limited", retry_after=retry_after
    )


def draining() -> ApiError:
    return ApiError(
        503,
        "the server is shutting down; retry elsewhere or later",
        type="server_error",
        code="draining",
        retry_after=5,
    )


def json_response(
    document: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """ASCII JSON: half of a surrogate pair, which a client may send, has no UTF-8."""
    body = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return Response(body, status, headers, media_type="application/json")


async def answer_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return json_response(error.to_json(), error.status, error.headers)


async def answer_invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [*error.errors()]
    lines = [_problem(problem) for problem in problems[:_MOST_NAMED]]
    if len(problems) > _MOST_NAMED:
        lines.append(f"and {len(problems) - _MOST_NAMED} more")
    first = bad_request("; ".join(lines), _field(problems[0]) or None)
    return json_response(first.to_json(), 400)


async def answer_http(_request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    return http_answer(error)


def http_answer(error: HTTPException) -> Response:
    message = "there is no such path here" if error.status_code == 404 else str(error.detail)
    known = ApiError(error.status_code, message)
    return json_response(known.to_json(), known.status, error.headers)


def _field(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "json_invalid":  # its place is a character of the body
        return ""
    return ".".join(str(part) for part in problem["loc"] if part != "body")[:200]


def _problem(problem: Mapping[str, Any]) -> str:
    field = _field(problem)
    if problem["type"] == "extra_forbidden":
        return f"{field}: this field is not known here; remove it"
    if problem["type"] == "json_invalid":
        return "the body is not JSON"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{field}: {message}" if field else message
