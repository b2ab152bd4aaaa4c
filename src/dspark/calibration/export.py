"""Temperatures in the shapes that other engines read."""

from typing import Any

from dspark.calibration.table import Entry
from dspark.core.errors import ConfigError
from dspark.core.exports import FORMATS


def export(entry: Entry, form: str, *, dataset: str) -> dict[str, Any]:
    """One condition's temperatures as SGLang's `--speculative-dspark-confidence-sts-path` or
    TensorRT-LLM's `confidence_calibration_path` takes them; ConfigError for another `form`.

    They divide and do not shift, so they get the temperatures that were fitted alone.

    dataset: for SGLang's record of where they come from.
    """
    if form == "sglang":
        positions = entry.positions
        return {
            "temperatures": [*entry.temperatures_alone],
            "dataset": dataset,
            "num_samples": entry.rounds_fitted,
            "ece_before": sum(p["ece_before"] for p in positions) / len(positions),
            "ece_after": sum(p["ece_temperature_alone"] for p in positions) / len(positions),
        }
    if form == "tensorrt-llm":
        return {"sts_temperatures": [*entry.temperatures_alone]}
    raise ConfigError(f"format is {form!r}; it must be {' or '.join(FORMATS)}")
