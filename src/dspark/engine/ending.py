"""Where a text ends inside the tokens of one step."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dspark.core.records import FinishReason
from dspark.engine.request import RequestState


@dataclass(frozen=True, slots=True)
class Walked:
    """The tokens of a step that belong to the text, and why it ended with the last of them."""

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
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
    texts: list[str] = []
    for index, token in enumerate(run):
        ends = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
        stop: int | str | None = token if ends else None
        if state.writer is not None:
            text = ""
            if not ends or params.include_stop:
                free = len(state.output) + index >= params.min_tokens
                text, found = state.writer.push(token, may_stop=free)
                stop = found if stop is None else stop
            texts.append(text)
        if stop is not None or index + 1 == state.remaining:
            if state.writer is not None and not isinstance(stop, str):
                texts[-1] += state.writer.finish()
            reason: FinishReason = "length" if stop is None else "stop"
            return Walked(tuple(run[: index + 1]), tuple(texts), reason, stop)
    if state.logits is not None:
        state.logits.commit(run)
    return Walked(tuple(run), tuple(texts))
