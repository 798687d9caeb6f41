"""Measures how long the first calls of every public kernel function take, and later ones on the host.

    python benchmarks/first_call.py [--json [PATH] [--join]] [--functions PATTERN ...] [--cold 1] [--warm 3]

A cold process begins with empty folders for kernels, and each of the warm ones after it finds what that one left there.
Exit codes: 0 measured, 1 a function failed, 2 wrong arguments or no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import first_calls, report, results
from benchmarks.harness.commands import add_json, fail, json_path
from benchmarks.harness.fresh_process import SKIPPED
from benchmarks.harness.provenance import ROOT, gpu_slug, provenance, read_smi

# Variables that name the folders where packages, Triton, CuTe DSL and the driver keep what they compiled.
CACHES = ("CULA_CACHE_DIR", "TRITON_CACHE_DIR", "CUTE_DSL_CACHE_DIR", "CUDA_CACHE_PATH")
NOTES = (
    "Every process is new. The imports are timed first, torch before the package. Python's byte code is there; the "
    "first process that imports a package may read files from disk that later ones find in memory.",
    "A call begins when the device and the inputs are ready, and ends when the device has finished. The first one "
    "holds everything that is compiled, tuned or loaded then.",
    f"An empty cache: the folders of {', '.join(CACHES)} are empty. A filled one: an earlier process filled them.",
    "fla tunes its kernels by itself, as a program that calls it does.",
    "Host, a later call: how long calls keep the host while the device has room in its queue, the median of 40 times 5 "
    "calls in a row.",
    "The backward pass follows a forward pass in the same process, whose time is not in it.",
)
TITLE = "First calls in new processes"
LIMIT_S = 600


@dataclass(frozen=True)
class Function:
    """A public function, and the smallest program that calls it: a setting and a provider of an op."""

    function: str
    module: str
    op: str
    setting: str
    provider: str


class Failed(RuntimeError):
    """A process ended with an error, or took too long."""


def functions(kda_package: str | None) -> list[Function]:
    """Every public kernel function; `kda_package` is the one that serves this GPU."""
    decode, prefill = "B64-T1-fp32-kv-cold", "B1-T4096-H64"
    delta, drafts = "gdn-B64-T1-fp32-vk", "kda-B64-T4-fp32-vk-step"
    full, listed = "full-B1-S4096-H16-D128", "list12.5-B1-S8192-H16-D128"
    ours = [
        ("linear_attention_decode", "cula_lightning_decode", "lightning_decode", decode, "cula"),
        ("delta_rule_decode", "cula_delta_decode", "delta_decode", delta, "cula"),
        ("delta_rule_decode, replay", "cula_delta_decode", "delta_decode", drafts, "cula"),
        ("lightning_attn_fwd", "cula_lightning_sm90", "lightning_prefill", prefill, "cula"),
        ("chunk_simple_gla", "cula_lightning_sm90", "lightning_prefill", f"{prefill}-gate", "cula"),
        ("chunk_gated_delta_rule", "cula_lightning_sm90", "gated_prefill", prefill, "cula"),
        ("lite_attention", "liteattention_sm89", "lite_attention", full, "lite"),
        ("lite_attention, backward", "liteattention_sm89", "lite_backward", listed, "lite"),
    ]
    if kda_package:
        ours.insert(6, ("chunk_kda", kda_package, "kda_prefill", prefill, "cula"))
    gla = "fla.ops.simple_gla"
    peers = [
        ("fused_recurrent_simple_gla", gla, "lightning_decode", decode, "fla"),
        (
            "fused_recurrent_gated_delta_rule",
            "fla.ops.gated_delta_rule",
            "delta_decode",
            delta,
            "fla",
        ),
        ("chunk_simple_gla", gla, "lightning_prefill", prefill, "fla"),
        ("chunk_kda", "fla.ops.kda", "kda_prefill", prefill, "fla"),
    ]
    return [Function(*facts) for facts in (*ours, *peers)]


def fresh(function: Function, folder: Path) -> dict[str, Any]:
    """What a new process reports that keeps kernels below `folder`; Failed holds the end of what it said."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    caches = {name: str(folder / name.lower()) for name in CACHES}
    words = (function.module, function.op, function.setting, function.provider)
    command = [sys.executable, "-m", "benchmarks.harness.fresh_process", *words]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **caches, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{' '.join(words)}: not finished after {LIMIT_S} s") from None
    if done.returncode:
        raise Failed(f"{' '.join(words)}: {done.stderr[-2000:].strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(function: Function, cold: int, warm: int) -> dict[str, Any]:
    """The row of a function, or an entry that says why it was skipped."""
    row: dict[str, Any] = {**asdict(function), **{name: [] for name in first_calls.LISTS}}
    for number in range(cold):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for later in range(1 + (warm if number == 0 else 0)):
                found = fresh(function, Path(folder))
                if SKIPPED in found:
                    return {**asdict(function), "reason": found[SKIPPED]}
                _add(row, found, "filled_cache_s" if later else "empty_cache_s")
    return row


def _add(row: dict[str, Any], found: dict[str, Any], first: str) -> None:
    for name in ("import_torch_s", "import_s"):
        row[name].append(round(found[name], 4))
    row[first].append(round(found["first_call_s"], 6))
    if first == "filled_cache_s":
        row["second_call_s"].append(round(found["second_call_s"], 6))
        row["host_s"].append(round(found["host_s"], 8))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures the first call of every function.")
    parser.add_argument("--functions", nargs="+", metavar="PATTERN", default=["*"])
    parser.add_argument("--cold", type=int, default=1, help="processes with an empty cache each")
    parser.add_argument("--warm", type=int, default=3, help="processes with a filled cache")
    add_json(parser, first_calls.OP)
    parser.add_argument(
        "--join",
        action="store_true",
        help="keep what the file has of other functions, measured at the same commit",
    )
    args = parser.parse_args(argv)
    if args.join and args.json is None:
        parser.error("--join: expected --json too")
    if args.cold < 1 or args.warm < 1:
        parser.error("--cold, --warm: expected at least one process")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    import torch

    from benchmarks.ops.kda.internals import package

    if not torch.cuda.is_available():
        return fail("benchmarks need a CUDA device, and torch sees none")
    known = functions(package())
    wanted = [
        f for f in known if any(fnmatchcase(f"{f.module}:{f.function}", p) for p in args.functions)
    ]
    if not wanted:
        return fail(f"functions: {' '.join(args.functions)!r} matches none, such as fla.ops.kda:*")
    origin = {**provenance(), "clocks_before": read_smi()}
    path = json_path(args.json, first_calls.OP, gpu_slug(origin["gpu"]))
    earlier = first_calls.load(path) if args.join and path.exists() else None
    head = {"title": TITLE, "provenance": origin, "notes": list(NOTES)}
    try:
        if earlier:
            results.refuse_another(earlier, head, first_calls.OF_BOTH)
        content = {**head, **_measured(wanted, args)}
        content["provenance"]["clocks_after"] = read_smi()
        if earlier:
            order = [(f.module, f.function) for f in known]
            content = first_calls.joined(earlier, content, order)
        first_calls.validate(content)
    except Failed as error:
        return fail(error, code=1)
    except ValueError as error:
        return fail(error)
    _print(content)
    if args.json is not None:
        results.write(content, path)
        print(f"wrote {path}")
    return 0


def _measured(wanted: Sequence[Function], args: argparse.Namespace) -> dict[str, Any]:
    """The rows of a result file, and what was skipped; Failed names every function that failed."""
    entries, failed = [], []
    for function in wanted:
        start = time.perf_counter()
        try:
            entries.append(measure(function, args.cold, args.warm))
        except Failed as error:
            failed.append(str(error))
        took = time.perf_counter() - start
        print(f"{function.module}: {function.function}: {took:.0f} s", file=sys.stderr, flush=True)
    if failed:
        raise Failed("\n".join(failed))
    return {
        "skipped": [entry for entry in entries if "reason" in entry],
        "rows": [entry for entry in entries if "reason" not in entry],
    }


def _print(content: dict[str, Any]) -> None:
    print(report.as_text(first_calls.table(content)))
    for entry in content["skipped"]:
        print(f"skipped {entry['module']}: {entry['function']}: {entry['reason']}")
    print(report.machine(content["provenance"]))


if __name__ == "__main__":
    sys.exit(main())
