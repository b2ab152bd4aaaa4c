"""`dspark profile`: what this machine's steps cost, kept for the policies that weigh it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dspark.core.errors import ConfigError
from dspark.engine.profiler import CaptureCell, ProfileConfig, passes
from dspark.engine.profiler import profile as measure
from dspark.evaluation.cost_plot import Point, plot_sps
from dspark.recipes.cost_tables import save_table, why_none
from dspark.recipes.device import clock_of
from dspark.recipes.llm import LLM
from dspark.recipes.progress import Progress
from dspark.scheduling.exports import export_table
from dspark.scheduling.fit import Fit
from dspark.scheduling.table import CostTable

__all__ = ["ProfileConfig", "ProfileResult", "draw", "export", "profile"]


class WholeBlock(NamedTuple):
    requests: int
    batch_tokens: int
    draft: float
    """Seconds of the draft block."""
    step: float
    """Seconds of everything else."""


@dataclass(frozen=True, slots=True)
class ProfileResult:
    table: CostTable
    fit: Fit
    path: Path
    """Where the table is kept."""
    capture: tuple[CaptureCell, ...]
    block_size: int

    @property
    def _context(self) -> int:
        """The context length that all shapes were measured at."""
        return min(cell.context_length for cell in self.table.steps)

    @property
    def _drafts(self) -> dict[int, float]:
        """Seconds of whole blocks at that context, by requests."""
        return {
            cell.requests: cell.seconds
            for cell in self.table.drafts
            if cell.context_length == self._context and cell.length == self.block_size
        }

    def whole_blocks(self) -> list["WholeBlock"]:
        """Measured steps in which every request verifies its whole block."""
        drafts = self._drafts
        return [
            WholeBlock(
                cell.requests, cell.batch_tokens, drafts[cell.requests], cell.forward + cell.rest
            )
            for cell in self.table.steps
            if cell.context_length == self._context
            and cell.batch_tokens == cell.requests * (1 + self.block_size)
        ]

    def measured_sps(self) -> list[Point]:
        """Whole steps, draft included, at the shortest context."""
        drafts = self._drafts
        return [
            (c.requests, c.batch_tokens, 1 / (c.forward + c.rest + drafts[c.requests]))
            for c in self.table.steps
            if c.context_length == self._context
        ]

    def fitted_sps(self) -> list[Point]:
        """The model at every batch size that these requests can have."""
        points: list[Point] = []
        for requests in sorted({cell.requests for cell in self.table.steps}):
            sps = self.fit.model.round_sps(
                requests=requests, drafting=requests, length=self.block_size,
                context_tokens=requests * self._context,
            )  # fmt: skip
            sizes = np.arange(requests, requests * (1 + self.block_size) + 1)
            points += [
                (requests, *pair) for pair in zip(sizes.tolist(), sps(sizes).tolist(), strict=True)
            ]
        return points

    def to_json(self) -> dict[str, Any]:
        return {
            **self.table.to_json(),
            "sps": [
                {"requests": requests, "batch_tokens": tokens, "steps_per_second": rate}
                for requests, tokens, rate in self.measured_sps()
            ],
            "capture": [
                {
                    "requests": cell.requests,
                    "plain_milliseconds": 1000 * cell.plain,
                    "captured_milliseconds": 1000 * cell.captured,
                }
                for cell in self.capture
            ],
            "worst_error": self.fit.worst_error,
            "table": str(self.path),
        }


def profile(
    llm: LLM, config: ProfileConfig | None = None, *, progress: Progress | None = None
) -> ProfileResult:
    """Measures, fits, keeps the table, and lets `llm` use it.

    Raises ConfigError without a drafter, and for contexts that the target cannot hold.
    """
    progress = progress or Progress(quiet=True)
    config = config or ProfileConfig()
    if llm.drafter is None:
        raise ConfigError("there is no drafter to profile; give a bundle with --draft")
    with progress.task("profiling", total=passes(config)) as advance:
        measured = measure(
            llm.loaded.target,
            llm.drafter,
            config,
            exact=llm.many_requests,  # the requests that the option is for
            clock=clock_of(llm.loaded.target.device),
            advance=advance,
        )
    table = CostTable(llm.policies.fingerprint, measured.steps, measured.drafts)
    result = ProfileResult(
        table, table.fit(), save_table(table), measured.capture, llm.drafter.block_size
    )
    llm.policies.forget_costs()
    return result


def ensure_costs(llm: LLM, policies: Sequence[str], progress: Progress) -> None:
    """Profiles first, with what `profile` does by default, if a policy needs a table and none fits.

    Policies that this drafter cannot run in any case are left for others to refuse.
    """
    if any(map(llm.policies.lacks_costs, policies)):
        progress.say(f"no cost table fits ({why_none(llm.policies.fingerprint)}): profiling first")
        profile(llm, progress=progress)


def export(result: ProfileResult, form: str, file: Path) -> None:
    """Writes the table for another engine."""
    document = json.dumps(export_table(result.table, form), allow_nan=False)
    file.write_text(document + "\n", encoding="utf-8")


def draw(result: ProfileResult, file: Path) -> None:
    """SPS(B) as a picture. Raises as `plot_sps` does."""
    plot_sps(file, result.measured_sps(), result.fitted_sps())
