"""Answers from any server that speaks OpenAI's chat API: asked with patience, failures sorted."""

import http.client
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dspark.core.errors import ConfigError, DSparkError
from dspark.data.conversation import Message

_T = TypeVar("_T")

_LONGEST_WAIT = 30.0
"""Seconds between two tries."""
_DAY = 86400
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Status codes that the same request may not meet again."""
_HOPELESS = frozenset({401, 403, 404, 405})
"""Status codes that every request will meet."""


class EndpointError(DSparkError):
    """No answer came. `kind` is what to count it under."""

    def __init__(self, kind: str, message: str, *, passing: bool, wait: float | None = None):
        super().__init__(message)
        self.kind, self.passing, self.wait = kind, passing, wait


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    ended: bool
    """It ended by itself; False: at the limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointConfig:
    url: str
    """Up to and with the version, as in http://127.0.0.1:8000/v1."""
    model: str | None = None
    """None: the only one that the server has."""
    api_key: str | None = None
    concurrency: int = 16
    timeout: float = 120.0
    """Seconds that a server may stay silent."""
    tries: int = 5
    first_wait: float = 1.0
    """Seconds before the second try; each further one waits twice as long."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"the endpoint is {self.url!r}; it must begin with http:// or https://"
            )
        try:
            parts = urllib.parse.urlsplit(self.url)
            named = parts.hostname and parts.port != 0  # the port is read here, and may be none
        except ValueError as error:
            raise ConfigError(f"the endpoint is {self.url!r}; it is no URL ({error})") from None
        if not named or not self.url.isascii() or any(c.isspace() for c in self.url):
            raise ConfigError(f"the endpoint is {self.url!r}; it must be http://HOST[:PORT]/PATH")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError(
                "the API key must be printable ASCII; it has a line break or another character"
            )
        for name in ("concurrency", "tries"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("timeout", "first_wait"):
            value = getattr(self, name)
            if not 0 < value <= _DAY:  # sockets take no infinity
                raise ConfigError(
                    f"{name} is {value}; it must be above 0 and at most {_DAY} seconds"
                )


class Endpoint:
    """May be asked by many threads at once. `stopped` ends the waiting between tries."""

    def __init__(self, config: EndpointConfig, stopped: threading.Event) -> None:
        """Raises EndpointError or ConfigError where the server cannot say what model it has."""
        self.config = config
        self.url = config.url.rstrip("/")
        self._wait: Callable[[float], bool] = stopped.wait
        self.model = config.model or self._only_model()

    def complete(
        self,
        messages: Sequence[Message],
        *,
        temperature: float,
        max_tokens: int,
        seed: int,
        template_options: dict[str, bool],
    ) -> Reply:
        """The assistant's next message. Raises EndpointError when every try failed."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed % 2**31,  # what every server takes
        }
        if template_options:
            body["chat_template_kwargs"] = template_options
        return self._patiently(lambda: _reply(self._ask("/chat/completions", body)))

    def _only_model(self) -> str:
        document = self._patiently(lambda: self._ask("/models", None))
        try:
            names = [str(entry["id"]) for entry in document["data"]]
        except (KeyError, TypeError):
            names = []
        if len(names) != 1:
            listed = f"has {len(names)} models ({', '.join(names)[:80]})" if names else "names none"
            raise ConfigError(f"{self.url} {listed}; name one with --endpoint-model")
        return names[0]

    def _patiently(self, ask: Callable[[], _T]) -> _T:
        wait = self.config.first_wait
        for left in reversed(range(self.config.tries)):
            try:
                return ask()
            except EndpointError as error:
                if not (left and error.passing):
                    raise
                if self._wait(min(_LONGEST_WAIT, max(wait, error.wait or 0.0))):
                    raise
                wait *= 2
        raise AssertionError("the last try returns or raises")

    def _ask(self, path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.config.api_key:
            headers["Authorization"] = f"Bearer {self.config.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self.config.timeout) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            raise self._refused(path, error) from None
        except TimeoutError:
            raise self._silent() from None
        except (OSError, http.client.HTTPException, ValueError) as error:  # where it redirects to
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError):
                raise self._silent() from None
            raise EndpointError(
                "not reached", f"{self.url} cannot be reached ({reason})", passing=True
            ) from None
        try:
            return json.loads(text)
        except ValueError:
            raise EndpointError(
                "not JSON", f"{self.url} answers with something that is not JSON", passing=True
            ) from None

    def _silent(self) -> EndpointError:
        seconds = self.config.timeout
        return EndpointError(
            "too slow", f"{self.url} says nothing for {seconds:g} s (--timeout)", passing=True
        )

    def _refused(self, path: str, error: urllib.error.HTTPError) -> EndpointError:
        with error:
            said = " ".join(error.read(300).decode(errors="replace").split())
        hint = {
            401: "; is the API key right?",
            403: "; is the API key right?",
            404: "; the URL ends before /chat/completions, usually with /v1",
        }.get(error.code, "")
        after = error.headers.get("Retry-After", "")
        return EndpointError(
            f"HTTP {error.code}",
            f"{self.url}{path} answers HTTP {error.code}: {said}{hint}",
            passing=error.code in _PASSING,
            wait=float(after) if after.isascii() and after.isdigit() else None,
        )


def is_hopeless(error: EndpointError) -> bool:
    """Whether every further request would end in the same way."""
    return error.kind in {f"HTTP {code}" for code in _HOPELESS}


def _reply(document: Any) -> Reply:
    try:
        choice = document["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        text = message["content"]
    except (KeyError, IndexError, TypeError):
        raise EndpointError(
            "no answer in the reply", "the reply holds no choice with a message", passing=True
        ) from None
    if message.get("reasoning_content") or message.get("reasoning"):
        raise EndpointError(
            "thought apart from the answer",
            "the server splits the thought off; start it without a reasoning parser",
            passing=False,
        )
    if reason not in ("stop", "length"):
        raise EndpointError(f"ended by {reason}", f"the answer ended by {reason}", passing=False)
    if not isinstance(text, str) or not text.strip():
        raise EndpointError("empty answer", "the answer is empty", passing=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise EndpointError(
            "broken text", "the answer is no valid Unicode", passing=False
        ) from None
    return Reply(text, ended=reason == "stop")
