"""Round latency on a GPU, with random weights of Qwen3-4B's shape (figure 4, right, of the paper).

* One decode round of a batch of 128 requests (draft, schedule, verification of the whole block,
  commit) with DSpark against DFlash, the same backbone without a sequential head, at draft lengths
  4, 8, 12 and 16, averaged over contexts of 512 to 4,096 tokens. The paper has 0.2% to 1.3%.
* The same with the draft run eagerly and captured in CUDA graphs, and how far the two drafts are
  apart; verification is eager in both. On a CPU a recorder stands in for the graphs: results can be
  compared there, times cannot.
* SPS(B), steps a second of the target alone, from 1 to 1,024 tokens, with verification run eagerly
  and, where its size is captured, in CUDA graphs; and how far the logits of the two are apart.

Weights and contexts are random: neither changes what a step costs. Contexts that do not fit the
memory are skipped by name. Medians of each contender's rounds are kept.

    bash benchmarks/gpu_check.sh          # tests on CUDA first, then this
    python benchmarks/gpu_check.py --device cpu --tiny
"""

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from common import finish
from transformers import AutoConfig, AutoModelForCausalLM

from dspark.core.errors import DSparkError
from dspark.core.records import StepRecord
from dspark.core.sampling import SamplingParams
from dspark.drafters.captured import CapturedDrafter
from dspark.drafters.config import DSparkConfig
from dspark.drafters.dspark import DSparkModel
from dspark.drafters.fused import bf16_linear, plain_linear
from dspark.drafters.serving import DSparkDrafter
from dspark.engine.batch import build_batch
from dspark.engine.config import EngineConfig
from dspark.engine.drafting import Drafting
from dspark.engine.engine import Engine
from dspark.nn.graphs import Capture, CudaCapture
from dspark.nn.kv_cache import KVShape
from dspark.nn.recorder import Recorder
from dspark.nn.seams import Binding, DraftBlock, Drafter
from dspark.scheduling.policies import FixedLength, Off, Policy
from dspark.targets.captured import CapturedTarget
from dspark.targets.hf import HFTarget
from dspark.targets.load import check_device


@dataclass(frozen=True, slots=True)
class Size:
    """A target, its drafters, and what is measured with them."""

    target: dict[str, Any]
    draft_layers: int
    markov_rank: int
    batch: int
    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    tokens: tuple[int, ...]


QWEN3_4B = Size(
    target={
        "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": True,
    },
    draft_layers=5, markov_rank=256, batch=128, lengths=(4, 8, 12, 16),
    contexts=(512, 1024, 2048, 4096), tokens=tuple(2**k for k in range(11)),
)  # fmt: skip
TINY = Size(
    target={
        "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "tie_word_embeddings": True,
    },
    draft_layers=1, markov_rank=8, batch=4, lengths=(2, 4), contexts=(16, 40), tokens=(1, 4, 8),
)  # fmt: skip


class Bench:
    """A random target on a device, and engines over it that stand in the middle of decoding."""

    def __init__(self, size: Size, device: str, dtype: torch.dtype) -> None:
        self.size, self.dtype = size, dtype
        torch.manual_seed(0)
        eos = {"eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 2}
        config = AutoConfig.for_model("qwen3", **size.target, **eos)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.target = HFTarget(model)
        on_cuda = self.target.device.type == "cuda"
        self.capture: Capture = CudaCapture(self.target.device) if on_cuda else Recorder()
        self.captured_target = CapturedTarget(model, capture=self.capture)
        embedding = model.get_input_embeddings().weight.detach().float()
        layers = size.target["num_hidden_layers"]
        self.binding = Binding(
            embedding_VD=embedding, embedding_scale=1.0, lm_head_VD=embedding, logit_scale=1.0,
            logit_softcap=None, num_target_layers=layers, mask_token_id=3,
            target_name="random", embedding_hash="", chat_template_hash=None,
        )  # fmt: skip

    def drafters(self, block_size: int, *, markov: bool) -> tuple[DSparkDrafter, CapturedDrafter]:
        """DSpark's, or DFlash's: the same without the sequential head. Run eagerly and captured."""
        shape, layers = self.size.target, self.size.target["num_hidden_layers"]
        config = DSparkConfig(
            hidden_size=shape["hidden_size"], intermediate_size=shape["intermediate_size"],
            num_hidden_layers=self.size.draft_layers,
            num_attention_heads=shape["num_attention_heads"],
            num_key_value_heads=shape["num_key_value_heads"], head_dim=shape["head_dim"],
            vocab_size=shape["vocab_size"], num_target_layers=layers,
            target_layer_ids=(layers // 4, layers - 1), mask_token_id=3, block_size=block_size,
            markov_rank=self.size.markov_rank if markov else 0, enable_confidence_head=markov,
        )  # fmt: skip
        with torch.device(self.target.device):
            model = DSparkModel(config)
        linear = bf16_linear if self.dtype == torch.bfloat16 else plain_linear
        return (
            DSparkDrafter(model, self.binding, linear_factory=linear),
            CapturedDrafter(model, self.binding, linear_factory=linear, capture=self.capture),
        )

    def bytes_needed(self, requests: int, context: int) -> int:
        """Of both caches, in pages' extents of a power of two."""
        slots = requests * (1 << (context + 2 * max(self.size.lengths)).bit_length())
        shape = self.size.target
        own = KVShape.uniform(
            self.size.draft_layers, shape["num_key_value_heads"], shape["head_dim"]
        )
        return slots * sum(s.bytes_per_token(self.dtype) for s in (self.target.kv_shape, own))

    def engine(
        self,
        drafter: Drafter | None,
        policy: Policy,
        requests: int,
        context: int,
        target: HFTarget | None = None,
    ) -> Engine:
        """Requests that have `context` tokens in the cache and one that they have just emitted."""
        block = 0 if drafter is None else drafter.block_size
        params = SamplingParams(temperature=1.0, max_new_tokens=2 * block + 4, ignore_eos=True)
        page = 64
        needs = context + params.max_new_tokens + block
        extent = page << (-(-needs // page) - 1).bit_length()
        engine = Engine(
            target or self.target, drafter, policy,
            EngineConfig(
                max_requests=requests, cache_tokens=requests * extent + page, page_size=page,
                row_exact=False, prefix_cache=False,
                cache_dtype="bfloat16" if self.dtype == torch.bfloat16 else "float32",
            ),
            clock=clock(self.target.device),
        )  # fmt: skip
        for number in range(requests):
            engine.add([number % 90 + 4] * context, params, seed=number)
        engine.places.prepare_step()
        for state in engine.running:  # as after a prefill, which would only take time
            state.cached = context
            state.emit([5])
        assert len(engine.running) == requests
        return engine


def clock(device: torch.device) -> Callable[[], float]:
    """Seconds, with everything done that was asked of the device."""
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read


def one_round(engine: Engine) -> StepRecord:
    """A decode step of all requests, which are then wound back."""
    engine.step()
    for state in engine.running:
        state.take_back(1)
        state.features.clear()
    [record] = engine.records
    engine.records.clear()
    return record


def free_bytes(device: torch.device) -> float:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")


def draft_latency(bench: Bench, repeats: int) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """A row for each draft length; contexts that were skipped; backbones that ran eagerly in the
    captured form."""
    size = bench.size
    skipped: list[str] = []
    eagerly: list[str] = []
    found: dict[tuple[int, str, str], list[tuple[float, float]]] = defaultdict(list)
    apart: dict[tuple[int, str], Apart] = {}
    for context in size.contexts:
        # The paper's largest context also wants room for logits and temporaries.
        needs = max(1.15 * bench.bytes_needed(size.batch, context), 100e9 if context >= 4096 else 0)
        if needs > free_bytes(bench.target.device):
            skipped.append(f"context {context}: needs about {needs / 1e9:.0f} GB free")
            continue
        for length in size.lengths:
            for name, markov in (("dspark", True), ("dflash", False)):
                eager, captured = bench.drafters(length, markov=markov)
                drafters: dict[str, DSparkDrafter] = {"eager": eager, "captured": captured}
                for form, drafter in drafters.items():  # one cache at a time fits the memory
                    engine = bench.engine(drafter, FixedLength(length), size.batch, context)
                    if form == "captured":
                        if not captured.captures([state.table for state in engine.running]):
                            eagerly.append(f"{name}'s backbone, {context} + {length} tokens")
                        if (length, name) not in apart:
                            apart[length, name] = how_far_apart(engine, eager)
                            check(apart[length, name], bench.dtype)
                    took = []
                    for number in range(repeats + 2):
                        record = one_round(engine)
                        draft = record.seconds["draft"] + record.seconds["draft_head"]
                        if number > 1:  # the first ones warm up
                            took.append((sum(record.seconds.values()), draft))
                    rounds, drafts = zip(*took, strict=True)
                    found[length, name, form].append((median(rounds), median(drafts)))
                    engine.cancel()
                    del engine
                    gc.collect()
                    if bench.target.device.type == "cuda":
                        torch.cuda.empty_cache()
    rows = []
    for length in size.lengths:
        if not found[length, "dspark", "eager"]:
            continue
        row: dict[str, Any] = {"draft_length": length}
        for form in ("eager", "captured"):
            for name in ("dspark", "dflash"):
                rounds, drafts = zip(*found[length, name, form], strict=True)
                row[f"{name}_{form}_ms"] = 1000 * mean(rounds)
                row[f"{name}_{form}_draft_ms"] = 1000 * mean(drafts)
            row[f"more_{form}"] = row[f"dspark_{form}_ms"] / row[f"dflash_{form}_ms"] - 1
        for name in ("dspark", "dflash"):
            row[f"{name}_same_tokens"] = apart[length, name].same_tokens
            row[f"{name}_probs_apart"] = apart[length, name].probs
        rows.append(row)
    return rows, skipped, eagerly


@dataclass(frozen=True, slots=True)
class Apart:
    """A captured draft and an eager one of the same round."""

    same_tokens: float
    """The share of drafted tokens that are equal."""
    probs: float
    """Largest difference of a first token's probability."""


def how_far_apart(engine: Engine, eager: Drafter) -> Apart:
    """Of what the engine drafts next and what `eager` would, over a context of random numbers."""
    store, drafter = engine.memory.draft_store, engine.drafter
    assert store is not None and drafter is not None
    for memory in (*store.keys, *store.values):
        memory.normal_()
    everyone = np.ones(len(engine.running), dtype=np.bool_)
    blocks = []
    for own in (drafter, eager):
        block = Drafting(own, store, engine.target.device).blocks(
            engine.running, everyone, own.block_size
        )
        blocks.append(block)
    one, other = blocks
    same = (one.tokens_RK == other.tokens_RK).double().mean()
    vocab = engine.target.vocab_size
    apart = first_probs(one, vocab).sub_(first_probs(other, vocab)).abs_().max()
    return Apart(float(same), float(apart))


def first_probs(block: DraftBlock, vocab: int) -> torch.Tensor:
    """float64 [R, V]: candidates may come in another order, or be others at the margin."""
    probs_RV = block.probs_RKC.new_zeros(len(block.probs_RKC), vocab)
    return probs_RV.scatter_(1, block.candidates_RKC[:, 0], block.probs_RKC[:, 0])


def check(apart: Apart, dtype: torch.dtype) -> None:
    """In bf16 the two attention kernels may well round a likeliest token apart: it is shown."""
    if dtype == torch.float32 and (apart.same_tokens < 0.98 or apart.probs > 1e-3):
        raise DSparkError(f"the captured draft is not the eager one: {apart}")


def steps_a_second(bench: Bench, repeats: int) -> dict[int, dict[str, float]]:
    """SPS(B): target forward, sampling and commit of B tokens, no draft. For each B, "eager" and,
    where it is captured, "captured", "same_tokens" and "logits_apart"."""
    found: dict[int, dict[str, float]] = {}
    context = bench.size.contexts[0]
    for tokens in bench.size.tokens:
        requests = min(tokens, bench.size.batch)
        extra = tokens // requests - 1
        drafter = bench.drafters(extra, markov=False)[0] if extra else None
        policy: Policy = FixedLength(extra) if extra else Off()
        row = found[requests * (1 + extra)] = {}
        for form, target in (("eager", bench.target), ("captured", bench.captured_target)):
            engine = bench.engine(drafter, policy, requests, context, target)
            if form == "captured":
                apart = verifications_apart(bench, engine, extra)
                if apart is None:
                    engine.cancel()
                    continue
                row |= apart
            took = []
            for number in range(repeats + 2):
                record = one_round(engine)
                assert record.batch_tokens == requests * (1 + extra)
                spent = dict(record.seconds)
                del spent["draft"], spent["draft_head"]
                if number > 1:
                    took.append(sum(spent.values()))
            row[form] = 1 / median(took)
            engine.cancel()
            del engine
            gc.collect()
    return found


def verifications_apart(bench: Bench, engine: Engine, extra: int) -> dict[str, float] | None:
    """A step of the engine's requests with `extra` random tokens each, in both forms, over a
    context of random numbers; None where it is not captured."""
    states, device = engine.running, engine.target.device
    tokens_RK = torch.randint(4, 90, (len(states), extra), device=device)
    draft = DraftBlock(tokens_RK, tokens_RK[..., None], torch.ones_like(tokens_RK[..., None]), None)
    batch = build_batch(
        states, [], draft, [extra] * len(states), chunk_tokens=1, row_exact=False, device=device
    )
    if not bench.captured_target.captures(batch.ragged):
        return None
    store = engine.memory.store
    for memory in (*store.keys, *store.values):
        memory.normal_()
    one, other = (
        target.forward(batch.ragged, store, logit_rows_M=batch.logit_rows_M).logits_MV
        for target in (bench.captured_target, bench.target)
    )
    same = float((one.argmax(-1) == other.argmax(-1)).double().mean())
    apart = float((one - other).abs().max())
    if bench.dtype == torch.float32 and (same < 0.98 or apart > 1e-2):  # as in `check`
        raise DSparkError(
            f"captured verification is not the eager one: {same:.1%} of the likeliest tokens are "
            f"the same, logits are up to {apart:.3g} apart"
        )
    return {"same_tokens": same, "logits_apart": apart}


def table(result: dict[str, Any]) -> str:
    lines = [
        "draft length   form       DSpark ms (draft)   DFlash ms (draft)   DSpark costs more by"
    ]
    for row in result["latency"]:
        for form in ("eager", "captured"):
            both = "   ".join(
                f"{row[f'{name}_{form}_ms']:8.2f} ({row[f'{name}_{form}_draft_ms']:6.2f})"
                for name in ("dspark", "dflash")
            )
            lines.append(
                f"{row['draft_length']:12}   {form:8}   {both}     {row[f'more_{form}']:+.1%}"
            )
        lines.append(
            f"{'':12}   tokens drafted alike: DSpark {row['dspark_same_tokens']:.1%}, DFlash "
            f"{row['dflash_same_tokens']:.1%}"
        )
    if result["captured_by"] == "recorder":
        lines.append("captured by a recorder: its results count, its times do not")
    lines += [f"skipped {what}" for what in result["skipped"]]
    lines += [f"not captured, for there is too much to copy: {w}" for w in result["not_captured"]]
    lines += ["", "tokens   steps a second: eager   captured   likeliest tokens alike"]
    for tokens, row in result["steps_a_second"].items():
        line = f"{tokens:6}   {row['eager']:21.2f}"
        if "captured" in row:
            line += f"   {row['captured']:8.2f}   {row['same_tokens']:22.1%}"
        lines.append(line)
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    options.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--tiny", action="store_true", help="a tiny target, to try the script")
    args = options.parse_args(argv)
    check_device(args.device)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    bench = Bench(TINY if args.tiny else QWEN3_4B, args.device, dtype)
    rows, skipped, eagerly = draft_latency(bench, args.repeats)
    sps = steps_a_second(bench, args.repeats)
    device = bench.target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    result = {
        "device": name, "dtype": args.dtype, "torch": torch.__version__, "tiny": args.tiny,
        "batch": bench.size.batch, "contexts": [*bench.size.contexts], "latency": rows,
        "skipped": skipped, "not_captured": eagerly, "steps_a_second": sps,
        "captured_by": "CUDA graphs" if device.type == "cuda" else "recorder",
    }  # fmt: skip
    print(table(result))
    return result


if __name__ == "__main__":
    finish(main)
