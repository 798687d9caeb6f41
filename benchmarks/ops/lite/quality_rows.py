"""The rows of `quality.py`: their fields, checking, reading, and a table.

A row is the timing of the last step's call, as `results.py` has it, and the fields of `FIELDS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import report, results
from benchmarks.harness.timers import Stats

if TYPE_CHECKING:  # they need torch, and tables are made without
    from benchmarks.ops.lite.workloads import Shape

OP = "lite_quality"
# How a row's threshold was chosen: given, one for the whole trajectory, or one per step by the package's calibration.
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


@dataclass(frozen=True)
class Label:
    """Names a row within its workload and size, and says how its thresholds were chosen."""

    name: str
    target: float | None = None
    calibration: str | None = None


DENSE = Label("dense")


def case_name(workload: str, shape: Shape) -> str:
    return f"{workload}-B{shape.batch}-S{shape.tokens}-H{shape.heads}-D{shape.dim}"


def row(
    workload: str,
    refresh: int | None,
    shape: Shape,
    label: Label,
    track: Any,
    method: str,
    stats: Stats,
    dense_us: Mapping[str, float],
    trajectory_us: float,
) -> dict[str, Any]:
    """A row from what a module did (`liteattention_sm89.replay.Trajectory`) and how long that took."""
    from benchmarks.ops.lite import problem as lite

    last, time_us = track.last, stats.median_us
    best, ours = min(dense_us, key=dense_us.__getitem__), dense_us["lite_dense"]
    best_us = dense_us[best]
    kind = "dense" if track.mask is None else "full"
    moved = lite.moved(lite.setting(kind, shape.tokens, shape.batch, shape.heads, shape.dim))
    size = {"B": shape.batch, "S": shape.tokens, "H": shape.heads, "D": shape.dim}
    per_step = label.calibration == "step"
    found = {
        "setting": f"{case_name(workload, shape)}-{label.name}",
        "params": {"workload": workload, "label": label.name, **size},
        "l2": "cold",
        "provider": "lite",
        "role": "ours",
        "method": method,
        "median_us": time_us,
        "p20_us": stats.p20_us,
        "p80_us": stats.p80_us,
        "samples": stats.samples,
        "calls_per_sample": stats.calls_per_sample,
        "bytes": moved,
        "gbps": moved / time_us / 1e3,
        "floor_us": None,
        "ratio_ceiling": None,
        "ratio_floor": None,
        "workload": workload,
        "dtype": "bfloat16",
        "refresh": refresh,
        "threshold": None if per_step else track.thresholds[-1],
        "thresholds": track.thresholds if per_step else [],
        "target": label.target,
        "calibration": label.calibration,
        "density": last.density,
        "mean_density": track.mean_density,
        "rel_l1": last.l1,
        "rel_l2": last.l2,
        "worst_head_l1": last.worst_l1,
        "worst_step_l1": track.worst.l1,
        "dropped_mean": last.dropped,
        "dropped_p99": last.dropped_p99,
        "inexact": last.inexact,
        "oracle_l1": last.best_l1,
        "oracle_l2": last.best_l2,
        "oracle_dropped": last.best_dropped,
        "best_dense": best,
        "dense_us": dict(dense_us),
        "speedup": best_us / time_us,
        "speedup_lite_dense": ours / time_us,
        "efficiency": last.density * best_us / time_us,
        "efficiency_lite_dense": last.density * ours / time_us,
        "trajectory_us": trajectory_us,
        "trajectory_speedup": best_us * len(track.density) / trajectory_us,
        "density_by_step": track.density,
        "l1_by_step": {str(step): quality.l1 for step, quality in track.quality.items()},
    }
    return _rounded(found)


def _rounded(value: Any) -> Any:
    """Floats to six digits, so that files stay small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(x) for x in value]
    if isinstance(value, dict):
        return {key: _rounded(x) for key, x in value.items()}
    return value


def validate(result: Any) -> None:
    """`results.validate`, and the same for `FIELDS`."""
    results.validate(result)
    for number, row in enumerate(result["rows"]):
        where = f"rows[{number}]"
        results._has(row, FIELDS, where)
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
    """A checked result file."""
    result = results.load(path)
    try:
        validate(result)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return result


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
    """Header and one line per row whose setting matches a shell pattern."""
    lines = [
        [r["setting"], *(form.format(r[name]) for name, form in COLUMNS.values())]
        for r in result["rows"]
        if fnmatchcase(r["setting"], pattern)
    ]
    return ["setting", *COLUMNS], lines
