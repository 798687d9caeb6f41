"""A simulated denoising trajectory of skip-list attention, step by step, at the thresholds that were asked for.

    python benchmarks/ops/lite/trajectory.py [--json [PATH]] [--device cpu] [--small] [--kernel sm89 | sm90]

Keys lie near their own queries, and every step adds a little noise (`simulation` of `workloads.py`). For every
threshold a module with lists of its own runs the steps one after the other. Each step is compared with dense attention,
and its call is timed with the list that it read; then all steps together.

On the CPU, or with --small, the size is tiny, and such a run is only a trial.
Exit codes: 0 measured, 1 a result was wrong, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from benchmarks.harness.commands import add_json, fail
from benchmarks.harness.registry import CheckFailed
from benchmarks.ops.lite import quality, trajectory_rows
from benchmarks.ops.lite.internals import asked
from benchmarks.ops.lite.quality_study import FULL, SMALL
from benchmarks.ops.lite.trajectory_study import (
    SMALL_STEPS,
    STEPS,
    THRESHOLDS,
    TrajectoryStudy,
    case,
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A simulated denoising trajectory of skip-list attention, step by step."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument("--small", action="store_true", help="a tiny size; always so on the CPU")
    quality.add_kernel(parser)
    add_json(parser, trajectory_rows.OP)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    started, args = time.monotonic(), parse(argv)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        return fail("device: torch sees no CUDA device")
    if refusal := quality.kernel_refusal(args.kernel, device):
        return fail(refusal)
    small = args.small or device == "cpu"
    origin = quality.begin()
    steps = SMALL_STEPS if small else STEPS
    study = quality.study_on(device, origin, steps, 1, THRESHOLDS, TrajectoryStudy, targets=())
    try:
        # Inference code records no autograd graph.
        with torch.inference_mode(), asked(args.kernel):
            study.run(case((SMALL if small else FULL)[0]))
    except CheckFailed as error:
        return fail(error, code=1)
    quality.finish(study, origin, started, args.json, trajectory_rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
