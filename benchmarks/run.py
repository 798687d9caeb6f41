"""Measures an op beside its peers and the physical floor.

    python benchmarks/run.py OP [--against fla] [--json [PATH] [--join]] [--settings PATTERN ...] [--quick]
    python benchmarks/run.py OP --methods sustained [--json [PATH]]

Exit codes: 0 measured, 1 a result was wrong, 2 wrong arguments or no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import ops
from benchmarks.harness import nvml, progress, registry, report, results
from benchmarks.harness.commands import add_json, fail, json_path
from benchmarks.harness.measure import DEFAULT_METHODS, Run
from benchmarks.harness.provenance import gpu_slug, provenance, read_smi
from benchmarks.harness.registry import CheckFailed, Op, Provider, Setting
from benchmarks.harness.sustained import Meter
from benchmarks.harness.timers import Timing


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures an op beside its peers and the physical floor."
    )
    parser.add_argument("op", choices=registry.names())
    parser.add_argument(
        "--against",
        action="append",
        metavar="PEER",
        help="only this peer (repeatable); 'none' for none",
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        metavar="PATTERN",
        help="shell patterns of setting names, e.g. 'B64-*'",
    )
    parser.add_argument(
        "--methods", nargs="+", choices=results.METHODS, default=list(DEFAULT_METHODS)
    )
    parser.add_argument("--quick", action="store_true", help="few settings, few samples")
    parser.add_argument("--list", action="store_true", help="print the setting names and stop")
    add_json(parser)
    parser.add_argument(
        "--join",
        action="store_true",
        help="keep what the file has of other settings, measured at the same commit",
    )
    args = parser.parse_args(argv)
    if args.join and args.json is None:
        parser.error("--join: expected --json too")
    if results.SUSTAINED in args.methods and (len(args.methods) > 1 or args.quick):
        parser.error(
            "--methods sustained: expected no other method, which it would heat, and no --quick"
        )
    return args


def chosen(op: Op, args: argparse.Namespace) -> list[Setting]:
    """The settings to measure: all that the patterns name, and under a sustained load HEADLINES by default."""
    patterns = args.settings
    if results.SUSTAINED in args.methods and not patterns:
        patterns = ops.HEADLINES.get(op.name)
        if not patterns:
            raise ValueError(f"settings: HEADLINES has none of {op.name}; name them by --settings")
    return registry.select(op.settings(args.quick), patterns)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        op = registry.get(args.op)
        settings = chosen(op, args)
        providers = registry.choose(op, args.against)
    except ValueError as error:
        return fail(error)
    if args.list:
        print("\n".join(s.name for s in settings))
        return 0
    import torch

    if not torch.cuda.is_available():
        return fail("benchmarks need a CUDA device, and torch sees none")
    if reasons := _absent(settings, providers, args.against or ()):
        return fail("; ".join(reasons))
    return _measure(op, settings, providers, args)


def _absent(
    settings: list[Setting], providers: Iterable[Provider], wanted: Iterable[str]
) -> list[str]:
    """The peers that were asked for by name and can serve none of the settings, with the reason."""
    absent = []
    for provider in providers:
        reasons = [provider.supports(s) for s in settings]
        if provider.name in wanted and all(reasons):
            absent.append(f"{provider.name}: {reasons[0]}")
    return absent


def _measure(
    op: Op, settings: list[Setting], providers: tuple[Provider, ...], args: argparse.Namespace
) -> int:
    import torch

    from benchmarks.harness import gpu

    # Inference code records no autograd graph, and peers must not record one either.
    with torch.inference_mode():
        origin = {**provenance(), "clocks_before": read_smi()}
        card = gpu_slug(origin["gpu"])
        path = json_path(args.json, results.file_name(op.name, args.methods), card)
        earlier = results.load(path) if args.join and path.exists() else None
        try:
            with gpu.place_of(op) as place:
                if results.SUSTAINED in args.methods and not place.graphs:
                    raise gpu.PlaceError("a sustained load needs graphs, which cannot be used here")
                run = Run(
                    op=op,
                    providers=providers,
                    timing=Timing.quick() if args.quick else Timing(),
                    backend=gpu.CudaBackend(place),
                    device="cuda",
                    l2_bytes=origin["l2_bytes"],
                    floor_tbs=results.ATTAINABLE_TBS.get(card),
                    methods=args.methods,
                    meter=_meter() if results.SUSTAINED in args.methods else None,
                    release=torch.cuda.empty_cache,
                )
                if earlier:
                    results.refuse_another(earlier, run.result(origin, place.describe()))
                run.measure(progress.progress(settings))
                origin["clocks_after"] = read_smi()
        except CheckFailed as error:
            return fail(error, code=1)
        except (gpu.PlaceError, results.Mismatch) as error:
            return fail(error)
    result = run.result(origin, place.describe())
    _print(result)
    if earlier:
        order = [setting.name for setting in op.settings(args.quick)]
        result = results.joined(earlier, result, order)
    if args.json is not None:
        results.save(result, path)
        print(f"wrote {path}")
    return 0


def _meter() -> Meter | None:
    try:
        return nvml.current()
    except nvml.Unreachable as error:
        print(f"without clock, power and energy: {error}", file=sys.stderr)
        return None


def _print(result: dict[str, Any]) -> None:
    for method in dict.fromkeys(row["method"] for row in result["rows"]):
        shown = (
            report.loads(result) if method == results.SUSTAINED else report.table(result, method)
        )
        print(f"\n{result['title']}: {method}\n{report.as_text(shown)}")
    for reason in dict.fromkeys(f"{s['provider']}: {s['reason']}" for s in result["skipped"]):
        print(f"skipped {reason}")
    print(report.origin(result))


if __name__ == "__main__":
    sys.exit(main())
