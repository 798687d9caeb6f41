"""`python -m cula demo`: linear attention at work on real text, checked against fp64 recurrences."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

DEFAULT_TOKENS = 4096
DEFAULT_OUT = "cula-demo.png"
FAILED, USAGE = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns 0 when every check passed, 1 when one failed or a step broke, 2 when the demo could not start (a bad
    argument, a file it cannot use, a missing extra); then one line on standard error says why.
    """
    options = _parser().parse_args(argv)
    try:
        from cula.demo import plot, report
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("rich", "matplotlib"):
            raise
        return _refuse(f"the demo needs {missing}, which is not installed: pip install {missing}")

    import torch

    from cula.demo import data, runner, runtime

    out = Path(options.out)
    if not out.absolute().parent.is_dir():
        return _refuse(f"--out {out}: expected a path in an existing directory")
    try:
        machine = runtime.machine(options.device)
        corpus = data.load(options.files or data.default_files(), options.tokens)
    except (data.DataError, runtime.DeviceError) as error:
        return _refuse(str(error))

    console = report.console()
    names = ", ".join(f"{d.name} ({len(d)} B)" for d in corpus.documents)
    console.print(f"text: {names}", markup=False)
    console.print(
        f"on {machine.name}, torch {torch.__version__}, {machine.dtype}, seed {options.seed}",
        markup=False,
    )
    if runtime.served_by("kda.prefill", machine, dtype=machine.dtype) == "fla":
        console.print(
            "fla compiles and tunes its kernels at first use: minutes (CULA_DISABLE=fla avoids it)",
            markup=False,
        )
    with torch.inference_mode(), runtime.single_thread(), report.bars(console) as progress:
        outcome = runner.run(
            machine, corpus, data.Projections(options.seed), options.tokens, progress
        )
    console.print(report.table(outcome.rows, console.width))
    try:
        plot.save(outcome, out)
    except OSError as error:
        return _refuse(f"--out {out}: cannot be written ({error.strerror or error})")
    console.print(f"plot: {out}", markup=False, soft_wrap=True)
    failed = sum(not row.ok for row in outcome.rows)
    console.print(f"{failed} of {len(outcome.rows)} rows failed" if failed else "all checks passed")
    return FAILED if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cula demo",
        description="Linear attention at work on real text, checked against fp64 recurrences.",
    )
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="text to use, any bytes (default: README and sources)",
    )
    parser.add_argument(
        "--out",
        default=DEFAULT_OUT,
        metavar="PNG",
        help="where the plot goes (default: %(default)s)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s"
    )
    parser.add_argument(
        "--seed",
        type=_natural,
        default=0,
        metavar="N",
        help="of the projections (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=_positive,
        default=DEFAULT_TOKENS,
        metavar="N",
        help="bytes of text, over all files (default: %(default)s)",
    )
    return parser


def _natural(text: str) -> int:
    return _at_least(text, 0)


def _positive(text: str) -> int:
    return _at_least(text, 1)


def _at_least(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
    return value


def _refuse(line: str) -> int:
    print(f"cula demo: {line}", file=sys.stderr)
    return USAGE
