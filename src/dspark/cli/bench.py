"""`dspark bench`: throughput and latency by policy and concurrency."""

from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli import options
from dspark.cli.output import Screen
from dspark.cli.table import number, table
from dspark.core.sampling import SamplingParams

if TYPE_CHECKING:
    from dspark.recipes.bench import Bench


def bench(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy to measure, as for generate. Repeatable. "
            "Default: off and what generate uses.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Requests in flight. Repeatable. Default: 1 and 8.", show_default=False
        ),
    ] = None,
    prompts: options.Prompts = None,
    split: options.Split = None,
    limit: options.Limit = 2,
    rounds: Annotated[
        int, typer.Option(min=1, help="Visits of every policy and concurrency; medians are shown.")
    ] = 3,
    target: options.Target = None,
    draft: options.Draft = "auto",
    draft_length: options.DraftLength = None,
    verification: Annotated[
        str | None,
        typer.Option(
            help="Verification rule of all rows. Default: rejection; coupled if global is among "
            "the policies.",
            show_default=False,
        ),
    ] = None,
    temperature: options.Temperature = 1.0,
    max_new_tokens: options.MaxNewTokens = 128,
    seed: options.BaseSeed = 0,
    weights: options.Weights = None,
    device: options.Device = "cpu",
    cuda_graphs: options.CudaGraphs = None,
    threads: options.Threads = None,
    many_requests: options.ManyRequests = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure throughput and latency of policies, side by side."""
    from dspark.recipes.bench import bench as run
    from dspark.recipes.bundles import check_policies
    from dspark.recipes.llm import LLM
    from dspark.recipes.progress import Progress
    from dspark.recipes.prompt_sets import gather_prompts
    from dspark.recipes.values import rule_value

    sampling = SamplingParams(
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        verification=rule_value(verification),
    )
    check_policies(policy or [], target, draft, draft_length)
    progress = Progress()
    chosen = gather_prompts(prompts, split=split, limit=limit, say=progress.say)
    llm = LLM(
        target,
        draft=draft,
        draft_length=draft_length,
        weights=weights,
        device=device,
        cuda_graphs=cuda_graphs,
        threads=threads,
        many_requests=many_requests,
        progress=progress,
    )
    result = run(
        llm,
        chosen,
        sampling,
        policies=policy,
        concurrencies=concurrency or (1, 8),
        rounds=rounds,
        seed=seed,
        progress=progress,
    )
    screen = Screen()
    screen.print(report(result))
    if json:
        screen.json(result.to_json())


def report(result: "Bench") -> str:
    """The result for people."""
    header = [
        "policy", "concurrency", "tokens/s", "against off", "accepted length", "verified/request",
        "first token, ms", "then, ms/token",
    ]  # fmt: skip
    rows = [
        [
            row.policy,
            str(row.concurrency),
            number(row.tokens_per_second, ".1f"),
            number(row.speedup, ".2f"),
            number(row.accepted_length),
            number(row.verified_per_request),
            number(row.ttft_ms, ".0f"),
            number(row.tpot_ms, ".1f"),
        ]
        for row in result.rows
    ]
    return "\n".join(
        [
            f"target {result.target} ({result.weights or 'own'} weights), "
            f"drafter {result.drafter or 'none'}, {result.verification} verification, "
            f"temperature {result.temperature:g}, {result.prompts} prompts, "
            f"at most {result.max_new_tokens} tokens a text, medians of {result.rounds} rounds",
            "",
            table(header, rows),
        ]
    )
