"""compute-sanitizer on a package's tiny problems: `python tools/sanitizer.py PACKAGE [TOOL ...] [--jobs N]`, on a GPU.

Runs `tests/sanitizer.py` of `packages/PACKAGE`, which prints a line per problem and exits with 1 if a number is wrong,
under each tool, all four unless told: memcheck (addresses), racecheck (shared memory), synccheck (barriers), initcheck
(what is read before it is written). Status 1 if a number is wrong or a tool reports an error. With N jobs as many
processes share the card; if that is more than one for each tool, the problems are dealt out to them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.layout import ROOT

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
MOST_JOBS = 10  # compute-sanitizer has a port for each process that it attaches to, and gives up without one
PROBLEMS = Path("tests", "sanitizer.py")


def command(package: Path, tool: str, first: int, step: int) -> list[str]:
    """Every `step`-th problem of the package from the `first` on."""
    return [
        "compute-sanitizer",
        f"--tool={tool}",
        "--error-exitcode=1",
        "--report-api-errors=no",  # queries for functions that the driver does not have
        sys.executable,
        str(package / PROBLEMS),
        str(first),
        str(step),
    ]


def run(label: str, line: list[str]) -> bool:
    """Prints what the command prints as it comes, every line after the label. True if it went well."""
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for printed in process.stdout or ():
            sys.stdout.write(f"{label}: {printed}")
            sys.stdout.flush()
    return process.returncode == 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="compute-sanitizer on a package's tiny problems.")
    there = sorted(p.parents[1].name for p in ROOT.glob(f"packages/*/{PROBLEMS}"))
    parser.add_argument("package", choices=there)
    parser.add_argument("tool", nargs="*", help=f"of {', '.join(TOOLS)}")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    given = parser.parse_args(arguments)
    for tool in given.tool:
        if tool not in TOOLS:
            parser.error(f"{tool}: expected one of {', '.join(TOOLS)}")
    if not 1 <= given.jobs <= MOST_JOBS:
        parser.error(f"--jobs: expected 1 to {MOST_JOBS}")
    package, tools = ROOT / "packages" / given.package, given.tool or TOOLS
    step = -(-given.jobs // len(tools))
    parts = [(tool, first) for first in range(step) for tool in tools]
    with ThreadPoolExecutor(given.jobs) as pool:
        went = pool.map(
            run,
            [tool if step == 1 else f"{tool} {first + 1}/{step}" for tool, first in parts],
            [command(package, tool, first, step) for tool, first in parts],
        )
        return int(not all(list(went)))


if __name__ == "__main__":
    sys.exit(main())
