"""Draws a result of pairs as a PNG: whole models without cula and with it, or calls on one GPU and on several.

python benchmarks/pairs.py benchmarks/results/h200/models.json [--out PATH.png]
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import model_rows, rank_rows, report
from benchmarks.harness.commands import draw_result


class Pair(NamedTuple):
    """Times in ms, (median, 20th, 80th percentile) each."""

    label: str
    before: tuple[float, float, float]
    after: tuple[float, float, float]


def pairs(content: Mapping[str, Any]) -> tuple[tuple[str, str], list[Pair]]:
    """What the two times of a result file are called, and the pairs."""

    def times(row: Mapping[str, Any], of: str = "") -> tuple[float, float, float]:
        return row[f"{of}ms"], row[f"{of}p20_ms"], row[f"{of}p80_ms"]

    if content["rows"] and "one_ms" in content["rows"][0]:
        rank_rows.validate(content)
        rows = [r for r in content["rows"] if r["one_ms"] is not None]
        found = [Pair(rank_rows.label(r), times(r, "one_"), times(r)) for r in rows]
        return ("one GPU", "together"), found
    model_rows.validate(content)
    keys = dict.fromkeys(model_rows.work_of(row) for row in content["rows"])
    rows = {key: model_rows.of_work(content, key) for key in keys}
    found = [Pair(model_rows.label(k), times(a), times(b)) for k, (a, b) in rows.items()]
    return ("without cula", "with cula"), found


def draw(content: Mapping[str, Any], out: Path) -> None:
    """Writes the PNG: bars relative to the first time of a pair, with both times in ms."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names, found = pairs(content)
    figure, axis = plt.subplots(figsize=(8, 1.2 + 0.5 * len(found)), layout="constrained")
    for side, (name, color) in enumerate(zip(names, ("tab:blue", "tab:red"), strict=True)):
        times = [(pair.before, pair.after)[side] for pair in found]
        whole = [pair.before[0] for pair in found]
        axis.barh(
            [i + 0.4 * side for i in range(len(found))],
            [t[0] / w for t, w in zip(times, whole, strict=True)],
            height=0.38,
            xerr=[
                [(t[0] - t[1]) / w for t, w in zip(times, whole, strict=True)],
                [(t[2] - t[0]) / w for t, w in zip(times, whole, strict=True)],
            ],
            color=color,
            label=name,
        )
        for i, t in enumerate(times):
            axis.text(
                0.01, i + 0.4 * side, f"{t[0]:.2f} ms", va="center", color="white", fontsize=7
            )
    axis.set_yticks(
        [i + 0.2 for i in range(len(found))], [pair.label for pair in found], fontsize=8
    )
    axis.invert_yaxis()
    axis.set_xlabel(f"time / time {names[0]}; median, 20th to 80th percentile")
    axis.legend(fontsize=7)
    origin = textwrap.fill(report.machine(content["provenance"]), 110)
    figure.suptitle(f"{content['title']}\n{origin}", fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    def run(args: argparse.Namespace, out: Path) -> None:
        draw(json.loads(args.result.read_text(encoding="utf-8")), out)

    return draw_result(argparse.ArgumentParser(description="Draws a result of pairs."), run, argv)


if __name__ == "__main__":
    sys.exit(main())
