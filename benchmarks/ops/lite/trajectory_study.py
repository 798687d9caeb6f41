"""The study of a trajectory step by step: what `quality_study.py` measures, and the time and cosine of every step."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.checks import SEED
from benchmarks.ops.lite import problem as lite
from benchmarks.ops.lite import providers as lite_providers
from benchmarks.ops.lite import trajectory_rows
from benchmarks.ops.lite.internals import replay
from benchmarks.ops.lite.quality_study import ALL, DENSE, Case, Study, bound, last_call, rounded
from benchmarks.ops.lite.workloads import Shape, Step

# log2 units, as those of the report that asked for them.
THRESHOLDS = (-0.5, -1.0, -2.0, -5.0, -8.0, -10.0)
STEPS, SMALL_STEPS = 20, 4


def case(shape: Shape) -> Case:
    """The simulation at a size."""
    (workload,) = (w for w in ALL if w.name == "simulation")
    return Case(workload, shape)


class TrajectoryStudy(Study):
    """Rows of `Study` with `trajectory_rows.FIELDS`."""

    def run(self, case: Case) -> None:
        """Appends one row per threshold and a dense one; CheckFailed, and no row, if a result is wrong."""
        first = len(self.rows)
        super().run(case)
        steps = list(case.workload.make(case.shape, self.steps, self.device, SEED))
        times, cosines = self._steps(case, steps)
        for row in self.rows[first:]:
            name = row["params"]["label"]
            row |= {
                "us_by_step": rounded(times[name]),
                # Six digits would not tell the cosines of close results apart.
                "cosine_by_step": [round(x, 9) for x in cosines[name]],
                "settled_step": trajectory_rows.settled(row["density_by_step"]),
            }

    def _steps(
        self, case: Case, steps: Sequence[Step]
    ) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Times and cosines of every step, by the name of the label."""
        shape = case.shape
        modules = {label.name: m for label, m in self._modules(case, steps).items()}
        problem = lite.setting("dense", shape.tokens, shape.batch, shape.heads, shape.dim)
        dense = functools.partial(bound, lite_providers.LITE, problem)
        times: dict[str, list[float]] = {name: [] for name in modules}
        cosines: dict[str, list[float]] = {name: [] for name in modules}
        for number, step in enumerate(steps):
            # Lists repeat themselves exactly, so every module gets here again with the list that it had.
            tracks = replay(steps[: number + 1], modules, every=number + 1)
            stats = self._steady(shape, step, tracks, {"lite_dense": dense})
            outs = [
                dense(step)()[0] if track.mask is None else last_call(step, track)()[0]
                for track in tracks.values()
            ]
            for name, cosine in zip(tracks, cosines_of(step, outs), strict=True):
                times[name].append(stats["lite_dense" if name == DENSE.name else name].median_us)
                cosines[name].append(cosine)
            del outs
            self.release()
        return times, cosines

    def result(self, origin: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
        """The content of a result file."""
        return {
            **super().result(origin, place),
            "op": trajectory_rows.OP,
            "title": "Skip-list attention: a simulated trajectory step by step",
            "notes": list(trajectory_rows.NOTES),
        }


def cosines_of(step: Step, outs: Sequence[Tensor]) -> list[float]:
    """Cosines of outputs [B, S, H, D] with dense attention in fp32 on the same inputs, over all elements at once."""
    q, k, v = step
    sums = torch.zeros(len(outs), 3, dtype=torch.float64, device=q.device)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            query, key, value = (t[b, :, h].float() for t in (q, k, v))
            exact = ((query * q.shape[3] ** -0.5) @ key.T).softmax(-1) @ value
            exact = exact.double()
            for total, out in zip(sums, outs):
                got = out[b, :, h].double()
                total += torch.stack(
                    [(got * exact).sum(), got.square().sum(), exact.square().sum()]
                )
    return [dot / math.sqrt(ours * theirs) for dot, ours, theirs in sums.tolist()]
