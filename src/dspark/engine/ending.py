"""Where a text ends inside the tokens of one step, and what those tokens add to it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dspark.core.records import FinishReason
from dspark.engine.request import RequestState, TokenEvent


@dataclass(frozen=True, slots=True)
class Walked:
    """The tokens of a step that belong to the text, and why it ended with the last of them."""

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    """() where no stop string is looked for: then nothing in the next round depends on them, and
    `write_texts` may make them later."""
    finished: FinishReason | None = None
    stopped_by: int | str | None = None


def walk(state: RequestState, run: Sequence[int], eos: Collection[int]) -> Walked:
    """Walks the tokens of `run` in order, up to whatever ends the text first.

    A token that ends it by itself comes before a stop string, and either before the length.
    Raises what is wrong with the request: `state.error`, or what its detokeniser says.
    """
    if state.error is not None:
        raise state.error
    params = state.request.params
    writer = state.writer if params.stops else None
    texts: list[str] = []
    for index, token in enumerate(run):
        ends = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
        stop: int | str | None = token if ends else None
        if writer is not None:
            text = ""
            if not ends or params.include_stop:
                free = len(state.output) + index >= params.min_tokens
                text, found = writer.push(token, may_stop=free)
                stop = found if stop is None else stop
            texts.append(text)
        if stop is not None or index + 1 == state.remaining:
            if writer is not None and not isinstance(stop, str):
                texts[-1] += writer.finish()
            reason: FinishReason = "length" if stop is None else "stop"
            return Walked(tuple(run[: index + 1]), tuple(texts), reason, stop)
    if state.logits is not None:
        state.logits.commit(run)
    return Walked(tuple(run), tuple(texts))


def write_texts(state: RequestState, event: TokenEvent) -> TokenEvent:
    """The event with the texts of its tokens, where `walk` did not have to read them already.

    Raises what the request's detokeniser says.
    """
    writer, tokens = state.writer, event.tokens
    if writer is None or not tokens or state.request.params.stops:
        return event
    silent = event.stopped_by is not None and not state.request.params.include_stop
    shown = tokens[:-1] if silent else tokens
    texts = [writer.push(token)[0] for token in shown] + [""] * (len(tokens) - len(shown))
    if event.finished is not None:
        texts[-1] += writer.finish()
    return replace(event, texts=tuple(texts))
