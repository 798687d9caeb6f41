"""The recurrence on Blackwell: it computes what needs the state, chunk after chunk, all columns of v at once.

With the state S [K, V] before a chunk, and what `prepare` has written of it:

    x   = v - kh S        u = T' x        o = qg S + Aqk u        S <- diag(decay) S + kg^T u

Everything is transposed, so that the 128 columns of v are the 128 lanes of tensor memory. S^T stays in fp32 registers;
what the tensor cores multiply with (a rounded copy of S^T, x^T, u^T) lies in tensor memory, beside their sums:

    x^T = v^T - S^T kh^T        o^T = S^T qg^T        u^T = x^T T'^T
    S^T <- S^T decay + u^T kg   o^T += u^T Aqk^T

A scan walks through a segment on a state of K + V columns, of which the first V start from zero and the last K from the
identity, with v = 0: they end as what the segment adds to a state, and as the matrix M that it applies to one.
"""

from enum import IntEnum

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05, warp
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.memory import SmemAllocator

from cula_core.cute.memory import by_token, swizzled, view
from cula_core.cute.schedule import counter_of
from cula_core.cute.types import DTYPES, F32, I32
from cula_core.cute.work import ITEM_WORDS, SLOTS, receive
from cula_core.delta_rule.config import CHUNK, HEAD_DIM, RecurrenceConfig
from cula_core.delta_rule.kernels.block import DECAY, KG, KH, QG, STAGED_AQK, T_PRIME, WIDE
from cula_core.delta_rule.kernels.fragments import UNIT, unit_of_wide
from cula_core.delta_rule.kernels.items import Item, Loader, Stages
from cula_core.delta_rule.kernels.states import States

from ..arch import TARGET

V_TILE = TARGET.v_tile
GROUPS = 2  # of four warps: each has half of the columns of whatever lies in tensor memory
THREADS = 128 * GROUPS  # that have the state
UNITS = HEAD_DIM // UNIT  # of 16 bytes, of a row
BARRIER_OUTPUT = 1
TMEM_COLUMNS = 512


class Tmem(IntEnum):
    """Columns of tensor memory. Sums are fp32, operands two to a column."""

    S = 0  # operand, 64
    X = 64  # operand, 32
    U = 96  # operand, 32
    X_SUM = 128  # 64
    U_SUM = 192  # 64
    S_SUM = 256  # 128
    O_SUM = 384  # 64 for each of two chunks


class Signal(IntEnum):
    """mbarriers between the warp that issues products and the threads that have the state, a phase per chunk.

    No signal says that a place is free again, because the next signal of the chain implies it.
    """

    S_READY, X_READY, U_READY = 0, 1, 2  # operands, from all threads
    X_DONE, U_DONE, S_DONE = 3, 4, 5  # sums
    O_DONE = 6  # and 7: of two chunks
    COUNT = 8


class KdaRecurrence:
    """Persistent CTAs over items of work: (segment or sequence, value head).

    | thread role | warps | work |
    |---|---|---|
    | state | 0-7 | state and outputs: warp w has 32 columns of v from 32 (w % 4) on, and half (w / 4) of the others |
    | products | 8 | issues them |
    | load | 9 | next item; blocks by bulk copies, v by TMA |
    | none | 10, 11 | |

    | shared memory | bytes | slots |
    |---|---|---|
    | block with all of T' and Aqk (in a scan without qg and Aqk), v [64, 128] | 2 stage | config.stages |
    | o [64, 128] | 16,384 | 2 |
    """

    def __init__(self, config: RecurrenceConfig):
        self.config = config
        self.dtype, self.operand = DTYPES[config.dtype], DTYPES[config.operand]
        self.tiles = config.tiles
        self.threads = THREADS + 128  # registers move between whole groups of four warps only
        self.stages = Stages(config)
        self.states = States(config, self)
        self.loader = Loader(config, self.stages, self.states)

    @cute.jit
    def __call__(
        self,
        blocks: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        targets: cute.Tensor,
        fresh: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        checkpoint_rows: cute.Tensor,
        checkpoint_offsets: cute.Tensor,
        maps: cute.Tensor,
        starts: cute.Tensor,
        factors: cute.Tensor,
        segments: cute.Tensor,
        null_slot: cutlass.Int32,
        checkpoint_every: cutlass.Int32,
        segment_tokens: cutlass.Int32,
        first_slot: cutlass.Int32,
        ctas: cutlass.Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `launch.recurrence_arguments`; what the config lacks is None."""
        tile = swizzled((CHUNK, V_TILE), "k", self.dtype)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_v, mV = cpasync.make_tiled_tma_atom(load, by_token(v), tile, (CHUNK, V_TILE))
        tma_o, mO = cpasync.make_tiled_tma_atom(store, by_token(out), tile, (CHUNK, V_TILE))
        counter = counter_of(segments, int(not self.config.scan))
        self.kernel(
            blocks, tma_v, mV, tma_o, mO, out, initial, indices, targets, fresh, final, checkpoints, checkpoint_rows,
            checkpoint_offsets, maps, starts, segments, counter, null_slot, checkpoint_every, segment_tokens,
            first_slot,
        ).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        blocks: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        out: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        targets: cute.Tensor,
        fresh: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        checkpoint_rows: cute.Tensor,
        checkpoint_offsets: cute.Tensor,
        maps: cute.Tensor,
        starts: cute.Tensor,
        segments: cute.Tensor,
        counter: cute.Tensor,
        null_slot: cutlass.Int32,
        checkpoint_every: cutlass.Int32,
        segment_tokens: cutlass.Int32,
        first_slot: cutlass.Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * (self.stages.count + SLOTS))
        signals = smem.allocate_array(cutlass.Int64, Signal.COUNT)
        tmem_address = smem.allocate_array(I32, 1)
        base = smem.allocate_array(
            self.operand, self.stages.count * self.stages.size, byte_alignment=1024
        )
        o_base = None
        if cutlass.const_expr(not self.config.scan):
            o_base = smem.allocate_array(self.dtype, SLOTS * WIDE, byte_alignment=1024)
        item_words = smem.allocate_array(I32, SLOTS * ITEM_WORDS, byte_alignment=16)
        thread = pipeline.Agent.Thread
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stages.count,
            producer_group=pipeline.CooperativeGroup(thread),
            # The threads that have the state, and the tensor cores.
            consumer_group=pipeline.CooperativeGroup(thread, THREADS + 1),
            tx_count=self.config.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )
        items = pipeline.PipelineAsync.create(
            barrier_storage=barriers + 2 * self.stages.count,
            num_stages=SLOTS,
            producer_group=pipeline.CooperativeGroup(thread, 1),
            consumer_group=pipeline.CooperativeGroup(thread, THREADS + 32),
            defer_sync=True,
        )
        if tidx == 0:
            for i in cutlass.range_constexpr(Signal.COUNT):
                cute.arch.mbarrier_init(signals + i, THREADS if i <= Signal.U_READY else 1)
        cute.arch.mbarrier_init_fence()
        if warp_idx == THREADS // 32:
            cute.arch.alloc_tmem(TMEM_COLUMNS, tmem_address)
            cute.arch.relinquish_tmem_alloc_permit()
        self.stages.clear(base, tidx, self.threads)
        before_sync()
        cute.arch.sync_threads()
        after_sync()
        tmem = cute.arch.retrieve_tmem_ptr(F32, 16, tmem_address)
        if warp_idx >= THREADS // 32:
            cute.arch.setmaxregister_decrease(72)
            if warp_idx == THREADS // 32:
                self.multiply(ring, items, base, item_words, signals, tmem)
            elif warp_idx == THREADS // 32 + 1:
                self.loader.load(
                    ring, items, base, item_words, blocks, tma_v, mV, indices, targets, fresh, None, None, segments,
                    counter, null_slot, segment_tokens, first_slot, out.shape[2], out.shape[1], out.shape[0],
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(216)
            self.walk(
                ring,
                items,
                base,
                o_base,
                item_words,
                signals,
                tmem,
                tma_o,
                mO,
                out,
                initial,
                final,
                checkpoints,
                checkpoint_rows,
                checkpoint_offsets,
                checkpoint_every,
                maps,
                starts,
                tidx,
            )
        before_sync()
        cute.arch.sync_threads()
        if warp_idx == THREADS // 32:
            after_sync()
            cute.arch.dealloc_tmem(tmem, TMEM_COLUMNS)

    # ---- products ---------------------------------------------------------------------------------------------------

    @cute.jit
    def multiply(self, ring, items, base: cute.Pointer, item_words, signals, tmem: cute.Pointer):
        """Issues the products of every chunk, each when its operands are ready; those of o fill the gaps."""
        scan = self.config.scan
        by_keys = self.product(CHUNK, OperandMajorMode.K)
        by_tokens = self.product(HEAD_DIM, OperandMajorMode.MN)
        kh = self.second(by_keys, base, KH, (CHUNK, HEAD_DIM), "k")
        tt = self.second(by_keys, base, T_PRIME, (CHUNK, CHUNK), "panels")
        kg = self.second(by_tokens, base, KG, (HEAD_DIM, CHUNK), "mn")
        s = self.first(by_keys, tmem + Tmem.S, HEAD_DIM)
        x = self.first(by_keys, tmem + Tmem.X, CHUNK)
        u = self.first(by_tokens, tmem + Tmem.U, CHUNK)
        x_sum = self.sums(by_keys, tmem + Tmem.X_SUM, CHUNK)
        u_sum = self.sums(by_keys, tmem + Tmem.U_SUM, CHUNK)
        s_sum = self.sums(by_tokens, tmem + Tmem.S_SUM, HEAD_DIM)
        if cutlass.const_expr(not scan):
            qg = self.second(by_keys, base, QG, (CHUNK, HEAD_DIM), "k")
            aqk = self.second(by_keys, base, STAGED_AQK, (CHUNK, CHUNK), "panels")
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages.count)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        turn = I32(0)  # chunks so far

        item = receive(Item, items, item_at, item_words)
        item_at.advance()
        while item.valid != 0:
            chunks = cute.ceil_div(item.length, CHUNK)
            if item.row < 0:
                chunks = 0
            for _ in cutlass.range(chunks, unroll=1):
                stage, phase, slot = at.index, turn % 2, turn % SLOTS
                o_sum = None
                if cutlass.const_expr(not scan):
                    o_sum = self.sums(by_keys, self.outputs(tmem, slot), CHUNK)
                ring.consumer_wait(at)
                self.await_signal(signals + Signal.S_READY, phase)
                issue(by_keys, x_sum, s, kh[None, None, None, stage], 0, 8, True)
                self.announce(signals + Signal.X_DONE)
                if cutlass.const_expr(not scan):
                    issue(by_keys, o_sum, s, qg[None, None, None, stage], 0, 4, True)
                self.await_signal(signals + Signal.X_READY, phase)
                issue(by_keys, u_sum, x, tt[None, None, None, stage], 0, 4, True)
                self.announce(signals + Signal.U_DONE)
                if cutlass.const_expr(not scan):
                    issue(by_keys, o_sum, s, qg[None, None, None, stage], 4, 8, False)
                self.await_signal(signals + Signal.U_READY, phase)
                issue(by_tokens, s_sum, u, kg[None, None, None, stage], 0, 4, True)
                self.announce(signals + Signal.S_DONE)
                if cutlass.const_expr(not scan):
                    issue(by_keys, o_sum, u, aqk[None, None, None, stage], 0, 4, False)
                    self.announce(signals + (Signal.O_DONE + slot))
                self.announce(ring.sync_object_empty.get_barrier(at.index))
                at.advance()
                turn = turn + 1
            item = receive(Item, items, item_at, item_words)
            item_at.advance()

    def product(self, columns, major):
        """Returns tcgen05.mma of 128 lanes with the first operand in tensor memory and the second in shared memory."""
        op = tcgen05.MmaF16BF16Op(
            self.operand, F32, (V_TILE, columns, 16), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.TMEM,
            OperandMajorMode.K, major,
        )  # fmt: skip
        return cute.make_tiled_mma(op)

    def first(self, tiled_mma, tmem, depth):
        """Returns an operand [128, depth] in tensor memory."""
        fragment = tiled_mma.make_fragment_A(tiled_mma.partition_shape_A((V_TILE, depth)))
        return cute.make_tensor(cute.recast_ptr(tmem, dtype=self.operand), fragment.layout)

    def second(self, tiled_mma, base, offset, shape, major):
        """Returns a matrix of the block, in every stage, as the second operand of a product."""
        staged = self.stages.part(base, offset, shape, major)
        return tiled_mma.make_fragment_B(tiled_mma.get_slice(0).partition_B(staged))

    def outputs(self, tmem, slot):
        return tmem + Tmem.O_SUM + cute.assume(CHUNK * slot, divby=CHUNK)

    def sums(self, tiled_mma, tmem, columns):
        shape = tiled_mma.partition_shape_C((V_TILE, columns))
        return cute.make_tensor(tmem, tiled_mma.make_fragment_C(shape).layout)

    @cute.jit
    def announce(self, barrier: cute.Pointer):
        """Arrives when all products issued so far are done."""
        with cute.arch.elect_one():
            tcgen05.commit(barrier)

    @cute.jit
    def await_signal(self, barrier: cute.Pointer, phase):
        cute.arch.mbarrier_wait(barrier, phase)
        after_sync()

    # ---- the chain --------------------------------------------------------------------------------------------------

    @cute.jit
    def walk(
        self,
        ring,
        items,
        base: cute.Pointer,
        o_base: cute.Pointer,
        item_words: cute.Pointer,
        signals: cute.Pointer,
        tmem: cute.Pointer,
        tma_o,
        mO: cute.Tensor,
        out: cute.Tensor,
        initial: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        checkpoint_rows: cute.Tensor,
        checkpoint_offsets: cute.Tensor,
        checkpoint_every: cutlass.Int32,
        maps: cute.Tensor,
        starts: cute.Tensor,
        tidx: cutlass.Int32,
    ):
        """Computes states and outputs, item after item.

        A thread has elements of 32 columns of v and half of the K channels or tokens: those that an accumulator of
        mma.sync would have (`places`).
        """
        scan = self.config.scan
        group, lane = tidx // 128, tidx % 32
        channels, tokens = HEAD_DIM // GROUPS, CHUNK // GROUPS
        s_copy = self.writer(tmem + Tmem.S, channels, group, tidx)
        x_copy = self.writer(tmem + Tmem.X, tokens, group, tidx)
        u_copy = self.writer(tmem + Tmem.U, tokens, group, tidx)
        x_sum = self.reader(tmem + Tmem.X_SUM, tokens, group, tidx)
        u_sum = self.reader(tmem + Tmem.U_SUM, tokens, group, tidx)
        s_sum = self.reader(tmem + Tmem.S_SUM, channels, group, tidx)

        s = registers(F32, channels)
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages.count)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        turn = I32(0)  # chunks so far

        item = receive(Item, items, item_at, item_words)
        item_at.advance()
        while item.valid != 0:
            token, length, head = item.token, item.length, item.head
            batch = I32(0) if cutlass.const_expr(self.config.packed) else item.sequence
            chunks = cute.ceil_div(length, CHUNK)
            if item.row < 0:
                chunks = 0
                if cutlass.const_expr(not scan):
                    self.clear_output(out, batch, token, length, head, tidx)
            self.states.start(s, initial, starts, item, item.tile, (group, tidx))
            gO = None
            if cutlass.const_expr(not scan):
                rows = cute.domain_offset((token, 0), mO[None, None, head, batch])
                gO = cute.local_tile(rows, (CHUNK, V_TILE), (None, 0))
            if cutlass.const_expr(self.config.checkpoints is not None):
                due = self.states.first_kept(item, checkpoint_offsets, checkpoint_every)
            for c in cutlass.range(chunks, unroll=1):
                phase = turn % 2
                self.store_operand(s_copy, s, signals + Signal.S_READY)
                ring.consumer_wait(at)
                v = self.values(base, at.index, length - c * CHUNK, item.tile, group, tidx)
                decay = self.decays(base, at.index, group, lane)
                # By every thread, for what it has read itself; the pipeline's own release is one lane's for its warp.
                cute.arch.mbarrier_arrive(ring.sync_object_empty.get_barrier(at.index))
                at.advance()
                if cutlass.const_expr(not scan):
                    if c > 0:
                        self.store_output(tmem, signals, o_base, turn - 1, group, tidx)
                        self.send(tma_o, gO, o_base, c - 1, turn - 1, tidx)
                x = self.load_sums(x_sum, signals + Signal.X_DONE, phase)
                x.store(v.load().to(F32) - x.load())
                self.store_operand(x_copy, x, signals + Signal.X_READY)
                u = self.load_sums(u_sum, signals + Signal.U_DONE, phase)
                self.store_operand(u_copy, u, signals + Signal.U_READY)
                by_pairs = cute.make_tensor(s.iterator, cute.make_layout((2, 2, channels // 8, 2)))
                for n in cutlass.range_constexpr(channels // 8):
                    for i in cutlass.range_constexpr(2):
                        for r in cutlass.range_constexpr(2):
                            for half in cutlass.range_constexpr(2):
                                by_pairs[i, r, n, half] = by_pairs[i, r, n, half] * decay[i, n]
                added = self.load_sums(s_sum, signals + Signal.S_DONE, phase)
                s.store(s.load() + added.load())
                turn = turn + 1
                if cutlass.const_expr(self.config.checkpoints is not None):
                    due = self.states.keep(
                        s, checkpoints, checkpoint_rows, checkpoint_every, due, item, c, out.shape[1], item.tile,
                        (group, tidx),
                    )  # fmt: skip
            if cutlass.const_expr(scan):
                self.write_state(s, maps[item.segment, head, None, None], item.tile, (group, tidx))
            else:
                if chunks > 0:
                    self.store_output(tmem, signals, o_base, turn - 1, group, tidx)
                    self.finish(
                        tma_o, gO, o_base, out, batch, token, length, head, chunks, turn - 1, tidx
                    )
                if cutlass.const_expr(self.config.final_state):
                    self.states.save(s, final, item, item.tile, (group, tidx))
            item = receive(Item, items, item_at, item_words)
            item_at.advance()
        if cutlass.const_expr(not scan):
            if tidx < 32:
                cute.arch.cp_async_bulk_wait_group(0)

    def reader(self, tmem, columns, group, tidx):
        """Returns the copy of fp32 sums to registers, and its source."""
        repeat = {32: tcgen05.Repetition.x4, 64: tcgen05.Repetition.x8}[columns]
        source = lanes_by_columns(tmem + cute.assume(group * columns, divby=32), columns)
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(tcgen05.Ld16x256bOp(repeat), F32), source)
        return copy, copy.get_slice(tidx % 128).partition_S(source), columns

    def writer(self, tmem, columns, group, tidx):
        """Returns the copy of an operand to tensor memory, and its target."""
        repeat = {32: tcgen05.Repetition.x4, 64: tcgen05.Repetition.x8}[columns]
        own = tmem + cute.assume(group * (columns // 2), divby=16)
        target = lanes_by_columns(cute.recast_ptr(own, dtype=self.operand), columns)
        atom = cute.make_copy_atom(tcgen05.St16x128bOp(repeat), self.operand)
        copy = tcgen05.make_tmem_copy(atom, target)
        return copy, copy.get_slice(tidx % 128).partition_D(target), columns

    @cute.jit
    def load_sums(self, reader, barrier: cute.Pointer, phase):
        """Waits until sums are done and loads them."""
        copy, source, columns = reader
        held = registers(F32, columns)
        self.await_signal(barrier, phase)
        cute.copy(copy, source, as_copied(held))
        cute.arch.fence_view_async_tmem_load()
        return held

    @cute.jit
    def store_operand(self, writer, values: cute.Tensor, barrier: cute.Pointer):
        """Rounds an operand, stores it in tensor memory and signals that it is ready."""
        copy, target, columns = writer
        rounded = registers(self.operand, columns)
        rounded.store(values.load().to(self.operand))
        cute.copy(copy, as_copied(rounded), target)
        cute.arch.fence_view_async_tmem_store()
        before_sync()
        cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def values(self, base: cute.Pointer, stage, left, tile, group, tidx):
        """Returns v^T of a chunk; it is zero past the end, and for the columns of M."""
        v = registers(self.dtype, CHUNK // GROUPS)
        whole = cute.recast_ptr(
            (base + (stage * self.stages.size + self.stages.v_at)).align(1024), dtype=self.dtype
        )
        self.move(whole, v, group, tidx, True)
        if cutlass.const_expr(self.config.scan):
            left = left if tile < self.config.v_tiles else I32(0)
        if cutlass.const_expr(self.config.scan or self.config.packed):
            if (
                left < CHUNK
            ):  # tokens of the next sequence may hold anything, and 0 * inf is no zero
                by_pairs = cute.make_tensor(
                    v.iterator, cute.make_layout((2, 2, CHUNK // GROUPS // 8, 2))
                )
                for n in cutlass.range_constexpr(CHUNK // GROUPS // 8):
                    for i in cutlass.range_constexpr(2):
                        beyond = group * (CHUNK // GROUPS) + 8 * n + tidx % 4 * 2 + i >= left
                        for r in cutlass.range_constexpr(2):
                            for half in cutlass.range_constexpr(2):
                                held = by_pairs[i, r, n, half]
                                by_pairs[i, r, n, half] = self.dtype(0.0) if beyond else held
        return v

    @cute.jit
    def move(self, tile: cute.Pointer, x: cute.Tensor, group, tidx, load: cutlass.Constexpr):
        """Copies v or o [token, column], transposed, between shared memory and registers, as matrices of 8 by 8."""
        lane, columns = tidx % 32, tidx // 32 % 4 * 32
        op = warp.LdMatrix8x8x16bOp if load else warp.StMatrix8x8x16bOp
        atom = cute.make_copy_atom(op(True, 4), self.dtype)
        flat = cute.make_layout((UNIT, 1))
        for half in cutlass.range_constexpr(2):
            # Lane 8 i + j has row j of matrix i: of two times 8 columns, then of the next 8 tokens.
            unit = (columns + 16 * half) // UNIT + lane // 8 % 2
            for n in cutlass.range_constexpr(CHUNK // GROUPS // 16):
                row = group * (CHUNK // GROUPS) + 16 * n + lane // 16 * 8 + lane % 8
                shared = view(tile, unit_of_wide(row, unit), UNIT)
                shared = cute.make_tensor(shared.iterator, flat)
                own = cute.make_tensor(x.iterator + (8 * n + half * cute.size(x) // 2), flat)
                if cutlass.const_expr(load):
                    cute.copy(atom, shared, own)
                else:
                    cute.copy(atom, own, shared)

    @cute.jit
    def decays(self, base: cute.Pointer, stage, group, lane):
        """Returns the decays of the thread's K channels [neighbour, pair]."""
        channels = HEAD_DIM // GROUPS
        decay = cute.make_rmem_tensor((2, channels // 8), F32)
        start = (base + (stage * self.stages.size + DECAY - self.stages.begin)).align(16)
        whole = cute.recast_ptr(start, dtype=F32)
        for n in cutlass.range_constexpr(channels // 8):
            cute.autovec_copy(
                view(whole, group * channels + 8 * n + lane % 4 * 2, 2), decay[None, n]
            )
        return decay

    # ---- outputs ----------------------------------------------------------------------------------------------------

    @cute.jit
    def store_output(
        self, tmem: cute.Pointer, signals: cute.Pointer, o_base: cute.Pointer, turn, group, tidx
    ):
        """Copies the outputs of a chunk from tensor memory to their slot."""
        slot, tokens = turn % SLOTS, CHUNK // GROUPS
        o_sum = self.reader(self.outputs(tmem, slot), tokens, group, tidx)
        o = self.load_sums(o_sum, signals + (Signal.O_DONE + slot), turn // SLOTS % 2)
        rounded = registers(self.dtype, tokens)
        rounded.store(o.load().to(self.dtype))
        self.move((o_base + slot * WIDE).align(1024), rounded, group, tidx, False)

    @cute.jit
    def send(self, tma, gO: cute.Tensor, o_base: cute.Pointer, c, turn, tidx):
        """Sends a full chunk; after its barrier the other slot may be written again."""
        if tidx < 32:  # whichever thread of the warp is elected to copy
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=BARRIER_OUTPUT, number_of_threads=THREADS)
        if tidx < 32:
            s, g = cpasync.tma_partition(
                tma, 0, cute.make_layout(1), cute.group_modes(self.slot(o_base, turn), 0, 2),
                cute.group_modes(gO[None, None, c], 0, 2),
            )  # fmt: skip
            cute.copy(tma, s, g)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def finish(
        self, tma, gO, o_base: cute.Pointer, out, batch, token, length, head, chunks, turn, tidx
    ):
        """Sends the last chunk of an item; a partial one by ordinary stores, because another sequence may follow."""
        left = length - (chunks - 1) * CHUNK
        if left == CHUNK:
            self.send(tma, gO, o_base, chunks - 1, turn, tidx)
        else:
            if tidx < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=BARRIER_OUTPUT, number_of_threads=THREADS)
            held = cute.make_rmem_tensor(UNIT, self.dtype)
            unit = tidx % UNITS
            for i in cutlass.range_constexpr(CHUNK * UNITS // THREADS):
                row = tidx // UNITS + i * (THREADS // UNITS)
                if row < left:
                    at = unit_of_wide(row, unit)
                    cute.autovec_copy(view(o_base + turn % SLOTS * WIDE, at, UNIT), held)
                    target = out[batch, token + (chunks - 1) * CHUNK + row, head, None]
                    cute.autovec_copy(held, view(target.iterator, unit * UNIT, UNIT))

    @cute.jit
    def clear_output(self, out, batch, token, length, head, tidx):
        """Writes zeros to the outputs of a skipped sequence."""
        zeros = cute.make_rmem_tensor(UNIT, self.dtype)
        zeros.fill(0.0)
        for i in cutlass.range(tidx, length * UNITS, THREADS, unroll=1):
            row = out[batch, token + i // UNITS, head, None]
            cute.autovec_copy(zeros, view(row.iterator, i % UNITS * UNIT, UNIT))

    def slot(self, o_base, turn):
        layout = swizzled((CHUNK, V_TILE), "k", self.dtype)
        pointer = cute.recast_ptr(
            (o_base + turn % SLOTS * WIDE).align(1024), layout.inner, dtype=self.dtype
        )
        return cute.make_tensor(pointer, layout.outer)

    # ---- states -----------------------------------------------------------------------------------------------------

    def places(self, group, tidx):
        """Returns (column of v, K channel) of each of the thread's elements of the state."""
        lane, row = tidx % 32, tidx // 32 % 4 * 32
        channel = group * (HEAD_DIM // GROUPS) + lane % 4 * 2
        for half in range(2):
            for n in range(HEAD_DIM // GROUPS // 8):
                for r in range(2):
                    for i in range(2):
                        yield row + 16 * half + 8 * r + lane // 4, channel + 8 * n + i

    def read_state(self, s: cute.Tensor, state: cute.Tensor, tile, where):
        for i, (row, channel) in enumerate(self.places(*where)):
            s[i] = F32(state[tile * V_TILE + row, channel])

    def write_state(self, s: cute.Tensor, state: cute.Tensor, tile, where):
        for i, (row, channel) in enumerate(self.places(*where)):
            state[tile * V_TILE + row, channel] = state.element_type(s[i])

    @cute.jit
    def write_identity(self, s: cute.Tensor, tile, where):
        for i, (row, channel) in enumerate(self.places(*where)):
            s[i] = F32(1.0) if tile * V_TILE + row == channel else F32(0.0)


@cute.jit
def issue(tiled_mma: cute.TiledMma, sums: cute.Tensor, a: cute.Tensor, b: cute.Tensor, begin: cutlass.Constexpr,
          end: cutlass.Constexpr, zero: cutlass.Constexpr):  # fmt: skip
    """Issues sums (+)= a b^T over the blocks begin ... end - 1 of 16."""
    atom = cute.make_mma_atom(tiled_mma.op)  # a fresh one: its flag may be set inside loops
    atom.set(tcgen05.Field.ACCUMULATE, not zero)
    for k in cutlass.range_constexpr(begin, end):
        cute.gemm(atom, sums, a[None, None, k], b[None, None, k], sums)
        atom.set(tcgen05.Field.ACCUMULATE, True)


def registers(dtype, columns):
    """Returns registers for a thread's part of 32 lanes and `columns` columns.

    Their modes are pairs of neighbours, 8 lanes further, 8 columns further, 16 lanes further.
    """
    return cute.make_rmem_tensor(columns, dtype)


def as_copied(held):
    """Returns registers as copies from and to tensor memory see them."""
    return cute.make_tensor(
        held.iterator, cute.make_layout((((2, 2, cute.size(held) // 8), 1), 2, 1))
    )


def lanes_by_columns(pointer, columns):
    """Returns a view [128 lanes, columns] of tensor memory; the lanes are 2^16 times 32 bits apart."""
    stride = 65536 * 32 // pointer.dtype.width
    return cute.make_tensor(pointer, cute.make_layout((V_TILE, columns), stride=(stride, 1)))


@dsl_user_op
def before_sync(*, loc=None, ip=None):
    """Orders what this thread did in tensor memory before a signal that follows."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def after_sync(*, loc=None, ip=None):
    """Orders what this thread does in tensor memory behind a signal in front."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)
