"""`dspark eval`: accepted length and acceptance by position, by domain."""

from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli import options
from dspark.cli.output import Screen
from dspark.cli.sampling import sampling_params
from dspark.cli.table import number, table

if TYPE_CHECKING:
    from dspark.recipes.evaluate import Evaluation


def evaluate(
    prompts: options.Prompts = None,
    split: options.Split = None,
    limit: options.Limit = None,
    samples: options.Samples = 1,
    target: options.Target = None,
    draft: options.Draft = "auto",
    draft_length: options.DraftLength = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="How many draft tokens to verify, as for generate. Default: the whole block.",
            show_default=False,
        ),
    ] = None,
    verification: Annotated[
        str, typer.Option(help="Verification rule: rejection or coupled.")
    ] = "rejection",
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    max_new_tokens: options.MaxNewTokens = 256,
    seed: options.BaseSeed = 0,
    max_requests: options.TextsAtOnce = 32,
    weights: options.Weights = None,
    device: options.Device = "cpu",
    cuda_graphs: options.CudaGraphs = None,
    threads: options.Threads = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure accepted length and acceptance by position."""
    from dspark.recipes.bundles import check_policies
    from dspark.recipes.evaluate import evaluate as run
    from dspark.recipes.llm import LLM
    from dspark.recipes.progress import Progress
    from dspark.recipes.prompt_sets import gather_prompts

    sampling = sampling_params(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_new_tokens=max_new_tokens,
        verification=verification,
    )
    check_policies([] if policy is None else [policy], target, draft, draft_length)
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
        max_requests=max_requests,
        progress=progress,
    )
    result = run(
        llm, chosen, sampling, policy=policy, samples=samples, seed=seed, progress=progress
    )
    screen = Screen()
    screen.print(report(result))
    if json:
        screen.json(result.to_json())


def report(result: "Evaluation") -> str:
    """The result for people."""
    positions = max(len(domain.acceptance.conditional) for domain in result.domains.values())
    greedy = result.sampling.temperature == 0
    header = ["domain", "prompts", "rounds", "accepted length", "95% interval", "accepted/offered"]
    header += ["repeated"] if greedy else []
    header += [f"@{k}" for k in range(1, positions + 1)]
    rows = []
    for name, domain in result.domains.items():
        acceptance = domain.acceptance
        conditional = [number(share) for share in acceptance.conditional]
        rows.append(
            [
                name,
                str(domain.prompts),
                str(acceptance.rounds),
                number(acceptance.accepted_length),
                "-" if domain.ci95 is None else "{:.2f} to {:.2f}".format(*domain.ci95),
                number(acceptance.acceptance_rate, ".1%"),
                *([number(domain.repeated_share, ".1%")] if greedy else []),
                *conditional,
                *["-"] * (positions - len(conditional)),
            ]
        )
    phases = ", ".join(
        f"{name.replace('_', ' ')} {share:.1%}" for name, share in result.phases.items()
    )
    lines = [
        f"target {result.target} ({result.weights or 'own'} weights), "
        f"drafter {result.drafter or 'none'}, policy {result.policy}, "
        f"{result.verification} verification, temperature {result.sampling.temperature:g}, "
        f"at most {result.sampling.max_new_tokens} tokens a text",
        "",
        table(header, rows),
        "",
        "@k: accepted at position k, among rounds that accepted all before it.",
    ]
    if greedy:
        lines.append("repeated: output tokens inside repeated n-grams.")
    return "\n".join([*lines, f"A decoding step: {phases}."] if phases else lines)
