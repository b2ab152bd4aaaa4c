"""Generates with vLLM for benchmarks/throughput.py, in vLLM's own environment.

Reads JSON lines: {"prompts": [[token ids], ...], "max_new_tokens": n, "temperature": t}, and
answers each with {"tokens": n, "seconds": s}. All prompts of a line are given to vLLM at once; it
is started with as many places as --concurrency.
"""

import argparse
import json
import os
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    # Standard output belongs to the answers; vLLM and its processes print there, too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_num_seqs=args.concurrency,
        max_model_len=args.context,
        enforce_eager=args.eager,
        enable_prefix_caching=False,
    )
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        params = SamplingParams(
            temperature=job["temperature"], max_tokens=job["max_new_tokens"], ignore_eos=True
        )
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in job["prompts"]]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"tokens": tokens, "seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
