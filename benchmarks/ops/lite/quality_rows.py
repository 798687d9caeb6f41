"""The rows that `quality.py` writes: their fields, how they are checked and read, and their table.

A row has the fields of `harness/results.py`, for the timed call of the last step, and those of FIELDS. No torch is
needed here, because documents are made without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.harness import report, results

OP = "lite_quality"
# How a row's threshold was chosen: by hand, once for the whole trajectory, or per step by the package's calibration.
CALIBRATIONS = (None, "trajectory", "step")

FIELDS: dict[str, tuple[type, ...]] = {
    "workload": (str,),
    "dtype": (str,),
    "refresh": (int, type(None)),
    "threshold": (int, float, type(None)),
    "thresholds": (list,),
    "target": (int, float, type(None)),
    "calibration": (str, type(None)),
    "best_dense": (str,),
    "dense_us": (dict,),
    "density_by_step": (list,),
    "l1_by_step": (dict,),
    **dict.fromkeys(
        (
            "density", "mean_density", "rel_l1", "rel_l2", "worst_head_l1", "worst_step_l1", "dropped_mean",
            "dropped_p99", "inexact", "oracle_l1", "oracle_l2", "oracle_dropped", "speedup", "speedup_lite_dense",
            "efficiency", "efficiency_lite_dense", "trajectory_us", "trajectory_speedup",
        ),
        (int, float),
    ),
}  # fmt: skip
# Fields that rows may have besides: the architecture of the kernels that ran, "reference" on the CPU. Files from before
# there was a choice have none; theirs were those of sm89.
MORE_FIELDS: dict[str, tuple[type, ...]] = {"kernel": (str,)}
SHARES = ("density", "mean_density", "dropped_mean", "dropped_p99", "oracle_dropped")

NOTES = (
    "spatial, temporal, local and diffuse heads, and mixed, by turns these: logits fall with the distance in a grid of "
    "frames, rows and columns, under noise that fades over the steps. random: nothing can be skipped. drift: from half "
    "of the steps on queries look half of the tokens further, where their lists have nothing; drift-refresh: the same "
    "with lists that are reset every 4 steps. simulation, for regressions only: one key tile per query tile matters, "
    "the same in every step, and the rest is spread evenly.",
    "Errors are relative to dense attention in fp32 on the same inputs, in the last step unless said otherwise. "
    "dropped: probability on tiles left out. oracle: exact attention over as many tiles of every query tile, those "
    "with most probability. inexact: relative L2 from exact attention over the same tiles. dense: the rounding alone.",
    "calibration trajectory: the one threshold at which the worst step's L1 is the target. calibration step: "
    "thresholds per step by the package's calibration on the same steps, whose target is what a new list adds.",
    "median_us is the call of the last step; trajectory_us all steps from full lists on, with what the module does "
    "between them. speedup and efficiency compare with the best dense kernel of the same run: efficiency is its time "
    "times the density, over ours. trajectory_speedup compares with as many steps of it.",
)


def validate(result: Any) -> None:
    """Does what `results.validate` does, and the same for FIELDS."""
    results.validate(result)
    for number, row in enumerate(result["rows"]):
        where = f"rows[{number}]"
        results.require_fields(row, FIELDS, where)
        results.require_fields(row, {k: t for k, t in MORE_FIELDS.items() if k in row}, where)
        for name in SHARES:
            # Sums of rounded probabilities may exceed 1 a little.
            if not 0 <= row[name] <= 1.0001:
                raise ValueError(f"{where}.{name}: expected 0 to 1, got {row[name]}")
        if row["calibration"] not in CALIBRATIONS:
            got = row["calibration"]
            raise ValueError(f"{where}.calibration: expected one of {CALIBRATIONS}, got {got!r}")
        if row["best_dense"] not in row["dense_us"]:
            got = row["best_dense"]
            raise ValueError(f"{where}.best_dense: expected one of dense_us, got {got!r}")


def load(path: Path) -> dict[str, Any]:
    """The content of a result file of `quality.py`, checked."""
    return results.load(path, validate)


COLUMNS = {
    "density": ("density", "{:.3f}"),
    "L1": ("rel_l1", "{:.2%}"),
    "worst step": ("worst_step_l1", "{:.2%}"),
    "oracle": ("oracle_l1", "{:.2%}"),
    "dropped": ("dropped_mean", "{:.2%}"),
    "p99": ("dropped_p99", "{:.2%}"),
    "us": ("median_us", "{:.1f}"),
    "x best dense": ("speedup", "{:.2f}"),
    "of ideal": ("efficiency", "{:.2f}"),
    "x our dense": ("speedup_lite_dense", "{:.2f}"),
    "of ideal, ours": ("efficiency_lite_dense", "{:.2f}"),
    "all steps, x best dense": ("trajectory_speedup", "{:.2f}"),
}


def table(result: Mapping[str, Any], pattern: str = "*") -> report.Table:
    """Header and one line per row whose setting matches a shell pattern; with the kernel, if rows name it."""
    columns = COLUMNS
    if any("kernel" in r for r in result["rows"]):
        columns = {"kernel": ("kernel", "{}"), **COLUMNS}
    lines = [
        [r["setting"], *(form.format(r[name]) for name, form in columns.values())]
        for r in result["rows"]
        if fnmatchcase(r["setting"], pattern)
    ]
    return ["setting", *columns], lines
