"""How each token of an event came about, for the playground."""

import math
from typing import Any

from dspark.core.records import RoundRecord
from dspark.engine.request import TokenEvent


def token_details(event: TokenEvent, note: RoundRecord | None) -> list[dict[str, Any]]:
    """One object a token: id, text, fate, round, position, target_prob, confidence, survival.

    note: the round's record; None for the first token, which prefill gave. `target_prob` is the
    target's own probability of the token, before temperature and truncation, where logprobs are
    asked for.
    """
    texts = event.texts or ("",) * len(event.tokens)
    details: list[dict[str, Any]] = []
    survival = 1.0
    for index, token in enumerate(event.tokens):
        one: dict[str, Any] = {
            "id": token,
            "text": texts[index],
            "fate": event.fates[index],
            "round": 0 if note is None else note.round,
            "position": index + 1,
        }
        if event.logprobs:
            one["target_prob"] = math.exp(event.logprobs[index].logprob)
        if note is not None and index < len(note.confidence) and index < note.admitted:
            confidence = 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, note.confidence[index]))))
            survival *= confidence
            one |= {"confidence": confidence, "survival": survival}
        details.append(one)
    return details
