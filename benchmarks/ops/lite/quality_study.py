"""The study of quality against speed: what runs on which workload, how it is checked and timed, and its rows."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import results, timers
from benchmarks.harness.registry import CheckFailed
from benchmarks.harness.timers import Stats, Timing
from benchmarks.ops.checks import SEED
from benchmarks.ops.lite import problem as lite
from benchmarks.ops.lite import providers as lite_providers
from benchmarks.ops.lite.internals import calibrated, compare, kernel_of, replay, threshold_for
from benchmarks.ops.lite.quality_rows import NOTES, OP
from benchmarks.ops.lite.workloads import GRIDS, HEAD_TYPES, WORKLOADS, Shape, Step, structured

THRESHOLDS = (-2.0, -4.0, -6.0, -8.0, -10.0, -12.0, -14.0, -16.0)
# Relative L1 errors that thresholds are calibrated to.
TARGETS = (0.01, 0.05)
# Relative L2 distance from exact attention over the same tiles.
INEXACT_LIMIT = 5e-3
# At this length and above, only structured workloads run, with one calibration, and not every step is compared.
LONG = 16_384


@dataclass(frozen=True)
class Workload:
    """make(shape, steps, device, seed) yields q, k, v; lists are reset every `refresh` steps, if that is not None."""

    name: str
    make: Callable[..., Iterator[Step]]
    refresh: int | None = None


STRUCTURED = (
    *(Workload(name, functools.partial(structured, types=(name,))) for name in HEAD_TYPES),
    Workload("mixed", structured),
)
ALL = (
    *STRUCTURED,
    Workload("random", WORKLOADS["random"]),
    Workload("drift", WORKLOADS["drift"]),
    Workload("drift-refresh", WORKLOADS["drift"], refresh=4),
    Workload("simulation", WORKLOADS["simulation"]),
)
FULL = (
    Shape(1, GRIDS[4096], 16, 128),
    Shape(1, GRIDS[8192], 16, 128),
    Shape(1, GRIDS[16384], 24, 128),
)
SMALL = (Shape(1, (4, 8, 16), 4, 32),)
# Steps of a trajectory, and thresholds tried by a calibration.
FULL_STEPS, SMALL_STEPS = 12, 4
FULL_TRIED, SMALL_TRIED = 8, 4
SMALL_THRESHOLDS = (-2.0, -6.0, -12.0)


class Case(NamedTuple):
    """A workload at a size."""

    workload: Workload
    shape: Shape

    @property
    def name(self) -> str:
        shape = self.shape
        return f"{self.workload.name}-B{shape.batch}-S{shape.tokens}-H{shape.heads}-D{shape.dim}"


@dataclass(frozen=True)
class Label:
    """Names a row within its workload and size, and says how its thresholds were chosen."""

    name: str
    target: float | None = None
    calibration: str | None = None


DENSE = Label("dense")


class HostBackend:
    """The part of `timers.Backend` that wall times on the CPU need."""

    graphs = False

    def synchronize(self) -> None:
        pass

    def clock(self) -> float:
        return time.perf_counter()


@dataclass
class Study:
    """What one invocation measures, on which device, and what it has found so far."""

    device: str
    backend: Any
    timing: Timing
    l2_bytes: int
    steps: int = FULL_STEPS
    tried: int = FULL_TRIED
    thresholds: Sequence[float] = THRESHOLDS
    targets: Sequence[float] = TARGETS
    release: Callable[[], None] = lambda: None
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    def run(self, case: Case) -> None:
        """Appends one row per threshold and a dense one; CheckFailed, and no row, if a result is wrong."""
        workload, shape = case
        steps = list(workload.make(shape, self.steps, self.device, SEED))
        modules = self._modules(case, steps)
        every = 3 if shape.tokens >= LONG else 1
        named = {label.name: module for label, module in modules.items()}
        tracks = replay(steps, named, refresh=workload.refresh, every=every, deep=True)
        inexact = {name: track.last.inexact for name, track in tracks.items()}
        self._check(case.name, "lite", inexact)
        dense = self._dense(case, steps[-1])
        stats = self._steady(shape, steps[-1], tracks, dense)
        dense_us = {name: stats[name].median_us for name in dense}
        method = "graph" if self.backend.graphs else "eager-host"
        for label, module in modules.items():
            timed = stats["lite_dense" if label is DENSE else label.name]
            whole = self._trajectory(module, steps, workload.refresh)
            track = tracks[label.name]
            made = row(case, label, track, method, timed, dense_us, whole)
            self.rows.append(made | {"kernel": kernel_of(steps[-1][0])})

    def _modules(self, case: Case, steps: Sequence[Step]) -> dict[Label, torch.nn.Module]:
        """A module for every threshold, those of the sweep and those calibrated, and a dense one."""
        from liteattention_sm89 import LiteAttention

        workload, shape = case
        size = {"max_batch_size": shape.batch}
        found = {Label(f"thr{t:g}"): LiteAttention(threshold=t, **size) for t in self.thresholds}
        for target in self.targets if workload.refresh is None else ():
            label = Label(f"L1-{target:g}", target, "trajectory")
            threshold = threshold_for(steps, target, max_steps=self.tried)
            found[label] = LiteAttention(threshold=threshold, **size)
            if shape.tokens < LONG:
                label = Label(f"L1-{target:g}-per-step", target, "step")
                config = calibrated(steps, target, max_steps=self.tried)
                found[label] = LiteAttention(config=config, **size)
        return {**found, DENSE: LiteAttention(enable_skipping=False, **size)}

    def _check(self, setting: str, provider: str, errors: Mapping[str, float]) -> None:
        """Notes errors relative to exact attention over the same tiles, none of which may be large."""
        self.checks.append({"setting": setting, "provider": provider, "errors": dict(errors)})
        for name, error in errors.items():
            if not error <= INEXACT_LIMIT:
                raise CheckFailed(
                    f"{setting}: {provider} {name} has a relative L2 error of {error:.2e} over the tiles that it "
                    f"visited, the limit is {INEXACT_LIMIT:.0e}"
                )

    def _dense(self, case: Case, step: Step) -> dict[str, Callable[[Step], Callable[[], Any]]]:
        """The functions that bind dense implementations to a step, by name, of those that run here and are right."""
        shape = case.shape
        problem = lite.setting("dense", shape.tokens, shape.batch, shape.heads, shape.dim)
        providers = [lite_providers.LITE, lite_providers.TORCH_FLASH]
        if self.backend.graphs:
            providers.append(lite_providers.TORCH_CUDNN)
        found = {}
        for provider in providers:
            bind = functools.partial(bound, provider, problem)
            if provider is lite_providers.LITE:
                found["lite_dense"] = bind  # the row without skipping is compared
                continue
            try:
                out: Tensor = bind(step)().transpose(1, 2)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                self.skipped.append(
                    {"setting": case.name, "provider": provider.name, "reason": reason}
                )
                continue
            (quality,) = compare(*step, [(out, None)])
            self._check(case.name, provider.name, {"dense": quality.l2})
            found[provider.name] = bind
        return found

    def _steady(
        self, shape: Shape, step: Step, tracks: Mapping[str, Any], dense: Mapping[str, Any]
    ) -> dict[str, Stats]:
        """Times of the call of the last step, for every threshold and every dense implementation, which take turns."""
        read = 3 * 2 * math.prod(shape.full)
        count = timers.buffer_sets(read, self.l2_bytes, resident=False)
        sets = [step, *(tuple(x.clone() for x in step) for _ in range(count - 1))]
        calls = {name: [bind(inputs) for inputs in sets] for name, bind in dense.items()}
        for name, track in tracks.items():
            if track.mask is not None:
                calls[name] = [last_call(inputs, track) for inputs in sets]
        if self.backend.graphs:
            return timers.time_graphs(self.backend, calls, self.timing, keep=True)
        return timers.time_eager_host(self.backend, calls, self.timing)

    def _trajectory(self, module: Any, steps: Sequence[Step], refresh: int | None) -> float:
        """Microseconds of all steps from full lists on, including resets; on a GPU the median of three replays."""

        def call() -> None:
            for number, step in enumerate(steps):
                if number % (refresh or len(steps)) == 0:
                    module.reset_skip_state()
                module(*step)

        if not self.backend.graphs:
            start = self.backend.clock()
            call()
            return (self.backend.clock() - start) * 1e6
        # The module has run these steps before: its kernels are compiled and its buffers are there.
        replayed = self.backend.capture([call], False)
        times = self.backend.time_each([replayed] * 4)[1:]
        self.release()
        return timers.percentile(times, 50)

    def result(self, origin: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
        """The content of a result file."""
        return {
            "schema": results.SCHEMA,
            "op": OP,
            "title": "Skip-list attention: quality against speed",
            "provenance": origin,
            "place": place,
            "method": {
                "timing": dataclasses.asdict(self.timing),
                "l2_bytes": self.l2_bytes,
                "l2_factor": timers.L2_FACTOR,
                "steps": self.steps,
                "seed": SEED,
                "thresholds_tried": self.tried,
            },
            "notes": list(NOTES),
            "checks": self.checks,
            "skipped": self.skipped,
            "rows": self.rows,
        }


def bound(provider: Any, problem: Any, step: Step) -> Callable[[], Any]:
    """The call of a dense implementation with the inputs of a step."""
    return provider.bind(problem, lite.Inputs(*step, None))


def last_call(step: Step, track: Any) -> Callable[[], Any]:
    """The call of the last step, with a copy of the list that it read."""
    from liteattention_sm89 import lite_attention

    mask = track.mask.clone()
    options = {"threshold": track.thresholds[-1], "direction": track.direction}
    return lambda: lite_attention(*step, mask, **options)


def cases(sizes: Sequence[Shape], names: Sequence[str] | None = None) -> list[Case]:
    """The workloads of those names at every size; without names all, but only the structured ones at long sizes."""
    by_name = {w.name: w for w in ALL}
    found = []
    for shape in sizes:
        usual = STRUCTURED if shape.tokens >= LONG else ALL
        chosen = usual if names is None else [by_name[name] for name in names]
        found += [Case(workload, shape) for workload in chosen]
    return found


def row(
    case: Case,
    label: Label,
    track: Any,
    method: str,
    stats: Stats,
    dense_us: Mapping[str, float],
    trajectory_us: float,
) -> dict[str, Any]:
    """A row from what a module did (`liteattention_sm89.replay.Trajectory`) and how long that took.

    `dense_us` has the times of the dense implementations, ours under `lite_dense`.
    """
    best_us, ours = min(dense_us.values()), dense_us["lite_dense"]
    per_step = label.calibration == "step"
    found = {
        **_timed(case, label, track, method, stats),
        "workload": case.workload.name,
        "dtype": "bfloat16",
        "refresh": case.workload.refresh,
        "threshold": None if per_step else track.thresholds[-1],
        "thresholds": track.thresholds if per_step else [],
        "target": label.target,
        "calibration": label.calibration,
        **_errors(track),
        "best_dense": min(dense_us, key=dense_us.__getitem__),
        "dense_us": dict(dense_us),
        "speedup": best_us / stats.median_us,
        "speedup_lite_dense": ours / stats.median_us,
        "efficiency": track.last.density * best_us / stats.median_us,
        "efficiency_lite_dense": track.last.density * ours / stats.median_us,
        "trajectory_us": trajectory_us,
        "trajectory_speedup": best_us * len(track.density) / trajectory_us,
        "density_by_step": track.density,
        "l1_by_step": {str(step): quality.l1 for step, quality in track.quality.items()},
    }
    return rounded(found)


def _timed(case: Case, label: Label, track: Any, method: str, stats: Stats) -> dict[str, Any]:
    """The fields that `harness/results.py` defines."""
    shape = case.shape
    kind = "dense" if track.mask is None else "full"
    problem = lite.setting(kind, shape.tokens, shape.batch, shape.heads, shape.dim)
    size = {"B": shape.batch, "S": shape.tokens, "H": shape.heads, "D": shape.dim}
    moved = lite.moved(problem)
    return {
        "setting": f"{case.name}-{label.name}",
        "params": {"workload": case.workload.name, "label": label.name, **size},
        "l2": "cold",
        "provider": "lite",
        "role": "ours",
        "method": method,
        **dataclasses.asdict(stats),
        "bytes": moved,
        "gbps": moved / stats.median_us / 1e3,
        "floor_us": None,
        "ratio_ceiling": None,
        "ratio_floor": None,
    }


def _errors(track: Any) -> dict[str, float]:
    """How many tiles were visited, and the errors that this led to."""
    last = track.last
    return {
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
    }


def rounded(value: Any) -> Any:
    """Rounds floats to six digits, so that files stay small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [rounded(x) for x in value]
    if isinstance(value, dict):
        return {key: rounded(x) for key, x in value.items()}
    return value
