"""Calls of the backward pass and what they must give, for the tests of its kernels."""

from __future__ import annotations

import functools
from dataclasses import replace

from cula_testing.lite.gradients import BITS, Backward, Problem, make_problem
from liteattention_sm89 import reference

LISTS = Backward(150, 200, heads=1, dim=64, listed=0.6)
# What shares a kernel with it, and what needs kernels of its own.
EMULATED = [
    LISTS,
    *(replace(LISTS, tiles=tiles) for tiles in BITS if tiles != "some"),
    replace(LISTS, listed=0.25, batch=2, views=True),
    replace(LISTS, listed=0.95, heads=4, fewer=True),
    replace(LISTS, rows=4300, keys=70, listed=0.1),
    replace(LISTS, rows=129, keys=2200, listed=0.1),
    replace(LISTS, rows=1, keys=65, listed=1.0),
    Backward(200, 70, heads=1, dim=64, causal=True, dlse=True, how=("order",)),
    Backward(100, 200, heads=4, heads_k=2, dim=64, causal=True, dlse=True, how=("order",)),
    Backward(
        dim=72, dtype="float16", causal=True, listed=0.7, block_n=128, index_dtype="int64", how=("atomics",),
        lengths=((70, 200), (0, 30), (200, 130), (0, 0), (5, 0), (129, 129)), arch="sm_90a",
    ),
    Backward(dim=96, lengths=((70, 130), (0, 30), (5, 0), (130, 64)), how=("order",)),
    Backward(dim=128, listed=0.7, lengths=((70, 130), (0, 30), (5, 0), (130, 64)), how=("atomics",)),
    Backward(130, 140, dim=192, causal=True, dlse=True, listed=0.8, dtype="float16", block_n=128, how=("order",)),
    Backward(130, 70, dim=256, how=("atomics",), arch="sm_90a"),
    Backward(200, 130, dim=8, batch=2, listed=0.8, how=("atomics",), arch="sm_90a"),
]  # fmt: skip


@functools.cache
def problem(call: Backward, device: str = "cpu") -> Problem:
    return make_problem(call, reference, device)
