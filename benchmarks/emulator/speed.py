"""Measures emulated instructions per second, and the time that building takes.

    python benchmarks/emulator/speed.py [--against TREE] [--json [PATH]] [--only KERNEL ...] [--seconds S]

TREE is another checkout of packages/cula-emulator (or of its src): the same kernels and inputs run on both, and the
rates of both use the instruction counts of this tree. An instruction is one PTX instruction of one thread.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

from benchmarks.harness import provenance, results  # noqa: E402

EMULATOR = ROOT / "packages" / "cula-emulator"
RESULT = ROOT / "benchmarks" / "results" / "cpu" / "emulator.json"
SCHEMA = 1


def sources(tree: Path) -> list[Path]:
    """The folders for PYTHONPATH: the emulator of `tree`, and the decode kernel and the test kernels of this tree."""
    src = tree / "src" if (tree / "src").is_dir() else tree
    if not (src / "cula_emulator").is_dir():
        raise SystemExit(f"{tree} holds no cula_emulator")
    kernels = [ROOT / "packages" / name / "src" for name in ("cula-lightning-decode", "cula-core")]
    return [src, *kernels, EMULATOR / "tests"]


def measure(tree: Path, only: list[str] | None, seconds: float) -> dict[str, Any]:
    """Runs the kernels on the emulator of `tree`, in a process of their own."""
    paths = [str(path) for path in sources(tree)]
    inherited = os.environ.get("PYTHONPATH")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, *([inherited] if inherited else [])]),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "emulator" / "workloads.py"),
        "--seconds",
        str(seconds),
    ]
    command += ["--only", *only] if only else []
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def best_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The quickest measurement of each kernel, because other programs can only slow a measurement down."""
    kernels = {
        name: min((r["kernels"][name] for r in rounds), key=lambda k: k["median_seconds"])
        for name in rounds[0]["kernels"]
    }
    builds = [r["build"] for r in rounds if r["build"]]
    build = min(builds, key=lambda b: b["cold_seconds"]) if builds else None
    if build:
        build = build | {"warm_seconds": min(b["warm_seconds"] for b in builds)}
    return {"kernels": kernels, "build": build}


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")),
        platform.machine(),
    )


def place() -> dict[str, Any]:
    """The CPU, the compiler, the versions and the commit of this run."""
    compiler = subprocess.run(
        [os.environ.get("CXX", "g++"), "--version"], capture_output=True, text=True
    ).stdout
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "compiler": compiler.splitlines()[0],
        "python": platform.python_version(),
        "versions": {
            name: provenance.version(name, module)
            for name, module in (("torch", "torch"), ("nvidia-cutlass-dsl", "cutlass"))
        },
        **provenance.commit(),
    }


def rows(now: dict[str, Any], before: dict[str, Any] | None) -> list[dict[str, Any]]:
    """One row per kernel: instructions, seconds, millions of instructions per second, and the gain."""
    table = []
    for name, measured in now["kernels"].items():
        count, seconds = measured["instructions"], measured["median_seconds"]
        row = {
            "kernel": name,
            "about": measured["about"],
            "instructions": count,
            "seconds": round(seconds, 6),
            "runs": measured["runs"],
            "minstr_per_s": round(count / seconds / 1e6, 1),
        }
        if before:
            old = before["kernels"][name]["median_seconds"]
            row |= {
                "seconds_before": round(old, 6),
                "minstr_per_s_before": round(count / old / 1e6, 1),
                "gain": round(old / seconds, 2),
            }
        table.append(row)
    return table


def as_text(result: dict[str, Any]) -> str:
    lines = []
    for row in result["rows"]:
        gain = (
            f"  {row['minstr_per_s_before']:>8} before, {row['gain']:.2f}x" if "gain" in row else ""
        )
        lines.append(f"{row['kernel']:>16} {row['minstr_per_s']:>8} M instructions/s{gain}")
    for label, build in (("build", result["build"]), ("build before", result.get("build_before"))):
        if build:
            cold, warm = build["cold_seconds"], build["warm_seconds"]
            lines.append(
                f"{label:>16} {build['lines']} lines: {cold:.1f} s cold, {warm:.2g} s with a warm cache"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Times the emulator on the CPU.")
    parser.add_argument("--against", type=Path, help="another tree of the emulator to compare with")
    parser.add_argument("--against-name", default="", help="what to call it, such as a commit")
    parser.add_argument(
        "--json", nargs="?", type=Path, const=RESULT, help=f"default {RESULT.relative_to(ROOT)}"
    )
    parser.add_argument("--only", nargs="*", help="kernels; default: all, and the build times")
    parser.add_argument("--seconds", type=float, default=2.0, help="at least so long per kernel")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each tree; the best counts")
    options = parser.parse_args()
    trees = [EMULATOR, *([options.against] if options.against else [])]
    rounds = [
        [measure(t, options.only, options.seconds) for t in trees] for _ in range(options.rounds)
    ]
    now, *others = (best_of(list(of_tree)) for of_tree in zip(*rounds))
    before = others[0] if others else None
    result = {
        "schema": SCHEMA,
        "op": "emulator",
        "title": "Emulated instructions per second of CPU time, on one core",
        "provenance": place(),
        "before": (options.against_name or str(options.against)) if before else None,
        "build": now["build"],
        "build_before": before["build"] if before else None,
        "rows": rows(now, before),
    }
    print(as_text(result))
    if options.json:
        results.write(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
