"""Draws the loss curves of `learning.py` as a PNG: the losses, and what they differ from those in fp32 by.

python benchmarks/curves.py benchmarks/results/h200/kda_learning.json [--out PATH.png]
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import loss_rows, report
from benchmarks.harness.commands import draw_result

LINES = ("-", "--", ":", "-.")


def draw(content: Mapping[str, Any], out: Path) -> None:
    """Writes the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = content["rows"]
    exact = next((row for row in rows if row["provider"] == loss_rows.EXACT), None)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    steps = range(1, len(rows[0]["losses"]) + 1)
    for row, dashes in zip(rows, LINES * len(rows)):
        label = f"{row['provider']}, {row['dtype']}"
        axes[0].plot(steps, row["losses"], dashes, label=label, linewidth=1.2)
        if exact is not None and row is not exact:
            apart = [a - b for a, b in zip(row["losses"], exact["losses"], strict=True)]
            axes[1].plot(steps, apart, dashes, label=label, linewidth=1.2)
    axes[0].set(xlabel="step", ylabel="loss, nats per byte")
    axes[1].set(xlabel="step", ylabel="loss - loss in fp32")
    axes[0].legend(fontsize=7)
    origin = textwrap.fill(report.machine(content["provenance"]), 110)
    figure.suptitle(f"{content['title']}\n{origin}", fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    def run(args: argparse.Namespace, out: Path) -> None:
        draw(loss_rows.load(args.result), out)

    return draw_result(argparse.ArgumentParser(description="Draws loss curves."), run, argv)


if __name__ == "__main__":
    sys.exit(main())
