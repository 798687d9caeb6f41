"""Hardware counters of the decode kernel, read with Nsight Compute.

    python benchmarks/ops/decode/ncu_decode.py profile [--batches 64 128 256] [--sms 80] [--json PATH] [--raw DIR]
    python benchmarks/ops/decode/ncu_decode.py parse FILE.csv

`profile` runs itself under ncu once per batch; the profiled step is fenced with the profiler API, so every kernel in it
is the op's own. Clocks are left as they are; ncu flushes the caches before each pass, so the figures are L2-cold.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.harness import results
from benchmarks.harness.commands import fail
from benchmarks.harness.provenance import gpu_slug, provenance

SCHEMA = 1
TIMEOUT_S = 240
WARM_UP_CALLS = 3
TOP_STALLS = 5
FIELDS = {
    "gpu__time_duration.sum": "duration_ns",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_throughput_pct",
    "dram__bytes_read.sum": "dram_bytes_read",
    "dram__bytes_write.sum": "dram_bytes_written",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "achieved_occupancy_pct",
    "lts__t_sector_hit_rate.pct": "l2_hit_rate_pct",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_active_pct",
    "launch__registers_per_thread": "registers_per_thread",
    "launch__grid_size": "grid_size",
    "launch__block_size": "block_size",
}
STALL_REASONS = (
    "barrier branch_resolving dispatch_stall drain imc_miss lg_throttle long_scoreboard math_pipe_throttle membar "
    "mio_throttle misc no_instruction not_selected selected short_scoreboard sleeping tex_throttle wait"
).split()
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALL_PATTERN = re.compile(re.escape(STALL).replace(r"\{\}", r"(\w+?)"))
# A warp that issues or could have issued is not waiting for anything.
NOT_WAITING = {"selected", "not_selected"}


def command(batch: int, sms: int, state: str, layout: str) -> list[str]:
    """The ncu command line of one batch; sms = 0 profiles on the whole card."""
    metrics = [*FIELDS, *(STALL.format(reason) for reason in STALL_REASONS)]
    ncu = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    ncu += ["--profile-from-start", "off", "--metrics", ",".join(metrics)]
    work = [sys.executable, str(Path(__file__).resolve()), "workload"]
    return (
        ncu
        + work
        + ["--batch", str(batch), "--sms", str(sms), "--state", state, "--layout", layout]
    )


def parse(text: str) -> list[dict[str, Any]]:
    """One entry per profiled kernel of ncu's CSV output, which has a column per metric, or a line per metric.

    Without a table, which means that ncu could not profile, it raises ValueError.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        said = (
            " / ".join(line for line in text.splitlines() if line.startswith("=="))
            or text.strip()[-500:]
        )
        raise ValueError(f"ncu printed no table: {said or 'no output'}")
    rows = [row for row in csv.DictReader(lines[start:]) if row["ID"].strip()]
    if rows and "Metric Name" in rows[0]:
        rows = _pivot(rows)
    if not rows:
        raise ValueError("ncu profiled no kernel")
    return [_kernel(row) for row in rows]


def _pivot(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    kernels: dict[str, dict[str, str]] = {}
    for row in rows:
        kernel = kernels.setdefault(row["ID"], {"ID": row["ID"], "Kernel Name": row["Kernel Name"]})
        kernel[row["Metric Name"]] = row["Metric Value"]
    return list(kernels.values())


def _kernel(row: Mapping[str, str]) -> dict[str, Any]:
    values = {name: _number(text) for name, text in row.items() if name and "__" in name}
    stalls = {}
    for name, value in values.items():
        if (match := STALL_PATTERN.fullmatch(name)) and value is not None:
            stalls[match[1]] = value
    waiting = {k: v for k, v in stalls.items() if k not in NOT_WAITING}
    total = sum(stalls.values())
    top = sorted(waiting, key=lambda k: -waiting[k])[:TOP_STALLS]
    return {
        "kernel": row["Kernel Name"],
        **{field: values.get(metric) for metric, field in FIELDS.items()},
        "top_stalls": [
            {"reason": k, "share_pct": round(100 * waiting[k] / total, 1)}
            for k in top
            if waiting[k]
        ],
    }


def _number(text: str | None) -> float | None:
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return int(value) if value.is_integer() else value


def profile(
    batches: Sequence[int], sms: int, state: str, layout: str, raw: Path | None
) -> dict[str, Any]:
    """Counters of every batch; where ncu cannot profile in a green context, they are those of the whole card."""
    entries = []
    for batch in batches:
        entry, reasons = None, []
        for place in dict.fromkeys((sms, 0)):
            try:
                kernels = parse(
                    _run(command(batch, place, state, layout), raw, f"B{batch}-sms{place}")
                )
                entry = {"B": batch, "sms": place or None, "kernels": kernels}
                break
            except ValueError as error:
                reasons.append(f"{place or 'all'} multiprocessors: {error}")
        if entry is None:
            raise ValueError(f"B={batch}: {'; '.join(reasons)}")
        entries.append({**entry, "failed": reasons})
    return {
        "schema": SCHEMA,
        "provenance": provenance(),
        "state": state,
        "layout": layout,
        "entries": entries,
    }


def _run(arguments: list[str], raw: Path | None, name: str) -> str:
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(str(error)) from None
    if raw is not None:
        raw.mkdir(parents=True, exist_ok=True)
        (raw / f"{name}.csv").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode != 0:
        raise ValueError(
            f"ncu exited with {done.returncode}: {(done.stdout + done.stderr).strip()[-500:]}"
        )
    return done.stdout


def workload(batch: int, sms: int, state: str, layout: str) -> None:
    """Runs a few steps, and then one step inside the range that ncu profiles."""
    import torch

    from benchmarks.harness import gpu
    from benchmarks.ops.decode import problem as decode
    from benchmarks.ops.decode.lightning_decode_80sm import narrow_card
    from benchmarks.ops.decode.providers import CULA

    problem = decode.setting(batch, state=state, layout=layout)
    with torch.inference_mode(), narrow_card(sms) if sms else gpu.whole_card():
        call = CULA.bind(problem, decode.make_inputs(problem, "cuda", 0))
        for _ in range(WARM_UP_CALLS):
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Reads hardware counters of the decode kernel with ncu."
    )
    actions = parser.add_subparsers(dest="action", required=True)
    one, many = actions.add_parser("workload"), actions.add_parser("profile")
    one.add_argument("--batch", type=int, required=True)
    many.add_argument("--batches", type=int, nargs="+", default=[64, 128, 256])
    many.add_argument("--json", type=Path, help="default: benchmarks/results/<gpu>/ncu_decode.json")
    many.add_argument("--raw", type=Path, help="keep ncu's own output in this folder")
    for action in (one, many):
        action.add_argument(
            "--sms", type=int, default=80, help="multiprocessors of the green context; 0 is all"
        )
        action.add_argument("--state", choices=("fp32", "bf16"), default="fp32")
        action.add_argument("--layout", choices=("kv", "vk"), default="kv")
    actions.add_parser("parse").add_argument("file", type=Path)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    if args.action == "workload":
        workload(args.batch, args.sms, args.state, args.layout)
        return 0
    try:
        if args.action == "parse":
            print(json.dumps(parse(args.file.read_text(encoding="utf-8")), indent=1))
            return 0
        found = profile(args.batches, args.sms, args.state, args.layout, args.raw)
    except (OSError, ValueError) as error:
        return fail(error, code=1)
    path = args.json or results.result_path("ncu_decode", gpu_slug(found["provenance"]["gpu"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
