"""What turns products of a chunk's tokens into Aqk and Akk: strengths of rows, norms of columns, and decays.

A warp has 16 rows, and a thread two of them, 8 apart. p, q: products with k of k and of q, as `by_pairs` sees them.
rows_p, rows_q: what their rows are multiplied by. sums: log2 decays summed up to the two rows. gate, table: as `Tokens`
has them.
"""

import operator

import cutlass
import cutlass.cute as cute

from cula_core.cute.functions import exp2
from cula_core.cute.memory import view
from cula_core.cute.types import F32

from ..config import CHUNK, SUB
from .tokens import NEAR, NORM, SUM


@cute.jit
def weigh_left(p, q, rows_p, rows_q, sums, gate: cute.Tensor, table: cute.Tensor, w, lane):
    """Weighs the blocks left of the diagonal in place.

    The decay is a product of what the row and the column have to do with the end of the column's block, both at most 1.
    """
    near = cute.make_rmem_tensor(2, F32)
    for block in cutlass.range_constexpr(CHUNK // SUB - 1):
        if block < w:
            end = gate[SUM + SUB * block + SUB - 1]
            decays = [exp2(sums[b] - end) for b in range(2)]
            of_p = [rows_p[b] * decays[b] for b in range(2)]
            of_q = [rows_q[b] * decays[b] for b in range(2)]
            for n in cutlass.range_constexpr(2 * block, 2 * block + 2):
                at = NEAR + 8 * n + lane % 4 * 2
                cute.autovec_copy(view(table.iterator, at, 2), near)
                for b in cutlass.range_constexpr(2):
                    for a in cutlass.range_constexpr(2):
                        p[a, b, n] = p[a, b, n] * (of_p[b] * near[a])
                        q[a, b, n] = q[a, b, n] * (of_q[b] * near[a])


@cute.jit
def weighed_diagonal(p, q, rows_p, rows_q, sums, gate: cute.Tensor, table: cute.Tensor, w, lane):
    """Returns the warp's blocks on the diagonal, weighed, as `by_pairs`: of p what is left of the diagonal, of q that
    and the diagonal; the rest is zero. And of p the thread's two elements on the diagonal, zero if it has none."""
    norms, before = cute.make_rmem_tensor(2, F32), cute.make_rmem_tensor(2, F32)
    found_p = cute.make_rmem_tensor((2, 2, 2), F32)
    found_q = cute.make_rmem_tensor((2, 2, 2), F32)
    own = [F32(0.0), F32(0.0)]
    for n in cutlass.range_constexpr(2):
        column = 8 * n + lane % 4 * 2
        at = SUB * w + column
        cute.autovec_copy(view(table.iterator + NORM, at, 2), norms)
        cute.autovec_copy(view(gate.iterator + SUM, at, 2), before)
        for b in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * b
            for a in cutlass.range_constexpr(2):
                # Chosen by selects: code for each of the four blocks would be four times as long.
                of_p, of_q = p[a, b, n], q[a, b, n]
                for block in cutlass.range_constexpr(1, CHUNK // SUB):
                    of_p = cutlass.select_(w == block, p[a, b, 2 * block + n], of_p)
                    of_q = cutlass.select_(w == block, q[a, b, 2 * block + n], of_q)
                decay = norms[a] * exp2(sums[b] - before[a])
                of_p, of_q = of_p * (rows_p[b] * decay), of_q * (rows_q[b] * decay)
                if cutlass.const_expr(n == b):
                    own[b] = cutlass.select_(row == column + a, of_p, own[b])
                found_p[a, b, n] = cutlass.select_(row > column + a, of_p, F32(0.0))
                found_q[a, b, n] = cutlass.select_(row >= column + a, of_q, F32(0.0))
    return found_p, found_q, own


@cute.jit
def store_growth(target: cute.Tensor, own, w, lane):
    """Writes a bound of the log2 by which what the warp's tokens write may enlarge a state, whatever it holds.

    own: minus the strength times the squared norm of two tokens' keys, or zero. A token multiplies the part of the
    state along its key by 1 plus that, and leaves the rest.
    """
    grown = F32(1.0)
    for i in cutlass.range_constexpr(2):
        kept = 1.0 + own[i]
        kept = cutlass.select_(kept < 0.0, -kept, kept)
        # Also of what is no number: nothing is known then.
        grown = grown * cutlass.select_(kept <= 1.0, F32(1.0), kept)
    growth = cute.math.log2(grown, fastmath=True)
    growth = cute.arch.warp_reduction(growth, operator.add)
    if lane == 0:
        target[w] = growth
