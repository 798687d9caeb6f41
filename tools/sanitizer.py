"""compute-sanitizer on a package's tiny problems: `python tools/sanitizer.py PACKAGE [TOOL ...]`, on a GPU.

Runs `tests/sanitizer.py` of `packages/PACKAGE`, which prints a line per problem and exits with 1 if a number is wrong,
under each tool, all four unless told: memcheck (addresses), racecheck (shared memory), synccheck (barriers), initcheck
(what is read before it is written). Status 1 if a number is wrong or a tool reports an error.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.layout import ROOT

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
PROBLEMS = Path("tests", "sanitizer.py")


def command(package: Path, tool: str) -> list[str]:
    return [
        "compute-sanitizer",
        f"--tool={tool}",
        "--error-exitcode=1",
        "--report-api-errors=no",  # queries for functions that the driver does not have
        sys.executable,
        str(package / PROBLEMS),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="compute-sanitizer on a package's tiny problems.")
    there = sorted(p.parents[1].name for p in ROOT.glob(f"packages/*/{PROBLEMS}"))
    parser.add_argument("package", choices=there)
    parser.add_argument("tool", nargs="*", help=f"of {', '.join(TOOLS)}")
    given = parser.parse_args(arguments)
    for tool in given.tool:
        if tool not in TOOLS:
            parser.error(f"{tool}: expected one of {', '.join(TOOLS)}")
    package = ROOT / "packages" / given.package
    failed = 0
    for tool in given.tool or TOOLS:
        sys.stdout.write(f"{tool}\n")
        sys.stdout.flush()
        failed |= subprocess.run(command(package, tool), check=False).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
