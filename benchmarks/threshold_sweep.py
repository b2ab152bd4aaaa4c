"""Static thresholds on the raw confidence, by domain: the paper's figure 5.

For each threshold and domain: draft tokens verified and accepted a round, and the acceptance rate
(accepted + 1) / (verified + 1). Every text is decoded once a threshold, under `rejection`; nothing
is timed.

    python benchmarks/threshold_sweep.py --files PROMPT_FOLDER --plot figure5.png
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

from common import DOMAINS, finish, parser, setup

from dspark.core.errors import ConfigError
from dspark.core.records import RoundRecord
from dspark.core.sampling import SamplingParams
from dspark.evaluation.acceptance import measure_acceptance
from dspark.evaluation.figures import check_figure, save_figure
from dspark.recipes.closed_loop import closed_loop
from dspark.recipes.progress import Progress
from dspark.recipes.values import check_file

THRESHOLDS = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]

Row = dict[str, float | None]


def row_of(rounds: list[RoundRecord]) -> Row:
    acceptance = measure_acceptance(rounds)
    budget = acceptance.verification_budget
    return {
        "rounds": acceptance.rounds,
        "verified": None if budget is None else budget - 1,
        "accepted": sum(record.accepted for record in rounds) / max(1, len(rounds)),
        "rate": acceptance.figure5_rate,
        "accepted_length": acceptance.accepted_length,
    }


def draw(rows: dict[str, dict[str, Row]], path: Path) -> None:
    """Bars: tokens a round, rejected ones hatched; line: acceptance rate. A panel a domain."""
    check_figure(path)
    from matplotlib.figure import Figure

    domains = [*next(iter(rows.values()))]
    figure = Figure(figsize=(4 * len(domains), 3.2), layout="constrained")
    for axes, domain in zip(
        figure.subplots(1, len(domains), squeeze=False)[0], domains, strict=True
    ):
        own = [by_domain[domain] for by_domain in rows.values()]
        accepted = [1 + (row["accepted"] or 0.0) for row in own]
        rejected = [(row["verified"] or 0.0) - (row["accepted"] or 0.0) for row in own]
        places = range(len(own))
        axes.bar(places, accepted, color="tab:blue", label="accepted + 1")
        axes.bar(
            places, rejected, bottom=accepted, color="white", edgecolor="tab:blue", hatch="///",
            label="rejected",
        )  # fmt: skip
        axes.set_xticks(places, [f"{float(threshold):g}" for threshold in rows])
        axes.set(title=domain, xlabel="threshold", ylabel="tokens a round")
        rate = axes.twinx()
        rate.plot(places, [row["rate"] for row in own], color="tab:red", marker="o")
        rate.set_ylim(0, 1)
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__ or "")
    options.add_argument("--threshold", type=float, action="append", help="default: 0, 0.1, .. 0.9")
    options.add_argument("--temperature", type=float, default=1.0)
    options.add_argument("--plot", type=Path, help="draw figure 5 into this file")
    args = options.parse_args(argv)
    if args.plot is not None:
        check_file(args.plot, figure=True)
    progress = Progress()
    llm, jobs = setup(args, progress)
    if llm.drafter is None:
        raise ConfigError("there is no drafter to measure; give a bundle with --draft")
    sampling = SamplingParams(
        temperature=args.temperature, max_new_tokens=args.max_new_tokens, verification="rejection"
    )
    jobs = [job.with_sampling(sampling) for job in jobs]
    rows: dict[str, dict[str, Row]] = {}
    thresholds = args.threshold or THRESHOLDS
    with progress.task("texts", total=len(thresholds) * len(jobs)) as advance:
        for threshold in thresholds:
            policy = llm.policies.resolve(f"threshold:{threshold:g}")
            result = closed_loop(
                llm, jobs, policy, concurrency=llm.max_requests,
                on_finished=lambda job, at=threshold: advance(1, f"{job.domain} at {at:g}"),
            )  # fmt: skip
            by_domain: dict[str, list[RoundRecord]] = defaultdict(list)
            for step in result.records:
                for record in step.rounds:
                    domain = jobs[record.request].domain
                    by_domain[DOMAINS.get(domain, domain)].append(record)
            rows[f"{threshold:g}"] = {name: row_of(own) for name, own in sorted(by_domain.items())}
    print("threshold  domain    verified  accepted  rate")
    for threshold, by_domain_rows in rows.items():
        for domain, row in by_domain_rows.items():
            print(
                f"{threshold:<9}  {domain:<8}  {row['verified']:8.2f}  {row['accepted']:8.2f}  "
                f"{row['rate']:.3f}"
            )
    if args.plot is not None:
        draw(rows, args.plot)
    return {"temperature": args.temperature, "prompts": len(jobs), "thresholds": rows}


if __name__ == "__main__":
    finish(main)
