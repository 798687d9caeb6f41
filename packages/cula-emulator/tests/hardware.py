"""The same kernels on a GPU and in the emulator, and a table of how well they agree.

    python tests/hardware.py --json PATH [--only GROUP ...] [--jobs N]

Each group of kernels runs in a process of its own, because an error of the GPU ends the process's context: the next
process takes up the rest. With --stand-in a second schedule of the emulator plays the GPU, to try out this program.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from cases import dsl
from cases.compare import Difference
from cases.subjects import groups
from hardware_worker import DSL_CHUNK, row

import cula_emulator as emulator

WORKER = Path(__file__).with_name("hardware_worker.py")
AGREE = ("identical", "within")
_SILENCE = 150  # seconds without a line from a worker before it counts as hanging


def _read(rows: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def _run_group(name: str, folder: Path, stand_in: bool, attempts: int = 12) -> list[dict[str, Any]]:
    """All rows of a group. A case that loses the GPU's context, or hangs, is named; the rest runs in a new process."""
    done: list[dict[str, Any]] = []
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # the groups themselves run side by side
    for attempt in range(attempts):
        rows = folder / f"{name.replace(' ', '_')}.{attempt}.jsonl"
        log = rows.with_suffix(".log")
        with log.open("w") as errors:
            skip = rows.with_suffix(".skip")
            skip.write_text(json.dumps([r["name"] for r in done]))
            command = [sys.executable, str(WORKER), name, str(rows), str(skip)]
            command += ["--stand-in"] if stand_in else []
            process = subprocess.Popen(command, stderr=errors, stdout=errors, env=one_thread)
            last, seen = time.monotonic(), 0
            while process.poll() is None:
                time.sleep(0.2)
                size = rows.stat().st_size if rows.exists() else 0
                if size != seen:
                    last, seen = time.monotonic(), size
                if time.monotonic() - last > _SILENCE:
                    process.kill()
                    process.wait()
        lines = _read(rows)
        done += [r for r in lines if "status" in r]
        if process.returncode == 0:
            return done
        begun = [r for r in lines if "begin" in r]
        finished = {r["name"] for r in done}
        tail = log.read_text().strip()[-1500:]
        reason = f"the process ended with status {process.returncode}: {tail}"
        if not begun or begun[-1]["begin"] in finished:
            done.append(
                row(name, f"{name} (start)", Difference(), 0.0, [reason]) | {"status": "failed"}
            )
            return done
        case = begun[-1]
        done.append(
            row(case["family"], case["begin"], Difference(), 0.0, [reason]) | {"status": "failed"}
        )
    return done


def group_names() -> list[str]:
    chunks = -(-len(dsl.CASES) // DSL_CHUNK)
    return [*groups(), *(f"dsl {i}" for i in range(chunks)), "tensor maps"]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per family: how many cases, how many agree bit for bit, and the largest differences."""
    families: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        families.setdefault(r["family"], []).append(r)
    table = []
    for family, members in families.items():
        counts = {s: sum(r["status"] == s for r in members) for s in AGREE}
        table.append(
            {
                "family": family,
                "cases": len(members),
                **counts,
                "disagree": len(members) - sum(counts.values()),
                "elements": sum(r["elements"] for r in members),
                "max_ulp": max(r["max_ulp"] for r in members),
                "max_relative": max((r["max_relative"] or 0.0 for r in members), default=0.0),
            }
        )
    return table


def _version(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    with contextlib.suppress(PackageNotFoundError):
        return version(distribution)
    return None


def provenance(stand_in: bool = False) -> dict[str, Any]:
    """GPU, driver, versions, compiler, date and commit (CULA_COMMIT where there is no git)."""
    compiler = subprocess.run(
        [os.environ.get("CXX", "g++"), "--version"], capture_output=True, text=True
    ).stdout
    query = ["nvidia-smi", "-i", "0", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = (
        None if stand_in else subprocess.run(query, capture_output=True, text=True).stdout.strip()
    )
    commit = os.environ.get("CULA_COMMIT")
    if not commit:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        with contextlib.suppress(OSError):
            commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "gpu": "stand-in" if stand_in else torch.cuda.get_device_name(0),
        "driver": driver,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "compiler": compiler.splitlines()[0] if compiler else None,
        "versions": {
            "cula-emulator": emulator.__version__,
            "torch": torch.__version__,
            "nvidia-cutlass-dsl": _version("nvidia-cutlass-dsl"),
        },
        "commit": commit,
    }


def agreement(
    only: list[str] | None = None, jobs: int | None = None, stand_in: bool = False
) -> dict[str, Any]:
    """Runs every group, several at a time, and returns what the JSON file holds."""
    if not stand_in:
        provenance_now = provenance()
    emulator.EmulatedModule(
        ".version 8.4\n.target sm_90a\n.address_size 64\n.visible .entry nothing() { ret; }\n"
    )
    names = [n for n in group_names() if not only or any(n.startswith(o) for o in only)]
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool,
    ):
        results = pool.map(lambda n: _run_group(n, Path(folder), stand_in), names)
        rows = [r for result in results for r in result]
    return {
        "schema": 1,
        "title": "Agreement of cula-emulator with a GPU",
        "provenance": provenance(stand_in) if stand_in else provenance_now,
        "seconds": round(time.monotonic() - start, 1),
        "families": summary(rows),
        "rows": rows,
    }


def save(result: dict[str, Any], path: Path) -> None:
    """One case per line, so that two runs can be compared with diff."""
    head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)[:-2]
    rows = ",\n".join("  " + json.dumps(r) for r in result["rows"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "rows": [\n{rows}\n ]\n}}\n', encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares the emulator with a GPU.")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--only", nargs="*", help="groups, by the beginning of their names")
    parser.add_argument("--jobs", type=int, help="processes side by side; default: one per core")
    parser.add_argument(
        "--stand-in", action="store_true", help="no GPU: compare two schedules of the emulator"
    )
    options = parser.parse_args()
    result = agreement(options.only, options.jobs, options.stand_in)
    if options.json:
        save(result, options.json)
    bad = [r for r in result["rows"] if r["status"] not in AGREE]
    lines = [json.dumps(family) for family in result["families"]]
    lines += [" | ".join([r["status"], r["family"], r["name"], *r["complaints"]]) for r in bad]
    lines.append(f"{len(result['rows'])} cases, {len(bad)} disagree, {result['seconds']} s")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
