"""What the command lines of the benchmarks share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness import results

DEFAULT_PATH = "default"


def fail(reason: object, code: int = 2) -> int:
    """Prints the reason for which a command stops, and returns its exit code."""
    print(f"error: {reason}", file=sys.stderr)
    return code


def add_json(parser: argparse.ArgumentParser, op: str = "<op>") -> None:
    """Adds --json, with or without a path; without --json no file is written."""
    parser.add_argument(
        "--json",
        nargs="?",
        const=DEFAULT_PATH,
        metavar="PATH",
        help=f"write the result, without PATH to benchmarks/results/<gpu>/{op}.json",
    )


def json_path(given: str | None, op: str, card: str) -> Path:
    """The path that --json was given, and otherwise that of the op's result on a card."""
    if given in (None, DEFAULT_PATH):
        return results.result_path(op, card)
    return Path(given)


def draw_result(
    parser: argparse.ArgumentParser,
    draw: Callable[[argparse.Namespace, Path], None],
    argv: Sequence[str] | None,
) -> int:
    """Runs a command that draws a result file: `draw(arguments, out)` writes the PNG."""
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path, help="default: beside the result file")
    args = parser.parse_args(argv)
    out = args.out or args.result.with_suffix(".png")
    try:
        draw(args, out)
    except (OSError, ValueError) as error:
        return fail(error)
    print(f"wrote {out}")
    return 0
