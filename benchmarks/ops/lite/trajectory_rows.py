"""The rows that `trajectory.py` writes: those of `quality_rows.py` with fields by step, and their tables.

Regions of `tables.py`: `<!-- bench:lite_trajectory:h200 -->` is a line per threshold, and with `table=steps` a line per
step. No torch is needed here, because documents are made without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import report, results
from benchmarks.ops.lite import quality_rows

OP = "lite_trajectory"
# Of all tiles: lists whose length stays this close to that of the last step have settled.
SETTLED = 0.01

FIELDS: dict[str, tuple[type, ...]] = {
    "us_by_step": (list,),
    "cosine_by_step": (list,),
    "settled_step": (int,),
}

NOTES = (
    "Near-diagonal attention, k = q + 0.3 N, and in every step after the first 0.02 N added to q, k and v, which does "
    "not add up: the simulation of `workloads.py`. One key tile per query tile matters, the same in every step, and "
    "the rest is spread evenly; it says nothing about real data.",
    "us_by_step: device time of the call of each step with the list that it read, inputs colder than the L2 cache; for "
    "the dense row, of our dense kernel. trajectory_us: one replay of all steps, from full lists on.",
    "cosine_by_step: cosine of all outputs of a step, as one vector, with those of dense attention in fp32. rel_l1 is "
    "the error of the outputs of the last step.",
    f"settled_step: the first step from which on the share of tiles stays within {SETTLED:g} of that of the last step. "
    "Step 0 visits all tiles.",
    *quality_rows.NOTES[1:2],
    *quality_rows.NOTES[3:],
)


def settled(density: list[float]) -> int:
    """The first step from which on the share of tiles stays near that of the last one."""
    last = density[-1]
    far = [step for step, share in enumerate(density) if abs(share - last) > SETTLED]
    return far[-1] + 1 if far else 0


def validate(result: Any) -> None:
    """Does what `quality_rows.validate` does, and the same for FIELDS."""
    quality_rows.validate(result)
    for number, row in enumerate(result["rows"]):
        where = f"rows[{number}]"
        results.require_fields(row, FIELDS, where)
        steps = len(row["density_by_step"])
        for name in ("us_by_step", "cosine_by_step"):
            if len(row[name]) != steps:
                raise ValueError(f"{where}.{name}: expected {steps} steps, got {len(row[name])}")
        if not 0 <= row["settled_step"] < steps:
            got = row["settled_step"]
            raise ValueError(f"{where}.settled_step: expected 0 to {steps - 1}, got {got}")


def load(path: Path) -> dict[str, Any]:
    """The content of a result file of `trajectory.py`, checked."""
    return results.load(path, validate)


def table(result: Mapping[str, Any]) -> report.Table:
    """A line per threshold: the last step, and the whole trajectory."""
    header = ["threshold", "tiles", "last step, us", "x our dense", "x best dense", "cosine", "L1"]
    header += [
        "settled at step",
        "all steps, us",
        "all steps, x our dense",
        "all steps, x best dense",
    ]
    lines = []
    for row in result["rows"]:
        ours = row["dense_us"]["lite_dense"] * len(row["us_by_step"])
        cells = [f"{row['density']:.1%}", f"{row['median_us']:.1f}"]
        cells += [f"{row[name]:.2f}" for name in ("speedup_lite_dense", "speedup")]
        cells += [f"{row['cosine_by_step'][-1]:.6f}", f"{row['rel_l1']:.2%}"]
        cells += [str(row["settled_step"]), f"{row['trajectory_us']:.0f}"]
        cells += [f"{ours / row['trajectory_us']:.2f}", f"{row['trajectory_speedup']:.2f}"]
        lines.append([_threshold(row), *cells])
    return header, lines


def step_table(result: Mapping[str, Any]) -> report.Table:
    """A line per step, and for every threshold its time, its share of the tiles and its cosine."""
    rows = [row for row in result["rows"] if row["threshold"] is not None]
    header = ["step"]
    for row in rows:
        name = _threshold(row)
        header += [f"{name}: us", f"{name}: tiles", f"{name}: cosine"]
    lines = []
    for step in range(len(rows[0]["us_by_step"])):
        line = [str(step)]
        for row in rows:
            line += [f"{row['us_by_step'][step]:.1f}", f"{row['density_by_step'][step]:.1%}"]
            line.append(f"{row['cosine_by_step'][step]:.4f}")
        lines.append(line)
    return header, lines


TABLES = {None: table, "steps": step_table}


def region(path: Path, name: str | None, root: Path) -> str:
    """The lines of a region of a document; `name` is the table that it asks for."""
    if name not in TABLES:
        raise ValueError(f"bench:{OP}: expected table=steps or none, got {name!r}")
    result = load(path)
    kernels = dict.fromkeys(row["kernel"] for row in result["rows"] if "kernel" in row)
    whose = f", kernels of {', '.join(kernels)}" if kernels else ""
    origin = f"Medians of {result['rows'][0]['method']}{whose}. {report.origin(result)}"
    return f"\n{report.as_markdown(TABLES[name](result))}\n\n{origin}\n\n"


def _threshold(row: Mapping[str, Any]) -> str:
    return "dense" if row["threshold"] is None else f"{row['threshold']:g}"
