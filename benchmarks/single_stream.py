"""One request at a time: our plain engine against transformers, DSpark against our plain engine.

Prints, by domain (math, code, chat) and for all together,

* plain / transformers: tokens per second of our engine without a drafter (packed weights) over
  transformers' `generate` (float32), both greedy, on the same prompts;
* DSpark / plain at each temperature: the same engine with a drafter (the bundle's policy, or those
  given) over the engine without; `rejection` verification, accepted length beside it;
* where a round of DSpark spends its time,

and ends with one JSON line. Timings include the prompt. Every text is written by all contenders in
turn in one run, so compare ratios, not the tokens per second of different runs.

    python benchmarks/single_stream.py --files PROMPT_FOLDER
"""

import time
from collections.abc import Iterable
from itertools import product
from typing import Any

import torch
from common import (
    Contender,
    Timing,
    engine_contender,
    finish,
    interleave,
    parser,
    rate,
    ratios,
    setup,
)

from dspark.core.errors import ConfigError
from dspark.core.records import StepRecord
from dspark.core.sampling import SamplingParams
from dspark.evaluation.acceptance import measure_acceptance
from dspark.evaluation.timing import phase_shares
from dspark.recipes.llm import LLM
from dspark.recipes.progress import Progress
from dspark.recipes.prompt_sets import Job
from dspark.targets.load import read_model


def transformers_contender(llm: LLM, source: str | None) -> Contender:
    """`generate` of the unpacked float32 model, greedy."""
    model, _, _ = read_model(source)
    model = model.float().eval()
    stops = [*llm.loaded.target.eos_token_ids]

    @torch.inference_mode()
    def run(job: Job) -> Timing:
        ids = torch.tensor([job.prompt])
        started = time.perf_counter()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=job.params.max_new_tokens,
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,
        )
        return Timing(output.shape[1] - ids.shape[1], time.perf_counter() - started)

    return run


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__ or "")
    options.add_argument("--temperature", type=float, action="append", help="default: 0 and 1")
    options.add_argument("--policy", action="append", help="default: the bundle's; repeatable")
    options.add_argument("--no-transformers", action="store_true", help="leave transformers out")
    args = options.parse_args(argv)
    progress = Progress()
    llm, jobs = setup(args, progress)
    if llm.drafter is None:
        raise ConfigError("there is no drafter to measure; give a bundle with --draft")
    policies = args.policy or [llm.policy.name]
    temperatures = args.temperature or [0.0, 1.0]

    contenders = {}
    if not args.no_transformers:
        contenders["transformers"] = transformers_contender(llm, args.target)
    for temperature in {0.0: None, **dict.fromkeys(temperatures)}:
        sampling = SamplingParams(
            temperature=temperature, max_new_tokens=args.max_new_tokens, verification="rejection"
        )
        contenders[f"plain {temperature:g}"] = engine_contender(llm, sampling, "off")
        if temperature in temperatures:
            for policy in policies:
                contenders[_name(policy, temperature)] = engine_contender(llm, sampling, policy)
    timings = interleave(contenders, jobs, repeats=args.repeats, progress=progress)

    print(f"target {llm.loaded.name}, {llm.loaded.weights} weights, drafter {llm.draft_name}")
    print(f"{len(jobs)} prompts, {args.max_new_tokens} tokens at most, {args.threads} threads")
    for name, by_domain in timings.items():
        print(f"{name}: {rate(by_domain.values()):.1f} tokens/s")
    result: dict[str, Any] = {
        "target": llm.loaded.name,
        "drafter": llm.draft_name,
        "weights": llm.loaded.weights,
        "policies": policies,
        "verification": "rejection",
        "prompts": len(jobs),
        "max_new_tokens": args.max_new_tokens,
        "threads": args.threads,
        "tokens_per_second": {name: rate(own.values()) for name, own in timings.items()},
        "dspark_over_plain": {},
        "accepted_length": {},
        "phases": {},
    }
    if "transformers" in timings:
        over = ratios(timings, "plain 0", "transformers")
        result["plain_over_transformers"] = over
        print("plain / transformers:", _line(over))
    for temperature, policy in product(temperatures, policies):
        key = _name(policy, temperature)
        own = timings[key]
        lengths = {domain: _accepted_length(timing.records) for domain, timing in own.items()}
        over = ratios(timings, key, f"plain {temperature:g}")
        shares = phase_shares(step for timing in own.values() for step in timing.records)
        result["dspark_over_plain"][key] = over
        result["accepted_length"][key] = lengths
        result["phases"][key] = shares
        print(f"DSpark / plain, {policy} at temperature {temperature:g}:", _line(over))
        print("  accepted length:", _line(lengths))
        print("  a round:", ", ".join(f"{name} {share:.1%}" for name, share in shares.items()))
    return result


def _name(policy: str, temperature: float) -> str:
    return f"dspark {policy} {temperature:g}"


def _accepted_length(steps: Iterable[StepRecord]) -> float | None:
    return measure_acceptance([record for step in steps for record in step.rounds]).accepted_length


def _line(values: dict[str, float | None] | dict[str, float]) -> str:
    return ", ".join(
        f"{name} {'-' if value is None else format(value, '.2f')}" for name, value in values.items()
    )


if __name__ == "__main__":
    finish(main)
