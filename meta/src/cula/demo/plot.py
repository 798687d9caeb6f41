"""The demo's picture: recall over the text, and density and error of skip-list attention per step."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cula.demo.results import Outcome

STYLES = {
    "delta": dict(color="tab:blue", linestyle="-"),
    "plain": dict(color="tab:orange", linestyle="-"),
    "forgetful": dict(color="tab:orange", linestyle="--"),
    "baseline": dict(color="tab:gray", linestyle=":"),
}


def save(outcome: Outcome, path: Path) -> None:
    """Write the PNG. Raises OSError when the file cannot be written."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)

    # Two implementations of one memory draw the same line: one of them is enough.
    for curve in {curve.kind: curve for curve in outcome.recall}.values():
        left.plot(curve.positions, curve.recall, **STYLES[curve.kind], label=curve.label)
    left.set(
        title="Which byte followed this context?",
        xlabel="position in the text (bytes)",
        ylabel="contexts recalled (running share)",
        ylim=(0, 1.02),
    )

    errors = right.twinx()
    for trace, style in zip(outcome.skips, ("-", "--"), strict=False):
        steps = range(1, len(trace.density) + 1)
        right.plot(
            steps,
            trace.density,
            style,
            color="tab:blue",
            marker="o",
            ms=3,
            label=f"density, {trace.label}",
        )
        errors.plot(
            steps,
            trace.error,
            style,
            color="tab:red",
            marker="s",
            ms=3,
            label=f"error, {trace.label}",
        )
    right.set(title="Skip-list attention on a moving pattern", xlabel="step", ylim=(0, 1.05))
    right.set_ylabel("density (share of tiles visited)", color="tab:blue")
    errors.set_ylabel("relative error against dense attention", color="tab:red")
    errors.set_ylim(bottom=0)

    below = dict(
        fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False
    )
    if outcome.recall:
        left.legend(**below)
    if outcome.skips:
        handles = right.get_legend_handles_labels()[0] + errors.get_legend_handles_labels()[0]
        right.legend(handles=handles, **below)
    figure.savefig(path, dpi=120)
