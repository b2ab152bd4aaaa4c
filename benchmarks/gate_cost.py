"""What speculation costs where it cannot pay: decision 11's promise, within 3% of plain decoding.

The drafter is made useless on purpose: it costs what it did, but its tokens are moved by one place
in the vocabulary, so that next to none is accepted, and its confidence and entropy say so. Each
text is made plainly (no drafter in the engine, no tiles that only speculation needs) and under
every policy, in turn, at temperature 1 under `rejection`. Prints tokens per second over plain
decoding by domain and in all, and the share of rounds that drafted; then the same with the real
drafter on the prompts of one domain (--domain, chat by default), where the shipped one loses.

    python benchmarks/gate_cost.py --files PROMPT_FOLDER
"""

import math
from dataclasses import replace
from typing import Any

import torch
from common import DOMAINS, engine_contender, finish, interleave, parser, rate, ratios, setup

from dspark.core.errors import ConfigError
from dspark.core.sampling import SamplingParams
from dspark.nn.seams import DraftBlock
from dspark.recipes.profile import ensure_costs
from dspark.recipes.progress import Progress


class Useless:
    """A drafter that costs what the real one does and proposes next to nothing that is right.

    Its proposals are the real ones moved by one place in the vocabulary, with the probabilities
    they were drawn with, so verification stays exact.
    """

    def __init__(self, drafter: Any, vocab_size: int) -> None:
        self._drafter, self._vocab_size = drafter, vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def shortened(self, block_size: int) -> "Useless":
        return Useless(self._drafter.shortened(block_size), self._vocab_size)

    def draft(self, *args: Any, **options: Any) -> DraftBlock:
        block = self._drafter.draft(*args, **options)
        confidence, entropy = block.confidence_RK, block.entropy_RK
        most = math.log(block.candidates_RKC.shape[2])
        return replace(
            block,
            tokens_RK=(block.tokens_RK + 1) % self._vocab_size,
            candidates_RKC=(block.candidates_RKC + 1) % self._vocab_size,
            confidence_RK=None if confidence is None else torch.full_like(confidence, -5.0),
            entropy_RK=None if entropy is None else torch.full_like(entropy, most),
        )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__ or "")
    options.add_argument("--policy", action="append", help="default: early, async and marginal")
    options.add_argument("--domain", default="chat", help="where the real drafter is tried, too")
    args = options.parse_args(argv)
    progress = Progress()
    llm, jobs = setup(args, progress)
    if llm.drafter is None:
        raise ConfigError("there is no drafter to measure; give a bundle with --draft")
    policies = args.policy or ["early", "async", "marginal"]
    ensure_costs(llm, policies, progress)
    sampling = SamplingParams(
        temperature=1.0, max_new_tokens=args.max_new_tokens, verification="rejection"
    )
    result: dict[str, Any] = {"policies": policies, "max_new_tokens": args.max_new_tokens}
    real = llm.drafter
    contenders = {"plain": engine_contender(llm, sampling, "off")}
    contenders |= {policy: engine_contender(llm, sampling, policy) for policy in policies}
    hard = [job for job in jobs if DOMAINS.get(job.domain, job.domain) == args.domain]
    for name, drafter, chosen in (
        ("useless drafter", Useless(real, llm.loaded.target.vocab_size), jobs),
        (f"own drafter, {args.domain}", real, hard),
    ):
        if not chosen:
            progress.say(f"no prompts of domain {args.domain}: left out")
            continue
        llm.drafter = drafter
        timings = interleave(contenders, chosen, repeats=args.repeats, progress=progress)
        result[name] = {}
        print(f"{name}: {len(chosen)} texts, tokens per second over plain decoding")
        for policy in policies:
            over = ratios(timings, policy, "plain")
            rounds = [
                record
                for timing in timings[policy].values()
                for step in timing.records
                for record in step.rounds
            ]
            drafted = sum(record.proposed > 0 for record in rounds) / max(1, len(rounds))
            result[name][policy] = {"over_plain": over, "drafted": drafted}
            cells = ", ".join(f"{domain} {value:.3f}" for domain, value in over.items())
            print(f"  {policy}: {cells}; {drafted:.1%} of rounds drafted")
        result[name]["plain_tokens_per_second"] = rate(timings["plain"].values())
    llm.drafter = real
    return result


if __name__ == "__main__":
    finish(main)
