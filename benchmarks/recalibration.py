"""Recalibration on a shifted workload: calibrated on some domains, served another.

Replays the rounds that `dspark calibrate --run FOLDER` kept. A scaling is fitted on the texts
of the `--fit` files; then those of the `--serve` files arrive, shuffled. Every served round behind
the first window is predicted twice: with what was fitted, and with the snapshot in force
when it came. Prints the ECE of both and the floor, by position, and ends with one JSON line.

    python benchmarks/recalibration.py RUN/rounds.jsonl --fit gsm8k math500 --serve mt-bench
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from common import finish

from dspark.calibration.condition import CandidateSet, Condition
from dspark.calibration.metrics import expected_calibration_error, floor_of_ece
from dspark.calibration.online import OnlineCalibration, OnlineConfig
from dspark.calibration.scaling import check_enough, fit_scaling, survival
from dspark.core.errors import DataError
from dspark.core.records import RoundRecord, StepRecord
from dspark.core.sampling import SamplingParams
from dspark.recipes.calibrate_rounds import rounds_of
from dspark.recipes.round_file import RoundFile


def main() -> dict[str, Any]:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("rounds", type=Path, help="rounds.jsonl of a calibrate run")
    options.add_argument("--fit", nargs="+", required=True, help="prompt files, by stem")
    options.add_argument("--serve", nargs="+", required=True, help="prompt files, by stem")
    options.add_argument("--window", type=int, default=OnlineConfig().window)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    if not args.rounds.is_file():
        raise DataError(f"there is no file {args.rounds}; dspark calibrate --run makes one")
    with args.rounds.open() as file:
        settings = json.loads(file.readline())
    settings.pop("format")
    texts, block = RoundFile(args.rounds, settings).texts, settings["block_size"]

    fitted = rounds_of({k: rows for k, rows in texts.items() if k[0] in args.fit}, block)
    check_enough(fitted)
    scaling = fit_scaling(fitted)
    served = rounds_of({k: rows for k, rows in texts.items() if k[0] in args.serve}, block)
    if len(served) < 2 * args.window:
        raise DataError(
            f"{len(served)} served rounds; a window of {args.window} needs twice as many"
        )

    condition = settings["condition"]
    proposals = CandidateSet(condition["candidates"], condition["draft_vocabulary"])
    sampling = SamplingParams(
        verification=condition["rule"],
        **{name: condition[name] for name in ("temperature", "top_k", "top_p", "min_p")},
    )
    config = OnlineConfig(
        window=args.window, every=max(1, args.window // 10), least=max(20, args.window // 20)
    )
    online = OnlineCalibration(
        {Condition.of(sampling, proposals): scaling}, proposals, block, config=config
    )
    online.expect(sampling)
    followed = np.empty((len(served), block))
    order = np.random.default_rng(args.seed).permutation(len(served))
    for row in order:
        logits, entropies = served.logits_NK[row], served.entropies_NK[row]
        confidence = online.snapshot().confidence(logits[None], entropies[None], [sampling])
        followed[row] = np.cumprod(confidence)
        accepted, judged = int(served.accepted_N[row]), int(served.judged_N[row])
        cut = judged < block
        record = RoundRecord(
            request=0, round=0, proposed=block, admitted=judged, accepted=accepted,
            emitted=accepted if cut else accepted + 1, ended=cut,
            confidence=tuple(logits), entropy=tuple(entropies),
        )  # fmt: skip
        step = StepRecord(step=0, batch_tokens=0, prefill_tokens=0, rounds=(record,))
        online.observe(step, {0: sampling})

    late = np.zeros(len(served), dtype=bool)
    late[order[args.window :]] = True
    kept, raw = survival(served, scaling), survival(served)
    generator = np.random.default_rng(args.seed)
    positions = []
    print(f"{int(late.sum())} served rounds behind the first window, {len(online.refits)} refits")
    for column in range(block):
        counted = late & served.counted(column)
        labels = served.labels(column)[counted]
        row = {
            "position": column + 1,
            "samples": int(counted.sum()),
            "ece_raw": expected_calibration_error(raw[counted, column], labels),
            "ece_kept": expected_calibration_error(kept[counted, column], labels),
            "ece_followed": expected_calibration_error(followed[counted, column], labels),
            "ece_floor": float(floor_of_ece(followed[counted, column], generator).mean()),
        }
        positions.append(row)
        print(
            f"position {row['position']}: ECE {row['ece_raw']:.1%} raw, {row['ece_kept']:.1%} "
            f"calibrated on the other workload, {row['ece_followed']:.1%} recalibrated, floor "
            f"{row['ece_floor']:.1%}"
        )
    return {
        "positions": positions,
        "refits": len(online.refits),
        "fitted": {
            "temperatures": scaling.temperatures.tolist(),
            "offsets": scaling.offsets.tolist(),
            "entropy_weights": scaling.entropy_weights.tolist(),
        },
        "served": {
            "temperatures": online.refits[-1].temperatures,
            "offsets": online.refits[-1].offsets,
        }
        if online.refits
        else None,
    }


if __name__ == "__main__":
    finish(main)
