"""Same seed, same tokens (law 5) on the real model: 100,000 tokens in every way of serving them.

Each text is generated alone and without speculation, then in a batch, with speculation alone and in
a batch, in a cache so small that requests are preempted, and after a hit in the prefix cache. Half
of the texts are greedy, half sampled with a seed. Prints how many tokens differ (none, where the
guarantee holds) and ends with one JSON line; the exit code is 1 if any does.

    python benchmarks/exactness.py                  # 100,000 tokens in each way: hours on a laptop
    python benchmarks/exactness.py --tokens 2000
"""

import argparse
import json
import sys

from dspark.cli.doctor import report
from dspark.recipes.doctor import Diagnosis, exactness_jobs, look_at_machine
from dspark.recipes.exactness import check_exactness
from dspark.recipes.llm import LLM
from dspark.recipes.progress import Progress
from dspark.recipes.values import weights_value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--policy")
    parser.add_argument("--weights")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--many-requests", action="store_true")
    parser.add_argument("--tokens", type=int, default=100_000, help="at least so many in each way")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    progress = Progress()
    llm = LLM(
        options.target,
        draft=options.draft,
        policy=options.policy,
        weights=weights_value(options.weights),
        threads=options.threads,
        many_requests=options.many_requests,
        progress=progress,
    )
    length = min(options.max_new_tokens, options.tokens)
    texts = -(-options.tokens // length)
    one_pass = len(exactness_jobs(llm, prompts=None, max_new_tokens=length))
    samples = -(-texts // one_pass)
    jobs = exactness_jobs(llm, prompts=None, max_new_tokens=length, samples=samples)[:texts]
    result = Diagnosis(
        machine=look_at_machine(),
        target=llm.loaded.name,
        drafter=llm.draft_name,
        target_weights=llm.loaded.weights,
        kv_memory="sized for each way",
        exactness=check_exactness(llm, jobs, batch=options.batch, progress=progress),
    )
    print(report(result))
    print(json.dumps(result.to_json(), separators=(",", ":")))
    sys.exit(0 if result.exactness.holds else 1)


if __name__ == "__main__":
    main()
