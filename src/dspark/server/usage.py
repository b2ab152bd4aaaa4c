"""What an answer cost."""

from collections.abc import Sequence
from typing import Any

from dspark.server.answer import Answer


def usage_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens computed so far. The token that ended a text counts, as it had to be generated."""
    prompt = sum(len(answer.prompt) for answer in answers)
    completion = sum(answer.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
