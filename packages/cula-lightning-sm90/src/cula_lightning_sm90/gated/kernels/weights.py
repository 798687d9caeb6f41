"""What turns products of a chunk's tokens into Aqk and Akk: strengths of rows, norms of columns, and decays.

A warp has 16 rows, and a thread two of them, 8 apart. strengths, sums: of these two, their strengths and log2 decays
summed up to them. gate, table: the chunk's slots of gates and tables. p: products, as `by_pairs` sees them.
"""

import cutlass
import cutlass.cute as cute

from cula_core.cute.functions import exp2
from cula_core.cute.memory import view
from cula_core.cute.types import F32

from ..config import CHUNK, SUB
from .layout import NEAR, NORM, SUM


@cute.jit
def weigh_left(p: cute.Tensor, strengths, sums, gate: cute.Tensor, table: cute.Tensor, w, lane):
    """Weighs the blocks left of the diagonal in place.

    The decay is a product of what the row and the column have to do with the end of the column's block, both at most 1.
    """
    near = cute.make_rmem_tensor(2, F32)
    for block in cutlass.range_constexpr(CHUNK // SUB - 1):
        if block < w:
            end = gate[SUM + SUB * block + SUB - 1]
            factors = [strengths[b] * exp2(sums[b] - end) for b in range(2)]
            for n in cutlass.range_constexpr(2 * block, 2 * block + 2):
                at = NEAR + 8 * n + lane % 4 * 2
                cute.autovec_copy(view(table.iterator, at, 2), near)
                for b in cutlass.range_constexpr(2):
                    for a in cutlass.range_constexpr(2):
                        p[a, b, n] = p[a, b, n] * (factors[b] * near[a])


@cute.jit
def weighed_diagonal(
    p: cute.Tensor,
    strengths,
    sums,
    gate: cute.Tensor,
    table: cute.Tensor,
    w,
    lane,
    inclusive: cutlass.Constexpr,
):
    """Returns the warp's block on the diagonal, weighed, as `by_pairs`; zero behind the diagonal.

    inclusive: the diagonal itself stays.
    """
    norms, before = cute.make_rmem_tensor(2, F32), cute.make_rmem_tensor(2, F32)
    found = cute.make_rmem_tensor((2, 2, 2), F32)
    for n in cutlass.range_constexpr(2):
        column = 8 * n + lane % 4 * 2
        at = SUB * w + column
        cute.autovec_copy(view(table.iterator + NORM, at, 2), norms)
        cute.autovec_copy(view(gate.iterator + SUM, at, 2), before)
        for b in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * b
            for a in cutlass.range_constexpr(2):
                # Chosen by selects: code for each of the four blocks would be four times as long.
                product = p[a, b, n]
                for block in cutlass.range_constexpr(1, CHUNK // SUB):
                    product = cutlass.select_(w == block, p[a, b, 2 * block + n], product)
                value = product * (strengths[b] * norms[a] * exp2(sums[b] - before[a]))
                kept = row >= column + a if inclusive else row > column + a
                found[a, b, n] = cutlass.select_(kept, value, F32(0.0))
    return found
