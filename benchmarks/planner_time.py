"""How long the scheduler itself takes: Algorithm 1, top-K with a lagged capacity, and the policies.

R requests with a block of 7, survival as a calibrated head gives it. Prints the median of many
calls in microseconds, and the growth from one R to the next beside that of R log R. No model runs.

    python benchmarks/planner_time.py
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from dspark.scheduling.by_confidence import Async, ByConfidence, Early, Marginal
from dspark.scheduling.cost_model import CostModel, Curve, PartCost
from dspark.scheduling.policies import RoundView
from dspark.scheduling.search import algorithm_1, top_k_admission

BLOCK = 7


def machine(most_tokens: int) -> CostModel:
    """A step that costs as much again at about 64 tokens, with a cliff at every 16."""
    tokens = np.arange(most_tokens + 1)
    seconds = 0.02 + 3e-4 * (tokens // 16 * 16)
    zero = Curve(np.zeros(1), 0.0)
    draft = Curve(0.004 + 1e-4 * np.arange(most_tokens // (1 + BLOCK) + 1), 1e-4)
    return CostModel(
        PartCost(Curve(seconds, 3e-4), zero, 1e-9, 1e-10),
        PartCost(Curve(1e-5 * tokens, 1e-5), zero),
        PartCost(zero, draft),
    )


def view_of(requests: int, seed: int) -> RoundView:
    random = np.random.default_rng(seed)
    confidence_RK = random.beta(4, 2, size=(requests, BLOCK))
    return RoundView(
        step=seed,
        requests=tuple(range(requests)),
        rounds=(seed,) * requests,
        block_size=BLOCK,
        prefill_tokens=0,
        max_admit_R=np.full(requests, BLOCK),
        context_R=np.full(requests, 500),
        confidence_RK=confidence_RK,
        survival_RK=np.cumprod(confidence_RK, axis=1),
    )


def planners(requests: int, views: list[RoundView]) -> dict[str, Callable[[RoundView], object]]:
    model = machine(requests * (1 + BLOCK))
    sps = model.round_sps(
        requests=requests, drafting=requests, length=BLOCK, context_tokens=500.0 * requests
    )
    policies: list[ByConfidence] = [Early(model), Async(model), Marginal(model)]
    for policy in policies:
        for view in views[:3]:
            policy.admit(view)  # so that what is two rounds old is there
    return {
        "algorithm 1": lambda view: algorithm_1(view.survival_RK, sps),
        "top-K": lambda view: top_k_admission(view.survival_RK, 2 * requests),
        **{f"policy {policy.name}": policy.admit for policy in policies},
    }


def microseconds(call: Callable[[RoundView], object], views: list[RoundView], calls: int) -> float:
    taken = []
    for number in range(calls):
        view = views[number % len(views)]
        started = time.perf_counter()
        call(view)
        taken.append(time.perf_counter() - started)
    return 1e6 * median(taken)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256, 4096])
    options.add_argument("--calls", type=int, default=500, help="of each planner (default: 500)")
    args = options.parse_args(argv)
    rows: dict[str, dict[int, float]] = {}
    for requests in args.requests:
        views = [view_of(requests, seed) for seed in range(8)]
        for name, call in planners(requests, views).items():
            rows.setdefault(name, {})[requests] = microseconds(call, views, args.calls)
    print("microseconds".ljust(18), *(f"R = {requests:<8}" for requests in args.requests))
    for name, own in rows.items():
        print(name.ljust(18), *(f"{value:<12.0f}" for value in own.values()))
    return {
        "block_size": BLOCK,
        "microseconds": {
            name: {str(requests): value for requests, value in own.items()}
            for name, own in rows.items()
        },
    }


if __name__ == "__main__":
    print(json.dumps(main(), separators=(",", ":")))
