"""Time and peak memory of the vocabulary end of the training loss, forward and backward, against
the plain version: whole logits, float32, autograd.

    python benchmarks/objective.py                                       the size of issue 3
    python benchmarks/objective.py --draft-vocabulary 16384 --dtype bfloat16

Every version runs in a process of its own, so that none pays for another's memory. Peak memory is
that above the inputs (hidden states, LM head, W1 and W2), which all of them need.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from common import finish

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the plain version, a test's oracle

from dspark.core.errors import DSparkError
from dspark.data.anchors import sample_anchors
from dspark.nn.seams import Binding
from dspark.training.vocab_head import VocabHead, VocabInputs, vocab_losses
from tests.oracles.plain_losses import plain_losses

_LENGTH, _ANCHORS_PER_SEQUENCE = 256, 32


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=7)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--hidden-size", type=int, default=576)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--draft-vocabulary", type=int, default=16384)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--version", help=argparse.SUPPRESS)  # the process of one version
    return parser


def make_inputs(args: argparse.Namespace) -> tuple[Binding, dict[str, torch.Tensor]]:
    """Positions as training samples them: neighbouring blocks share the teacher's rows."""
    generator = torch.Generator().manual_seed(0)
    supervised = np.ones(_LENGTH, dtype=np.bool_)
    positions = []
    for sequence in range(-(-args.anchors // _ANCHORS_PER_SEQUENCE)):
        count = min(_ANCHORS_PER_SEQUENCE, args.anchors - sequence * _ANCHORS_PER_SEQUENCE)
        anchors = sample_anchors(supervised, count, seed=0, epoch=0, sequence=sequence)
        slots = anchors[:, None] + np.arange(args.block_size) + sequence * 2 * _LENGTH
        positions.append(np.sort(slots.reshape(-1)))
    _, rows = np.unique(np.concatenate(positions), return_inverse=True)
    U, D, V = int(rows[-1]) + 1, args.hidden_size, args.vocabulary
    rows_M = torch.from_numpy(rows)
    labels_U = torch.randint(0, V, (U,), generator=generator)
    head_VD = torch.randn(V, D, generator=generator) * (2.0 / D**0.5)
    binding = Binding(
        embedding_VD=head_VD, embedding_scale=1.0, lm_head_VD=head_VD, logit_scale=1.0,
        logit_softcap=None, num_target_layers=1, mask_token_id=0, target_name="random",
        embedding_hash="", chat_template_hash=None,
    )  # fmt: skip
    teacher_UD = torch.randn(U, D, generator=generator)
    hidden_MD = teacher_UD[rows_M] + 0.3 * torch.randn(len(rows), D, generator=generator)
    return binding, {
        "hidden_MD": hidden_MD.requires_grad_(),
        "latent_Mr": torch.randn(len(rows), args.rank, generator=generator).requires_grad_(),
        "w2_Vr": (torch.randn(V, args.rank, generator=generator) * 0.1).requires_grad_(),
        "teacher_UD": teacher_UD,
        "teacher_rows_M": rows_M,
        "labels_M": labels_U[rows_M],
        "weights_M": torch.full((len(rows),), 1.0 / len(rows)),
    }


def run_version(args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a step and peak bytes above the inputs, of one version."""
    torch.set_num_threads(args.threads)
    binding, inputs = make_inputs(args)
    name, _, dtype = args.version.partition(" ")
    reduced = "reduced" in name
    ids = torch.arange(args.draft_vocabulary) * (args.vocabulary // args.draft_vocabulary)
    before = psutil.Process().memory_info().rss
    head = None
    if not name.startswith("plain"):
        kind = getattr(torch, dtype)
        head = VocabHead(binding, args.rank, kind, draft_token_ids=ids if reduced else None)
    seconds = []
    for _ in range(1 + args.repeats):  # the first one warms up
        started = time.perf_counter()
        if head is None:
            loss = plain_losses(
                binding, **inputs, ce=0.1, l1=0.9, draft_token_ids=ids if reduced else None
            )[0]
        else:
            loss = vocab_losses(head, VocabInputs(**inputs), ce=0.1, l1=0.9).loss
        loss.backward()
        seconds.append(time.perf_counter() - started)
        for tensor in inputs.values():
            tensor.grad = None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in kB
    return {"seconds": statistics.median(seconds[1:]), "bytes": peak - before}


def main(arguments: list[str]) -> dict[str, Any]:
    args = options().parse_args(arguments)
    if args.version:
        return run_version(args)
    dtypes = args.dtype or ["float32", "bfloat16"]
    names = [
        "plain", "plain-reduced",
        *(f"{name} {dtype}" for dtype in dtypes for name in ("ours", "ours-reduced")),
    ]  # fmt: skip
    results = {name: _in_own_process(name, arguments) for name in names}
    plain = results["plain"]
    rows = {}
    for name, own in results.items():
        rows[name] = {
            **own,
            "plain_seconds_over_own": plain["seconds"] / own["seconds"],
            "share_of_plain_bytes": own["bytes"] / plain["bytes"],
        }
        print(
            f"{name:24} {own['seconds']:8.3f} s  {own['bytes'] / 1e9:6.2f} GB   "
            f"{rows[name]['plain_seconds_over_own']:5.2f} x as fast as plain, "
            f"{rows[name]['share_of_plain_bytes']:.3f} of its memory"
        )
    return {
        "anchors": args.anchors, "block_size": args.block_size, "vocabulary": args.vocabulary,
        "draft_vocabulary": args.draft_vocabulary, "threads": args.threads, "versions": rows,
    }  # fmt: skip


def _in_own_process(name: str, arguments: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, *arguments, "--version", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DSparkError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    finish(lambda: main(sys.argv[1:]))
