"""The one exception tree.

DSparkError                    something failed; exit code 1
├── OverloadedError            too much is waiting already; the same request may pass later
└── UserError                  the input was bad; exit code 2, one line, no traceback
    ├── ConfigError            a flag, a configuration key, sampling parameters
    ├── PromptError            a prompt that is empty, too long, or not readable
    ├── TargetError            a target that is missing, broken or of an unsupported architecture
    ├── CheckpointError        a draft bundle that is missing, broken or made for another target
    ├── DataError              a data file or run folder with something wrong in it
    └── MissingExtraError      an optional dependency that is not installed

Messages say what was wrong, the limit, and what to change. ``assert`` is for our own invariants.
"""


class DSparkError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class OverloadedError(DSparkError):
    """Nothing is wrong with the request but the moment (HTTP 429)."""


class UserError(DSparkError):
    """Bad input from outside: shown as one line."""

    exit_code = 2


class ConfigError(UserError):
    pass


class PromptError(UserError):
    pass


class TargetError(UserError):
    pass


class CheckpointError(UserError):
    pass


class DataError(UserError):
    pass


class MissingExtraError(UserError):
    """Raised where a feature needs a package of an install extra."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'dspark[{extra}]'")
