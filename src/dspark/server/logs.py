"""One JSON object a line on standard error: what happened, to which request, never what it said."""

import json
import logging
import sys
import time
from typing import Any

logger = logging.getLogger("dspark.server")


class JsonLines(logging.Formatter):
    """`logger.info("event", extra={"fields": {...}})` -> one line of JSON.

    Keys and values go through `json`, so that no text from outside can start a line of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"), default=str)


class QuietHandler(logging.StreamHandler[Any]):
    """A log that cannot be written (a full disk, a closed pipe) loses lines, not requests."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def log(event: str, level: int = logging.INFO, **fields: Any) -> None:
    logger.log(level, event, extra={"fields": fields})


def start_logging() -> None:
    """Sends this package's and uvicorn's messages to standard error as JSON lines."""
    handler = QuietHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in (("dspark", logging.INFO), ("uvicorn", logging.WARNING)):
        source = logging.getLogger(name)
        source.handlers = [handler]
        source.propagate = False
        source.setLevel(level)
