"""Whole denoising steps of a video transformer: dense attention by cuDNN and by our kernels, and skip lists.

    python benchmarks/ops/lite/end_to_end.py [--json [PATH] [--join]] [--models 1.3B 14B] [--resolutions 480p 720p]
        [--providers torch lite_dense lite] [--targets 0.01 0.05] [--kernels auto sm89 sm90] [--blocks 2] [--steps 20]
        [--device cpu] [--small]

Blocks of Wan 2.1 from diffusers, with random weights and replayed attention inputs; `NOTES` of `end_to_end_study.py`
say what that means. A file is written after every model and resolution. `end_to_end_plot.py` draws the result.

On the CPU, or with --small, the sizes are tiny, and such a run is only a trial. Needs diffusers 0.35 or newer.
Exit codes: 0 measured, 1 a result was wrong, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from benchmarks.harness import report, results
from benchmarks.harness.commands import add_json, fail, json_path
from benchmarks.harness.provenance import gpu_slug, provenance, read_smi, version
from benchmarks.harness.registry import CheckFailed
from benchmarks.ops.lite import end_to_end_rows as rows
from benchmarks.ops.lite import end_to_end_study as study
from benchmarks.ops.lite.internals import asked
from benchmarks.ops.lite.quality import KERNELS, kernel_refusal

# Seconds after which no other setting is started.
LIMIT = 150.0
PROVIDERS = ("torch", "lite_dense", "lite")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Whole denoising steps of a video transformer, with dense attention and with skip lists."
    )
    sizes = [model.name.rpartition("-")[2] for model in study.MODELS]
    parser.add_argument("--models", nargs="+", choices=sizes, metavar="SIZE", default=sizes)
    parser.add_argument(
        "--resolutions", nargs="+", choices=study.GRIDS, default=[*study.GRIDS], metavar="NAME"
    )
    parser.add_argument(
        "--providers", nargs="+", choices=PROVIDERS, default=PROVIDERS, metavar="NAME",
        help="of torch (cuDNN), lite_dense and lite",
    )  # fmt: skip
    parser.add_argument(
        "--targets", nargs="+", type=float, default=study.TARGETS, metavar="ERROR",
        help="relative L1 errors to find thresholds for",
    )  # fmt: skip
    parser.add_argument(
        "--kernels", nargs="+", choices=(study.AUTO, *KERNELS), default=[study.AUTO],
        help="whose kernels run; auto: as the package chooses",
    )  # fmt: skip
    parser.add_argument("--blocks", type=int, default=study.BLOCKS, help="of the stack")
    parser.add_argument("--steps", type=int, help="denoising steps (20)")
    parser.add_argument("--tried", type=int, help="thresholds that a calibration tries (8)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument("--small", action="store_true", help="tiny sizes; always so on the CPU")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, metavar="SECONDS",
        help="after these nothing new is started (%(default)s)",
    )  # fmt: skip
    add_json(parser, rows.OP)
    parser.add_argument(
        "--join",
        action="store_true",
        help="keep other rows of the file, measured at the same commit",
    )
    args = parser.parse_args(argv)
    if args.join and args.json is None:
        parser.error("--join: expected --json too")
    if args.steps is not None and args.steps < 1:
        parser.error("--steps: expected at least one")
    if args.tried is not None and args.tried < 1:
        parser.error("--tried: expected at least one")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    started, args = time.monotonic(), parse(argv)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        return fail("device: torch sees no CUDA device")
    if find_spec("diffusers") is None:
        return fail("needs diffusers 0.35 or newer")
    small = args.small or device == "cpu"
    models = study.SMALL_MODELS if small else study.MODELS
    if not small:
        models = tuple(m for m in models if m.name.rpartition("-")[2] in args.models)
    grids = study.SMALL_GRIDS if small else {name: study.GRIDS[name] for name in args.resolutions}
    most = min(model.layers for model in models)
    if not 1 <= args.blocks <= most:
        return fail(f"blocks: expected 1 to {most}, got {args.blocks}")
    if bad := [t for t in args.targets if not 0 < t < 1]:
        return fail(f"targets: expected relative errors between 0 and 1, got {bad}")
    for kernel in args.kernels:
        if kernel != study.AUTO and (refusal := kernel_refusal(kernel, device)):
            return fail(refusal)
    found = study.Study(
        device, args.blocks,
        steps=args.steps or (study.SMALL_STEPS if small else study.STEPS),
        tried=args.tried or (study.SMALL_TRIED if small else study.TRIED),
        text_tokens=study.SMALL_TEXT if small else study.TEXT_TOKENS,
        targets=args.targets, providers=args.providers, kernels=args.kernels,
        say=lambda text: print(f"{time.monotonic() - started:6.1f} s  {text}", flush=True),
    )  # fmt: skip
    only = args.kernels[0] if len(args.kernels) == 1 and study.AUTO not in args.kernels else None
    origin = begin(device)
    path = json_path(args.json, rows.OP, gpu_slug(origin["gpu"]))
    earlier = rows.load(path) if args.join and path.exists() else None
    content: dict[str, Any] = {
        "title": study.TITLE, "provenance": origin, "method": found.method(),
        "notes": list(study.NOTES), "skipped": found.skipped, "rows": found.rows,
    }  # fmt: skip
    try:
        if earlier:
            results.refuse_another(earlier, content, rows.OF_BOTH)
        for model in models:
            for resolution, grid in grids.items():
                if time.monotonic() - started > args.limit:
                    reason = f"not started after {args.limit:g} s"
                    where = {"model": model.name, "resolution": resolution}
                    found.skipped.append({**where, "provider": "all", "reason": reason})
                else:
                    # Where one kernel serves all, nothing is chosen anew between the steps.
                    with torch.inference_mode(), asked(only):
                        found.run(model, resolution, grid)
                    gc.collect()
                    torch.cuda.empty_cache()
                origin["clocks_after"] = read_smi()
                whole = rows.joined(earlier, content) if earlier else content
                rows.validate(whole)
                if args.json is not None:
                    results.write(whole, path)
    except CheckFailed as error:
        return fail(error, code=1)
    except ValueError as error:
        return fail(error)
    print(f"{time.monotonic() - started:6.1f} s\n\n{report.as_text(rows.table(content))}")
    for line in rows.left_out(content):
        print(f"skipped {line}")
    print(report.machine(origin))
    if args.json is not None:
        print(f"wrote {path}")
    return 0


def begin(device: str) -> dict[str, Any]:
    """The provenance of a run that begins now, with the version of diffusers."""
    origin = {**provenance(), "clocks_before": read_smi()}
    origin["versions"] = {**origin["versions"], "diffusers": version("diffusers", "diffusers")}
    if device == "cpu":
        origin |= {"gpu": "cpu", "sms": None}
    return origin


if __name__ == "__main__":
    sys.exit(main())
