"""Reports files that have outgrown their budget: `python tools/file_sizes.py`. A kernel file over its budget fails.

C++ counts like host code.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.layout import ROOT, base, is_kernel, packages, sources

KERNEL_LINES = 900
HOST_LINES = 600


def report(root: Path = ROOT) -> tuple[list[str], list[str]]:
    """(failures, warnings), one line per file over its budget."""
    failures, warnings = [], []
    kernels = {
        path
        for folder in (*base(root).values(), *packages(root).values())
        for path in sources(folder / "src")
        if is_kernel(path)
    }
    for folder in ("meta", "packages", "benchmarks", "tools", "tests-integration"):
        for path in sources(root / folder, ".py", ".h", ".cpp"):
            lines = len(path.read_text().splitlines())
            name = path.relative_to(root)
            if path in kernels and lines > KERNEL_LINES:
                failures.append(f"{name}: {lines} lines, a kernel file may have {KERNEL_LINES}")
            elif path not in kernels and lines > HOST_LINES:
                warnings.append(f"{name}: {lines} lines, over the host budget of {HOST_LINES}")
    return failures, warnings


def main(root: Path = ROOT) -> int:
    failures, warnings = report(root)
    for line in warnings:
        print(f"warning: {line}")
    for line in failures:
        print(f"error: {line}")
    print(f"file sizes: {len(failures)} over the limit, {len(warnings)} over budget")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
