"""The reliability diagram, a panel a position (paper, figure 6)."""

from collections.abc import Sequence
from pathlib import Path

from dspark.calibration.curves import ReliabilityCurve
from dspark.evaluation.figures import check_figure, save_figure


def plot_reliability(
    panels: Sequence[tuple[str, ReliabilityCurve, ReliabilityCurve]], path: Path
) -> None:
    """Draws title, curve before and curve after calibration of every panel into `path`, whose
    ending says the format. Raises as `figures.check_figure` and `save_figure` do.
    """
    check_figure(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.0 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, before, after) in zip(axes, panels, strict=True):
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1, linestyle="--")
        for curve, label, color in ((before, "raw", "tab:red"), (after, "calibrated", "tab:blue")):
            largest = max(curve.counts)
            sizes = [4 + 60 * count / largest for count in curve.counts]
            axis.plot(curve.predicted, curve.accepted, color=color, linewidth=1, label=label)
            axis.scatter(curve.predicted, curve.accepted, s=sizes, color=color, alpha=0.6)
        axis.set(title=title, xlabel="predicted survival", xlim=(0, 1), ylim=(0, 1))
        axis.title.set_fontsize(9)
    axes[0].set_ylabel("share accepted")
    axes[0].legend(loc="upper left", fontsize=8)
    save_figure(figure, path)
