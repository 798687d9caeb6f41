"""Quality against speed of skip-list attention, on workloads that change from step to step.

    python benchmarks/ops/lite/quality.py [--json [PATH]] [--workloads NAME ...] [--sizes S ...] [--device cpu] [--small]

Every threshold runs through the steps of a workload with lists of its own, one after the other as a model would call
it. Each step is compared with dense attention in fp32. Then the call of the last step is timed, in turns with dense
attention by the same kernel and by torch's backends, and after that all steps together. `quality_plot.py` draws
the result.

On the CPU, or with --small, the size is tiny; times on the CPU are those of the reference implementation: a trial only.
Exit codes: 0 measured, 1 a result was wrong, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import Tensor

from benchmarks.harness import report, results, timers
from benchmarks.harness.provenance import gpu_slug, provenance, read_smi
from benchmarks.harness.registry import CheckFailed
from benchmarks.harness.timers import Stats, Timing
from benchmarks.ops.lite import problem as lite
from benchmarks.ops.lite import providers as lite_providers
from benchmarks.ops.lite import quality_rows
from benchmarks.ops.lite.quality_rows import DENSE, NOTES, OP, Label, case_name
from benchmarks.ops.lite.workloads import GRIDS, HEAD_TYPES, WORKLOADS, Shape, Step, structured

DEFAULT_PATH = "default"
THRESHOLDS = (-2.0, -4.0, -6.0, -8.0, -10.0, -12.0, -14.0, -16.0)
# Relative L1 errors that thresholds are calibrated to.
TARGETS = (0.01, 0.05)
SEED = 20_231
# Relative L2 distance from exact attention over the same tiles.
INEXACT_LIMIT = 5e-3
# From this length on only the structured workloads run, with one kind of calibration, and not every step is compared.
LONG = 16_384
# Seconds after which no other workload is started.
LIMIT = 125.0


@dataclass(frozen=True)
class Workload:
    """make(shape, steps, device, seed) yields q, k, v; `refresh`: lists are reset every so many steps."""

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


class HostBackend:
    """`timers.Backend`, as far as wall times on the CPU need it."""

    graphs = False

    def synchronize(self) -> None:
        pass

    def clock(self) -> float:
        return time.perf_counter()


@dataclass
class Study:
    """What one invocation measures and on what."""

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

    def run(self, workload: Workload, shape: Shape) -> None:
        """Appends one row per threshold and a dense one; CheckFailed, and no row, if a result is wrong."""
        from liteattention_sm89.replay import replay

        where = case_name(workload.name, shape)
        steps = list(workload.make(shape, self.steps, self.device, SEED))
        modules = self._modules(workload, shape, steps)
        every = 3 if shape.tokens >= LONG else 1
        named = {label.name: module for label, module in modules.items()}
        tracks = replay(steps, named, refresh=workload.refresh, every=every, deep=True)
        self._check(where, "lite", {name: track.last.inexact for name, track in tracks.items()})
        dense = self._dense(where, shape, steps[-1])
        stats = self._steady(shape, steps[-1], tracks, dense)
        dense_us = {name: stats[name].median_us for name in dense}
        method = "graph" if self.backend.graphs else "eager-host"
        for label, module in modules.items():
            self.rows.append(
                quality_rows.row(
                    workload.name,
                    workload.refresh,
                    shape,
                    label,
                    tracks[label.name],
                    method,
                    stats["lite_dense" if label is DENSE else label.name],
                    dense_us,
                    self._trajectory(module, steps, workload.refresh),
                )
            )

    def _modules(
        self, workload: Workload, shape: Shape, steps: Sequence[Step]
    ) -> dict[Label, torch.nn.Module]:
        """A module for every threshold, those of the sweep and those calibrated, and a dense one."""
        from liteattention_sm89 import LiteAttention
        from liteattention_sm89.replay import calibrated, threshold_for

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

    def _check(self, where: str, provider: str, errors: Mapping[str, float]) -> None:
        self.checks.append({"setting": where, "provider": provider, "errors": dict(errors)})
        for name, error in errors.items():
            if not error <= INEXACT_LIMIT:
                raise CheckFailed(
                    f"{where}: {provider} {name} has a relative L2 error of {error:.2e} over the tiles that it "
                    f"visited, the limit is {INEXACT_LIMIT:.0e}"
                )

    def _dense(
        self, where: str, shape: Shape, step: Step
    ) -> dict[str, Callable[[Step], Callable[[], Any]]]:
        """The dense implementations that run here and are right: name -> what binds them to a step."""
        from liteattention_sm89.quality import compare

        problem = lite.setting("dense", shape.tokens, shape.batch, shape.heads, shape.dim)
        providers = [lite_providers.LITE, lite_providers.TORCH_FLASH]
        if self.backend.graphs:
            providers.append(lite_providers.TORCH_CUDNN)
        found = {}
        for provider in providers:
            bind = functools.partial(_bound, provider, problem)
            if provider is lite_providers.LITE:
                found["lite_dense"] = bind  # compared as the row without skipping
                continue
            try:
                out: Tensor = bind(step)().transpose(1, 2)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                self.skipped.append({"setting": where, "provider": provider.name, "reason": reason})
                continue
            (quality,) = compare(*step, [(out, None)])
            self._check(where, provider.name, {"dense": quality.l2})
            found[provider.name] = bind
        return found

    def _steady(
        self, shape: Shape, step: Step, tracks: Mapping[str, Any], dense: Mapping[str, Any]
    ) -> dict[str, Stats]:
        """Times of the last step's call, of every threshold and every dense implementation, in turns."""
        read = 3 * 2 * math.prod(shape.full)
        count = timers.buffer_sets(read, self.l2_bytes, resident=False)
        sets = [step, *(tuple(x.clone() for x in step) for _ in range(count - 1))]
        calls = {name: [bind(inputs) for inputs in sets] for name, bind in dense.items()}
        for name, track in tracks.items():
            if track.mask is not None:
                calls[name] = [_last_call(inputs, track) for inputs in sets]
        if self.backend.graphs:
            return timers.time_graphs(self.backend, calls, self.timing, keep=True)
        return timers.time_eager_host(self.backend, calls, self.timing)

    def _trajectory(self, module: Any, steps: Sequence[Step], refresh: int | None) -> float:
        """Microseconds of all steps from full lists on, resets included; on a GPU the median of three replays."""

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


def _bound(provider: Any, problem: Any, step: Step) -> Callable[[], Any]:
    return provider.bind(problem, lite.Inputs(*step, None))


def _last_call(step: Step, track: Any) -> Callable[[], Any]:
    """The call as it ran, with a copy of the list that it read."""
    from liteattention_sm89 import lite_attention

    mask = track.mask.clone()
    options = {"threshold": track.thresholds[-1], "direction": track.direction}
    return lambda: lite_attention(*step, mask, **options)


def cases(
    sizes: Sequence[Shape], names: Sequence[str] | None = None
) -> list[tuple[Workload, Shape]]:
    """What runs on which size, the small sizes first; on long ones the structured workloads, unless named."""
    by_name = {w.name: w for w in ALL}
    found = []
    for shape in sizes:
        usual = STRUCTURED if shape.tokens >= LONG else ALL
        chosen = usual if names is None else [by_name[name] for name in names]
        found += [(workload, shape) for workload in chosen]
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Quality against speed of skip-list attention, on workloads that change from step to step."
    )
    names = [w.name for w in ALL]
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument("--small", action="store_true", help="a tiny size; always so on the CPU")
    parser.add_argument(
        "--sizes", nargs="+", type=int, metavar="S", help="of 4096, 8192 and 16384 tokens"
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--thresholds", nargs="+", type=float, metavar="T")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, metavar="SECONDS",
        help="after these nothing new is started (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--json", nargs="?", const=DEFAULT_PATH, metavar="PATH",
        help=f"write the result, without PATH to benchmarks/results/<gpu>/{OP}.json",
    )  # fmt: skip
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    started, args = time.monotonic(), parse(argv)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        return _fail("device: torch sees no CUDA device")
    small = args.small or device == "cpu"
    sizes = SMALL if small else FULL
    if args.sizes and not (sizes := tuple(s for s in sizes if s.tokens in args.sizes)):
        return _fail(f"sizes: there is none of {args.sizes}")
    thresholds = args.thresholds or (SMALL_THRESHOLDS if small else THRESHOLDS)
    if bad := [t for t in thresholds if not -math.inf < t <= 0]:
        return _fail(f"thresholds: expected finite log2 units, at most 0, got {bad}")
    origin = {**provenance(), "clocks_before": read_smi()}
    study = _study(device, origin, small, thresholds)
    try:
        # Inference code records no autograd graph.
        with torch.inference_mode():
            for workload, shape in cases(sizes, args.workloads):
                name, elapsed = case_name(workload.name, shape), time.monotonic() - started
                if elapsed > args.limit:
                    reason = f"not started after {args.limit:g} s"
                    study.skipped.append({"setting": name, "provider": "lite", "reason": reason})
                    continue
                print(f"{elapsed:6.1f} s  {name}", flush=True)
                study.run(workload, shape)
                study.release()
    except CheckFailed as error:
        return _fail(error, code=1)
    print(f"{time.monotonic() - started:6.1f} s")
    origin["clocks_after"] = read_smi()
    if device == "cpu":
        origin["gpu"], origin["sms"] = "cpu", None
    place = {
        "sms": origin["sms"],
        "sms_seen": None,
        "strategy": "whole card",
        "graphs": study.backend.graphs,
    }
    _publish(study.result(origin, place), args.json)
    return 0


def _study(
    device: str, origin: Mapping[str, Any], small: bool, thresholds: Sequence[float]
) -> Study:
    extent = (SMALL_STEPS, SMALL_TRIED) if small else (FULL_STEPS, FULL_TRIED)
    if device == "cpu":
        timing = Timing(rounds=3, block=1, eager_calls=1, warmup=1)
        return Study(device, HostBackend(), timing, 0, *extent, thresholds)
    from benchmarks.harness.gpu import CudaBackend

    timing = Timing(rounds=5, block=3, warmup=2)
    release = torch.cuda.empty_cache
    return Study(
        device, CudaBackend(), timing, origin["l2_bytes"], *extent, thresholds, release=release
    )


def _publish(result: dict[str, Any], path: str | None) -> None:
    quality_rows.validate(result)
    print(f"\n{report.as_text(quality_rows.table(result))}")
    for skipped in result["skipped"]:
        print(f"skipped {skipped['setting']}, {skipped['provider']}: {skipped['reason']}")
    print(report.origin(result))
    if path is not None:
        card = gpu_slug(result["provenance"]["gpu"])
        target = results.result_path(OP, card) if path == DEFAULT_PATH else Path(path)
        results.save(result, target)
        print(f"wrote {target}")


def _fail(reason: object, code: int = 2) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
