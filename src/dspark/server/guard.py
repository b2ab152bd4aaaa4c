"""Who may come in, and how many at once: decided from the headers, before a body is read."""

from starlette.types import ASGIApp, Receive, Scope, Send

from dspark.server.auth import ApiKeys
from dspark.server.errors import ApiError, draining, json_response
from dspark.server.limits import KeyLimits
from dspark.server.serving import Serving

GUARDED = ("/v1/", "/tokenize", "/detokenize", "/stats")
_COUNTED = ("/v1/chat/completions", "/v1/completions")
"""What takes a place in the key's limits, for as long as its answer lasts."""


class Guard:
    def __init__(self, app: ASGIApp, *, serving: Serving) -> None:
        self._app = app
        self._serving = serving
        self._keys: ApiKeys = serving.keys
        self._limits: KeyLimits = serving.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED):
            await self._app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            holder = self._keys.check(headers.get(b"authorization", b"").decode("latin-1"))
            scope["state"]["log"]["key"] = holder
            if scope["path"] not in _COUNTED:
                await self._app(scope, receive, send)
                return
            if self._serving.draining:
                raise draining()
            with self._limits.request(holder):
                await self._app(scope, receive, send)
        except ApiError as error:
            await json_response(error.to_json(), error.status, error.headers)(scope, receive, send)
