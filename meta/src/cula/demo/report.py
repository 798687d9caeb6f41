"""What the demo shows: one progress bar per step while it runs, one table at the end."""

from __future__ import annotations

import io
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cula.demo.results import Row

WIDTH_WITHOUT_TERMINAL = 160
WIDE = 120


def console() -> Console:
    """Standard output; a pipe or a log file gets lines wide enough for the table."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names may hold what the terminal's encoding does not.
        sys.stdout.reconfigure(errors="replace")
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=WIDTH_WITHOUT_TERMINAL)


def bars(out: Console) -> Progress:
    """Progress bars of the steps."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=out,
    )


def table(rows: list[Row], width: int) -> Table:
    """What ran, what served it, how fast, how far from the fp64 oracle, and whether that is good enough.

    Below `WIDE` columns, of the further checks only those that failed are listed; all of them count.
    """
    result = Table(title="linear attention on this text", title_justify="left", show_lines=False)
    for name in ("op", "what", "served by"):
        result.add_column(name, overflow="fold")
    result.add_column("tokens/s", justify="right", no_wrap=True)
    result.add_column("error vs fp64", no_wrap=True)
    result.add_column("also checked", overflow="fold")
    result.add_column("result", no_wrap=True)
    for row in rows:
        result.add_row(
            Text(row.op),
            Text(row.what),
            Text(row.impl),
            "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
            "" if row.error is None else Text(f"{row.error.value:.1e} <= {row.error.bound:.0e}"),
            Text(_details(row, every=width >= WIDE)),
            _verdict(row),
        )
    return result


def _details(row: Row, every: bool) -> str:
    checks = (str(check) for check in row.checks if every or not check.ok)
    return "; ".join(filter(None, (row.failure, row.note, *checks)))


def _verdict(row: Row) -> Text:
    if not row.checked:
        return Text("")
    return Text("pass", style="green") if row.ok else Text("FAIL", style="bold red")
