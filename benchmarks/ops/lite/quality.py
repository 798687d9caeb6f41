"""Quality against speed of skip-list attention, on workloads that change from step to step.

    python benchmarks/ops/lite/quality.py [--json [PATH]] [--workloads NAME ...] [--sizes S ...] [--device cpu]
        [--small] [--kernel sm89 | sm90]

For every threshold a module with lists of its own runs the steps of a workload one after the other, as a model would
call it. Each step is compared with dense attention in fp32. Then the call of the last step is timed, in turns with
dense attention by the same kernel and by torch's backends, and after that all steps together. `quality_plot.py` draws
the result. --kernel asks for the kernels of an architecture, where the package would choose others.

On the CPU, or with --small, the size is tiny. Times on the CPU are those of the reference implementation, so such a run
is only a trial.
Exit codes: 0 measured, 1 a result was wrong, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from benchmarks.harness import report, results
from benchmarks.harness.commands import add_json, fail, json_path
from benchmarks.harness.provenance import gpu_slug, provenance, read_smi
from benchmarks.harness.registry import CheckFailed
from benchmarks.harness.timers import Timing
from benchmarks.ops.lite import quality_rows
from benchmarks.ops.lite.internals import asked, kernel_of
from benchmarks.ops.lite.quality_rows import OP
from benchmarks.ops.lite.quality_study import (
    ALL,
    FULL,
    FULL_STEPS,
    FULL_TRIED,
    SMALL,
    SMALL_STEPS,
    SMALL_THRESHOLDS,
    SMALL_TRIED,
    THRESHOLDS,
    Case,
    HostBackend,
    Study,
    cases,
)

# Seconds after which no other workload is started.
LIMIT = 125.0
KERNELS = ("sm89", "sm90")


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
    add_kernel(parser)
    parser.add_argument(
        "--limit", type=float, default=LIMIT, metavar="SECONDS",
        help="after these nothing new is started (%(default)s)",
    )  # fmt: skip
    add_json(parser, OP)
    return parser.parse_args(argv)


def add_kernel(parser: argparse.ArgumentParser) -> None:
    """Adds --kernel: the architecture whose kernels serve, where there is a choice."""
    parser.add_argument(
        "--kernel", choices=KERNELS, help="whose kernels run; default: as the package chooses"
    )


def kernel_refusal(kernel: str | None, device: str) -> str | None:
    """Why the kernel that --kernel names cannot serve on a device, or None."""
    try:
        with asked(kernel):
            kernel_of(torch.empty(1, 64, 1, 128, dtype=torch.bfloat16, device=device))
    except RuntimeError as error:
        return f"kernel: {error}"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    started, args = time.monotonic(), parse(argv)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        return fail("device: torch sees no CUDA device")
    small = args.small or device == "cpu"
    sizes = SMALL if small else FULL
    if args.sizes and not (sizes := tuple(s for s in sizes if s.tokens in args.sizes)):
        return fail(f"sizes: there is none of {args.sizes}")
    thresholds = args.thresholds or (SMALL_THRESHOLDS if small else THRESHOLDS)
    if bad := [t for t in thresholds if not -math.inf < t <= 0]:
        return fail(f"thresholds: expected finite log2 units, at most 0, got {bad}")
    if refusal := kernel_refusal(args.kernel, device):
        return fail(refusal)
    extent = (SMALL_STEPS, SMALL_TRIED) if small else (FULL_STEPS, FULL_TRIED)
    origin = begin()
    study = study_on(device, origin, *extent, thresholds)
    try:
        with asked(args.kernel):
            _run(study, cases(sizes, args.workloads), started, args.limit)
    except CheckFailed as error:
        return fail(error, code=1)
    finish(study, origin, started, args.json, quality_rows)
    return 0


def begin() -> dict[str, Any]:
    """The provenance of a study that begins now."""
    return {**provenance(), "clocks_before": read_smi()}


def finish(
    study: Study, origin: dict[str, Any], started: float, path: str | None, rows: ModuleType
) -> None:
    """Prints what a study has found, and writes it if there is a path; `rows` has OP, `validate` and `table`."""
    print(f"{time.monotonic() - started:6.1f} s")
    origin["clocks_after"] = read_smi()
    if study.device == "cpu":
        origin["gpu"], origin["sms"] = "cpu", None
    place = {
        "sms": origin["sms"],
        "sms_seen": None,
        "strategy": "whole card",
        "graphs": study.backend.graphs,
    }
    result = study.result(origin, place)
    rows.validate(result)
    print(f"\n{report.as_text(rows.table(result))}")
    for skipped in result["skipped"]:
        print(f"skipped {skipped['setting']}, {skipped['provider']}: {skipped['reason']}")
    print(report.origin(result))
    if path is not None:
        target = json_path(path, rows.OP, gpu_slug(result["provenance"]["gpu"]))
        results.save(result, target)
        print(f"wrote {target}")


def _run(study: Study, chosen: Sequence[Case], started: float, limit: float) -> None:
    """Runs the cases one after the other; after `limit` seconds it notes the others as skipped."""
    # Inference code records no autograd graph.
    with torch.inference_mode():
        for case in chosen:
            elapsed = time.monotonic() - started
            if elapsed > limit:
                reason = f"not started after {limit:g} s"
                study.skipped.append({"setting": case.name, "provider": "lite", "reason": reason})
                continue
            print(f"{elapsed:6.1f} s  {case.name}", flush=True)
            study.run(case)
            study.release()


def study_on(
    device: str,
    origin: Mapping[str, Any],
    steps: int,
    tried: int,
    thresholds: Sequence[float],
    kind: type[Study] = Study,
    **more: Any,
) -> Study:
    """A study on a device; more: fields of it."""
    if device == "cpu":
        timing = Timing(rounds=3, block=1, eager_calls=1, warmup=1)
        return kind(device, HostBackend(), timing, 0, steps, tried, thresholds, **more)
    from benchmarks.harness.gpu import CudaBackend

    timing = Timing(rounds=5, block=3, warmup=2)
    size = (origin["l2_bytes"], steps, tried, thresholds)
    return kind(device, CudaBackend(), timing, *size, release=torch.cuda.empty_cache, **more)


if __name__ == "__main__":
    sys.exit(main())
