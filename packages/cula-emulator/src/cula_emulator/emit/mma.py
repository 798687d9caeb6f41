"""mma.sync: D = A B + C for one warp, all operands in registers."""

from __future__ import annotations

from ..ptx import ir
from .function import FunctionEmitter, block, boolean
from .matrix import FORMATS, accumulator_of, array, check_count, check_types, format_of, match
from .registry import Unsupported, emits

_DEPTHS = {"f16": (8, 16), "bf16": (8, 16), "tf32": (4, 8)}  # of m16n8k*; 8-bit types: 16 and 32


@emits("mma")
def mma(e: FunctionEmitter, i: ir.Instruction) -> str:
    types = "|".join(FORMATS)
    found = match(
        i,
        r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(\.satfinite)?"
        rf"\.(f32|f16|s32)\.({types})\.({types})\.(f32|f16|s32)",
    )
    depth, saturates, d_type, a_type, b_type, c_type = found.groups()
    if c_type != d_type:
        raise Unsupported("different C and D types")
    check_types(d_type, a_type, b_type, bool(saturates))
    if int(depth) not in _DEPTHS.get(a_type, (16, 32)):
        raise Unsupported(f"k{depth} of {a_type}")
    row_bytes = int(depth) * FORMATS[a_type][1]
    d, a, b, c = i.operands
    results = 2 if d_type == "f16" else 4
    shape = f"{depth}, {format_of(a_type)}, {format_of(b_type)}, {accumulator_of(d_type)}, {boolean(saturates)}"
    return block(
        array(e, "a_", check_count(a, row_bytes // 8, "A")),
        array(e, "b_", check_count(b, row_bytes // 16, "B")),
        array(e, "c_", check_count(c, results, "C")),
        f"uint32_t d_[{results}]; mma_sync(MmaShape{{{shape}}}, d_, a_, b_, c_);",
        *(e.write(r, "b32", f"d_[{n}]") for n, r in enumerate(check_count(d, results, "D"))),
    )
