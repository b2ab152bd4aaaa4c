"""A request, and what the engine keeps of it while it runs."""

from dataclasses import dataclass, field

from torch import Tensor

from dspark.core.errors import DSparkError
from dspark.core.records import FinishReason, TokenFate, TokenLogprob
from dspark.core.sampling import SamplingParams
from dspark.engine.text import OutputText
from dspark.nn.kv_cache import PageTable
from dspark.nn.noise import RequestNoise, Round


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to generate."""

    id: int
    """Never used again in one engine; in no random key."""
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    """The seed that is used: the request's own, or one drawn at admission."""
    choice: int = 0

    @property
    def exact(self) -> bool:
        """Its tokens are promised not to depend on the batch."""
        return self.params.temperature == 0 or self.params.rule == "coupled"

    @property
    def most_tokens(self) -> int:
        """Positions it can ever hold: what is reserved at admission."""
        return len(self.prompt) + self.params.max_new_tokens


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one step added to a request's output; the last one says why it ended.

    An event of "error" or "cancelled" brings no tokens.
    """

    request: int
    """The id that the engine gave: one a choice."""
    tokens: tuple[int, ...]
    """With "stop", the last one is what ended the text, or completed its stop string."""
    fates: tuple[TokenFate, ...]
    finished: FinishReason | None = None
    choice: int = 0
    texts: tuple[str, ...] = ()
    """What each token adds to the text: whole characters, nothing that may be the beginning of a
    stop string; empty strings are common. () in an engine without a tokenizer."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One a token, where the request asks for them."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """In a request's first event with tokens, where it asks for them: one a prompt token; None for
    the first, which nothing comes before."""
    stopped_by: int | str | None = None
    """With "stop": the token id or stop string that ended the text."""
    error: DSparkError | None = None
    """With "error": why. No other request is touched."""

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(slots=True, eq=False)
class RequestState:
    request: Request
    noise: RequestNoise
    table: PageTable
    """Reserved whole at admission, so that no draft is ever cut for want of a page (law 2)."""
    cached: int = 0
    """Positions whose target K/V (and, with a drafter, context K/V) are in the cache."""
    writer: OutputText | None = None
    """None in an engine without a tokenizer."""
    output: list[int] = field(default_factory=list)
    rounds: int = 0
    """Number of the next round; prefill's first token is round 0."""
    features: list[Tensor] = field(default_factory=list)
    """Tapped features that are not context K/V yet, in order of position (`DraftContext`)."""
    features_end: int = 0
    """Position after the last of them."""

    @property
    def prefilling(self) -> bool:
        return self.cached < len(self.request.prompt)

    @property
    def anchor(self) -> int:
        """The last emitted token: nobody has its K/V yet."""
        return self.output[-1]

    @property
    def text(self) -> list[int]:
        """Prompt and output so far."""
        return [*self.request.prompt, *self.output]

    @property
    def remaining(self) -> int:
        return self.request.params.max_new_tokens - len(self.output)

    def peek_round(self) -> Round:
        """The round this step runs; the engine counts it when it commits."""
        return Round(self.noise, self.rounds, len(self.output))
