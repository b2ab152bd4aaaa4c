"""What 8-bit features cost: one drafter's analytic numbers on held-out answers, once with bf16 and
once with int8 features, and the bytes that both take.

    python benchmarks/feature_precision.py --prompts PROMPTS --responses RESPONSES.jsonl --limit 40

This is the drafter reading coarser features. What training on them costs is the accepted length of
two runs of `dspark train`, one of them with `--features int8`.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

from common import finish

from dspark.checkpoints.fit import check_fit
from dspark.checkpoints.native import read_bundle
from dspark.data.prompts import read_prompts
from dspark.data.responses import ResponseFile
from dspark.data.template import template_hash
from dspark.recipes.bundles import shipped_bundle
from dspark.recipes.features import FeatureExtractor
from dspark.recipes.progress import Progress
from dspark.recipes.train import bytes_per_token
from dspark.recipes.training_data import from_responses
from dspark.recipes.values import set_threads, weights_value
from dspark.targets.load import load_target
from dspark.training.config import TrainConfig
from dspark.training.features import FeatureKind, FeatureStore
from dspark.training.trainer import Trainer


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--responses", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=40, help="held-out answers")
    parser.add_argument("--target", help="default: the embedded model")
    parser.add_argument("--draft", type=Path, default=shipped_bundle())
    parser.add_argument("--weights")
    parser.add_argument("--threads", type=int)
    return parser


def main(arguments: list[str]) -> dict[str, Any]:
    args = options().parse_args(arguments)
    set_threads(args.threads)
    progress = Progress()
    bundle = read_bundle(args.draft)
    loaded = load_target(
        args.target, weights=weights_value(args.weights), template_hash=template_hash,
        say=progress.say,
    )  # fmt: skip
    check_fit(bundle, loaded.binding)
    responses = ResponseFile(
        args.responses,
        target=loaded.name,
        template_hash=loaded.binding.chat_template_hash,
        vocab_size=loaded.target.vocab_size,
    )
    data = from_responses(read_prompts(*args.prompts), responses.responses)
    held_out = data.held_out[: args.limit]
    config = bundle.config
    results: dict[str, Any] = {}
    for kind in get_args(FeatureKind):
        with tempfile.TemporaryDirectory() as folder:
            store = FeatureStore(
                Path(folder) / "features", target=loaded.name,
                tap_layers=config.target_layer_ids, hidden_size=config.hidden_size, kind=kind,
            )  # fmt: skip
            extract = FeatureExtractor(loaded.target, config.target_layer_ids)
            store.fill([sequence.token_ids for sequence in held_out], extract)
            trainer = Trainer(
                bundle.model(), loaded.binding, store, data.train, held_out, TrainConfig(),
                Path(folder) / "run", draft_token_ids=bundle.draft_token_ids,
            )  # fmt: skip
            results[kind] = {
                "bytes_per_token": bytes_per_token(config, kind),
                **trainer.validate(),
            }
        print(
            f"{kind}: {results[kind]['bytes_per_token']:,} bytes a token (DeepSpec: "
            f"{6 * config.hidden_size * 2:,}), accepted length "
            f"{results[kind]['accepted_length']:.4f}"
        )
    lengths = [results[kind]["accepted_length"] for kind in ("bf16", "int8")]
    return {"kinds": results, "loss": lengths[0] - lengths[1], "answers": len(held_out)}


if __name__ == "__main__":
    finish(lambda: main(sys.argv[1:]))
