"""Factors that a backward pass reads, for every chunk and value head at once, from what `prepare` has written:

    w = T' kh        u = T' v        qg = 2^G q        kg = 2^(G_L - G) k

with T' = (I + Akk)^-1 diag(beta) and kh = 2^G k. Only training needs them. The kernel is
limited by the bytes that it moves.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from ...cute.memory import copy_async, view
from ...cute.types import DTYPES, F32
from ..config import CHUNK, HEAD_DIM, SUB, TRIANGLE, FactorsConfig
from .block import KG, KH, QG, T_PRIME, WIDE, find_chunk
from .fragments import UNIT, unit_of_triangle, unit_of_wide

THREADS = 256  # a warp has 16 columns of w and of u
UNITS = HEAD_DIM // UNIT  # of a row
SUBS = CHUNK // SUB


class KdaFactors:
    """One CTA per chunk and value head.

    | shared memory | bytes |
    |---|---|
    | qg, kh, kg of the block; later w in kh's place | 49,152 |
    | v, rounded as an operand; later u | 16,384 |
    | T' from the diagonal's sub-blocks on | 5,120 |
    """

    def __init__(self, config: FactorsConfig):
        self.config = config
        self.dtype, self.operand = DTYPES[config.dtype], DTYPES[config.operand]

    @cute.jit
    def __call__(
        self,
        blocks: cute.Tensor,
        v: cute.Tensor,
        w: cute.Tensor,
        u: cute.Tensor,
        qg: cute.Tensor,
        kg: cute.Tensor,
        cu_seqlens: cute.Tensor,
        scale: cutlass.Float32,
        first_slot: cutlass.Int32,
        slots: cutlass.Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `launch.factors_arguments`."""
        per_row = None
        if cutlass.const_expr(cu_seqlens is None):
            per_row = cute.fast_divmod_create_divisor_v2(cute.ceil_div(v.shape[1], CHUNK))
        self.kernel(blocks, v, w, u, qg, kg, cu_seqlens, per_row, scale, first_slot).launch(
            grid=(v.shape[2], slots, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        blocks: cute.Tensor,
        v: cute.Tensor,
        w: cute.Tensor,
        u: cute.Tensor,
        qg: cute.Tensor,
        kg: cute.Tensor,
        cu_seqlens: cute.Tensor,
        per_row: cute.FastDivmodDivisorV2,
        scale: cutlass.Float32,
        first_slot: cutlass.Int32,
    ):
        head, slot, _ = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        batch, token, left = find_chunk(cu_seqlens, per_row, first_slot + slot, v.shape[1])
        smem = SmemAllocator()
        wide = smem.allocate_array(self.operand, 3 * WIDE, byte_alignment=128)
        values = smem.allocate_array(self.operand, WIDE, byte_alignment=128)
        triangle = smem.allocate_array(self.operand, TRIANGLE, byte_alignment=128)
        if left > 0:
            block = blocks[slot, head, None]
            self.fetch(view(block.iterator, QG, UNIT).iterator, wide, 3 * WIDE, tidx)
            self.fetch(view(block.iterator, T_PRIME, UNIT).iterator, triangle, TRIANGLE, tidx)
            cute.arch.cp_async_commit_group()
            own = cute.domain_offset((token, 0), v[batch, None, head, None])
            self.load_values(own, values, left, tidx)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            for source, target in ((wide + KH, w), (values, u)):
                # Nobody but the warp itself has read the columns that it writes.
                self.store_product(self.multiply(triangle, source, tidx), source, tidx)
                cute.arch.sync_threads()
                rows = cute.domain_offset((token, 0), target[batch, None, head, None])
                self.write_rows(source, self.dtype, rows, F32(1.0), left, tidx)
            for source, target, factor in ((wide + QG, qg, 1.0 / scale), (wide + KG, kg, F32(1.0))):
                rows = cute.domain_offset((token, 0), target[batch, None, head, None])
                self.write_rows(source, self.operand, rows, factor, left, tidx)

    @cute.jit
    def fetch(self, source: cute.Pointer, target: cute.Pointer, size: cutlass.Constexpr, tidx):
        """Starts to copy a part of the block, in the layout that it has there."""
        for i in cutlass.range(tidx, size // UNIT, THREADS, unroll=1):
            copy_async(view(source, i * UNIT, UNIT), view(target, i * UNIT, UNIT))

    @cute.jit
    def load_values(self, v: cute.Tensor, target: cute.Pointer, left, tidx):
        """Loads v as an operand; rows past the end become zero, whatever lies behind the end."""
        held = cute.make_rmem_tensor(UNIT, self.dtype)
        rounded = cute.make_rmem_tensor(UNIT, self.operand)
        for i in cutlass.range_constexpr(CHUNK * UNITS // THREADS):
            row, unit = self.place(i, tidx)
            held.fill(0.0)
            if row < left:
                cute.autovec_copy(view(v[row, None].iterator, unit * UNIT, UNIT), held)
            rounded.store(held.load().to(F32).to(self.operand))
            cute.autovec_copy(rounded, view(target, unit_of_wide(row, unit), UNIT))

    def place(self, i, tidx):
        """Returns row and unit of the thread's i-th 16 bytes of a [64, 128] matrix."""
        return tidx // UNITS + i * (THREADS // UNITS), tidx % UNITS

    @cute.jit
    def multiply(self, triangle: cute.Pointer, source: cute.Pointer, tidx):
        """Returns the products of 16 columns of T' and a [64, 128] matrix: [registers of C, tile, sub-block]."""
        mma = cute.make_mma_atom(warp.MmaF16BF16Op(self.operand, F32, (SUB, 8, SUB)))
        turned = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), self.operand)
        plain = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.operand)
        lane, unit = tidx % 32, tidx // 32 * 2 + tidx % 32 // 16
        a = cute.make_rmem_tensor(UNIT, self.operand)
        b = cute.make_rmem_tensor((UNIT, SUBS), self.operand)
        acc = cute.make_rmem_tensor((4, 2, SUBS), F32)
        acc.fill(0.0)
        for j in cutlass.range_constexpr(SUBS):
            at = unit_of_wide(SUB * j + lane % SUB, unit)
            cute.copy(turned, as_matrices(view(source, at, UNIT)), as_matrices(b[None, j]))
        for i in cutlass.range_constexpr(SUBS):
            for j in cutlass.range_constexpr(i + 1):
                at = unit_of_triangle(SUB * i + lane % SUB, SUB * j + lane // SUB * UNIT)
                cute.copy(plain, as_matrices(view(triangle, at, UNIT)), as_matrices(a))
                left = cute.make_tensor(a.iterator, cute.make_layout(((2, 2, 2), 1, 1)))
                for tile in cutlass.range_constexpr(2):
                    right = cute.make_tensor(
                        b.iterator + (4 * tile + UNIT * j), cute.make_layout(((2, 2), 1, 1))
                    )
                    sums = cute.make_tensor(
                        acc.iterator + (4 * tile + 8 * i), cute.make_layout(((2, 2), 1, 1))
                    )
                    cute.gemm(mma, sums, left, right, sums)
        return acc

    @cute.jit
    def store_product(self, product: cute.Tensor, target: cute.Pointer, tidx):
        """Writes the product where its second operand was, in the dtype of the results."""
        store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        place = cute.recast_ptr(target, dtype=self.dtype)
        lane = tidx % 32
        unit = tidx // 32 * 2 + lane // SUB
        rounded = cute.make_rmem_tensor(UNIT, self.dtype)
        for i in cutlass.range_constexpr(SUBS):
            own = cute.make_tensor(product.iterator + 8 * i, cute.make_layout(UNIT))
            rounded.store(own.load().to(self.dtype))
            at = unit_of_wide(SUB * i + lane % SUB, unit)
            cute.copy(store, as_matrices(rounded), as_matrices(view(place, at, UNIT)))

    @cute.jit
    def write_rows(
        self,
        source: cute.Pointer,
        dtype: cutlass.Constexpr,
        target: cute.Tensor,
        factor,
        left,
        tidx,
    ):
        """Writes the rows of a matrix in shared memory to the caller's tensor."""
        place = cute.recast_ptr(source, dtype=dtype)
        held = cute.make_rmem_tensor(UNIT, dtype)
        rounded = cute.make_rmem_tensor(UNIT, self.dtype)
        for i in cutlass.range_constexpr(CHUNK * UNITS // THREADS):
            row, unit = self.place(i, tidx)
            if row < left:
                cute.autovec_copy(view(place, unit_of_wide(row, unit), UNIT), held)
                rounded.store((held.load().to(F32) * factor).to(self.dtype))
                cute.autovec_copy(rounded, view(target[row, None].iterator, unit * UNIT, UNIT))


def as_matrices(registers):
    """Returns eight elements as ldmatrix and stmatrix see them."""
    return cute.make_tensor(registers.iterator, cute.make_layout((UNIT, 1)))
