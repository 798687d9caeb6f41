"""The warpgroup that makes Aqk, the norms of q and k, and every factor that belongs to a token."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from cula_core.cute.functions import exp2
from cula_core.cute.output import GROUP
from cula_core.cute.types import F32
from cula_core.cute.wgmma import issue, mma
from cula_core.cute.widen import widened
from cula_core.cute.work import SLOTS, receive

from ...kernels.chunks import clear_past
from ..config import CHUNK, SUB
from .layout import (
    ADDED,
    BARRIER_PRODUCTS,
    BEHIND,
    GATE_SLOTS,
    GATES,
    K_SLOTS,
    NEAR,
    NORM,
    PRODUCT_SLOTS,
    Q_SLOTS,
    READ,
    SEEN,
    SUM,
    TABLE_SLOTS,
    TABLES,
    TOTAL,
    WIDE,
    Item,
    Layout,
    Memory,
    Pipes,
    by_pairs,
    commit,
    release,
)
from .weights import weigh_left, weighed_diagonal

NORM_EPS = 1e-6


class Products(Layout):
    """Aqk_ij = scale r(q_i) r(k_j) (q_i . k_j) 2^(G_i - G_j), j <= i, as blocks of 16 x 16 on and below the diagonal.

    r is 1 over the norm, or 1. Warp w has tokens 16 w ... In blocks left of the diagonal the decay is a product of what
    the row and the column have to do with the end E of the column's block, both at most 1. The tables hold, by token:

        SEEN 2^G r(k)    READ scale 2^G r(q)    ADDED 2^(behind) r(k)    NEAR 2^(E - G) r(k)    NORM r(k)
    """

    @cute.jit
    def run(self, pipes: Pipes, memory: Memory, scale: cutlass.Float32, tidx: cutlass.Int32):
        """Makes tables and products of every chunk, as far ahead of the chain as there are slots."""
        lane, w = tidx % 32, cute.arch.make_warp_uniform(tidx // 32)
        product = mma(self.dtype, CHUNK, OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        part = product.get_slice(tidx)
        sQ, sK = self.queries(memory.q), self.keys(memory.k)
        queries = product.make_fragment_A(part.partition_A(sQ))
        keys = product.make_fragment_B(part.partition_B(sK))
        acc = cute.make_rmem_tensor(product.partition_shape_C((CHUNK, CHUNK)), F32)
        p = by_pairs(acc)
        sP = self.square(memory.products, PRODUCT_SLOTS)
        gates = self.by_token(memory.gates, GATES, GATE_SLOTS)
        tables = self.by_token(memory.tables, TABLES, TABLE_SLOTS)
        q_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, Q_SLOTS)
        k_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, K_SLOTS)
        table_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, TABLE_SLOTS)
        out_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, PRODUCT_SLOTS)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        item = receive(Item, pipes.items, item_at, memory.items)
        item_at.advance()
        while item.valid != 0:
            for c in cutlass.range(item.chunks, unroll=1):
                pipes.k.consumer_wait(k_at)
                pipes.q.consumer_wait(q_at)
                if cutlass.const_expr(self.config.packed):
                    left = item.length - c * CHUNK
                    if left < CHUNK:
                        clear_past(sK[None, None, k_at.index], left, BARRIER_PRODUCTS, tidx)
                warpgroup.fence()
                tQ, tK = queries[None, None, None, q_at.index], keys[None, None, None, k_at.index]
                issue(product, acc, tQ, tK, True)
                # 1 over the norms of the rows of an accumulator that this thread has, and of token lane % 16.
                rows_q, own_q, own_k = [F32(1.0), F32(1.0)], F32(1.0), F32(1.0)
                if cutlass.const_expr(self.config.l2norm):
                    own_q = self.norm(memory.q, q_at.index, w, lane)
                    own_k = self.norm(memory.k, k_at.index, w, lane)
                    rows_q = [cute.arch.shuffle_sync(own_q, lane // 4 + 8 * b) for b in range(2)]
                pipes.gates.consumer_wait(k_at)
                gate, table = gates[None, k_at.index], tables[None, table_at.index]
                pipes.tables.producer_acquire(table_at)
                self.write_tables(gate, table, own_q * scale, own_k, w, lane)
                commit(pipes.tables, table_at)
                cute.arch.barrier(barrier_id=BARRIER_PRODUCTS, number_of_threads=GROUP)
                sums = (gate[SUM + SUB * w + lane // 4], gate[SUM + SUB * w + lane // 4 + 8])
                strengths = (rows_q[0] * scale, rows_q[1] * scale)
                warpgroup.wait_group(0)
                weigh_left(p, strengths, sums, gate, table, w, lane)
                diagonal = weighed_diagonal(p, strengths, sums, gate, table, w, lane, True)
                pipes.products.producer_acquire(out_at)
                self.store(p, diagonal, sP[None, None, out_at.index], w, lane)
                cute.arch.fence_view_async_shared()
                commit(pipes.products, out_at)
                release(pipes.gates, k_at)
                q_at.advance()
                k_at.advance()
                table_at.advance()
                out_at.advance()
            item = receive(Item, pipes.items, item_at, memory.items)
            item_at.advance()

    @cute.jit
    def norm(self, base: cute.Pointer, slot, w, lane):
        """Returns 1 / |x| of token lane % 16 of the warp, whose halves the lanes of two half warps sum up.

        By ordinary arithmetic: tensor cores are what the chain waits for.
        """
        token = SUB * w + lane % SUB
        # Where the 128-byte swizzle puts the token's first 8 elements of a half; the others differ in three bits.
        row = base + cute.assume(slot * WIDE + lane // SUB * (CHUNK * 64) + token * 64, divby=64)
        sums = [F32(0.0)] * 4
        for unit in cutlass.range_constexpr(64 // 8):
            at = row + cute.assume((unit ^ token % 8) * 8, divby=8)
            eight = cute.make_rmem_tensor(8, self.dtype)
            cute.autovec_copy(cute.make_tensor(at, cute.make_layout(8)), eight)
            wide = widened(eight)
            for i in cutlass.range_constexpr(8):
                sums[i % 4] = sums[i % 4] + wide[i] * wide[i]
        square = (sums[0] + sums[1]) + (sums[2] + sums[3])
        square = square + cute.arch.shuffle_sync_bfly(square, SUB)
        return cute.math.rsqrt(square + NORM_EPS)

    @cute.jit
    def write_tables(self, gate, table, q_factor, k_factor, w, lane):
        """Writes what belongs to the warp's 16 tokens; half of the lanes write what looks back, half what looks on."""
        token = SUB * w + lane % SUB
        here = gate[SUM + token]
        if lane < SUB:
            kept = exp2(here)
            table[SEEN + token] = kept * k_factor
            table[READ + token] = kept * q_factor
            table[NORM + token] = k_factor
        else:
            table[ADDED + token] = exp2(gate[BEHIND + token]) * k_factor
            table[NEAR + token] = exp2(gate[SUM + SUB * w + SUB - 1] - here) * k_factor
        if (w == 0) & (lane == 0):
            table[TOTAL] = exp2(gate[SUM + CHUNK - 1])

    @cute.jit
    def store(self, p: cute.Tensor, diagonal: cute.Tensor, target: cute.Tensor, w, lane):
        """Rounds the warp's blocks left of the diagonal and on it, and stores them."""
        block = cute.make_tiled_mma(
            warp.MmaF16BF16Op(self.operand, F32, (SUB, 8, SUB)), permutation_mnk=(SUB, SUB, SUB)
        )
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.operand)
        save = cute.make_tiled_copy_C(atom, block).get_slice(lane)
        rounded = cute.make_rmem_tensor(block.partition_shape_C((SUB, SUB)), self.operand)
        for j in cutlass.range_constexpr(CHUNK // SUB):
            if j < w:
                exact = cute.make_tensor(p.iterator + 8 * j, rounded.layout)
                rounded.store(exact.load().to(self.operand))
                tile = cute.local_tile(target, (SUB, SUB), (w, j))
                cute.copy(save, save.retile(rounded), save.partition_D(tile))
        exact = cute.make_tensor(diagonal.iterator, rounded.layout)
        rounded.store(exact.load().to(self.operand))
        tile = cute.local_tile(target, (SUB, SUB), (w, w))
        cute.copy(save, save.retile(rounded), save.partition_D(tile))
