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
from cula_core.cute.memory import load_tile, repeated, swizzled
from cula_core.cute.types import DTYPES, F32, I32
from cula_core.cute.wgmma import as_operand, mma

from ..config import BACKWARD_REGISTERS, NUMBERS, STAGES, STEP, THREADS, UNIT, BackwardConfig
from .packed import row_in, rows_in, sequence_of, tokens, units_before
from .shared import Layout, copy_out, lowest

END, MASK = 4, 8  # flags of a step, above a bit per warpgroup
BOX = 32  # columns of a box of fp32
GROUP = 128  # threads of a warpgroup
DONE = 1  # the first of two named barriers, one per warpgroup
ROWS, COLUMNS = 2, UNIT // 4  # of a thread: keys, and query rows of each
# Barriers, each with a number of arrivals, and how many there are of a kind.
BARRIERS = {
    "kv_full": 1,
    "full": 1,
    "free": 8,
    "ds_full": 8,
    "ds_free": 8,
    "dq_full": 4,
    "dq_free": 1,
}


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

    Gradients of keys are added up in registers in one order; those of q come in any order, unless they are left out.
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
        starts_q: cute.Tensor,
        starts_k: cute.Tensor,
        work: cute.Tensor,
        acc: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scale: cutlass.Float32,
        scale_log2: cutlass.Float32,
        longest: cutlass.Int32 | None,
        stream,
    ):
        """The arguments of `build.backward_arguments`, which describes them."""
        packed = self.config.packed is not None
        load = cpasync.CopyBulkTensorTileG2SOp()
        box = swizzled((UNIT, UNIT), "k", self.dtype), (UNIT, UNIT)
        tma_q, mQ = cpasync.make_tiled_tma_atom(load, tokens(q, packed), *box)
        tma_k, mK = cpasync.make_tiled_tma_atom(load, tokens(k, packed), *box)
        tma_v, mV = cpasync.make_tiled_tma_atom(load, tokens(v, packed), *box)
        tma_do, mDo = cpasync.make_tiled_tma_atom(load, tokens(do, packed), *box)
        tma_dq = mDq = None
        if cutlass.const_expr(not self.config.keys_only):
            add = cpasync.CopyReduceBulkTensorTileS2GOp()
            tma_dq, mDq = cpasync.make_tiled_tma_atom(
                add, tokens(acc, packed), swizzled((UNIT, BOX), "k", F32), (UNIT, BOX)
            )
        store = cpasync.CopyBulkTensorTileS2GOp()
        tma_dk, mDk = cpasync.make_tiled_tma_atom(store, tokens(dk, packed), *box)
        tma_dv, mDv = cpasync.make_tiled_tma_atom(store, tokens(dv, packed), *box)
        keys, batches = k.shape[1], k.shape[0]
        if cutlass.const_expr(packed):
            keys, batches = longest, starts_k.shape[0] - 1
        self.kernel(
            tma_q, mQ, tma_k, mK, tma_v, mV, tma_do, mDo, tma_dq, mDq, tma_dk, mDk, tma_dv, mDv, lse, delta, mask,
            starts_q, starts_k, work, scale, scale_log2, longest,
        ).launch(
            grid=(cute.ceil_div(keys, STEP) * k.shape[2] * batches, 1, 1), block=(THREADS, 1, 1),
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
        tma_dk: cute.CopyAtom,
        mDk: cute.Tensor,
        tma_dv: cute.CopyAtom,
        mDv: cute.Tensor,
        lse: cute.Tensor,
        delta: cute.Tensor,
        mask: cute.Tensor,
        starts_q: cute.Tensor,
        starts_k: cute.Tensor,
        work: cute.Tensor,
        scale: cutlass.Float32,
        scale_log2: cutlass.Float32,
        longest: cutlass.Int32 | None,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.config.ordered):
            number = work[NUMBERS + number]
        tiles = cute.ceil_div(mK.shape[0] if longest is None else longest, STEP)
        tile, rest = number % tiles, number // tiles
        head_k, batch = rest % mK.shape[2], rest // mK.shape[2]
        queries = sequence_of(batch, starts_q, mQ.shape[0])
        keys = sequence_of(batch, starts_k, mK.shape[0])
        if cutlass.const_expr(self.config.packed is not None):
            # Of keys behind the end TMA stores nothing, and no queries see them.
            queries = queries[0], queries[1] if tile * STEP < keys[1] else I32(0)
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
        ds_at = dq_at = None
        if cutlass.const_expr(not self.config.keys_only):
            ds_at = smem.allocate_array(self.dtype, STAGES * UNIT * STEP, byte_alignment=1024)
            dq_at = smem.allocate_array(F32, 2 * UNIT * UNIT, byte_alignment=1024)
        sums_at = smem.allocate_array(F32, STAGES * 2 * UNIT, byte_alignment=16)
        records = smem.allocate_array(I32, 4 * STAGES, byte_alignment=16)
        places = smem.allocate_array(I32, 4 * 2, byte_alignment=16)
        if tidx == 0:
            readers = {"ds_free": 4} if self.config.by_turns else {}
            counts = [count for count in {**BARRIERS, **readers}.values() for _ in range(STAGES)]
            for i in cutlass.range_constexpr(len(counts)):
                cute.arch.mbarrier_init(barriers + i, counts[i])
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        memory = Memory(barriers, k_at, v_at, q_at, do_at, ds_at, dq_at, sums_at, records, places)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(BACKWARD_REGISTERS[0])
            if warp_idx == 0:
                self.load(
                    memory, tma_q, mQ, tma_k, mK, tma_v, mV, tma_do, mDo, lse, delta, mask, tile, head_k, batch,
                    queries, keys,
                )  # fmt: skip
            if cutlass.const_expr(not self.config.keys_only):
                if warp_idx == 1:
                    self.add(memory, tma_dq, mDq, batch, queries)
        else:
            cute.arch.setmaxregister_increase(BACKWARD_REGISTERS[1])
            self.attend(
                memory, tma_dk, mDk, tma_dv, mDv, scale, scale_log2, queries, keys, tile, head_k, batch,
                warp_idx // 4 - 1, tidx % GROUP,
            )  # fmt: skip

    # ---- shared memory ----------------------------------------------------------------------------------------------

    def barrier(self, memory, name: str, number):
        return memory.barriers + (STAGES * list(BARRIERS).index(name) + number)

    def wait(self, memory, name: str, number, phase):
        cute.arch.mbarrier_wait(self.barrier(memory, name, number), phase)

    box = Layout.box

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
        mask: cute.Tensor, tile, head_k, batch, queries, keys,
    ):  # fmt: skip
        """Loads the keys, and then q and do of every step."""
        lane = cute.arch.lane_idx()
        length_q, length_k = queries[1], keys[1]
        group = mQ.shape[2] // mK.shape[2]
        full = self.barrier(memory, "kv_full", 0)
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * 2 * STEP * self.width)
        for tma, whole, base in ((tma_k, mK, memory.k), (tma_v, mV, memory.v)):
            for half in cutlass.range_constexpr(2):
                for column in cutlass.range_constexpr(self.columns):
                    box = self.box(base, half * self.columns + column)
                    row, place = row_in(tile * STEP + half * UNIT, batch, *keys)
                    load_tile(tma, whole, row, head_k, place, column, box, full)
        query_tiles = cute.ceil_div(length_q, 2 * UNIT)
        words = cute.ceil_div(query_tiles, 32)
        count = cutlass.Uint32(0)
        for i in cutlass.range(group, unroll=1):
            head = head_k * group + i
            for word in cutlass.range(words, unroll=1):
                lists = [self.word(mask, batch, head, tile, half, word) for half in range(2)]
                bits = lists[0] | lists[1]
                if query_tiles < 32 * word + 32:
                    bits = bits & ((I32(1) << (query_tiles % 32)) - 1)
                while bits != 0:
                    bit = lowest(bits)
                    bits = bits & (bits - 1)
                    for half in cutlass.range(2, unroll=1):
                        row = 2 * (32 * word + bit) + half
                        flags = ((lists[0] >> bit) & 1) + ((lists[1] >> bit) & 1) * 2
                        if cutlass.const_expr(self.config.causal):
                            behind = length_k - length_q
                            last = cutlass.min(row * UNIT + UNIT, length_q) - 1 + behind
                            if last < tile * STEP:
                                flags = I32(0)
                            if (flags != 0) & (row * UNIT + behind < tile * STEP + STEP - 1):
                                flags = flags | MASK
                        if (flags != 0) & (row * UNIT < length_q):
                            self.step(
                                memory, count, row, head, flags, batch, queries, tma_q, mQ, tma_do, mDo, lse, delta,
                                lane,
                            )  # fmt: skip
                            count = count + 1
        stage = count % STAGES
        self.wait(memory, "free", stage, (count // STAGES) % 2 ^ 1)
        if lane == 0:
            records = self.records(memory)
            records[2, stage] = I32(END)
            cute.arch.mbarrier_arrive(self.barrier(memory, "full", stage))

    @cute.jit
    def word(self, mask: cute.Tensor, batch, head, tile, half: cutlass.Constexpr, number):
        """Returns which of 32 query tiles list half of the keys."""
        word = I32(-1)
        if cutlass.const_expr(self.config.skip):
            word = I32(0)
            listed = tile
            if cutlass.const_expr(self.config.block_n == UNIT):
                listed = 2 * tile + half
            if listed < mask.shape[2]:
                word = mask[batch, head, listed, number]
        return word

    @cute.jit
    def step(
        self, memory, count, row, head, flags, batch, queries, tma_q, mQ, tma_do, mDo, lse: cute.Tensor,
        delta: cute.Tensor, lane,
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
                first, place = row_in(row * UNIT, batch, *queries)
                load_tile(tma, whole, first, head, place, column, box, full)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), F32)
        known = self.sums(memory)
        if cutlass.const_expr(self.config.packed is not None):
            row, batch = row + units_before(batch, queries[0]), 0
        with cute.arch.elect_one():
            for i, x in enumerate((lse, delta)):
                source = cute.local_tile(x[batch, head, None], (UNIT,), (row,))
                cute.copy(bulk, source, known[None, i, stage], mbar_ptr=full)

    @cute.jit
    def add(self, memory, tma_dq, mDq, batch, queries):
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
                    whole = rows_in(mDq, head, batch, *queries)
                    for i in cutlass.range_constexpr(boxes):
                        column = i if self.config.by_turns else group * boxes + i
                        target = cute.local_tile(whole, (UNIT, BOX), (row, column))
                        copy_out(tma_dq, self.dq_box(memory, group * boxes + i), target)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.sync_warp()
                    if lane == 0:
                        cute.arch.mbarrier_arrive(self.barrier(memory, "dq_free", group))
            phase = phase ^ 1
        cute.arch.cp_async_bulk_wait_group(0)

    def dq_box(self, memory, column):
        """Returns 32 columns of gradients of q of a warpgroup as TMA reads them."""
        return repeated(memory.dq, (UNIT, BOX), "k", F32, 4)[None, None, column]

    # ---- the keys ---------------------------------------------------------------------------------------------------

    @cute.jit
    def attend(
        self, memory, tma_dk, mDk, tma_dv, mDv, scale, scale_log2, queries, keys, tile, head_k, batch, group, tidx
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
        if cutlass.const_expr(not self.config.keys_only):
            square = (UNIT, UNIT), "mn", self.dtype
            tDs = mma_q.make_fragment_A(
                part_q.partition_A(repeated(memory.ds, *square, 2 * STAGES))
            )
            tKt = mma_q.make_fragment_B(
                part_q.partition_B(repeated(memory.k, *square, 2 * self.columns))
            )
            copy = cute.make_tiled_copy_C(
                cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma_s
            ).get_slice(tidx)
            ds_target = copy.partition_D(
                repeated(memory.ds, (UNIT, UNIT), "k", self.dtype, 2 * STAGES)
            )
            dq = cute.make_rmem_tensor(mma_q.partition_shape_C((UNIT, UNIT)), F32)
            dq_target = part_q.partition_C(repeated(memory.dq, (UNIT, UNIT), "k", F32, 2))
        s, dp = (
            cute.make_rmem_tensor(mma_s.partition_shape_C((UNIT, UNIT)), F32) for _ in range(2)
        )
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
        length_k = mDk.shape[0] if keys[0] is None else keys[1]
        behind = length_k - queries[1]
        self.wait(memory, "kv_full", 0, 0)
        count, sent = (
            cutlass.Uint32(0),
            cutlass.Uint32(0),
        )  # steps, and gradients of q that are this warpgroup's
        last_row, last_head, listed = I32(0), I32(0), I32(3)
        self.wait(memory, "full", 0, 0)
        flags = records[2, 0]
        while flags & END == 0:
            stage, before = count % STAGES, (count + 1) % STAGES
            row, head = records[0, stage], records[1, stage]
            own = (flags >> group) & 1 != 0
            if own:
                self.multiply(
                    mma_s, s, tK[None, None, None, group], tQ[None, None, None, stage], False
                )
                self.multiply(
                    mma_s, dp, tV[None, None, None, group], tDo[None, None, None, stage], False
                )
                warpgroup.wait_group(1)
                self.weigh(s_rows, known, scale_log2, stage, tidx)
                if cutlass.const_expr(self.config.branches):
                    # As in the forward, a wait per branch keeps exponentials in front of it. Warps take the same one.
                    if flags & MASK != 0:
                        warpgroup.wait_group(0)
                        self.hide(s_rows, first_key, row * UNIT + behind, tidx)
                    else:
                        warpgroup.wait_group(0)
                else:
                    warpgroup.wait_group(0)
                for n in cutlass.range_constexpr(COLUMNS // 2):
                    for j in cutlass.range_constexpr(2):
                        delta = known[8 * n + tidx % 4 * 2 + j, 1, stage]
                        for r in cutlass.range_constexpr(ROWS):
                            c = 2 * n + j
                            dp_rows[r, c] = s_rows[r, c] * (dp_rows[r, c] - delta)
                if cutlass.const_expr(not self.config.causal and not self.config.keys_only):
                    self.clear_behind(
                        dp_rows, first_key, tile * STEP + group * UNIT + UNIT, length_k
                    )
                p.store(as_operand(s, p).load().to(self.dtype))
                ds.store(as_operand(dp, ds).load().to(self.dtype))
                self.multiply(mma_v, sum_v, p, tDot[None, None, None, stage], True, False)
                # Gradients of q end this group, where some follow.
                self.multiply(
                    mma_v, sum_k, ds, tQt[None, None, None, stage], True,
                    self.config.by_turns or self.config.keys_only,
                )  # fmt: skip
            elif cutlass.const_expr(not self.config.keys_only):
                dp.fill(0.0)
            if cutlass.const_expr(not self.config.keys_only):
                self.wait(memory, "ds_free", stage, (count + 1) // STAGES % 2 ^ 1)
                rounded = cute.make_rmem_tensor(dp.shape, self.dtype)
                rounded.store(dp.load().to(self.dtype))
                cute.copy(
                    copy, copy.retile(rounded), ds_target[None, None, None, 2 * stage + group]
                )
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                self.release(memory, "ds_full", stage, tidx)
                # Gradients of q are those of the step before: the other warpgroup has had a step's time for its part.
                # In front of the first step they are nothing's; as a condition they would cost too many registers.
                turn = (count + 1) % 2 == group
                if cutlass.const_expr(self.config.by_turns):
                    if turn:
                        self.multiply_ds(memory, mma_q, dq, tDs, tKt, count - 1, listed, group)
                else:
                    self.multiply_ds(memory, mma_q, dq, tDs, tKt, count - 1, listed, group)
            warpgroup.wait_group(0)
            if cutlass.const_expr(self.config.keys_only):
                cute.arch.sync_warp()
            self.release(memory, "free", stage, tidx)
            if cutlass.const_expr(not self.config.keys_only):
                if turn | (not self.config.by_turns):
                    self.release(memory, "ds_free", before, tidx)
                    if count > 0:
                        self.send(memory, dq, dq_target, last_row, last_head, sent, group, tidx)
                        sent = sent + 1
            last_row, last_head, listed = row, head, flags
            count = count + 1
            self.wait(memory, "full", count % STAGES, count // STAGES % 2)
            flags = records[2, count % STAGES]
        # Gradients of v take the place of v, those of k that of gradients of q, or that of k where only this warpgroup
        # reads it.
        free, stride = memory.k, STEP // 2 * self.width
        if cutlass.const_expr(not self.config.keys_only):
            if (count > 0) & (((count + 1) % 2 == group) | (not self.config.by_turns)):
                self.multiply_ds(memory, mma_q, dq, tDs, tKt, count - 1, listed, group)
                warpgroup.wait_group(0)
                self.send(memory, dq, dq_target, last_row, last_head, sent, group, tidx)
                sent = sent + 1
            self.wait(memory, "dq_free", group, sent % 2 ^ 1)
            if tidx == 0:
                places[0, group] = I32(0)
            self.release(memory, "dq_full", group, tidx)
            free, stride = cute.recast_ptr(memory.dq, dtype=self.dtype), 2 * UNIT * UNIT
        own_v = self.finish(sum_v, F32(1.0), mma_v, memory.v, STEP // 2 * self.width, group, tidx)
        own_k = self.finish(sum_k, scale, mma_v, free, stride, group, tidx)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DONE + group, number_of_threads=GROUP)
        if tidx // 32 == 0:
            for tma, whole, base in ((tma_dk, mDk, own_k), (tma_dv, mDv, own_v)):
                for column in cutlass.range_constexpr(self.columns):
                    rows = rows_in(whole, head_k, batch, *keys)
                    target = cute.local_tile(rows, (UNIT, UNIT), (2 * tile + group, column))
                    copy_out(tma, self.box(base, column), target)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def release(self, memory, name: cutlass.Constexpr, number, tidx):
        """Tells others that this warp has done with a stage; its lanes are together behind products."""
        if tidx % 32 == 0:
            cute.arch.mbarrier_arrive(self.barrier(memory, name, number))

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
    def multiply_ds(self, memory, mma_q, dq: cute.Tensor, tDs, tKt, number, listed, group):
        """Issues gradients of q of a step, 64 columns: those of the warpgroup, or all there are.

        Where a tile is not listed dS is zero, and keys that are listed stand in for those that might not be finite.
        """
        stage, column = number % STAGES, group
        if cutlass.const_expr(self.config.by_turns):
            column = 0
        self.wait(memory, "ds_full", stage, number // STAGES % 2)
        for half in cutlass.range_constexpr(2):
            keys = I32(half)
            if (listed >> half) & 1 == 0:
                keys = I32(1 - half)
            self.multiply(
                mma_q, dq, tDs[None, None, None, 2 * stage + half],
                tKt[None, None, None, keys * self.columns + column], half > 0, half > 0,
            )  # fmt: skip

    @cute.jit
    def weigh(self, s_rows: cute.Tensor, known: cute.Tensor, scale_log2, stage, tidx):
        """Replaces scores by probabilities, those that `hide` sets to zero too."""
        for n in cutlass.range_constexpr(COLUMNS // 2):
            for j in cutlass.range_constexpr(2):
                at = 8 * n + tidx % 4 * 2 + j
                lse = known[at, 0, stage]
                for r in cutlass.range_constexpr(ROWS):
                    value = exp2_pinned(s_rows[r, 2 * n + j] * scale_log2 - lse)
                    s_rows[r, 2 * n + j] = value

    @cute.jit
    def clear_behind(self, dp_rows: cute.Tensor, first_key, end, length_k):
        """Sets dS of keys behind the end to zero: their scores are zeros, which may lie far above all others."""
        if end > length_k:
            for r in cutlass.range_constexpr(ROWS):
                hidden = first_key + 8 * r >= length_k
                for c in cutlass.range_constexpr(COLUMNS):
                    dp_rows[r, c] = F32(0.0) if hidden else dp_rows[r, c]

    @cute.jit
    def hide(self, s_rows: cute.Tensor, first_key, first_seen, tidx):
        """Sets the probabilities of keys that a query row does not see to zero."""
        for c in cutlass.range_constexpr(COLUMNS):
            at = c // 2 * 8 + tidx % 4 * 2 + c % 2
            for r in cutlass.range_constexpr(ROWS):
                hidden = first_key + 8 * r > first_seen + at
                s_rows[r, c] = F32(0.0) if hidden else s_rows[r, c]

    @cute.jit
    def send(self, memory, dq: cute.Tensor, dq_target: cute.Tensor, row, head, sent, group, tidx):
        """Hands gradients of q to the warp that adds them up."""
        self.wait(memory, "dq_free", group, sent % 2 ^ 1)
        cute.autovec_copy(dq, dq_target[None, None, None, group])
        if tidx == 0:
            places = self.places(memory)
            places[0, group], places[1, group], places[2, group] = I32(1), row, head
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self.release(memory, "dq_full", group, tidx)

    @cute.jit
    def finish(self, acc: cute.Tensor, factor, mma_v, base, stride: cutlass.Constexpr, group, tidx):
        """Rounds gradients of 64 keys, writes them to shared memory, and returns where."""
        copy = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma_v
        ).get_slice(tidx)
        halves = repeated(base, (UNIT, self.width), "k", self.dtype, 2, stride)
        rounded = cute.make_rmem_tensor(acc.shape, self.dtype)
        rounded.store((acc.load() * factor).to(self.dtype))
        cute.copy(copy, copy.retile(rounded), copy.partition_D(halves)[None, None, None, group])
        return base + group * stride
