"""Calls of the backward pass that this package serves, and what they must give."""

from __future__ import annotations

import functools
from dataclasses import replace

from torch import Tensor

from cula_testing.lite.gradients import BITS, Backward, Problem, make_problem
from liteattention_sm89 import reference

WIDE = Backward(130, 200, heads=1, dim=128, how=("atomics",), arch="sm_90a")
LISTS = replace(WIDE, rows=150, dim=64, listed=0.6)
PACKED = replace(WIDE, heads=2, lengths=((70, 130), (0, 30), (200, 70), (0, 0), (5, 0), (129, 129)))
CALLS = [
    WIDE,
    replace(WIDE, heads=2, dlse=True, views=True),
    replace(WIDE, rows=200, keys=130, causal=True),
    replace(WIDE, rows=70, dim=96, causal=True, listed=0.6, batch=2),
    replace(WIDE, rows=300, keys=300, heads=2, heads_k=2, listed=0.5, dlse=True),
    replace(WIDE, rows=260, keys=400, heads=4, heads_k=2, dim=80, dtype="float16", listed=0.6, block_n=128),
    replace(WIDE, dim=64),
    replace(WIDE, rows=200, keys=130, heads=2, dim=64, dtype="float16", causal=True, dlse=True),
    *(replace(LISTS, tiles=tiles) for tiles in BITS if tiles != "some"),
    replace(LISTS, listed=0.25, batch=2, views=True),
    replace(LISTS, listed=0.95, heads=4, fewer=True),
    replace(LISTS, rows=4300, keys=70, listed=0.1),
    replace(LISTS, rows=129, keys=2200, listed=0.1),
    replace(LISTS, rows=1, keys=65, listed=1.0),
    replace(LISTS, rows=200, keys=130, dim=8, batch=2, listed=0.8),
    replace(LISTS, rows=64, keys=65, dim=40, heads=3, heads_k=3, listed=0.8, dlse=True),
    PACKED,
    replace(PACKED, causal=True, dim=72, dtype="float16", listed=0.7, block_n=128, index_dtype="int64"),
    replace(PACKED, dim=64, heads=4, heads_k=2, listed=0.6, dlse=True, views=True),
    replace(PACKED, dim=40, causal=True, listed=0.8, fewer=True),
]  # fmt: skip


@functools.cache
def problem(call: Backward, device: str = "cpu") -> Problem:
    return make_problem(call, reference, device)


def per_row(rows: Tensor | None) -> Tensor | None:
    """Numbers of rows as [B, Hq, Sq]; packed ones come without a batch."""
    return rows[None] if rows is not None and rows.dim() == 2 else rows
