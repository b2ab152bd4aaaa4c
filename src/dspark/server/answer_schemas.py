"""Answers as `/openapi.json` describes them. Handlers write their JSON themselves; a test holds
them to these shapes."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dspark.core.records import FinishReason, TokenFate


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorBody(Document):
    message: str = Field(min_length=1)
    """What was wrong, the limit, and what to do."""
    type: str
    param: str | None
    """The field it is about."""
    code: str | None


class ErrorAnswer(Document):
    error: ErrorBody


class Usage(Document):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenDetails(Document):
    """How one token came about."""

    id: int
    text: str
    fate: TokenFate
    round: int
    position: int
    target_prob: float | None = None
    """With logprobs: the target's own probability, before temperature and truncation."""
    draft_prob: float | None = None
    """With logprobs: what the drafter's slot gave this token, after temperature and truncation, as
    drafts are drawn; 0 for a token that it could not have drawn."""
    confidence: float | None = None
    """Calibrated: that the draft token here is accepted, given that all before it are."""
    survival: float | None = None
    """Product of the confidences so far."""


class ChoiceDetails(Document):
    tokens: list[TokenDetails]


class ChosenLogprob(Document):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(ChosenLogprob):
    top_logprobs: list[ChosenLogprob]


class ChatLogprobs(Document):
    content: list[ContentLogprob]


class AnsweredFunction(Document):
    name: str
    arguments: str
    """JSON."""


class AnsweredCall(Document):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AssistantMessage(Document):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(Document):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    dspark: ChoiceDetails | None = None


class ChatCompletion(Document):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class PromptLogprobs(Document):
    """Four lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None for a prompt's first token, which nothing comes before."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Document):
    index: int
    text: str
    logprobs: PromptLogprobs | None
    finish_reason: FinishReason
    dspark: ChoiceDetails | None = None


class Completion(Document):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ServedModel(Document):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Document):
    object: Literal["list"]
    data: list[ServedModel]


class Tokens(Document):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(Document):
    prompt: str


class Status(Document):
    status: str


class Version(Document):
    version: str


class Stats(BaseModel):
    """What the live page draws; the lists of numbers are `dspark.server.live`'s."""

    now: float
    seconds: list[list[int]]
    steps: list[dict[str, Any]]
    totals: dict[str, int]
    engine: dict[str, int]
    server: dict[str, Any]
