"""Writes every result file into one HTML page that needs no network and no other file.

    python -m benchmarks.report [--out report.html] [--pictures FOLDER]

Exit codes: 0 written, 2 a result file that cannot be shown, or no browser for --pictures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import results
from benchmarks.harness.commands import fail
from benchmarks.report import page, pictures

OUT = Path(__file__).resolve().parents[2] / "report.html"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description="Writes every result file into one HTML page.",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="default: report.html in the root")
    parser.add_argument(
        "--results", type=Path, default=results.RESULTS, help="default: benchmarks/results"
    )
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="write pictures of the page, by a Chromium"
    )
    args = parser.parse_args(argv)
    try:
        text = page.render(args.results)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
        print(f"wrote {args.out}")
        if args.pictures:
            taken = pictures.take(args.out, args.pictures)
            print(f"wrote {len(taken)} pictures to {args.pictures}")
    except (OSError, ValueError) as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
