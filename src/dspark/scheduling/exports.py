"""Cost tables in the shapes that other engines read.

SGLang (`--speculative-dspark-sps-table-path`): steps per second by batch tokens; a size between two
listed ones is priced like the smaller. TensorRT-LLM (`confidence_cost_table_path`, its first
schema): milliseconds by tokens, plus a part by batch size, plus a fixed part.
"""

from typing import Any

import numpy as np

from dspark.core.errors import ConfigError
from dspark.core.exports import FORMATS
from dspark.scheduling.table import CostTable


def export_table(table: CostTable, form: str) -> dict[str, Any]:
    """The table as `form` wants it, at the shortest context measured.

    Raises ConfigError for a form that does not exist.
    """
    if form not in FORMATS:
        raise ConfigError(f"format is {form!r}; it must be {' or '.join(FORMATS)}")
    model = table.fit().model
    sizes = sorted({cell.batch_tokens for cell in table.steps})
    counts = sorted({cell.requests for cell in table.steps})
    context = min(cell.context_length for cell in table.steps)
    length = max(cell.length for cell in table.drafts)  # they draft whole blocks
    if form == "sglang":
        # One number a batch size: of the fewest requests that can make it up with whole blocks.
        most = max(cell.batch_tokens / cell.requests for cell in table.steps)
        rates = []
        for size in sizes:
            requests = max(1, int(np.ceil(size / most)))
            sps = model.round_sps(
                requests=requests, drafting=requests, length=length,
                context_tokens=requests * context,
            )  # fmt: skip
            rates.append(float(sps(size)))
        return {
            "sample_batch_tokens": sizes,
            "sample_steps_per_sec": np.minimum.accumulate(rates).tolist(),
            "max_batch_tokens": sizes[-1],
        }
    tokens = model.forward.tokens(sizes) + model.rest.tokens(sizes)
    tokens = tokens + model.forward.per_pair * context * np.array(sizes)
    step = [
        float(model.step_seconds(0, requests=count, context_tokens=count * context))
        + model.draft_seconds(count, length=length, requests=count, context_tokens=count * context)
        - float(model.forward.tokens(0) + model.rest.tokens(0))
        for count in counts
    ]
    return {
        "token_counts": sizes,
        "step_time_ms": (1000 * tokens).tolist(),
        "fixed_overhead_ms": 1000 * step[0],
        "batch_sizes": counts,
        "batch_overhead_ms": [1000 * (seconds - step[0]) for seconds in step],
    }
