"""The warpgroups that multiply: 64 rows each, over one stream of steps."""

import math

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from cula_core.cute.functions import exp2_pinned
from cula_core.cute.types import F32, I32
from cula_core.cute.wgmma import as_operand, mma

from ..config import BLOCK_M, STAGES, STEP, UNIT, ForwardConfig
from .packed import token
from .shared import KEYS, QUERIES, Layout
from .steps import END, FIRST, MASK, SLOT

LOWEST = -3.0e38  # in the place of minus infinity where differences are taken
SLACK = 8.0  # log2 units
ROWS = 2  # of a thread
COLUMNS = STEP // 4  # of a thread and row


class Consumers(Layout):
    """Scores, exponentials, votes and outputs of 64 rows."""

    def __init__(self, config: ForwardConfig):
        super().__init__(config)

    @cute.jit
    def attend(self, shared, lse: cute.Tensor, length_q, length_k, scale_log2, margin, group, tidx):
        """Does all steps of a CTA for the rows of a warpgroup.

        The products of a step's scores are issued before those of the outputs of the step before, which exponentials
        then hide behind.
        """
        mma_s = mma(self.dtype, STEP, OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        mma_o = mma(self.dtype, self.width, OperandMajorMode.MN)
        part_s, part_o = mma_s.get_slice(tidx), mma_o.get_slice(tidx)
        tQ = mma_s.make_fragment_A(part_s.partition_A(self.queries(shared)))
        tK = mma_s.make_fragment_B(part_s.partition_B(self.keys(shared)))
        tV = mma_o.make_fragment_B(part_o.partition_B(self.values(shared)))
        copy = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma_o
        ).get_slice(tidx)
        target = copy.partition_D(self.queries(shared))
        s = cute.make_rmem_tensor(mma_s.partition_shape_C((UNIT, STEP)), F32)
        o = cute.make_rmem_tensor(mma_o.partition_shape_C((UNIT, self.width)), F32)
        p = mma_o.make_fragment_A(mma_o.partition_shape_A((UNIT, STEP)))
        by_row = cute.make_layout((ROWS, (2, COLUMNS // 2)), stride=(2, (1, 4)))
        s_rows = cute.make_tensor(s.iterator, by_row)
        o_rows = cute.make_tensor(
            o.iterator, cute.make_layout((ROWS, (2, self.width // 8)), stride=(2, (1, 4)))
        )
        origins, total, old_origins, old_total, shrinks = (
            cute.make_rmem_tensor(ROWS, F32) for _ in range(5)
        )
        limit, flags_of = cute.make_rmem_tensor(1, F32), cute.make_rmem_tensor(2, I32)
        row = group * UNIT + tidx // 32 * 16 + tidx % 32 // 4  # the first of this thread's
        records = self.records(shared)

        count, tiles = cutlass.Uint32(0), cutlass.Uint32(0)
        self.wait(shared, "k_full", count)
        flags = records[2, 0]
        if flags & END == 0:
            self.wait(shared, "q_full", tiles)
            unit, other = records[0, 0], records[1, 0]
            self.multiply(
                mma_s, s, tQ[None, None, None, (flags >> SLOT) * 2 + group], tK[None, None, None, 0]
            )
            warpgroup.wait_group(0)
            cute.arch.sync_warp()
            self.release(shared, "k_free", 0)
            self.weigh(
                shared, s_rows, origins, total, old_origins, old_total, shrinks, limit, flags_of, flags, unit, other,
                row, length_q, length_k, scale_log2, margin, group, tidx,
            )  # fmt: skip
            p.store(as_operand(s, p).load().to(self.dtype))
        old = flags
        count = cutlass.Uint32(1)
        tiles = cutlass.Uint32(1)
        if flags & END == 0:
            self.wait(shared, "k_full", count)
            flags = records[2, 1]
        while flags & END == 0:
            stage, before = count % STAGES, (count - 1) % STAGES
            unit, other = records[0, stage], records[1, stage]
            if flags & FIRST != 0:
                self.wait(shared, "q_full", tiles)
                tiles = tiles + 1
            self.multiply(
                mma_s,
                s,
                tQ[None, None, None, (flags >> SLOT) * 2 + group],
                tK[None, None, None, stage],
            )
            self.wait(shared, "v_full", count - 1)
            self.accumulate(mma_o, o, p, tV[None, None, None, before], old & FIRST == 0)
            warpgroup.wait_group(1)
            cute.arch.sync_warp()
            self.release(shared, "k_free", stage)
            rose = self.weigh(
                shared, s_rows, origins, total, old_origins, old_total, shrinks, limit, flags_of, flags, unit, other,
                row, length_q, length_k, scale_log2, margin, group, tidx,
            )  # fmt: skip
            # Each branch has a wait of its own: behind a common one the compiler puts most of the exponentials. All
            # warps of a warpgroup take the same of these two, as products and their waits ask for.
            if flags & FIRST != 0:
                warpgroup.wait_group(0)
                self.release(shared, "v_free", before)
                self.finish(
                    shared, o, o_rows, old_origins, old_total, copy, target, lse, old >> SLOT, row, length_q, group,
                    tidx,
                )  # fmt: skip
            else:
                warpgroup.wait_group(0)
                self.release(shared, "v_free", before)
                if rose:
                    for r in cutlass.range_constexpr(ROWS):
                        for c in cutlass.range_constexpr(self.width // 4):
                            o_rows[r, c] = o_rows[r, c] * shrinks[r]
            old = flags
            count = count + 1
            self.wait(shared, "k_full", count)
            flags = records[2, count % STAGES]
            p.store(as_operand(s, p).load().to(self.dtype))
        if old & END == 0:
            before = (count - 1) % STAGES
            self.wait(shared, "v_full", count - 1)
            self.accumulate(mma_o, o, p, tV[None, None, None, before], old & FIRST == 0)
            warpgroup.wait_group(0)
            self.finish(
                shared, o, o_rows, origins, total, copy, target, lse, old >> SLOT, row, length_q, group, tidx
            )  # fmt: skip
        # The other warps learn of the end as of a query tile.
        self.arrive(shared, flags >> SLOT, tidx)

    @cute.jit
    def multiply(self, mma_s, s: cute.Tensor, q: cute.Tensor, k: cute.Tensor):
        """Issues s = q k^T."""
        self.accumulate(mma_s, s, q, k, cutlass.Boolean(False))

    @cute.jit
    def accumulate(self, tiled_mma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, more):
        """Issues acc = a b^T as one group, added to what acc was if `more`."""
        warpgroup.fence()
        atom = cute.make_mma_atom(tiled_mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, more)
        for i in cutlass.range_constexpr(cute.size(a, mode=[2])):
            cute.gemm(atom, acc, a[None, None, i], b[None, None, i], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def release(self, shared, name: cutlass.Constexpr, stage):
        """Tells the loading warp that this warp has done with a stage, and its lanes with what they have read there."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.barrier(shared, name, stage))

    @cute.jit
    def weigh(
        self, shared, s_rows: cute.Tensor, origins: cute.Tensor, total: cute.Tensor, old_origins: cute.Tensor,
        old_total: cute.Tensor, shrinks: cute.Tensor, limit: cute.Tensor, flags_of: cute.Tensor, flags, unit, other,
        row, length_q, length_k, scale_log2, margin, group, tidx,
    ):  # fmt: skip
        """Replaces scores by exponentials, adds these up, and votes on the tiles of a step.

        Returns whether an origin has moved, by factors that are then in `shrinks`. The first step of a query tile
        begins anew, and leaves what there was in `old_origins` and `old_total`.
        """
        slot = flags >> SLOT
        if flags & FIRST != 0:
            for r in cutlass.range_constexpr(ROWS):
                old_origins[r], old_total[r] = origins[r], total[r]
                origins[r], total[r] = F32(LOWEST), F32(0.0)
            limit[0] = margin - F32.inf
            flags_of[0], flags_of[1] = I32(0), I32(0)
        place = self.places(shared)
        first = place[1, slot] * BLOCK_M + row
        if flags & MASK != 0:
            _, rows = self.sequence(place, slot, QUERIES, length_q)
            _, keys = self.sequence(place, slot, KEYS, length_k)
            self.mask(s_rows, unit, other, first, rows, keys, tidx)
        best = []
        for half in cutlass.range_constexpr(2):
            best.append(
                [
                    self.largest(s_rows, r, half * COLUMNS // 2, (half + 1) * COLUMNS // 2)
                    for r in range(ROWS)
                ]
            )
        rose = cutlass.Boolean(False)
        tops = cute.make_rmem_tensor(ROWS, F32)
        for r in cutlass.range_constexpr(ROWS):
            tops[r] = cute.arch.fmax(best[0][r], best[1][r]) * scale_log2
            rose = rose | (tops[r] - origins[r] > SLACK)
        rose = cute.arch.vote_any_sync(rose)
        if rose:
            for distance in cutlass.range_constexpr(1, 3):
                for r in cutlass.range_constexpr(ROWS):
                    tops[r] = cute.arch.fmax(
                        tops[r], cute.arch.shuffle_sync_bfly(tops[r], distance)
                    )
            for r in cutlass.range_constexpr(ROWS):
                origin = cute.arch.fmax(origins[r], tops[r])
                shrinks[r] = exp2_pinned(origins[r] - origin)
                origins[r] = origin
                total[r] = total[r] * shrinks[r]
        for r in cutlass.range_constexpr(ROWS):
            for c in cutlass.range_constexpr(COLUMNS):
                s_rows[r, c] = exp2_pinned(s_rows[r, c] * scale_log2 - origins[r])
                total[r] = total[r] + s_rows[r, c]
        if cutlass.const_expr(self.config.skip):
            self.vote(shared, best, limit, flags_of, first, length_q, margin, slot, group, tidx)
        return rose

    @cute.jit
    def vote(
        self,
        shared,
        best,
        limit: cute.Tensor,
        flags_of: cute.Tensor,
        first,
        length_q,
        margin,
        slot,
        group,
        tidx,
    ):
        """Votes for the tiles of a step in which a row of this warp has a score near to its best one so far.

        Of its two rows a thread judges one, and rows behind the end have no vote.
        """
        _, length_q = self.sequence(self.places(shared), slot, QUERIES, length_q)
        upper = tidx & 2 != 0
        mine = first + (8 if upper else 0)
        tops = [self.of_row(pair, upper) for pair in best]
        if cutlass.const_expr(self.config.block_n == STEP):
            tops = [cute.arch.fmax(*tops)]
        flags = flags_of[0]
        for top in tops:
            near = (top > limit[0]) & (mine < length_q)
            limit[0] = cute.arch.fmax(limit[0], top + margin)
            flags = flags << 1 | I32(cute.arch.vote_any_sync(near))
        if tidx % 32 == 0:
            votes = self.votes(shared)
            votes[flags_of[1] >> 5, 4 * group + tidx // 32, slot] = flags
        flags_of[0] = flags
        flags_of[1] = flags_of[1] + len(tops)

    @cute.jit
    def of_row(self, pair, upper):
        """Returns the best score of the row that this thread judges, of both of a thread and its three neighbours."""
        own, given = (pair[1] if upper else pair[0]), (pair[0] if upper else pair[1])
        own = cute.arch.fmax(own, cute.arch.shuffle_sync_bfly(given, 2))
        return cute.arch.fmax(own, cute.arch.shuffle_sync_bfly(own, 1))

    @cute.jit
    def mask(
        self, s_rows: cute.Tensor, unit, other, first, length_q, length_k, tidx,
        hidden_is: cutlass.Constexpr = -math.inf,
    ):  # fmt: skip
        """Sets the scores of keys that a row does not see to minus infinity, or what else is theirs."""
        for r in cutlass.range_constexpr(ROWS):
            seen = length_k
            if cutlass.const_expr(self.config.causal):
                seen = first + 8 * r + length_k - length_q + 1
                seen = cutlass.min(seen, length_k)
            for c in cutlass.range_constexpr(COLUMNS):
                column = c % (COLUMNS // 2) // 2 * 8 + tidx % 4 * 2 + c % 2
                key = (unit if c < COLUMNS // 2 else other) * UNIT + column
                hidden = key >= seen
                if cutlass.const_expr(c >= COLUMNS // 2):
                    hidden = hidden | (other < 0)
                s_rows[r, c] = F32(hidden_is) if hidden else s_rows[r, c]

    def largest(self, s_rows, r, first, end):
        """Returns the largest score of a row in some columns, compared in pairs."""
        if end - first == 1:
            return s_rows[r, first]
        middle = (first + end) // 2
        return cute.arch.fmax(
            self.largest(s_rows, r, first, middle), self.largest(s_rows, r, middle, end)
        )

    @cute.jit
    def finish(
        self, shared, o: cute.Tensor, o_rows: cute.Tensor, origins: cute.Tensor, total: cute.Tensor, copy, target,
        lse: cute.Tensor, slot, row, length_q, group, tidx,
    ):  # fmt: skip
        """Stores the outputs of a query tile where its queries were, and the log-sum-exp in global memory."""
        place = self.places(shared)
        tile, head, batch = place[1, slot], place[2, slot], place[3, slot]
        first_q, length_q = self.sequence(place, slot, QUERIES, length_q)
        for r in cutlass.range_constexpr(ROWS):
            whole = total[r]
            for distance in cutlass.range_constexpr(1, 3):
                whole = whole + cute.arch.shuffle_sync_bfly(whole, distance)
            inverse = cute.arch.rcp_approx(whole) if whole > 0.0 else F32(0.0)
            for c in cutlass.range_constexpr(self.width // 4):
                o_rows[r, c] = o_rows[r, c] * inverse
            value = (origins[r] + cute.math.log2(whole, fastmath=True)) * math.log(2)
            value = value if whole > 0.0 else -F32.inf
            mine = tile * BLOCK_M + row + 8 * r
            if (tidx % 4 == 0) & (mine < length_q):
                batch, at = token(mine, batch, first_q)
                lse[batch, head, at] = value
        rounded = cute.make_rmem_tensor(o.shape, self.dtype)
        rounded.store(o.load().to(self.dtype))
        cute.copy(copy, copy.retile(rounded), target[None, None, None, 2 * slot + group])
        cute.arch.fence_view_async_shared()
        self.arrive(shared, slot, tidx)

    @cute.jit
    def arrive(self, shared, slot, tidx):
        """Tells the storing warp, and that which makes lists, that a slot has all they need."""
        cute.arch.mbarrier_arrive(self.barrier(shared, "o_full", slot))
        if cutlass.const_expr(self.config.skip):
            if tidx % 32 == 0:
                cute.arch.mbarrier_arrive(self.barrier(shared, "votes_full", slot))
