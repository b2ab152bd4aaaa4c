"""Who may ask: API keys from a file or the environment."""

import hashlib
import hmac
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from dspark.core.errors import ConfigError
from dspark.server.errors import ApiError

ENVIRONMENT = "DSPARK_API_KEYS"
_LEAST_CHARACTERS = 8
ANYONE = "anyone"
"""Who asks where no keys are set."""


class ApiKeys:
    """Keys as digests: comparing digests of one length takes the same time for any key."""

    def __init__(self, keys: Sequence[str]) -> None:
        for number, key in enumerate(keys, 1):
            if len(key) < _LEAST_CHARACTERS or not key.isascii() or not key.isprintable():
                raise ConfigError(
                    f"API key {number} must be at least {_LEAST_CHARACTERS} printable ASCII "
                    f"characters; make one with: openssl rand -hex 24"
                )
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def load(cls, file: Path | None, environment: Mapping[str, str] = os.environ) -> "ApiKeys":
        """Keys of a file (one a line, # comments), else of the environment (commas), else none."""
        if file is None:
            return cls([key for key in environment.get(ENVIRONMENT, "").split(",") if key])
        try:
            lines = [line.strip() for line in file.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"API keys cannot be read from {file}: {error}") from None
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:  # an empty file must not open the server to everyone
            raise ConfigError(f"{file} holds no API key; write one a line")
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str | None) -> str:
        """A short name of the key's holder, for limits and logs. Raises ApiError 401."""
        if not self._digests:
            return ANYONE
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        # Every key is compared, so that time says nothing about which one, or whether any, fits.
        fits = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(fits):
            raise ApiError(
                401,
                "a valid API key is needed: send the header Authorization: Bearer KEY",
                type="authentication_error",
                code="invalid_api_key",
            )
        return given.hex()[:8]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
