"""Request bodies, after OpenAI's. A field that is not listed is refused by name.

Ranges that the engine checks itself are left to it, so that every way in refuses in the same words;
the OpenAPI description tells them all the same (`_told`).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.config import JsonDict

from dspark.core.sampling import MOST_LOGPROBS

SEED_LIMIT = 2**63


def _told(**constraints: Any) -> Any:
    """Constraints of JSON schema that are described here and checked by the engine."""

    def extend(schema: dict[str, Any]) -> None:
        # An optional value is described as anyOf [its type, null].
        (schema["anyOf"][0] if "anyOf" in schema else schema).update(constraints)

    return Field(json_schema_extra=extend)


def _whole(value: Any) -> Any:
    """JSON knows one kind of number: 5.0 is 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_WHOLE = BeforeValidator(_whole)
Whole = Annotated[int, _WHOLE]
_BIAS = {
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
TOKEN_ID = {"type": "integer", "minimum": 0}
_TOKEN_IDS: dict[str, Any] = {"items": TOKEN_ID}


_FIRST: Any = Field(fail_fast=True)
"""Of a list, only the first wrong entry is told: to list a million of them takes seconds, in which
nobody is served."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's: usage in every chunk."""


class JsonSchema(Body):
    name: Annotated[str, Field(max_length=64)] = "schema"
    description: str | None = None
    strict: bool | None = None
    """The grammar is always enforced."""
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SpeculationOptions(Body):
    max: Annotated[int, Field(ge=0, le=64), _WHOLE]
    """Most draft tokens a round."""


_STREAM_OPTIONS: JsonDict = {
    "if": {"properties": {"stream": {"const": False}}},
    "then": {"properties": {"stream_options": {"type": "null"}}},
}


class GenerationBody(Body):
    """What chat and completions share."""

    model_config = ConfigDict(json_schema_extra=_STREAM_OPTIONS)

    model: str | None = None
    """Must be the served model's name; None is that model."""
    temperature: Annotated[float | None, _told(minimum=0)] = None
    top_p: Annotated[float | None, _told(exclusiveMinimum=0, maximum=1)] = None
    top_k: Annotated[Whole | None, _told(minimum=0, exclusiveMaximum=2**31)] = None
    min_p: Annotated[float | None, _told(minimum=0, maximum=1)] = None
    n: Annotated[int, Field(ge=1), _WHOLE] = 1
    seed: Annotated[int | None, Field(ge=-SEED_LIMIT, lt=SEED_LIMIT), _WHOLE] = None
    stop: str | Annotated[list[str], _FIRST] | None = None
    """One string or several, none of them empty."""
    stop_token_ids: Annotated[Annotated[list[Whole], _FIRST] | None, _told(**_TOKEN_IDS)] = None
    ignore_eos: bool = False
    min_tokens: Annotated[Whole | None, _told(minimum=0)] = None
    presence_penalty: Annotated[float | None, _told(minimum=-2, maximum=2)] = None
    frequency_penalty: Annotated[float | None, _told(minimum=-2, maximum=2)] = None
    repetition_penalty: Annotated[float | None, _told(minimum=0.01, maximum=100)] = None
    logit_bias: Annotated[dict[str, float] | None, _told(**_BIAS)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: Annotated[str | None, Field(max_length=512)] = None
    """Taken, and used for nothing."""

    speculation: Literal["off", "auto"] | SpeculationOptions | None = None
    """`off`, `auto` (the server's policy) or `{"max": N}` draft tokens a round at most."""
    verification: Literal["rejection", "coupled"] | None = None
    """None: `coupled` with a seed, else `rejection`."""
    token_details: bool = False
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
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], _FIRST] | None = None
    name: Annotated[str | None, Field(max_length=64)] = None
    tool_calls: Annotated[list[ToolCall], _FIRST] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    """Clients send an answer back as they got it, this field and all."""


class FunctionDefinition(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1), _FIRST]
    max_tokens: Annotated[Whole | None, _told(minimum=1)] = None
    max_completion_tokens: Annotated[Whole | None, _told(minimum=1)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MOST_LOGPROBS), _WHOLE] = None
    tools: Annotated[list[Tool], _FIRST] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None


Text = Annotated[str, Field(json_schema_extra={"minLength": 1})]
TokenIds = Annotated[list[Whole], Field(json_schema_extra={"minItems": 1, **_TOKEN_IDS}), _FIRST]
Prompt = Text | TokenIds | Annotated[list[Text], _FIRST] | Annotated[list[TokenIds], _FIRST]


class CompletionBody(GenerationBody):
    prompt: Annotated[Prompt, Field(json_schema_extra={"minItems": 1})]
    max_tokens: Annotated[Whole | None, _told(minimum=0)] = None
    logprobs: Annotated[int | None, Field(ge=0, le=MOST_LOGPROBS), _WHOLE] = None
    echo: bool = False
    best_of: Whole | None = None
    """Only as a second name of n: the same number."""
    suffix: None = None


_ONLY_PROMPT: JsonDict = {"prompt": {"type": "string"}, "messages": {"type": "null"}}
_ONLY_MESSAGES: JsonDict = {"prompt": {"type": "null"}, "messages": {"type": "array"}}
_EITHER: JsonDict = {
    "oneOf": [
        {"required": ["prompt"], "properties": _ONLY_PROMPT},
        {"required": ["messages"], "properties": _ONLY_MESSAGES},
    ]
}


class TokenizeBody(Body):
    """Either a prompt or messages."""

    model_config = ConfigDict(json_schema_extra=_EITHER)
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], _FIRST] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[Whole], Field(json_schema_extra={**_TOKEN_IDS}), _FIRST]
