"""How the server is set up. The fields are the flags of `dspark serve` and the keys of its file."""

from dataclasses import dataclass
from pathlib import Path

from dspark.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Raises ConfigError, naming the flag and its range, for a value outside it."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 lets the system choose."""
    model_name: str | None = None
    """What clients call the model; None is the target's own name."""
    api_keys: Path | None = None
    """One key a line; without a file, the environment's DSPARK_API_KEYS; without both, no check."""
    default_tokens: int = 1024
    """Most new tokens of a chat request that names no limit (OpenAI's completions have 16)."""
    max_body_kib: int = 1024
    max_prompt_tokens: int | None = None
    """None is whatever fits the target's context."""
    max_choices: int = 16
    """Most `n` of one request, prompts times choices in all."""
    requests_per_minute: int = 0
    """Per key, with a minute's worth as the burst; 0 is no limit."""
    concurrent_requests: int = 0
    """Per key; 0 is no limit."""
    receive_timeout: float = 30.0
    """Seconds that a client has to send a request's head, and then between parts of its body; also
    how long a connection may be idle between requests."""
    request_timeout: float = 600.0
    """Seconds from arrival to the last token."""
    drain_timeout: float = 30.0
    """Seconds that running requests get after SIGTERM."""
    log_prompts: bool = False
    """Write prompts and answers to the log. Off: no text of a user ever gets there."""

    def __post_init__(self) -> None:
        limits: dict[str, tuple[float, float]] = {
            "port": (0, 65535),
            "default_tokens": (1, 10**9),
            "max_body_kib": (1, 10**6),
            "max_choices": (1, 1024),
            "requests_per_minute": (0, 10**9),
            "concurrent_requests": (0, 10**9),
            "receive_timeout": (0.001, 10**7),
            "request_timeout": (0.001, 10**7),
            "drain_timeout": (0.0, 10**7),
        }
        if self.max_prompt_tokens is not None:
            limits["max_prompt_tokens"] = (1, 10**9)
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high:
                flag = name.replace("_", "-")
                raise ConfigError(f"{flag} is {value}; it must be in [{low:g}, {high:g}]")
