"""`dspark generate`: answer one prompt, streamed; with --compare, against plain decoding."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import options
from dspark.cli.output import Screen, print_note
from dspark.cli.sampling import sampling_params
from dspark.cli.table import number
from dspark.core.errors import ConfigError
from dspark.core.sampling import SamplingParams

if TYPE_CHECKING:
    from dspark.recipes.generation import RequestOutput, StreamPiece
    from dspark.recipes.llm import LLM
    from dspark.recipes.progress import Progress


def generate(
    prompt: Annotated[
        str, typer.Argument(help="What to ask; the target's chat template is applied.")
    ],
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also decode without speculation: the speed of both, and whether the tokens "
            "are the same.",
        ),
    ] = False,
    target: options.Target = None,
    draft: options.Draft = "auto",
    draft_length: options.DraftLength = None,
    policy: options.Policy = None,
    verification: options.Verification = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    max_new_tokens: options.MaxNewTokens = 256,
    stop: options.Stop = None,
    n: options.Choices = 1,
    logprobs: options.Logprobs = None,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    grammar: options.Grammar = None,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    weights: options.Weights = None,
    device: options.Device = "cpu",
    cuda_graphs: options.CudaGraphs = None,
    threads: options.Threads = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Answer one prompt: drafted ahead, verified by the model, with its own distribution."""
    from dspark.recipes.llm import LLM
    from dspark.recipes.progress import Progress
    from dspark.recipes.values import guided_from

    params = sampling_params(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_new_tokens=max_new_tokens,
        verification=verification,
        seed=seed,
        stop=tuple(stop or ()),
        n=n,
        logprobs=logprobs,
        guided=guided_from(json_schema, regex, grammar),
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
    )
    if compare and n > 1:
        raise ConfigError("--compare times one text; leave --n out")
    progress = Progress()
    llm = LLM(
        target,
        draft=draft,
        draft_length=draft_length,
        policy=policy,
        weights=weights,
        device=device,
        cuda_graphs=cuda_graphs,
        threads=threads,
        progress=progress,
    )
    [ids] = llm.encode_chat(prompt)
    screen = Screen()
    if llm.policy.drafts:
        if policy is None:
            progress.say(f"policy: {llm.policy.name}")
        screen.legend()
    try:
        if compare:
            output, measured = _compare(llm, ids, params, screen, progress)
        else:
            output, measured = _answer(llm, ids, params, screen)
    finally:  # Ctrl-C keeps the text there is
        screen.end_line()
    if json:
        screen.json(
            {
                "output_tokens": len(output.token_ids),
                **measured,
                "accepted_length": output.accepted_length,
                "finish_reason": output.finish_reason,
                **_details(output, params),
                "seed": output.seed,
                "policy": llm.policy.name,
                "weights": llm.loaded.weights,
                "text": output.text,
            }
        )


def _answer(
    llm: "LLM", ids: Sequence[int], params: SamplingParams, screen: Screen
) -> "tuple[RequestOutput, dict[str, Any]]":
    generation = llm.start([ids], params)
    started = time.perf_counter()
    for piece in generation:
        if params.n == 1:  # several texts at once would run into each other
            _show(piece, screen)
    seconds = time.perf_counter() - started
    [output] = generation.checked_outputs()
    if params.n > 1:
        for choice in output.choices:
            screen.print(f"[{choice.index + 1}] {choice.text}")
    if params.logprobs is not None:
        _show_logprobs(llm, output, screen)
    tokens = sum(len(choice.token_ids) for choice in output.choices)
    rate = tokens / seconds
    print_note(
        f"\n{tokens} tokens in {seconds:.1f} s ({rate:.1f} tokens/s), accepted "
        f"length {number(output.accepted_length)} tokens a round, seed {output.seed}"
    )
    return output, {"tokens_per_second": rate}


def _compare(
    llm: "LLM", ids: Sequence[int], params: SamplingParams, screen: Screen, progress: "Progress"
) -> "tuple[RequestOutput, dict[str, Any]]":
    from dspark.recipes.compare import compare

    result = compare(llm, ids, params, show=lambda piece: _show(piece, screen), progress=progress)
    output = result.output
    print_note(
        f"\n{number(result.tokens_per_second, '.1f')} tokens/s with speculation "
        f"({llm.policy.name}), {number(result.plain_tokens_per_second, '.1f')} without: "
        f"{number(result.speedup)}x"
    )
    print_note(
        f"accepted length {number(output.accepted_length)} tokens a round; "
        + ("the tokens are identical" if result.identical else "THE TOKENS DIFFER")
    )
    return output, {
        "tokens_per_second": result.tokens_per_second,
        "plain_tokens_per_second": result.plain_tokens_per_second,
        "speedup": result.speedup,
        "identical": result.identical,
    }


def _show_logprobs(llm: "LLM", output: "RequestOutput", screen: Screen) -> None:
    """A line a token: its log-probability, then the likeliest tokens at its place."""
    for choice in output.choices:
        screen.print(f"\nlog-probabilities of text {choice.index + 1}")
        for own in choice.logprobs:
            likeliest = "  ".join(f"{llm.token_text(t)!r} {value:.2f}" for t, value in own.top)
            screen.print(f"{own.logprob:8.3f}  {llm.token_text(own.token)!r:<16}{likeliest}")


def _details(output: "RequestOutput", params: SamplingParams) -> dict[str, Any]:
    """What was asked for beyond a text, for the document."""
    details: dict[str, Any] = {}
    if params.n > 1:
        details["choices"] = [
            {"text": choice.text, "finish_reason": choice.finish_reason,
             "output_tokens": len(choice.token_ids)}
            for choice in output.choices
        ]  # fmt: skip
    if params.logprobs is not None:
        details["logprobs"] = [
            {"token": own.token, "logprob": own.logprob, "top": [list(pair) for pair in own.top]}
            for own in output.logprobs
        ]
    return details


def _show(piece: "StreamPiece", screen: Screen) -> None:
    for text, fate in zip(piece.texts, piece.fates, strict=True):
        screen.token(text, fate)
    if piece.finish_reason is not None:
        screen.end_line()
