"""Gradients of q over listed key tiles on Hopper, each added up by one thread in one order: TMA loads, wgmma.

The forward's stream of steps of 128 keys, in which dq takes the place of the outputs: scores and dP of a step are
multiplied beside dq of the step before. What `LiteBackward` does otherwise, and with it all gradients are the same bits
every time.
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

from ..config import BLOCK_M, REGISTERS, STAGES, STEP, THREADS, UNIT, QueriesConfig
from .consumers import COLUMNS, ROWS, Consumers
from .loader import LAST_A, LAST_B, STEPS, Loader
from .packed import row_in, tokens, units_before
from .shared import KEYS, QUERIES, Shared, barrier_counts
from .steps import END, FIRST, MASK, SLOT

# As those of the forward, without votes: dq lies where outputs do there, there is one do beside two q, and who has done
# with keys has done with their values.
BARRIERS = {
    "k_full": 1, "k_free": 8, "v_full": 1, "q_full": 1, "q_free": 1, "o_full": 256, "do_full": 1, "do_free": 8,
    "list_full": 32, "list_free": 1,
}  # fmt: skip


@dataclass(frozen=True)
class QueryShared(Shared):
    """Pointers to shared memory, and where do comes from."""

    do: cute.Pointer
    tma_do: cute.CopyAtom
    mDo: cute.Tensor


class LiteQueries:
    """Persistent CTAs of three warpgroups.

    | thread role | warps | work |
    |---|---|---|
    | load | 0 | turns lists into steps, loads q, do, k and v |
    | store | 2 | stores gradients |
    | look ahead | 3 | draws query tiles, reads their lists |
    | rows w | 4 + 4w ... | gradients of 64 rows |

    | shared memory at D=128 | shape | bytes |
    |---|---|---|
    | q, later dq of the same rows | [64, D], two halves, two slots | 65,536 |
    | do | [64, D], two halves | 32,768 |
    | k, v | [128, D], two stages each | 65,536 each |
    """

    def __init__(self, config: QueriesConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.loader, self.consumers = QueryLoader(config), QueryConsumers(config)

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
        dq: cute.Tensor,
        scale: cutlass.Float32,
        scale_log2: cutlass.Float32,
        longest: cutlass.Int32 | None,
        ctas: cutlass.Int32,
        stream,
    ):
        """The arguments of `build.queries_arguments`, which describes them."""
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        box = swizzled((UNIT, UNIT), "k", self.dtype), (UNIT, UNIT)
        packed = self.config.packed is not None
        tma_q, mQ = cpasync.make_tiled_tma_atom(load, tokens(q, packed), *box)
        tma_k, mK = cpasync.make_tiled_tma_atom(load, tokens(k, packed), *box)
        tma_v, mV = cpasync.make_tiled_tma_atom(load, tokens(v, packed), *box)
        tma_do, mDo = cpasync.make_tiled_tma_atom(load, tokens(do, packed), *box)
        tma_dq, mDq = cpasync.make_tiled_tma_atom(store, tokens(dq, packed), *box)
        self.kernel(
            tma_q, mQ, tma_k, mK, tma_v, mV, tma_do, mDo, tma_dq, mDq, dq, lse, delta, mask, starts_q, starts_k, work,
            scale, scale_log2, longest,
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
        tma_do: cute.CopyAtom,
        mDo: cute.Tensor,
        tma_dq: cute.CopyAtom,
        mDq: cute.Tensor,
        dq: cute.Tensor,
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
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        counts = barrier_counts(BARRIERS)
        barriers = smem.allocate_array(cutlass.Int64, len(counts))
        whole = STEP * self.config.width
        q_base, k_base, v_base, do_base = (
            smem.allocate_array(self.dtype, tiles * whole, byte_alignment=1024)
            for tiles in (STAGES, STAGES, STAGES, 1)
        )
        records = smem.allocate_array(I32, 4 * STAGES, byte_alignment=16)
        places = smem.allocate_array(I32, self.loader.place_words * STAGES, byte_alignment=16)
        waiting = smem.allocate_array(I32, self.loader.waiting_words, byte_alignment=16)
        if tidx == 0:
            for i in cutlass.range_constexpr(len(counts)):
                cute.arch.mbarrier_init(barriers + i, counts[i])
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        shared = QueryShared(
            barriers, q_base, k_base, v_base, records, places, waiting, None, do_base, tma_do, mDo
        )

        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp_idx == 0:
                self.loader.load(shared, tma_q, mQ, tma_k, mK, tma_v, mV, I32(1))
            if warp_idx == 2:
                self.loader.store(shared, tma_dq, mDq, dq.shape[1])
            if warp_idx == 3:
                self.loader.look_ahead(
                    shared, mQ, mK, dq, None, mask, None, work, I32(1), starts_q, starts_k, longest
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            self.consumers.attend(
                shared, lse, delta, mQ.shape[0], mK.shape[0], scale, scale_log2, warp_idx // 4 - 1, tidx % 128
            )  # fmt: skip


class QueryLoader(Loader):
    """The forward's warps, but do comes beside q, v beside k, and nothing but dq is stored."""

    barriers = BARRIERS

    def __init__(self, config: QueriesConfig):
        super().__init__(config)
        self.votes_count = False

    @cute.jit
    def step(
        self, shared, at: cute.Tensor, unit, other, flags, clear, slot, head_k, batch, keys, tma_k, mK, tma_v, mV, lane
    ):  # fmt: skip
        """Loads the keys of a step, and its values, which are needed as soon."""
        Loader.step(
            self, shared, at, unit, other, flags, clear, slot, head_k, batch, keys, tma_k, mK, tma_v, mV, lane
        )  # fmt: skip
        stage = (at[STEPS] - 1) % STAGES
        full = self.barrier(shared, "v_full", stage)
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes)
        self.load_units(
            tma_v, mV, shared, shared.v, stage, at[LAST_A], at[LAST_B], head_k, batch, keys, full
        )

    @cute.jit
    def load_values(self, shared, at: cute.Tensor, tma_v, mV, lane):
        """Does nothing: the values of the step before are there."""

    @cute.jit
    def load_queries(self, shared, tma_q, mQ, tile, head, batch, queries, slot):
        """Loads q, and do once nobody reads that of the query tile before."""
        Loader.load_queries(self, shared, tma_q, mQ, tile, head, batch, queries, slot)
        # Slots take turns, as phases of the one do.
        cute.arch.mbarrier_wait(self.barrier(shared, "do_free", 0), slot ^ 1)
        full = self.barrier(shared, "do_full", 0)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes)
        for half in cutlass.range_constexpr(2):
            for column in cutlass.range_constexpr(self.columns):
                box = self.box(shared.do, half * self.columns + column)
                row, place = row_in(tile * BLOCK_M + half * UNIT, batch, *queries)
                load_tile(shared.tma_do, shared.mDo, row, head, place, column, box, full)


class QueryConsumers(Consumers):
    """Probabilities, dS and gradients of 64 rows."""

    barriers = BARRIERS

    @cute.jit
    def attend(
        self, shared, lse: cute.Tensor, delta: cute.Tensor, length_q, length_k, scale, scale_log2, group, tidx
    ):  # fmt: skip
        """Does all steps of a CTA for the rows of a warpgroup.

        Gradients of a step are issued before the scores of the next one, and dP behind both, where registers of dS are
        free again: exponentials hide behind dP.
        """
        mma_s = mma(self.dtype, STEP, OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        mma_q = mma(self.dtype, self.width, OperandMajorMode.MN)
        part_s, part_q = mma_s.get_slice(tidx), mma_q.get_slice(tidx)
        rows = repeated(shared.do, (UNIT, self.width), "k", self.dtype, 2)
        values = repeated(shared.v, (STEP, self.width), "k", self.dtype, STAGES)
        turned = repeated(shared.k, (self.width, STEP), "mn", self.dtype, STAGES)
        tQ = mma_s.make_fragment_A(part_s.partition_A(self.queries(shared)))
        tDo = mma_s.make_fragment_A(part_s.partition_A(rows))[None, None, None, group]
        tK = mma_s.make_fragment_B(part_s.partition_B(self.keys(shared)))
        tV = mma_s.make_fragment_B(part_s.partition_B(values))
        tKt = mma_q.make_fragment_B(part_q.partition_B(turned))
        copy = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma_q
        ).get_slice(tidx)
        target = copy.partition_D(self.queries(shared))
        s, dp = (
            cute.make_rmem_tensor(mma_s.partition_shape_C((UNIT, STEP)), F32) for _ in range(2)
        )
        dq = cute.make_rmem_tensor(mma_q.partition_shape_C((UNIT, self.width)), F32)
        ds = mma_q.make_fragment_A(mma_q.partition_shape_A((UNIT, STEP)))
        by_row = cute.make_layout((ROWS, (2, COLUMNS // 2)), stride=(2, (1, 4)))
        s_rows, dp_rows = (cute.make_tensor(x.iterator, by_row) for x in (s, dp))
        known = cute.make_rmem_tensor((ROWS, 2), F32)
        row = group * UNIT + tidx // 32 * 16 + tidx % 32 // 4  # the first of this thread's
        records = self.records(shared)

        count, tiles = cutlass.Uint32(0), cutlass.Uint32(0)
        self.wait(shared, "k_full", count)
        flags = records[2, 0]
        if flags & END == 0:
            self.wait(shared, "q_full", tiles)
            self.multiply(
                mma_s, s, tQ[None, None, None, (flags >> SLOT) * 2 + group], tK[None, None, None, 0]
            )
            self.weigh(
                shared, mma_s, s_rows, dp, dp_rows, known, ds, tDo, tV[None, None, None, 0], lse, delta, flags, count,
                row, length_q, length_k, scale_log2, tidx,
            )  # fmt: skip
        old = flags
        count = cutlass.Uint32(1)
        tiles = cutlass.Uint32(1)
        if flags & END == 0:
            self.wait(shared, "k_full", count)
            flags = records[2, 1]
        while flags & END == 0:
            stage, before = count % STAGES, (count - 1) % STAGES
            if flags & FIRST != 0:
                self.release(shared, "do_free", 0)
                self.wait(shared, "q_full", tiles)
                tiles = tiles + 1
            self.accumulate(mma_q, dq, ds, tKt[None, None, None, before], old & FIRST == 0)
            self.multiply(
                mma_s,
                s,
                tQ[None, None, None, (flags >> SLOT) * 2 + group],
                tK[None, None, None, stage],
            )
            warpgroup.wait_group(1)
            cute.arch.sync_warp()
            self.release(shared, "k_free", before)
            if flags & FIRST != 0:
                self.finish(shared, dq, copy, target, scale, old >> SLOT, group, tidx)
            self.weigh(
                shared, mma_s, s_rows, dp, dp_rows, known, ds, tDo, tV[None, None, None, stage], lse, delta, flags,
                count, row, length_q, length_k, scale_log2, tidx,
            )  # fmt: skip
            old = flags
            count = count + 1
            self.wait(shared, "k_full", count)
            flags = records[2, count % STAGES]
        if old & END == 0:
            self.accumulate(
                mma_q, dq, ds, tKt[None, None, None, (count - 1) % STAGES], old & FIRST == 0
            )
            warpgroup.wait_group(0)
            self.finish(shared, dq, copy, target, scale, old >> SLOT, group, tidx)
        # The other warps learn of the end as of a query tile.
        cute.arch.mbarrier_arrive(self.barrier(shared, "o_full", flags >> SLOT))

    @cute.jit
    def weigh(
        self, shared, mma_s, s_rows: cute.Tensor, dp: cute.Tensor, dp_rows: cute.Tensor, known: cute.Tensor,
        ds: cute.Tensor, tDo, tV, lse: cute.Tensor, delta: cute.Tensor, flags, count, row, length_q, length_k,
        scale_log2, tidx,
    ):  # fmt: skip
        """Multiplies dP of a step whose scores are issued, and makes dS of both. known: lse and Delta of rows.

        dS is rounded at once: with what comes next in front of that, registers do not suffice.
        """
        slot = flags >> SLOT
        unit, other = (self.records(shared)[i, count % STAGES] for i in range(2))
        place = self.places(shared)
        first = place[1, slot] * BLOCK_M + row
        if flags & FIRST != 0:
            head, batch = place[2, slot], place[3, slot]
            first_q, rows = self.sequence(place, slot, QUERIES, length_q)
            before = UNIT * units_before(batch, first_q)
            if cutlass.const_expr(self.config.packed is not None):
                batch = I32(0)
            for r in cutlass.range_constexpr(ROWS):
                known[r, 0], known[r, 1] = F32.inf, F32(0.0)
                if first + 8 * r < rows:
                    known[r, 0] = lse[batch, head, before + first + 8 * r]
                    known[r, 1] = delta[batch, head, before + first + 8 * r]
            cute.arch.mbarrier_wait(self.barrier(shared, "do_full", 0), slot)
        self.wait(shared, "v_full", count)
        self.multiply(mma_s, dp, tDo, tV)
        warpgroup.wait_group(1)
        for r in cutlass.range_constexpr(ROWS):
            for c in cutlass.range_constexpr(COLUMNS):
                s_rows[r, c] = exp2_pinned(s_rows[r, c] * scale_log2 - known[r, 0])
        # As in the forward, a wait per branch keeps exponentials in front of it. Warps take the same branch.
        if flags & MASK != 0:
            warpgroup.wait_group(0)
            _, rows = self.sequence(place, slot, QUERIES, length_q)
            _, keys = self.sequence(place, slot, KEYS, length_k)
            self.mask(s_rows, unit, other, first, rows, keys, tidx, 0.0)
        else:
            warpgroup.wait_group(0)
        for r in cutlass.range_constexpr(ROWS):
            for c in cutlass.range_constexpr(COLUMNS):
                dp_rows[r, c] = s_rows[r, c] * (dp_rows[r, c] - known[r, 1])
        ds.store(as_operand(dp, ds).load().to(self.dtype))

    @cute.jit
    def finish(self, shared, dq: cute.Tensor, copy, target, scale, slot, group, tidx):
        """Rounds gradients of a query tile, and stores them where its queries were."""
        rounded = cute.make_rmem_tensor(dq.shape, self.dtype)
        rounded.store((dq.load() * scale).to(self.dtype))
        cute.copy(copy, copy.retile(rounded), target[None, None, None, 2 * slot + group])
        cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_arrive(self.barrier(shared, "o_full", slot))
