"""Tables of KDA prefill on an H200 beside the times that others published for that card.

Regions of `tables.py`: `<!-- bench:kda_h200:published -->`, with `table=cut` long sequences of few heads, cut into
segments or not, and with `table=proposal` those that came with the proposal to cut them. Ours are of
`results/h200/kda_prefill.json`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import results
from benchmarks.harness.report import Table
from benchmarks.ops.published import body, milliseconds, ms

OP, MEASURED, CARD = "kda_h200", "kda_prefill", "h200"
# The figures of cuLA for a setting, of which the lowest is compared with ours.
WHOLE = ("cula_april_ms", "cula_august_ms", "cula_best_ms")
CUT = ("cula_cut_ms",)

Row = Mapping[str, Any]


def whole_table(rows: list[Row], measured: Mapping[str, Any]) -> Table:
    """The main settings: published times in the order in which they appeared, and the lowest over ours."""
    header = ["setting", "ours, ms", "cuLA, April, ms", "cuLA, August, ms", "cuLA, best, ms"]
    header += ["lowest of cuLA / ours", "FLA 0.6.0, measured here, ms", "FLA 0.5.0, August, ms"]
    lines = []
    for row in rows:
        ours, fla = (milliseconds(measured, row["setting"], name) for name in ("cula", "fla"))
        line = [row["setting"], ms(ours), *(ms(row.get(field)) for field in WHOLE)]
        lines.append(
            [*line, f"{ratio(row, WHOLE, measured):.2f}", ms(fla), ms(row.get("fla_august_ms"))]
        )
    return header, lines


def cut_table(rows: list[Row], measured: Mapping[str, Any]) -> Table:
    """Sequences that may be cut: ours as it decides and serial, theirs cut and serial, and FLA's cut if it is there."""
    peers = {"FLA, cut": "fla_cut_ms", "cuLA, cut": "cula_cut_ms", "cuLA, serial": "cula_serial_ms"}
    peers = {name: field for name, field in peers.items() if all(field in row for row in rows)}
    header = ["setting", "ours, ms", "ours, serial, ms", *(f"{name}, ms" for name in peers)]
    header += [f"{name} / ours" for name in peers]
    lines = []
    for row in rows:
        ours, serial = (
            milliseconds(measured, row["setting"], name) for name in ("cula", "cula_serial")
        )
        times = [ours, serial, *(row[field] for field in peers.values())]
        ratios = [f"{ratio(row, (field,), measured):.2f}" for field in peers.values()]
        lines.append([row["setting"], *map(ms, times), *ratios])
    return header, lines


def ratio(row: Row, fields: tuple[str, ...], measured: Mapping[str, Any]) -> float:
    """The lowest published time of these fields over ours."""
    ours = milliseconds(measured, row["setting"], "cula")
    if ours is None:
        raise ValueError(f"{OP}: {row['setting']} was not measured")
    return min(row[field] for field in fields if field in row) / ours


def region(path: Path, name: str | None, root: Path) -> str:
    """The lines of a region of a document; `name` is the table that it asks for."""
    if name not in (None, "cut", "proposal"):
        raise ValueError(f"bench:{OP}: expected table=cut, table=proposal or none, got {name!r}")
    content = json.loads(path.read_text(encoding="utf-8"))
    measured = results.load(results.result_path(MEASURED, CARD, root))
    fields, table = (CUT, cut_table) if name else (WHOLE, whole_table)
    kind = "proposal_" if name == "proposal" else ""
    rows = [row for row in content[f"{kind}rows"] if any(field in row for field in fields)]
    mean = statistics.geometric_mean(ratio(row, fields, measured) for row in rows)
    what = "cuLA's time, cut," if name else "cuLA's lowest time"
    caption = (
        f"Geometric mean of {what} over ours, {len(rows)} settings: {mean:.2f}. cuLA and FLA, if not said to be "
        f"measured here: {content[f'{kind}source']}"
    )
    return body(table(rows, measured), caption, measured)
