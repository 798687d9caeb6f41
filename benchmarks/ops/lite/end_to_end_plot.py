"""Draws a result of `end_to_end.py` as a PNG: the time of every step and the share of tiles that it visits.

python benchmarks/ops/lite/end_to_end_plot.py RESULT.json [--out PATH.png]
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.harness import report
from benchmarks.harness.commands import draw_result
from benchmarks.ops.lite import end_to_end_rows as rows

COLORS = {"torch_cudnn": "black", "torch_default": "black", "lite_dense": "tab:gray"}
# By target.
LISTED = ("tab:red", "tab:orange", "tab:purple", "tab:blue")
# The package's own kernel and the reference are drawn with lines, others with dashes.
DASHED = {"sm90"}


def draw(content: Mapping[str, Any], out: Path) -> None:
    """Writes the PNG, a column per model and resolution; ValueError if there is nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = rows.by_setting(content["rows"])
    if not settings:
        raise ValueError("result: expected rows, there are none")
    count = len(settings)
    figure, axes = plt.subplots(
        2, count, figsize=(3.2 + 2.6 * count, 5.4), sharex=True, squeeze=False, layout="constrained"
    )
    for column, found in enumerate(settings.values()):
        draw_setting(axes[:, column], found)
        axes[0][column].set_title(caption(found[0]), fontsize=8)
    named = {}
    for axis in axes[0]:
        named |= {text: line for line, text in zip(*axis.get_legend_handles_labels())}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=4, fontsize=7)
    origin = textwrap.fill(report.machine(content["provenance"]), 40 + 32 * count)
    figure.suptitle(f"{content['title']}\n{origin}", fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def caption(row: rows.Row) -> str:
    return (
        f"{rows.title_of(row)}: {row['tokens']:,} tokens, {row['blocks']} of {row['layers']} blocks"
    )


def draw_setting(axes: Sequence[Any], found: Sequence[rows.Row]) -> None:
    """Draws the rows of one setting on two axes."""
    times, shares = axes
    targets = sorted({row["target"] for row in found if row["target"] is not None})
    for row in found:
        target = row["target"]
        color = (
            COLORS.get(row["provider"])
            or LISTED[targets.index(target) % len(LISTED) if target is not None else -1]
        )
        look = {"color": color, "lw": 1.2, "ls": "--" if row["kernel"] in DASHED else "-"}
        times.plot(row["ms_by_step"], marker=".", ms=3, label=rows.label(row), **look)
        if row["threshold"] is not None:
            shares.plot(row["density_by_step"], marker=".", ms=3, **look)
    times.set_ylim(0, None)
    shares.set_ylim(0, 1.02)
    times.set_ylabel("ms per step", fontsize=8)
    shares.set_ylabel("share of tiles", fontsize=8)
    shares.set_xlabel("step", fontsize=8)
    for axis in axes:
        axis.tick_params(labelsize=7)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draws a result of end_to_end.py as a PNG.")
    return draw_result(parser, lambda args, out: draw(rows.load(args.result), out), argv)


if __name__ == "__main__":
    sys.exit(main())
