"""Request bodies, after OpenAI's. A field that is not listed is refused by name.

Ranges that the engine checks itself are left to it, so that every way in refuses in the same words.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool

SEED_LIMIT = 2**63


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(Body):
    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    """vLLM's: usage in every chunk."""


class JsonSchema(Body):
    name: Annotated[str, Field(max_length=64)] = "schema"
    description: str | None = None
    strict: StrictBool | None = None
    """The grammar is always enforced."""
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SpeculationOptions(Body):
    max: Annotated[int, Field(ge=0, le=64)]
    """Most draft tokens a round."""


class GenerationBody(Body):
    """What chat and completions share."""

    model: str | None = None
    """Must be the served model's name; None is that model."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int | None, Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)] = None
    stop: Annotated[list[str] | None, BeforeValidator(_as_list)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: StrictBool = False
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: Annotated[str | None, Field(max_length=512)] = None
    """Taken, and used for nothing."""

    speculation: Literal["off", "auto"] | SpeculationOptions | None = None
    """`off`, `auto` (the server's policy) or `{"max": N}` draft tokens a round at most."""
    verification: Literal["rejection", "coupled"] | None = None
    """None: `coupled` with a seed, else `rejection`."""
    token_details: StrictBool = False
    """Adds a `dspark` object to every choice: each token's text, fate and probabilities."""


class TextPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    role: Annotated[str, Field(pattern=r"^(system|developer|user|assistant|tool)$")]
    content: str | list[TextPart] | None = None
    name: Annotated[str | None, Field(max_length=64)] = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    """Clients send an answer back as they got it, this field and all."""


class FunctionDefinition(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: StrictBool | None = None


Prompt = str | list[str] | list[int] | list[list[int]]


class CompletionBody(GenerationBody):
    prompt: Prompt
    max_tokens: int | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    echo: StrictBool = False
    best_of: int | None = None
    """Only as a second name of n."""
    suffix: None = None


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: StrictBool = True


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]
