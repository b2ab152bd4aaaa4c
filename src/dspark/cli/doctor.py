"""`dspark doctor`: versions, processor, memory, and whether row-exactness holds here."""

from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli import options
from dspark.cli.output import Screen
from dspark.cli.table import table

if TYPE_CHECKING:
    from dspark.recipes.doctor import Diagnosis


def doctor(
    target: options.Target = None,
    draft: options.Draft = "auto",
    policy: options.Policy = None,
    weights: options.Weights = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    many_requests: options.ManyRequests = False,
    prompts: Annotated[
        int, typer.Option(min=1, help="Prompts of each domain that are served in every way.")
    ] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each text.")] = 24,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Say what this machine can do, and test that the same seed gives the same tokens on it.

    Ends with code 1 if it does not.
    """
    from dspark.recipes.doctor import diagnose
    from dspark.recipes.llm import LLM
    from dspark.recipes.progress import Progress

    progress = Progress()
    llm = LLM(
        target,
        draft=draft,
        policy=policy,
        weights=weights,
        device=device,
        threads=threads,
        many_requests=many_requests,
        progress=progress,
    )
    result = diagnose(llm, prompts=prompts, max_new_tokens=max_new_tokens, progress=progress)
    screen = Screen()
    screen.print(report(result))
    if json:
        screen.json(result.to_json())
    if not result.exactness.holds:
        raise typer.Exit(1)


def report(result: "Diagnosis") -> str:
    machine, exactness = result.machine, result.exactness
    kinds = [
        kind if why is None else f"{kind} (no: {why})" for kind, why in machine.weights.items()
    ]
    facts = [
        ", ".join(f"{name} {number}" for name, number in machine.versions.items()),
        f"{machine.system}; {machine.processor}; {machine.cores} cores, {machine.threads} threads",
        f"free memory: {machine.free_memory_gib:.1f} GiB; {result.kv_memory}",
        f"weights: {', '.join(kinds)}",
        f"GPUs: {', '.join(machine.cuda) or 'none'}",
        f"target: {result.target} ({result.target_weights or 'its own layers'}); "
        f"drafter: {result.drafter or 'none'}",
        "row-exact kernels for every product: " + ("yes" if exactness.row_exact_kernels else "NO"),
    ]
    rows = table(
        ["served", "tokens", "differing", "in requests", "exercised"],
        [
            [way.name, str(way.tokens), str(way.differing), str(way.requests), str(way.exercised)]
            for way in exactness.ways
        ],
    )
    idle = [way.name for way in exactness.ways if not way.exercised]
    remark = [f"not exercised, so not shown: {', '.join(idle)} (take longer texts)"] if idle else []
    verdict = "holds on this machine" if exactness.holds else "DOES NOT HOLD on this machine"
    return "\n".join(
        [*facts, "", "against each request alone, without speculation:", rows, *remark, "",
         f"same seed, same tokens: {verdict}"]
    )  # fmt: skip
