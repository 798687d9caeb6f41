"""Gradients of attention over listed key tiles on Hopper: TMA loads, wgmma, gradients of q added up by TMA.

A CTA has 128 keys of a kv head, and each of two warpgroups 64 of them, FlashAttention-3's way (arXiv 2407.08608) but
for lists: a warpgroup is a key tile of 64, and steps of 64 query rows that its tile does not list are none of its own.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from cula_core.cute.functions import exp2_pinned
from cula_core.cute.memory import by_token, load_tile, repeated, swizzled
from cula_core.cute.types import DTYPES, F32, I32
from cula_core.cute.wgmma import as_operand, mma

from ..config import REGISTERS, STAGES, STEP, THREADS, UNIT, BackwardConfig

END, MASK = 4, 8  # flags of a step, above a bit per warpgroup
BOX = 32  # columns of a box of fp32
ALL, GROUP = 1, 128  # the named barrier of both warpgroups; threads of one
ROWS, COLUMNS = 2, UNIT // 4  # of a thread: keys, and query rows of each
# Barriers, each with a number of arrivals, and how many there are of a kind.
BARRIERS = {"kv_full": 1, "full": 1, "free": 8, "dq_full": 128, "dq_free": 1}


@dataclass(frozen=True)
class Memory:
    """Pointers to shared memory."""

    barriers: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    q: cute.Pointer
    do: cute.Pointer
    ds: cute.Pointer
    dq: cute.Pointer
    sums: cute.Pointer
    records: cute.Pointer
    places: cute.Pointer


class LiteBackward:
    """One CTA per (128 keys, kv head, sequence).

    | thread role | warps | work |
    |---|---|---|
    | load | 0 | turns lists into steps, loads q, do and what is known of their rows |
    | add | 1 | adds gradients of q up in global memory |
    | keys w | 4 + 4w ... | gradients of 64 keys |
    """

    def __init__(self, config: BackwardConfig):
        self.config, self.dtype, self.width = config, DTYPES[config.dtype], config.width
        self.columns = self.width // UNIT

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        delta: cute.Tensor,
        mask: cute.Tensor,
        acc: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scale: cutlass.Float32,
        scale_log2: cutlass.Float32,
        stream,
    ):
        """The arguments of `build.backward_arguments`, which describes them."""
        load = cpasync.CopyBulkTensorTileG2SOp()
        box = swizzled((UNIT, UNIT), "k", self.dtype), (UNIT, UNIT)
        tma_q, mQ = cpasync.make_tiled_tma_atom(load, by_token(q), *box)
        tma_k, mK = cpasync.make_tiled_tma_atom(load, by_token(k), *box)
        tma_v, mV = cpasync.make_tiled_tma_atom(load, by_token(v), *box)
        tma_do, mDo = cpasync.make_tiled_tma_atom(load, by_token(do), *box)
        plain = cute.make_layout((UNIT, BOX), stride=(BOX, 1))
        add = cpasync.CopyReduceBulkTensorTileS2GOp()
        tma_dq, mDq = cpasync.make_tiled_tma_atom(add, by_token(acc), plain, (UNIT, BOX))
        self.kernel(
            tma_q, mQ, tma_k, mK, tma_v, mV, tma_do, mDo, tma_dq, mDq, lse, delta, mask, dk, dv, scale, scale_log2
        ).launch(
            grid=(cute.ceil_div(k.shape[1], STEP), k.shape[2], k.shape[0]), block=(THREADS, 1, 1),
            min_blocks_per_mp=1, stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        tma_do: cute.CopyAtom,
        mDo: cute.Tensor,
        tma_dq: cute.CopyAtom,
        mDq: cute.Tensor,
        lse: cute.Tensor,
        delta: cute.Tensor,
        mask: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scale: cutlass.Float32,
        scale_log2: cutlass.Float32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        tile, head_k, batch = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, STAGES * len(BARRIERS))
        k_at, v_at = (
            smem.allocate_array(self.dtype, STEP * self.width, byte_alignment=1024)
            for _ in range(2)
        )
        q_at, do_at = (
            smem.allocate_array(self.dtype, STAGES * UNIT * self.width, byte_alignment=1024)
            for _ in range(2)
        )
        ds_at = smem.allocate_array(self.dtype, STAGES * UNIT * STEP, byte_alignment=1024)
        dq_at = smem.allocate_array(F32, 2 * UNIT * UNIT, byte_alignment=1024)
        sums_at = smem.allocate_array(F32, STAGES * 2 * UNIT, byte_alignment=16)
        records = smem.allocate_array(I32, 4 * STAGES, byte_alignment=16)
        places = smem.allocate_array(I32, 4 * 2, byte_alignment=16)
        if tidx == 0:
            counts = [count for count in BARRIERS.values() for _ in range(STAGES)]
            for i in cutlass.range_constexpr(len(counts)):
                cute.arch.mbarrier_init(barriers + i, counts[i])
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        memory = Memory(barriers, k_at, v_at, q_at, do_at, ds_at, dq_at, sums_at, records, places)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp_idx == 0:
                self.load(
                    memory, tma_q, mQ, tma_k, mK, tma_v, mV, tma_do, mDo, lse, delta, mask, tile, head_k, batch
                )  # fmt: skip
            if warp_idx == 1:
                self.add(memory, tma_dq, mDq, batch)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            self.attend(
                memory, dk, dv, scale, scale_log2, mQ.shape[0], tile, head_k, batch, warp_idx // 4 - 1, tidx % GROUP
            )  # fmt: skip

    # ---- shared memory ----------------------------------------------------------------------------------------------

    def barrier(self, memory, name: str, number):
        return memory.barriers + (STAGES * list(BARRIERS).index(name) + number)

    def wait(self, memory, name: str, number, phase):
        cute.arch.mbarrier_wait(self.barrier(memory, name, number), phase)

    def box(self, base, offset):
        """Returns a box [64, 64] as TMA writes it, so many boxes behind a pointer."""
        layout = swizzled((UNIT, UNIT), "k", self.dtype)
        pointer = base + cute.assume(offset * (UNIT * UNIT), divby=UNIT * UNIT)
        return cute.make_tensor(
            cute.recast_ptr(pointer.align(1024), layout.inner, dtype=self.dtype), layout.outer
        )

    def records(self, memory):
        """Returns the words of a step by stage: which 64 query rows, their head, and flags."""
        return cute.make_tensor(memory.records, cute.make_layout((4, STAGES)))

    def places(self, memory):
        """Returns where the gradients of q of a warpgroup belong: whether to any rows, which, and the head."""
        return cute.make_tensor(memory.places, cute.make_layout((4, 2)))

    def sums(self, memory):
        """Returns what is known of rows, [row, log-sum-exp in log2 units or Delta, stage]."""
        return cute.make_tensor(memory.sums, cute.make_layout((UNIT, 2, STAGES)))

    # ---- loading and adding -----------------------------------------------------------------------------------------

    @cute.jit
    def load(
        self, memory, tma_q, mQ, tma_k, mK, tma_v, mV, tma_do, mDo, lse: cute.Tensor, delta: cute.Tensor,
        mask: cute.Tensor, tile, head_k, batch,
    ):  # fmt: skip
        """Loads the keys, and then q and do of every step."""
        lane = cute.arch.lane_idx()
        length_q, length_k = mQ.shape[0], mK.shape[0]
        group = mQ.shape[2] // mK.shape[2]
        full = self.barrier(memory, "kv_full", 0)
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * 2 * STEP * self.width)
        for tma, whole, base in ((tma_k, mK, memory.k), (tma_v, mV, memory.v)):
            for half in cutlass.range_constexpr(2):
                for column in cutlass.range_constexpr(self.columns):
                    box = self.box(base, half * self.columns + column)
                    load_tile(
                        tma, whole, tile * STEP + half * UNIT, head_k, batch, column, box, full
                    )
        row_tiles = cute.ceil_div(length_q, UNIT)
        per_step = STEP // self.config.block_n  # listed tiles of a CTA
        count = I32(0)
        for i in cutlass.range(group, unroll=1):
            head = head_k * group + i
            for row in cutlass.range(row_tiles, unroll=1):
                flags = I32(3)
                if cutlass.const_expr(self.config.skip):
                    number = row // 2
                    flags = I32(0)
                    for half in cutlass.range_constexpr(2):
                        listed = tile * per_step + half * per_step // 2
                        if listed < mask.shape[2]:
                            word = mask[batch, head, listed, number // 32]
                            flags = flags | ((word >> (number % 32)) & 1) << half
                if cutlass.const_expr(self.config.causal):
                    behind = length_k - length_q
                    last = cutlass.min(row * UNIT + UNIT, length_q) - 1 + behind
                    if last < tile * STEP:
                        flags = I32(0)
                    if (flags != 0) & (row * UNIT + behind < tile * STEP + STEP - 1):
                        flags = flags | MASK
                if flags != 0:
                    self.step(
                        memory,
                        count,
                        row,
                        head,
                        flags,
                        batch,
                        tma_q,
                        mQ,
                        tma_do,
                        mDo,
                        lse,
                        delta,
                        lane,
                    )
                    count = count + 1
        stage = count % STAGES
        self.wait(memory, "free", stage, (count // STAGES) % 2 ^ 1)
        if lane == 0:
            words = self.records(memory)
            words[2, stage] = I32(END)
            cute.arch.mbarrier_arrive(self.barrier(memory, "full", stage))

    @cute.jit
    def step(
        self, memory, count, row, head, flags, batch, tma_q, mQ, tma_do, mDo, lse: cute.Tensor, delta: cute.Tensor, lane
    ):  # fmt: skip
        """Loads 64 query rows."""
        stage = count % STAGES
        self.wait(memory, "free", stage, (count // STAGES) % 2 ^ 1)
        full = self.barrier(memory, "full", stage)
        if lane == 0:
            words = self.records(memory)
            words[0, stage], words[1, stage], words[2, stage] = row, head, flags
            cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * 2 * UNIT * self.width + 8 * UNIT)
        for tma, whole, base in ((tma_q, mQ, memory.q), (tma_do, mDo, memory.do)):
            for column in cutlass.range_constexpr(self.columns):
                box = self.box(base, stage * self.columns + column)
                load_tile(tma, whole, row * UNIT, head, batch, column, box, full)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), F32)
        known = self.sums(memory)
        with cute.arch.elect_one():
            for i, x in enumerate((lse, delta)):
                source = cute.local_tile(x[batch, head, None], (UNIT,), (row,))
                cute.copy(bulk, source, known[None, i, stage], mbar_ptr=full)

    @cute.jit
    def add(self, memory, tma_dq, mDq, batch):
        """Adds what both warpgroups leave of gradients of q to what is in global memory."""
        lane, words = cute.arch.lane_idx(), self.places(memory)
        phase, valid = I32(0), I32(1)
        boxes = UNIT // BOX
        while valid != 0:
            for group in cutlass.range_constexpr(2):
                self.wait(memory, "dq_full", group, phase)
                valid = words[0, group]
                if valid != 0:
                    row, head = words[1, group], words[2, group]
                    whole = mDq[None, None, head, batch]
                    for i in cutlass.range_constexpr(boxes):
                        column = i if self.config.by_turns else group * boxes + i
                        target = cute.local_tile(whole, (UNIT, BOX), (row, column))
                        box = self.dq_box(memory, group * boxes + i)
                        s, g = cpasync.tma_partition(
                            tma_dq, 0, cute.make_layout(1), cute.group_modes(box, 0, 2), cute.group_modes(target, 0, 2)
                        )  # fmt: skip
                        cute.copy(tma_dq, s, g)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.sync_warp()
                    if lane == 0:
                        cute.arch.mbarrier_arrive(self.barrier(memory, "dq_free", group))
            phase = phase ^ 1
        cute.arch.cp_async_bulk_wait_group(0)

    def dq_box(self, memory, column):
        pointer = memory.dq + column * (UNIT * BOX)
        return cute.make_tensor(pointer.align(128), cute.make_layout((UNIT, BOX), stride=(BOX, 1)))

    # ---- the keys ---------------------------------------------------------------------------------------------------

    @cute.jit
    def attend(
        self, memory, dk: cute.Tensor, dv: cute.Tensor, scale, scale_log2, length_q, tile, head_k, batch, group, tidx
    ):  # fmt: skip
        """Does all steps for 64 keys, and stores their gradients."""
        smem_a = warpgroup.OperandSource.SMEM
        mma_s = mma(self.dtype, UNIT, OperandMajorMode.K, smem_a)
        mma_v = mma(self.dtype, self.width, OperandMajorMode.MN)
        op = warpgroup.MmaF16BF16Op(
            self.dtype, F32, (UNIT, UNIT, 16), smem_a, OperandMajorMode.MN, OperandMajorMode.MN
        )  # fmt: skip
        mma_q = cute.make_tiled_mma(cute.make_mma_atom(op), cute.make_layout((1, 1, 1)))
        part_s, part_v, part_q = (m.get_slice(tidx) for m in (mma_s, mma_v, mma_q))
        halves = (UNIT, self.width), "k", self.dtype
        tK, tV = (
            mma_s.make_fragment_A(part_s.partition_A(repeated(x, *halves, 2)))
            for x in (memory.k, memory.v)
        )
        tQ, tDo = (
            mma_s.make_fragment_B(part_s.partition_B(repeated(x, *halves, STAGES)))
            for x in (memory.q, memory.do)
        )
        turned = (self.width, UNIT), "mn", self.dtype
        tQt, tDot = (
            mma_v.make_fragment_B(part_v.partition_B(repeated(x, *turned, STAGES)))
            for x in (memory.q, memory.do)
        )
        square = (UNIT, UNIT), "mn", self.dtype
        tDs = mma_q.make_fragment_A(part_q.partition_A(repeated(memory.ds, *square, 2 * STAGES)))
        tKt = mma_q.make_fragment_B(
            part_q.partition_B(repeated(memory.k, *square, 2 * self.columns))
        )
        copy = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma_s
        ).get_slice(tidx)
        ds_target = copy.partition_D(repeated(memory.ds, (UNIT, UNIT), "k", self.dtype, 2 * STAGES))
        s, dp = (
            cute.make_rmem_tensor(mma_s.partition_shape_C((UNIT, UNIT)), F32) for _ in range(2)
        )
        dq = cute.make_rmem_tensor(mma_q.partition_shape_C((UNIT, UNIT)), F32)
        p, ds = (mma_v.make_fragment_A(mma_v.partition_shape_A((UNIT, UNIT))) for _ in range(2))
        sum_k, sum_v = (
            cute.make_rmem_tensor(mma_v.partition_shape_C((UNIT, self.width)), F32)
            for _ in range(2)
        )
        sum_k.fill(0.0)
        sum_v.fill(0.0)
        by_row = cute.make_layout((ROWS, (2, COLUMNS // 2)), stride=(2, (1, 4)))
        s_rows, dp_rows = (cute.make_tensor(x.iterator, by_row) for x in (s, dp))
        first_key = tile * STEP + group * UNIT + tidx // 32 * 16 + tidx % 32 // 4
        records, places, known = self.records(memory), self.places(memory), self.sums(memory)
        behind = dk.shape[1] - length_q
        self.wait(memory, "kv_full", 0, 0)
        count, sent = I32(0), I32(0)  # steps, and those whose gradients of q are this warpgroup's
        self.wait(memory, "full", 0, 0)
        flags = records[2, 0]
        while flags & END == 0:
            stage = count % STAGES
            row, head = records[0, stage], records[1, stage]
            own = 2 * stage + group
            if (flags >> group) & 1 != 0:
                self.multiply(
                    mma_s, s, tK[None, None, None, group], tQ[None, None, None, stage], False
                )
                self.multiply(
                    mma_s, dp, tV[None, None, None, group], tDo[None, None, None, stage], False
                )
                warpgroup.wait_group(1)
                for n in cutlass.range_constexpr(COLUMNS // 2):
                    for j in cutlass.range_constexpr(2):
                        at = 8 * n + tidx % 4 * 2 + j
                        lse = known[at, 0, stage]
                        for r in cutlass.range_constexpr(ROWS):
                            value = exp2_pinned(s_rows[r, 2 * n + j] * scale_log2 - lse)
                            if cutlass.const_expr(self.config.causal):
                                hidden = (flags & MASK != 0) & (
                                    first_key + 8 * r > row * UNIT + at + behind
                                )
                                value = F32(0.0) if hidden else value
                            s_rows[r, 2 * n + j] = value
                warpgroup.wait_group(0)
                for n in cutlass.range_constexpr(COLUMNS // 2):
                    for j in cutlass.range_constexpr(2):
                        delta = known[8 * n + tidx % 4 * 2 + j, 1, stage]
                        for r in cutlass.range_constexpr(ROWS):
                            c = 2 * n + j
                            dp_rows[r, c] = s_rows[r, c] * (dp_rows[r, c] - delta)
                p.store(as_operand(s, p).load().to(self.dtype))
                ds.store(as_operand(dp, ds).load().to(self.dtype))
                self.multiply(mma_v, sum_v, p, tDot[None, None, None, stage], True, False)
                # Where no gradients of q follow, this ends a group.
                ends = self.config.by_turns
                self.multiply(mma_v, sum_k, ds, tQt[None, None, None, stage], True, ends)
            else:
                dp.fill(0.0)
            rounded = cute.make_rmem_tensor(dp.shape, self.dtype)
            rounded.store(dp.load().to(self.dtype))
            cute.copy(copy, copy.retile(rounded), ds_target[None, None, None, own])
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=ALL, number_of_threads=2 * GROUP)
            turn, column = cutlass.Boolean(True), group
            if cutlass.const_expr(self.config.by_turns):
                turn, column = count % 2 == group, 0
            if turn:
                for half in cutlass.range_constexpr(2):
                    self.multiply(
                        mma_q, dq, tDs[None, None, None, 2 * stage + half],
                        tKt[None, None, None, half * self.columns + column], half > 0, half > 0,
                    )  # fmt: skip
            warpgroup.wait_group(0)
            if tidx % 32 == 0:  # all lanes have read the record: a barrier stands between
                cute.arch.mbarrier_arrive(self.barrier(memory, "free", stage))
            if turn:
                self.wait(memory, "dq_free", group, sent % 2 ^ 1)
                self.put(memory, dq, part_q, group)
                if tidx == 0:
                    places[0, group], places[1, group], places[2, group] = I32(1), row, head
                cute.arch.fence_view_async_shared()
                cute.arch.mbarrier_arrive(self.barrier(memory, "dq_full", group))
                sent = sent + 1
            count = count + 1
            self.wait(memory, "full", count % STAGES, (count // STAGES) % 2)
            flags = records[2, count % STAGES]
        self.wait(memory, "dq_free", group, sent % 2 ^ 1)
        if tidx == 0:
            places[0, group] = I32(0)
        cute.arch.mbarrier_arrive(self.barrier(memory, "dq_full", group))
        self.store(sum_k, dk, scale, part_v, tile * STEP + group * UNIT, head_k, batch)
        self.store(sum_v, dv, F32(1.0), part_v, tile * STEP + group * UNIT, head_k, batch)

    @cute.jit
    def multiply(
        self, tiled_mma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, more: cutlass.Constexpr,
        last: cutlass.Constexpr = True,
    ):  # fmt: skip
        """Issues acc = a b^T, added to what acc was if `more`. last: what was issued since the last group is one."""
        warpgroup.fence()
        atom = cute.make_mma_atom(tiled_mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, more)
        for i in cutlass.range_constexpr(cute.size(a, mode=[2])):
            cute.gemm(atom, acc, a[None, None, i], b[None, None, i], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        if cutlass.const_expr(last):
            warpgroup.commit_group()

    @cute.jit
    def put(self, memory, dq: cute.Tensor, part_q, group):
        """Writes 64 columns of gradients of q to shared memory."""
        boxes = UNIT // BOX
        layout = cute.make_layout((UNIT, (BOX, boxes)), stride=(BOX, (1, UNIT * BOX)))
        own = cute.make_tensor((memory.dq + group * (boxes * UNIT * BOX)).align(128), layout)
        cute.autovec_copy(dq, part_q.partition_C(own))

    @cute.jit
    def store(self, acc: cute.Tensor, out: cute.Tensor, factor, part_v, first, head, batch):
        """Stores gradients of 64 keys."""
        rows = cute.domain_offset((first, 0), out[batch, None, head, None])
        whole = cute.make_tensor(
            rows.iterator, cute.make_layout((UNIT, self.width), stride=(rows.stride[0], 1))
        )
        target = part_v.partition_C(whole)
        where = part_v.partition_C(cute.make_identity_tensor((UNIT, self.width)))
        left = out.shape[1] - first
        for i in cutlass.range_constexpr(0, cute.size(acc), 2):
            if (where[i][0] < left) & (where[i][1] < self.config.head_dim):
                for j in cutlass.range_constexpr(2):
                    target[i + j] = (acc[i + j] * factor).to(self.dtype)
