"""T' = (I + Akk)^-1 diag(beta) of a chunk: substitution in fp32 on 16 x 16 blocks, then Schur complements in fp16.

A Neumann series would be shorter, and wrong by orders of magnitude where keys repeat. Entries of the inverse are about
1 at most, which is why fp16 holds them, whatever the dtype of the operands is.
"""

from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from ...cute.memory import view
from ...cute.types import DTYPES, F16, F32
from ..config import CHUNK, SUB, TRIANGLE, PrepareConfig
from .block import T_PRIME
from .fragments import UNIT, place_in_triangle, write_columns

GROUP = 128  # threads that invert
SUBS = CHUNK // SUB
# Of a row of a matrix in shared memory: rows fall on different banks.
STRIDE = CHUNK + 8
AKK_STRIDE = CHUNK - SUB + 8
DIAG_STRIDE = SUB + 4
AKK = (CHUNK - SUB) * AKK_STRIDE
INVERSE_BYTES = 2 * (AKK + CHUNK * STRIDE) + 4 * CHUNK * DIAG_STRIDE


class Barrier(IntEnum):
    """Named barriers of a team of the chunk-parallel kernel."""

    WHOLE = 0  # all threads of the team
    HALF = 1  # the first half of the threads has read what the inverse overwrites
    SPAN = 2  # decays over sub-blocks are there
    GROUP = 3  # the threads that invert
    FREE = 4  # the operands have been read, and the next chunk may take their place


def sync_team(team):
    """Waits for all threads of a team; of a CTA that is one, `team` is the number 0."""
    if isinstance(team, int):
        cute.arch.sync_threads()
    else:
        cute.arch.barrier(
            barrier_id=Barrier.WHOLE + len(Barrier) * team, number_of_threads=2 * GROUP
        )


def tile_of(sub, row, d: cutlass.Constexpr, shared: cutlass.Constexpr):
    """Returns whether a warp has the products with the sub-block d before, their rows and the column's sub-block.

    row: of the lane in the warp's own sub-block. The last one has the most sub-blocks before it, and the first one
    none: where they are `shared`, the warp of the first has the products of the last one with the first.
    """
    if d < SUBS - 1 or not shared:
        return d <= sub, row, sub - d
    return sub == 0, row + (SUBS - 1) * SUB, 0


class Inverse:
    """The inversion by a group of threads.

    All of them store Akk, and two warps substitute and form the Schur complements. Then twice as many store T'.
    """

    def __init__(self, config: PrepareConfig):
        self.config = config
        self.dtype, self.operand = DTYPES[config.dtype], DTYPES[config.operand]

    def matrices(self, base: cute.Pointer):
        """Returns views of INVERSE_BYTES of shared memory.

        They are Akk from row 16 on without its diagonal blocks, its inverse, and the diagonal blocks of Akk.
        """
        base = cute.recast_ptr(base, dtype=F16)
        below = cute.make_layout((CHUNK - SUB, CHUNK - SUB), stride=(AKK_STRIDE, 1))
        whole = cute.make_layout((CHUNK, CHUNK), stride=(STRIDE, 1))
        blocks = cute.make_layout((SUB, SUB, SUBS), stride=(1, DIAG_STRIDE, SUB * DIAG_STRIDE))
        diagonal = cute.recast_ptr(base + AKK + CHUNK * STRIDE, dtype=F32)
        return (
            cute.make_tensor(base, below),
            cute.make_tensor(base + AKK, whole),
            cute.make_tensor(diagonal, blocks),
        )

    @cute.jit
    def invert(
        self, base: cute.Pointer, diag, acc, betas, sub, lane, row, tidx, team=0, meanwhile=None
    ):
        """Inverts I + Akk.

        diag, acc: products of keys as the MMA leaves them. base: memory for `matrices` that nobody else reads.
        meanwhile: what the last warp does while others substitute.
        """
        sA, sInv, sZ = self.matrices(base)
        self.store_akk(sA, sZ, diag, acc, betas, sub, lane, row)
        self.sync_group(team)
        pair = cute.arch.make_warp_uniform(tidx // 32)
        if pair < 2:
            self.substitute(sZ[None, None, tidx // SUB], sInv, tidx // SUB, tidx % SUB)
        elif cutlass.const_expr(meanwhile is not None):
            if pair == SUBS - 1:
                meanwhile()
        self.sync_group(team)
        if pair < 2:
            self.complement(sA, sInv, 2 * pair + 1, 2 * pair, 1, lane)
        self.sync_group(team)
        if pair < 2:
            self.complement(sA, sInv, pair + 2, 0, 2, lane)

    def sync_group(self, team):
        cute.arch.barrier(barrier_id=Barrier.GROUP + len(Barrier) * team, number_of_threads=GROUP)

    @cute.jit
    def store_akk(self, sA: cute.Tensor, sZ: cute.Tensor, diag, acc, betas, sub, lane, row):
        """Stores Akk = beta_i k_i k_j ..., j < i; keys that have roots of strengths need no beta."""
        for r in cutlass.range_constexpr(2):
            beta = F32(1.0) if cutlass.const_expr(self.config.rooted) else betas[row + r]
            own = cute.make_rmem_tensor(4, F32)
            for c in cutlass.range_constexpr(4):
                below = lane % 4 * 4 + c < lane // 4 * 2 + r
                own[c] = beta * diag[2 * r + c // 2, c % 2] if below else F32(0.0)
            at = lane % 4 * 4 + (lane // 4 * 2 + r + sub * SUB) * DIAG_STRIDE
            cute.autovec_copy(own, view(sZ.iterator, at, 4))
            for d in cutlass.range_constexpr(1, SUBS):
                here, rows, column = tile_of(sub, row, d, self.config.beside)
                if here:
                    strength = beta
                    if cutlass.const_expr(d == SUBS - 1 and not self.config.rooted):
                        strength = betas[rows + r]
                    for c in cutlass.range_constexpr(4):
                        own[c] = strength * acc[2 * r + c // 2, c % 2, d - 1]
                    rounded = cute.make_rmem_tensor(4, F16)
                    rounded.store(own.load().to(F16))
                    at = (rows + r - SUB) * AKK_STRIDE + column * SUB + lane % 4 * 4
                    cute.autovec_copy(rounded, view(sA.iterator, at, 4))

    @cute.jit
    def substitute(self, z: cute.Tensor, sInv: cute.Tensor, number, column):
        """Computes one column of the inverse of a diagonal block."""
        x = cute.make_rmem_tensor(SUB, F32)
        z_row = cute.make_rmem_tensor(SUB, F32)
        for i in cutlass.range_constexpr(SUB):
            for part in cutlass.range_constexpr(cute.ceil_div(i, 4)):
                source = view(z.iterator, DIAG_STRIDE * i + 4 * part, 4)
                cute.autovec_copy(
                    source, cute.make_tensor(z_row.iterator + 4 * part, cute.make_layout(4))
                )
            value = F32(1.0) if column == i else F32(0.0)
            for m in cutlass.range_constexpr(i):
                value = value - z_row[m] * x[m]
            x[i] = value
        for i in cutlass.range_constexpr(SUB):
            sInv[number * SUB + i, number * SUB + column] = x[i].to(F16)

    @cute.jit
    def complement(self, sA, sInv, to, first, size: cutlass.Constexpr, lane):
        """Computes blocks (to, first ..) of the inverse: -sum over m of inverse(to, m) Akk(m, ..) inverse(.., ..)."""
        mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(F16, F32, (SUB, 8, SUB)), permutation_mnk=(SUB, SUB, SUB)
        )
        a = mma.make_fragment_A(mma.partition_shape_A((SUB, SUB)))
        b = mma.make_fragment_B(mma.partition_shape_B((SUB, SUB)))
        left = cute.make_rmem_tensor((a.shape, size), F16)
        for j in cutlass.range_constexpr(size):
            acc = cute.make_rmem_tensor(mma.partition_shape_C((SUB, SUB)), F32)
            acc.fill(0.0)
            for m in cutlass.range(first + size, to + 1, unroll=1):
                self.fetch_a(mma, sInv, to, m, a, lane)
                self.fetch_b(mma, sA, m - 1, first + j, b, lane)
                cute.gemm(mma, acc, a, b, acc)
            negative = cute.make_rmem_tensor(cute.size(acc), F32)
            for i in cutlass.range_constexpr(cute.size(acc)):
                negative[i] = -acc[i]
            part = cute.make_tensor(
                left.iterator + j * cute.size(a), cute.make_layout(cute.size(a))
            )
            part.store(negative.load().to(F16))
        for j in cutlass.range_constexpr(size):
            acc = cute.make_rmem_tensor(mma.partition_shape_C((SUB, SUB)), F32)
            acc.fill(0.0)
            for m in cutlass.range_constexpr(j, size):
                own = cute.make_tensor(left.iterator + m * cute.size(a), a.layout)
                self.fetch_b(mma, sInv, first + m, first + j, b, lane)
                cute.gemm(mma, acc, own, b, acc)
            rounded = cute.make_rmem_tensor(cute.size(acc), F16)
            flat = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
            rounded.store(flat.load().to(F16))
            for tile in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    at = (
                        (to * SUB + lane // 4 + 8 * r) * STRIDE
                        + (first + j) * SUB
                        + 8 * tile
                        + lane % 4 * 2
                    )
                    pair = cute.make_tensor(
                        rounded.iterator + 4 * tile + 2 * r, cute.make_layout(2)
                    )
                    cute.autovec_copy(pair, view(sInv.iterator, at, 2))

    def fetch_a(self, mma, matrix, i, j, fragment, lane):
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), F16)
        load = cute.make_tiled_copy_A(atom, mma).get_slice(lane)
        cute.copy(load, load.partition_S(tile(matrix, i, j)), load.retile(fragment))

    def fetch_b(self, mma, matrix, i, j, fragment, lane):
        """Loads a row-major tile as the second operand: ldmatrix transposes."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), F16)
        load = cute.make_tiled_copy_B(atom, mma).get_slice(lane)
        source = tile(matrix, i, j)
        turned = cute.make_tensor(source.iterator, cute.select(source.layout, mode=[1, 0]))
        cute.copy(load, load.partition_S(turned), load.retile(fragment))

    @cute.jit
    def store_tprime(self, base: cute.Pointer, block, akk, betas, tidx, left):
        """Writes T' to the block, and for the caller whole rows of the inverse, which have no beta; by 256 threads.

        A thread has one or two units of the triangle, in the order of the block.
        """
        _, sInv, _ = self.matrices(base)
        held = cute.make_rmem_tensor(UNIT, F16)
        weighed = cute.make_rmem_tensor(UNIT, F32)
        rounded = cute.make_rmem_tensor(UNIT, self.operand)
        beta = cute.make_rmem_tensor(UNIT, F32)
        beta.fill(1.0)
        for i in cutlass.range_constexpr(2):
            number = tidx + 2 * GROUP * i
            if number < TRIANGLE // UNIT:
                row, column = place_in_triangle(number)
                if cutlass.const_expr(not self.config.rooted):
                    cute.autovec_copy(view(betas.iterator, column, UNIT), beta)
                cute.autovec_copy(view(sInv.iterator, row * STRIDE + column, UNIT), held)
                for c in cutlass.range_constexpr(UNIT):
                    weighed[c] = held[c].to(F32) * beta[c]
                rounded.store(weighed.load().to(self.operand))
                cute.autovec_copy(rounded, view(block.iterator, T_PRIME + UNIT * number, UNIT))
        if cutlass.const_expr(self.config.intra):
            units = CHUNK // UNIT  # of a row
            column, apart = tidx % units * UNIT, 2 * GROUP // units
            for i in cutlass.range_constexpr(CHUNK // apart):
                row = tidx // units + apart * i
                weighed.fill(0.0)
                if column // SUB <= row // SUB:
                    cute.autovec_copy(view(sInv.iterator, row * STRIDE + column, UNIT), held)
                    for c in cutlass.range_constexpr(UNIT):
                        weighed[c] = held[c].to(F32)
                write_columns(akk, weighed, row, column, left, self.dtype)


def tile(matrix, i, j):
    """Returns block (i, j) of a matrix in shared memory."""
    stride = matrix.stride[0]
    pointer = matrix.iterator + cute.assume(i * SUB * stride + j * SUB, divby=8)
    return cute.make_tensor(pointer, cute.make_layout((SUB, SUB), stride=(stride, 1)))
