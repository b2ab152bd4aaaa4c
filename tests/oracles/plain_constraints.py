"""What a request does to its logits, token by token: the slow twin of `nn.logit_transforms`."""

import math


def plain_logits(logits, prompt, text, params, end_token_ids=(), forbidden=()):
    """Logits (a list of floats) of the token after `text`, which follows `prompt`."""
    changed = []
    for token, logit in enumerate(logits):
        logit += params.logit_bias.get(token, 0.0)
        if token in prompt or token in text:
            positive = logit > 0
            factor = params.repetition_penalty
            logit = logit / factor if positive else logit * factor
        logit -= params.frequency_penalty * text.count(token)
        logit -= params.presence_penalty * (token in text)
        early = token in end_token_ids and len(text) < params.min_tokens
        if token in params.banned_token_ids or early or token in forbidden:
            logit = -math.inf
        changed.append(logit)
    return changed
