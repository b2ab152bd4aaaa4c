"""From a request's body to what the engine is asked."""

from typing import Any

from dspark.core.errors import UserError
from dspark.core.guided import Guided
from dspark.core.sampling import SamplingParams
from dspark.server.errors import ApiError, bad_request
from dspark.server.schemas import SEED_LIMIT, GenerationBody, ResponseFormat
from dspark.server.serving import Serving

OUR_NAMES = {"max_new_tokens": "max_tokens", "prompt_logprobs": "echo"}
"""Engine's name -> API's, where they differ."""


def check_model(serving: Serving, model: str | None) -> None:
    if model is not None and model != serving.name:
        raise ApiError(
            404,
            f"there is no model {model[:200]!r} here; this server has {serving.name!r}",
            param="model",
            code="model_not_found",
        )


def check_choices(serving: Serving, choices: int) -> None:
    most = serving.config.max_choices
    if choices > most:
        raise bad_request(f"n: {choices} choices in all; at most {most} here", "n")


def sampling_params(
    body: GenerationBody, *, max_tokens: int, logprobs: int | None, scored: bool = False
) -> SamplingParams:
    """scored: the prompt's log-probabilities are wanted, too.

    Raises ApiError 400 where the engine refuses a value.
    """
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "logit_bias": _token_ids(body.logit_bias),
        "min_tokens": body.min_tokens,
        "stop": body.stop,
        "stop_token_ids": None if body.stop_token_ids is None else tuple(body.stop_token_ids),
        "verification": body.verification,
        "speculation": _speculation(body),
        # OpenAI's seeds may be negative; the engine's are not.
        "seed": None if body.seed is None else body.seed % SEED_LIMIT,
        "guided": _guided(body.response_format),
        "logprobs": logprobs,
        "prompt_logprobs": (logprobs or 0) if scored else None,
    }
    try:
        return SamplingParams(
            n=body.n,
            max_new_tokens=max_tokens,
            ignore_eos=body.ignore_eos,
            **{name: value for name, value in given.items() if value is not None},
        )
    except UserError as error:
        raise as_bad_request(error) from None


def as_bad_request(error: UserError) -> ApiError:
    """The engine's own words; they begin with the parameter's name where there is one."""
    message = str(error)
    for ours, theirs in OUR_NAMES.items():
        message = message.replace(ours, theirs)
    name: str | None = message.split(" ", 1)[0]
    if name in ("json_schema", "guided"):
        name, message = "response_format", f"response_format: {message}"
    elif name not in GenerationBody.model_fields and name != "max_tokens":
        name = None
    refused = bad_request(message, name)
    if "context of" in message:
        refused.body["code"] = "context_length_exceeded"
    return refused


def encode_text(serving: Serving, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a plain text. Raises ApiError 400 for one that is empty or no valid Unicode."""
    if not text:  # before a tokenizer puts its own first token there
        raise bad_request("the prompt is empty; give it some text", "prompt")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_request("prompt: it has half of a surrogate pair; send UTF-8", "prompt") from None
    encoded = serving.tokenizer(text, add_special_tokens=add_special_tokens)
    return [int(token) for token in encoded["input_ids"]]


def _speculation(body: GenerationBody) -> str | int | None:
    if body.speculation is None or isinstance(body.speculation, str):
        return body.speculation
    return body.speculation.max or "off"


def _token_ids(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in bias):
        raise bad_request('logit_bias: keys must be token ids, such as "123"', "logit_bias")
    return {int(key): value for key, value in bias.items()}


def _guided(format: ResponseFormat | None) -> Guided | None:
    if format is None or format.type == "text":
        return None
    try:
        if format.type == "json_object":
            return Guided.json_schema({"type": "object"})
        if format.json_schema is None:
            raise bad_request(
                'response_format.json_schema is missing; give {"schema": ...}',
                "response_format",
            )
        return Guided.json_schema(format.json_schema.json_schema)
    except UserError as error:
        raise bad_request(f"response_format: {error}", "response_format") from None
