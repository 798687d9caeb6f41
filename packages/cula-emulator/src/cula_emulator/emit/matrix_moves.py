"""ldmatrix, stmatrix, movmatrix: 8x8 matrices of 16-bit elements."""

from __future__ import annotations

from ..ptx import ir
from .function import FunctionEmitter, block, boolean
from .matrix import array, check_count
from .registry import emits


@emits(
    "ldmatrix",
    "stmatrix",
    forms=["sync aligned m8n8 x1|x2|x4 ?trans ?shared|shared::cta b16"],
    operands=2,
)
def matrix_move(e: FunctionEmitter, i: ir.Instruction) -> str:
    count = int(i.first_of(("x1", "x2", "x4"))[1:])
    is_load = i.parts[0] == "ldmatrix"
    vector, address = i.operands if is_load else reversed(i.operands)
    registers = check_count(vector, count, "the matrices")
    arguments = f"({count}, {boolean(i.has('trans'))}, {e.shared_address(i, address)}, m_);"
    if not is_load:
        return block(array(e, "m_", registers), f"store_matrix{arguments}")
    results = (e.write(r, "b32", f"m_[{n}]") for n, r in enumerate(registers))
    return block(f"uint32_t m_[{count}]; load_matrix{arguments}", *results)


@emits("movmatrix", forms=["sync aligned m8n8 trans b16"], operands=2)
def matrix_transpose(e: FunctionEmitter, i: ir.Instruction) -> str:
    return e.write(i.operands[0], "b32", f"move_matrix_transposed({e.value(i.operands[1])})")
