"""SPS(B): steps per second by batch tokens, as measured and as fitted."""

from collections.abc import Sequence
from pathlib import Path

from dspark.evaluation.figures import check_figure, save_figure

Point = tuple[int, int, float]
"""Requests, batch tokens, steps per second."""


def plot_sps(path: Path, measured: Sequence[Point], fitted: Sequence[Point]) -> None:
    """Dots are medians, lines the fit; a colour a count of requests. Raises as
    `figures.check_figure` and `save_figure` do."""
    check_figure(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for requests in sorted({point[0] for point in measured}):
        own = [(tokens, rate) for count, tokens, rate in measured if count == requests]
        line = [(tokens, rate) for count, tokens, rate in fitted if count == requests]
        [drawn] = axes.plot(*zip(*line, strict=True), drawstyle="steps-pre", linewidth=1)
        axes.plot(
            *zip(*own, strict=True), "o", markersize=3, color=drawn.get_color(),
            label=f"{requests} requests",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens in the batch, B", ylabel="steps per second, draft included")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    save_figure(figure, path)
