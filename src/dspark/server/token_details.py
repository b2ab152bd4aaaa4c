"""How each token of an event came about, for the playground."""

import math
from typing import Any

from dspark.core.records import RoundRecord
from dspark.engine.request import TokenEvent
from dspark.server.reliability import conditional


def token_details(event: TokenEvent, note: RoundRecord | None) -> list[dict[str, Any]]:
    """One object a token: id, text, fate, round, position, target_prob, draft_prob, confidence,
    survival.

    note: the round's record; None for the first token, which prefill gave. Where logprobs are asked
    for, `target_prob` is the target's own probability of the token, before temperature and
    truncation, and `draft_prob` what the drafter's slot gave it, after both. `confidence` and
    `survival` are calibrated.
    """
    texts = event.texts or ("",) * len(event.tokens)
    details: list[dict[str, Any]] = []
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
        if index < len(event.draft_probs):
            one["draft_prob"] = event.draft_probs[index]
        if note is not None and index < len(note.survival) and index < note.admitted:
            confidence = conditional(note.survival, index)
            one |= {"confidence": confidence, "survival": note.survival[index]}
        details.append(one)
    return details
