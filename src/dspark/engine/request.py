"""A request, and what the engine keeps of it while it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dspark.core.errors import DSparkError
from dspark.core.records import FinishReason, TokenFate, TokenLogprob
from dspark.core.sampling import SamplingParams
from dspark.engine.text import OutputText
from dspark.nn.logit_transforms import Grammar, LogitState
from dspark.nn.noise import RequestNoise, Round
from dspark.nn.pages import PageTable


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
    priority: int = 0
    """Higher goes first, and is preempted last."""
    owner: str = ""
    """Whom its tokens are charged to; owners of one priority get equal shares."""
    grammar: Grammar | None = None
    """Compiled from `params.guided`, for this choice alone."""

    @property
    def exact(self) -> bool:
        """Its tokens are promised not to depend on the batch."""
        return self.params.temperature == 0 or self.params.rule == "coupled"

    @property
    def scores_only(self) -> bool:
        """It wants its prompt's log-probabilities and no token."""
        return self.params.max_new_tokens == 0

    @property
    def most_tokens(self) -> int:
        """Positions it can ever hold."""
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
    draft_probs: tuple[float, ...] = ()
    """Beside them: what the drafter's slot at each token gave it, after temperature and truncation,
    0 for a token that the slot could not have drawn. Shorter than `tokens` where there was no draft
    slot, as for the token after a whole accepted block."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """In a request's first event that is no failure, where it asks for them: one a prompt token;
    None for the first, which nothing comes before."""
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
    """Grows before a step drafts, by whole blocks: no draft is cut for want of a page (law 2)."""
    digests: tuple[bytes, ...] = ()
    """Of the prompt's full pages, for the prefix cache."""
    cached: int = 0
    """Positions whose target K/V (and, with a drafter, context K/V) are in the cache."""
    logits: LogitState | None = None
    """None for a request that takes its logits as they are."""
    error: Exception | None = None
    """Why it ends in this step, before its tokens are counted."""
    writer: OutputText | None = None
    """None in an engine without a tokenizer."""
    computed: int = 0
    """The most that `cached` ever was: below it, what is computed now is computed again."""
    published: int = 0
    """Pages that the prefix cache knows, or was offered."""
    exact_prefix: bool = True
    """Every step that computed the cached part of the prompt was row-exact."""
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """Those of a prompt's first tokens so far, where asked for; a preemption loses none."""
    output: list[int] = field(default_factory=list)
    text: list[int] = field(init=False)
    """Prompt and output so far; for readers only."""
    rounds: int = 0
    """Number of the running or last round. Prefill's first token is round 0; a decode step takes a
    fresh number before it drafts, so that one that is abandoned has used its number up."""
    features: list[Tensor] = field(default_factory=list)
    """Tapped features that are not context K/V yet, in order of position (`DraftContext`)."""
    features_end: int = 0
    """Position after the last of them."""

    def __post_init__(self) -> None:
        self.text = [*self.request.prompt, *self.output]

    def emit(self, tokens: Sequence[int]) -> None:
        """Adds tokens to the output."""
        self.output += tokens
        self.text += tokens

    def take_back(self, kept: int) -> None:
        """Leaves the first `kept` output tokens, at least one of them not in the cache yet."""
        del self.output[kept:]
        self.text = [*self.request.prompt, *self.output]
        self.cached = self.known

    @property
    def rank(self) -> tuple[int, int]:
        """Who keeps its place longest comes first: by priority, then by age."""
        return -self.request.priority, self.request.id

    @property
    def known(self) -> int:
        """Positions that can be computed without a new token: all but the anchor's."""
        return len(self.request.prompt) + max(0, len(self.output) - 1)

    @property
    def prefilling(self) -> bool:
        """There is something to compute before it can decode: prompt, or what a preemption lost."""
        return self.cached < self.known

    def chunk(self, most: int) -> tuple[int, ...]:
        """The next tokens to compute while prefilling: of the prompt, or generated, never both."""
        prompt, start = self.request.prompt, self.cached
        if start < len(prompt):
            return prompt[start : start + most]
        start -= len(prompt)
        return tuple(self.output[start : min(start + most, len(self.output) - 1)])

    def reach(self, start: int, block_size: int) -> int:
        """Positions below this may be written by a round whose anchor is at `start`, the draft
        block's own keys and values included, though the text may end before them."""
        return start if self.request.scores_only else start + 1 + block_size

    @property
    def shareable(self) -> tuple[bytes, ...]:
        """Digests of the pages that it may take from the prefix cache: rows of a prompt that are
        still to be scored must be computed."""
        if self.request.params.prompt_logprobs is None:
            return self.digests
        return self.digests[: max(0, len(self.prompt_logprobs) - 1) // self.table.page_size]

    @property
    def anchor(self) -> int:
        """The last emitted token: nobody has its K/V yet."""
        return self.output[-1]

    def room(self, block_size: int) -> int:
        """The most draft tokens it may have verified in a round, whatever was drafted."""
        if self.error is not None:
            return 0
        most = min(block_size, self.remaining - 1, self.request.params.most_draft_tokens)
        return max(0, int(most))

    @property
    def remaining(self) -> int:
        return self.request.params.max_new_tokens - len(self.output)

    def peek_round(self) -> Round:
        """The round this step runs."""
        return Round(self.noise, self.rounds, len(self.output))
