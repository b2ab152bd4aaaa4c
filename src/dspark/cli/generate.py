"""`dspark generate`: answer one prompt, streamed; with --compare, against plain decoding."""

import time
from typing import Annotated

import typer

from dspark.cli import options
from dspark.cli.output import Screen, print_note


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
    draft: options.Draft = None,
    policy: options.Policy = None,
    verification: options.Verification = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    max_new_tokens: options.MaxNewTokens = 256,
    weights: options.Weights = None,
    threads: options.Threads = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Answer one prompt with a language model, faster than it decodes on its own."""
    from dspark.core.sampling import SamplingParams
    from dspark.recipes.compare import compare as run_comparison
    from dspark.recipes.llm import LLM, StreamPiece
    from dspark.recipes.progress import Progress
    from dspark.recipes.values import rule_value, weights_value

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        verification=rule_value(verification),
        max_new_tokens=max_new_tokens,
    )
    llm = LLM(
        target,
        draft=draft or "auto",
        policy=policy,
        weights=weights_value(weights),
        threads=threads,
        progress=Progress(),
    )
    [ids] = llm.encode_chat(prompt)
    screen = Screen()
    drafts = llm.policy.drafts

    def show(piece: StreamPiece) -> None:
        # A step's text is one string; its colour is that of the tokens it mostly came from.
        screen.token(piece.text, piece.fates[0])

    if drafts:
        screen.legend()
    if compare:
        result = run_comparison(llm, ids, params, show=show)
        output = result.output
        screen.print()
        print_note("")
        print_note(
            f"{result.tokens_per_second:.1f} tokens/s with speculation ({llm.policy.name}), "
            f"{result.plain_tokens_per_second:.1f} without: {result.speedup:.2f}x"
        )
        print_note(
            f"accepted length {output.accepted_length or 1:.2f} tokens a round; "
            + ("the tokens are identical" if result.identical else "THE TOKENS DIFFER")
        )
        document = {
            "output_tokens": len(output.token_ids),
            "tokens_per_second": result.tokens_per_second,
            "plain_tokens_per_second": result.plain_tokens_per_second,
            "speedup": result.speedup,
            "accepted_length": output.accepted_length,
            "identical": result.identical,
        }
    else:
        generation = llm.start([ids], params)
        started = time.perf_counter()
        try:
            for piece in generation:
                show(piece)
        finally:  # Ctrl-C keeps what there is
            screen.print()
        seconds = time.perf_counter() - started
        [output] = generation.outputs()
        print_note(
            f"{len(output.token_ids)} tokens in {seconds:.1f} s "
            f"({len(output.token_ids) / seconds:.1f} tokens/s), "
            f"accepted length {output.accepted_length or 1:.2f}, seed {output.seed}"
        )
        document = {
            "output_tokens": len(output.token_ids),
            "tokens_per_second": len(output.token_ids) / seconds,
            "accepted_length": output.accepted_length,
        }
    if json:
        screen.json(
            {
                **document,
                "finish_reason": output.finish_reason,
                "policy": llm.policy.name,
                "weights": llm.loaded.weights,
                "text": output.text,
            }
        )
