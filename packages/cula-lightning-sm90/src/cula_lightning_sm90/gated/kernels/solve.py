"""The inverse of a chunk: T' = (I + Akk)^-1 diag(beta).

Akk_ij = beta_i r(k_i) r(k_j) (k_i . k_j) 2^(G_i - G_j), j < i, and the code has its negative. Its diagonal blocks of
16 x 16 are inverted by substitution in fp32. The rest of T' follows block by block, T'_iw = -D_i sum over m < i of
A_im T'_mw with the inverses D of the diagonal blocks, in 16 bits: entries of the inverse are about 1 at most. A Neumann
series would be shorter, and wrong by orders of magnitude where keys repeat.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from cula_core.cute.memory import view
from cula_core.cute.output import GROUP
from cula_core.cute.types import F32
from cula_core.cute.wgmma import as_operand

from ..config import CHUNK, SUB
from .tokens import STRENGTH

BLOCKS = CHUNK // SUB
# Elements from one row to the next, so that rows fall on different banks.
BELOW_STRIDE, INVERTED_STRIDE, DIAGONAL_STRIDE = CHUNK - SUB + 8, SUB + 8, SUB + 4
BELOW, INVERTED = (CHUNK - SUB) * BELOW_STRIDE, CHUNK * INVERTED_STRIDE
SCRATCH_BYTES = 2 * (BELOW + INVERTED) + 4 * CHUNK * DIAGONAL_STRIDE


class Solve:
    """Warp w has rows 16 w ... of Akk, whose block on the diagonal it inverts, and then block column w of the inverse.

    | scratch | |
    |---|---|
    | -Akk from row 16 on, without its diagonal blocks | 16 bits, [48, 48] |
    | inverses of the diagonal blocks, transposed | 16 bits, [16, 16] each |
    | diagonal blocks of -Akk; then those of T', transposed | fp32, [16, 16] each; 16 bits |
    """

    def __init__(self, operand):
        self.operand = operand

    @cute.jit
    def invert(
        self, p: cute.Tensor, diagonal: cute.Tensor, gate: cute.Tensor, scratch: cute.Pointer, target: cute.Tensor,
        barrier: cutlass.Int32, w: cutlass.Int32, lane: cutlass.Int32,
    ):  # fmt: skip
        """Stores T' to `target`, by a warpgroup.

        p, diagonal: -Akk left of the diagonal blocks and in the warp's own one, as `by_pairs`. gate: the chunk's gates.
        barrier: a named one of the group.
        """
        below, inverted = scratch, scratch + BELOW
        z_base = cute.recast_ptr(scratch + BELOW + INVERTED, dtype=F32)
        own_z = z_base + cute.assume(SUB * w * DIAGONAL_STRIDE, divby=4)
        first = SUB * w + lane // 4
        beta = gate[STRENGTH + SUB * w + lane % SUB]
        self.store_below(p, below, first, w, lane)
        pair = cute.make_rmem_tensor(2, F32)
        for n in cutlass.range_constexpr(2):
            for b in cutlass.range_constexpr(2):
                for a in cutlass.range_constexpr(2):
                    pair[a] = diagonal[a, b, n]
                at = (lane // 4 + 8 * b) * DIAGONAL_STRIDE + 8 * n + lane % 4 * 2
                cute.autovec_copy(pair, view(own_z, at, 2))
        cute.arch.sync_warp()
        x = self.substitute(own_z, lane % SUB)
        cute.arch.sync_warp()
        # Both halves of the warp have the same columns: each stores half of the rows.
        values = cute.make_rmem_tensor(SUB // 2, F32)
        for i in cutlass.range_constexpr(SUB // 2):
            values[i] = cutlass.select_(lane < SUB, x[i], x[i + SUB // 2])
        rounded = cute.make_rmem_tensor(SUB // 2, self.operand)
        rounded.store(values.load().to(self.operand))
        own_t = cute.recast_ptr(own_z, dtype=self.operand)
        at = lane % SUB * INVERTED_STRIDE + lane // SUB * (SUB // 2)
        own_d = inverted + cute.assume(w * SUB * INVERTED_STRIDE, divby=8)
        cute.autovec_copy(rounded, view(own_d, at, SUB // 2))
        rounded.store((values.load() * beta).to(self.operand))
        cute.autovec_copy(rounded, view(own_t, at, SUB // 2))
        cute.arch.barrier(barrier_id=barrier, number_of_threads=GROUP)
        self.complete(below, inverted, own_t, target, w, lane)

    @cute.jit
    def store_below(self, p: cute.Tensor, below: cute.Pointer, first, w, lane):
        """Rounds the warp's blocks left of the diagonal, and stores them."""
        pair = cute.make_rmem_tensor(2, self.operand)
        for block in cutlass.range_constexpr(BLOCKS - 1):
            if block < w:
                for n in cutlass.range_constexpr(2 * block, 2 * block + 2):
                    for b in cutlass.range_constexpr(2):
                        for a in cutlass.range_constexpr(2):
                            pair[a] = p[a, b, n].to(self.operand)
                        at = (first + 8 * b - SUB) * BELOW_STRIDE + 8 * n + lane % 4 * 2
                        cute.autovec_copy(pair, view(below, at, 2))

    @cute.jit
    def substitute(self, z: cute.Pointer, column):
        """Returns one column of the inverse of I minus a strictly lower triangular block."""
        x = cute.make_rmem_tensor(SUB, F32)
        z_row = cute.make_rmem_tensor(SUB, F32)
        for i in cutlass.range_constexpr(SUB):
            for part in cutlass.range_constexpr(cute.ceil_div(i, 4)):
                source = view(z, DIAGONAL_STRIDE * i + 4 * part, 4)
                cute.autovec_copy(source, view(z_row.iterator, 4 * part, 4))
            value = cutlass.select_(column == i, F32(1.0), F32(0.0))
            for m in cutlass.range_constexpr(i):
                value = value + z_row[m] * x[m]
            x[i] = value
        return x

    @cute.jit
    def complete(
        self, below: cute.Pointer, inverted: cute.Pointer, own_t: cute.Pointer, target: cute.Tensor, w, lane
    ):  # fmt: skip
        """Computes block column w of T', transposed: T'_iw^T = (sum of T'_mw^T (-A_im)^T) D_i^T below the diagonal.

        Transposed, sums are first operands as they are.
        """
        block = cute.make_tiled_mma(
            warp.MmaF16BF16Op(self.operand, F32, (SUB, 8, SUB)), permutation_mnk=(SUB, SUB, SUB)
        )
        turned = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), self.operand)
        plain = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.operand)
        turned_back = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.operand)
        load_a = cute.make_tiled_copy_A(plain, block).get_slice(lane)
        load_b = cute.make_tiled_copy_B(plain, block).get_slice(lane)
        load_turned = cute.make_tiled_copy_B(turned, block).get_slice(lane)
        load_c = cute.make_tiled_copy_C(plain, block).get_slice(lane)
        save = cute.make_tiled_copy_C(turned_back, block).get_slice(lane)
        shape_a, shape_c = block.partition_shape_A((SUB, SUB)), block.partition_shape_C((SUB, SUB))
        found = [block.make_fragment_A(shape_a) for _ in range(BLOCKS)]
        sums = block.make_fragment_A(shape_a)
        b = block.make_fragment_B(block.partition_shape_B((SUB, SUB)))
        acc = cute.make_rmem_tensor(shape_c, F32)
        rounded = cute.make_rmem_tensor(shape_c, self.operand)
        # Blocks are at constant distances from the column's first ones.
        below = below + cute.assume(w * SUB * (BELOW_STRIDE + 1), divby=8)
        inverted = inverted + cute.assume(w * SUB * INVERTED_STRIDE, divby=8)
        places = save.partition_D(flipped(cute.local_tile(target, (SUB, SUB), (w, w))))
        source = load_c.partition_S(tile(own_t, INVERTED_STRIDE, 0, 0))
        cute.copy(load_c, source, load_c.retile(rounded))
        cute.copy(save, save.retile(rounded), places)
        first = load_a.partition_S(tile(own_t, INVERTED_STRIDE, 0, 0))
        cute.copy(load_a, first, load_a.retile(found[0]))
        for step in cutlass.range_constexpr(1, BLOCKS):
            if w + step < BLOCKS:
                acc.fill(0.0)
                for m in cutlass.range_constexpr(step):
                    part = tile(below, BELOW_STRIDE, step - 1, m)
                    cute.copy(load_b, load_b.partition_S(part), load_b.retile(b))
                    cute.gemm(block, acc, found[m], b, acc)
                sums.store(as_operand(acc, sums).load().to(self.operand))
                inverse = flipped(tile(inverted, INVERTED_STRIDE, step, 0))
                cute.copy(load_turned, load_turned.partition_S(inverse), load_turned.retile(b))
                acc.fill(0.0)
                cute.gemm(block, acc, sums, b, acc)
                found[step].store(as_operand(acc, sums).load().to(self.operand))
                # What comes next is found from it as it is stored, and makes up for its rounding.
                stored = cute.make_tensor(found[step].iterator, acc.layout)
                place = cute.make_tensor(places.iterator + step * SUB * SUB, places.layout)
                cute.copy(save, save.retile(stored), place)


def tile(first, stride, i, j):
    """Returns block (i, j) of a matrix in shared memory whose block (0, 0) begins at a pointer."""
    pointer = first + (i * SUB * stride + j * SUB)
    return cute.make_tensor(pointer, cute.make_layout((SUB, SUB), stride=(stride, 1)))


def flipped(matrix):
    """Returns a matrix transposed."""
    return cute.make_tensor(matrix.iterator, cute.select(matrix.layout, mode=[1, 0]))
