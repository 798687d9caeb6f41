"""Prefill of the gated delta rule on Hopper in one kernel: nothing but inputs, outputs and states in global memory.

Every CTA makes what belongs to the tokens of a chunk (decays, norms, products of q and k, the inverse) for itself, some
chunks ahead of the warpgroup that holds the state.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cula_core.cute.memory import by_token, load_tile, swizzled
from cula_core.cute.output import GROUP
from cula_core.cute.types import F32, I32
from cula_core.cute.work import ITEM_WORDS, SLOTS, draw, post

from ..config import CHUNK, HEAD_DIM, V_TILE, Config
from .chain import Chain
from .gates import Gates
from .layout import (
    GATE_SLOTS,
    GATES,
    INVERSE_SLOTS,
    K_SLOTS,
    PRODUCT_SLOTS,
    Q_SLOTS,
    SQUARE,
    TABLE_SLOTS,
    TABLES,
    TALL,
    V_SLOTS,
    WIDE,
    Item,
    Layout,
    Memory,
    Pipes,
)
from .products import Products
from .solve import SCRATCH_BYTES, Solve

THREADS = 640
LOADER, GATER = 16, 17  # warps
# Per thread of the chain, of the warpgroups that help it, of the warps behind these: 5 x 96 together.
REGISTERS = (216, 72, 48)
V_TILES = HEAD_DIM // V_TILE


class GatedDeltaPrefill(Layout):
    """Persistent CTAs over items of work: (sequence, state head, 64 columns of v).

    | thread role | warps | work |
    |---|---|---|
    | chain | 0-3 | state and outputs |
    | products | 4-7 | Aqk, norms, factors of tokens |
    | solve | 8-11, 12-15 | T' of every other chunk each |
    | load | 16 | next item, TMA loads |
    | gates | 17 | sums of log decays, write strengths |

    | shared memory | bytes | slots |
    |---|---|---|
    | k [64, 128] | 16384 | 4 |
    | q [64, 128] | 16384 | 3 |
    | v [64, 64] | 8192 | 2 |
    | T' [64, 64] | 8192 | 3 |
    | Aqk [64, 64] | 8192 | 2 |
    | o [64, 64] | 8192 | 2 |
    | gates | 768 | 4 |
    | tables | 1296 | 4 |
    | scratch of a group that inverts | 13568 | 2 |
    """

    def __init__(self, config: Config):
        super().__init__(config)
        self.chain, self.products = Chain(config), Products(config)
        self.solve, self.gates = Solve(config), Gates(config)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        rates: cute.Tensor,
        biases: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        targets: cute.Tensor,
        fresh: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        segments: cute.Tensor,
        counter: cute.Tensor,
        scale: cutlass.Float32,
        softplus_beta: cutlass.Float32,
        threshold: cutlass.Float32,
        null_slot: cutlass.Int32,
        checkpoint_every: cutlass.Int32,
        ctas: cutlass.Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `launch.fake_arguments`; what the config lacks is None."""
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        wide = swizzled((CHUNK, HEAD_DIM), "k", self.dtype)
        tall = swizzled((CHUNK, V_TILE), "k", self.dtype)
        tma_q, mQ = cpasync.make_tiled_tma_atom(load, by_token(q), wide, (CHUNK, HEAD_DIM))
        tma_k, mK = cpasync.make_tiled_tma_atom(load, by_token(k), wide, (CHUNK, HEAD_DIM))
        tma_v, mV = cpasync.make_tiled_tma_atom(load, by_token(v), tall, (CHUNK, V_TILE))
        tma_o, mO = cpasync.make_tiled_tma_atom(store, by_token(out), tall, (CHUNK, V_TILE))
        self.kernel(
            tma_q, mQ, tma_k, mK, tma_v, mV, tma_o, mO, out, g, beta, rates, biases, initial, indices, targets, fresh,
            final, checkpoints, segments, counter, scale, softplus_beta, threshold, null_slot, checkpoint_every,
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        out: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        rates: cute.Tensor,
        biases: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        targets: cute.Tensor,
        fresh: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        segments: cute.Tensor,
        counter: cute.Tensor,
        scale: cutlass.Float32,
        softplus_beta: cutlass.Float32,
        threshold: cutlass.Float32,
        null_slot: cutlass.Int32,
        checkpoint_every: cutlass.Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        pipes = self.make_pipes(smem)
        memory = Memory(
            k=smem.allocate_array(self.dtype, K_SLOTS * WIDE, byte_alignment=1024),
            q=smem.allocate_array(self.dtype, Q_SLOTS * WIDE, byte_alignment=1024),
            v=smem.allocate_array(self.dtype, V_SLOTS * TALL, byte_alignment=1024),
            inverse=smem.allocate_array(self.operand, INVERSE_SLOTS * SQUARE, byte_alignment=1024),
            products=smem.allocate_array(self.operand, PRODUCT_SLOTS * SQUARE, byte_alignment=1024),
            o=smem.allocate_array(self.dtype, SLOTS * TALL, byte_alignment=1024),
            gates=smem.allocate_array(F32, GATE_SLOTS * GATES, byte_alignment=16),
            tables=smem.allocate_array(F32, TABLE_SLOTS * TABLES, byte_alignment=16),
            items=smem.allocate_array(I32, SLOTS * ITEM_WORDS, byte_alignment=16),
            scratch=smem.allocate_array(self.operand, SCRATCH_BYTES, byte_alignment=128),
        )
        self.clear(memory.inverse, INVERSE_SLOTS * SQUARE, tidx)
        self.clear(memory.products, PRODUCT_SLOTS * SQUARE, tidx)
        cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp_idx >= LOADER:
            cute.arch.setmaxregister_decrease(REGISTERS[2])
            if warp_idx == LOADER:
                self.load(
                    pipes, memory, tma_q, mQ, tma_k, mK, tma_v, mV, indices, targets, fresh, segments, counter,
                    null_slot, out.shape[2], out.shape[1], out.shape[0],
                )  # fmt: skip
            if warp_idx == GATER:
                self.gates.run(
                    pipes, memory, g, beta, rates, biases, softplus_beta, 1.0 / softplus_beta, threshold
                )  # fmt: skip
        elif warp_idx < 4:
            cute.arch.setmaxregister_increase(REGISTERS[0])
            self.chain.run(
                pipes, memory, tma_o, mO, out, initial, final, checkpoints, checkpoint_every, tidx
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_decrease(REGISTERS[1])
            if warp_idx < 8:
                self.products.run(pipes, memory, scale, tidx % GROUP)
            else:
                self.solve.run(pipes, memory, warp_idx // 4 - 2, tidx % GROUP)

    def make_pipes(self, smem):
        """Returns the pipelines, on barriers of their own."""
        thread = pipeline.Agent.Thread

        def group(count):
            return pipeline.CooperativeGroup(thread, count)

        def loaded(slots, elements):
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=smem.allocate_array(cutlass.Int64, 2 * slots),
                num_stages=slots,
                producer_group=pipeline.CooperativeGroup(thread),
                consumer_group=group(4),
                tx_count=elements * self.dtype.width // 8,
                cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
                defer_sync=True,
            )

        def made(slots, producers, consumers):
            return pipeline.PipelineAsync.create(
                barrier_storage=smem.allocate_array(cutlass.Int64, 2 * slots),
                num_stages=slots,
                producer_group=group(producers),
                consumer_group=group(consumers),
                defer_sync=True,
            )

        return Pipes(
            k=loaded(K_SLOTS, WIDE),
            q=loaded(Q_SLOTS, WIDE),
            v=loaded(V_SLOTS, TALL),
            gates=made(GATE_SLOTS, 32, 8),
            tables=made(TABLE_SLOTS, 4, 4),
            products=made(PRODUCT_SLOTS, 4, 4),
            inverse=made(INVERSE_SLOTS, 4, 4),
            items=made(SLOTS, 1, 4 * GROUP + 32),
        )

    @cute.jit
    def clear(self, base: cute.Pointer, count: cutlass.Constexpr, tidx):
        """Writes zeros to shared memory: blocks above the diagonal stay zero."""
        units = cute.make_tensor(base, cute.make_layout((8, count // 8)))
        zeros = cute.make_rmem_tensor(8, self.operand)
        zeros.fill(0.0)
        for i in cutlass.range(tidx, count // 8, THREADS, unroll=1):
            cute.autovec_copy(zeros, units[None, i])

    # ---- items of work ----------------------------------------------------------------------------------------------

    @cute.jit
    def load(
        self,
        pipes: Pipes,
        memory: Memory,
        tma_q,
        mQ: cute.Tensor,
        tma_k,
        mK: cute.Tensor,
        tma_v,
        mV: cute.Tensor,
        indices: cute.Tensor,
        targets: cute.Tensor,
        fresh: cute.Tensor,
        segments: cute.Tensor,
        counter: cute.Tensor,
        null_slot: cutlass.Int32,
        heads: cutlass.Int32,
        tokens: cutlass.Int32,
        batch: cutlass.Int32,
    ):
        """Announces items to the other warps and loads their chunks, ahead of them."""
        if cutlass.const_expr(self.config.packed):  # the segment table is there
            cute.arch.griddepcontrol_wait()
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        sQ, sK, sV = self.queries(memory.q), self.keys(memory.k), self.values(memory.v)
        group_q, group_k, group_v = heads // mQ.shape[2], heads // mK.shape[2], heads // mV.shape[2]
        columns = heads * V_TILES
        count = batch * columns
        if cutlass.const_expr(self.config.packed):
            count = segments[0, 0] * columns
        producer = pipeline.PipelineUserType.Producer
        k_at = pipeline.make_pipeline_state(producer, K_SLOTS)
        q_at = pipeline.make_pipeline_state(producer, Q_SLOTS)
        v_at = pipeline.make_pipeline_state(producer, V_SLOTS)
        item_at = pipeline.make_pipeline_state(producer, SLOTS)
        number = block
        if cutlass.const_expr(self.config.packed):
            number = draw(counter, lane)
        while number < count:
            segment, column = number // columns, number % columns
            head, tile = column // V_TILES, column % V_TILES
            token, in_batch, length, sequence = self.describe(segments, segment, tokens)
            row, target, begins = self.states_of(sequence, indices, targets, fresh, null_slot)
            post(
                pipes.items, item_at, memory.items,
                lambda: Item(1, token, in_batch, length, sequence, row, target, begins, head, tile),
                lane,
            )  # fmt: skip
            item_at.advance()
            chunks = cute.ceil_div(length, CHUNK)
            if row < 0:
                chunks = 0
            head_q, head_k, head_v = head // group_q, head // group_k, head // group_v
            for c in cutlass.range(chunks, unroll=1):
                first = token + c * CHUNK
                pipes.k.producer_acquire(k_at)
                full = pipes.k.producer_get_barrier(k_at)
                load_tile(tma_k, mK, first, head_k, in_batch, 0, sK[None, None, k_at.index], full)
                pipes.q.producer_acquire(q_at)
                full = pipes.q.producer_get_barrier(q_at)
                load_tile(tma_q, mQ, first, head_q, in_batch, 0, sQ[None, None, q_at.index], full)
                pipes.v.producer_acquire(v_at)
                full = pipes.v.producer_get_barrier(v_at)
                load_tile(
                    tma_v, mV, first, head_v, in_batch, tile, sV[None, None, v_at.index], full
                )
                k_at.advance()
                q_at.advance()
                v_at.advance()
            if cutlass.const_expr(self.config.packed):
                number = draw(counter, lane)
            else:
                number = number + ctas
        post(pipes.items, item_at, memory.items, lambda: (0,), lane)

    @cute.jit
    def describe(self, segments: cute.Tensor, segment: cutlass.Int32, tokens: cutlass.Int32):
        """Returns (first token, batch, length, sequence)."""
        if cutlass.const_expr(self.config.packed):
            row = segments[1 + segment, None]
            return row[0], I32(0), row[1], row[2]
        else:
            return I32(0), segment, tokens, segment

    @cute.jit
    def states_of(self, sequence, indices, targets, fresh, null_slot):
        """Returns (row, target, begins) of an item."""
        row = sequence
        if cutlass.const_expr(self.config.indexed):
            row = indices[sequence]
            row = cutlass.select_(row == null_slot, I32(-1), row)
        target = row
        if cutlass.const_expr(self.config.redirected):
            target = targets[sequence]
            target = cutlass.select_(target == null_slot, I32(-1), target)
        begins = I32(1)
        if cutlass.const_expr(self.config.fresh):
            begins = I32(fresh[sequence])
        return row, target, begins
