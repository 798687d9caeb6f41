"""Tables of KDA prefill as predicted for Blackwell, from what `model.py` writes and from published figures.

Regions of `tables.py`: `<!-- bench:kda_prefill_blackwell:predicted -->`, and with `table=held_out` how the model does
on rows of the H200 that it was not fitted to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import report, results
from benchmarks.harness.report import Table

OP, PUBLISHED = "kda_prefill_blackwell", "kda_blackwell"
CARDS = ("GB200", "GB300")
CASES = ("low", "mid", "high")
MAIN = [f"B{b}-T{t}-H64" for b in (1, 2) for t in (512, 1024, 4096, 8192, 16384)]


def prediction_table(content: Mapping[str, Any], published: Mapping[str, Any]) -> Table:
    """Predicted milliseconds of the main settings, beside published times of other implementations."""
    rows = {(r["card"], r["setting"]): r for r in content["rows"]}
    theirs = {(r["card"], r["setting"]): r for r in published["rows"]}
    header, lines = ["setting"], []
    for card in CARDS:
        header += [f"{card}: ours, predicted, ms", "cuLA, published, ms", "FLA, published, ms"]
    for name in MAIN:
        line = [name]
        for card in CARDS:
            low, mid, high = (rows[card, name][f"{case}_us"] / 1e3 for case in CASES)
            line.append(f"{mid:.3f} ({low:.3f}-{high:.3f})")
            figures = theirs.get((card, name))
            line += [f"{figures[who]:.3f}" if figures else "-" for who in ("cula_ms", "fla_ms")]
        lines.append([*line, *(limits(rows[card, name]) for card in CARDS[:1])])
    return [*header, f"binds {CARDS[0]} (prepare, recurrence)"], lines


def limits(row: Mapping[str, Any]) -> str:
    """The terms that limit the kernels of a row, in the order in which the kernels run."""
    return ", ".join(row["binds"].values())


def limits_table(content: Mapping[str, Any]) -> Table:
    """Predicted microseconds of every setting on every card, and what limits them."""
    header = ["setting", "card", "predicted, us", "limited by (prepare, scan if any, recurrence)"]
    return header, [
        [r["setting"], r["card"], f"{r['mid_us']:.1f}", limits(r)] for r in content["rows"]
    ]


def held_out_table(content: Mapping[str, Any]) -> Table:
    """Measured and modelled times of whole calls on the H200."""
    lines = []
    for r in content["held_out"]["rows"]:
        error = r["modelled_us"] / r["measured_us"] - 1
        times = [f"{r['measured_us']:.1f}", f"{r['modelled_us']:.1f}"]
        lines.append([r["setting"], *times, f"{error:+.1%}"])
    return ["setting", "measured, us", "modelled, us", "error"], lines


def captions(content: Mapping[str, Any], published: Mapping[str, Any]) -> tuple[str, str]:
    """The captions of the table of predictions and of the table that checks the model."""
    c, held, own = content["constants"], content["held_out"], content["fitted"]
    low, mid, high = (content["assumed"]["hand_over_clk"][case] for case in CASES)
    predicted = (
        f"Ours: predicted, not measured, for hand-overs of {mid} clk; device time alone, as in a CUDA graph. Range: "
        f"from {low} clk and a prepare that nothing but the issue of instructions limits, to {high} clk and a "
        "prepare that memory never held up on the H200. Clocks, multiprocessors and bandwidths are public "
        "specifications or assumptions. cuLA and FLA: " + published["source"]
    )
    first, step = c["merge_us"]
    check = (
        f"Whole calls on the H200, none of which the fit has seen: error {held['median']:.1%} in the median, "
        f"{held['worst']:.1%} at most; of the {len(own['rows'])} kernels alone that it is fitted to "
        f"{own['median']:.1%} and {own['worst']:.1%}. Fitted: {c['share']:.1%} of the memory's peak rate, "
        f"{c['start_us']:.2f} us to start a kernel, {c['prepare_clk']:.0f} clk of prepare per chunk and head "
        f"({c['highest_prepare_clk']:.0f} if memory is never to blame), {first:.1f} us of merge and {step:.2f} us for "
        "every segment beyond two."
    )
    return predicted, check


def published(root: Path = results.RESULTS) -> dict[str, Any]:
    """The file of published times."""
    path = results.result_path(PUBLISHED, "published", root)
    return json.loads(path.read_text(encoding="utf-8"))


def region(path: Path, name: str | None, root: Path) -> str:
    """The lines of a region of a document; `name` is the table that it asks for."""
    content, others = json.loads(path.read_text(encoding="utf-8")), published(root)
    predicted, check = captions(content, others)
    if name is None:
        return f"\n{report.as_markdown(prediction_table(content, others))}\n\n{predicted}\n\n"
    if name != "held_out":
        raise ValueError(f"bench:{OP}: expected table=held_out or none, got {name!r}")
    return f"\n{report.as_markdown(held_out_table(content))}\n\n{check}\n\n"
