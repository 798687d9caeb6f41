"""Softmax attention over listed key tiles: cp.async, ldmatrix and mma.sync, 99 KB of shared memory.

One CTA has 128 queries of a head and walks over 64 keys at a time, FlashAttention's way (arXiv 2205.14135). With a list
it visits the listed key tiles only, and finds out which of them the next call needs (LiteAttention, arXiv 2511.11062).
"""

import functools
import math
import operator
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from cula_core.cute.functions import exp2_pinned
from cula_core.cute.types import DTYPES, F32, I32

from ..config import (
    BLOCK_M,
    KEY_GROUP,
    MAX_LISTED,
    MAX_WORDS,
    PADDING,
    QUERY_GROUP,
    ForwardConfig,
)
from .int8 import EXACT, EXACT_BITS, SignedInt8Op, multiply
from .tiles import Tiles, rarely, tokens_of

TINY = 1.2e-38
LOWEST = -3.0e38  # in the place of minus infinity where differences are taken
SLACK = 8.0  # log2 units
# In units of the second product, 16 keys and 16 columns: when votes are counted, and how long before its end the
# exponentials of the next 16 keys are done.
VOTE, LEAD = 2, 2


@dataclass(frozen=True)
class Tile:
    """What a CTA works on: the query tile `tile` of a head and sequence, the call's arguments, and shared memory.

    first_q, first_k: the first tokens of the sequence in its batch; length_q, length_k: its numbers of tokens.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    read: cute.Tensor
    must_do: cute.Tensor
    write: cute.Tensor
    query_scales: cute.Tensor
    key_scales: cute.Tensor
    lse_shift: cute.Tensor
    scale_log2: cutlass.Float32
    margin: cutlass.Float32
    direction: cutlass.Int32
    mma: cute.TiledMma
    mma8: cute.TiledMma
    load: cute.TiledCopy
    load_scored: cute.TiledCopy
    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sO: cute.Tensor
    listed: cute.Tensor
    kept: cute.Tensor
    votes: cute.Tensor
    tidx: cutlass.Int32
    tile: cutlass.Int32
    head: cutlass.Int32
    sequence: cutlass.Int32
    batch: cutlass.Int32
    first_q: cutlass.Int32
    first_k: cutlass.Int32
    length_q: cutlass.Int32
    length_k: cutlass.Int32


@dataclass(frozen=True)
class Registers:
    """What a thread has while its CTA walks over keys.

    starts: its addresses of k and v. gK, gV: the rows of its head. tXsX, tXrX: how fragments of X are loaded. o, s:
    sums of outputs and scores, `scores` the same memory as s in the type of the mma; o_rows, s_rows: the same by row.
    limit: the score from which on a tile is near. total, origins: of each row, the sum of exponentials and its origin.
    factors, offsets: an exponential is that of `score * factor - offset`. of_queries, of_keys: scales of
    8-bit integers. count: of the steps. clear: all rows see the keys in front of this one.
    """

    starts: tuple
    gK: cute.Tensor
    gV: cute.Tensor
    thr_load: cute.TiledCopy
    thr_scored: cute.TiledCopy
    ldmatrix: cute.CopyAtom
    ldmatrix_t: cute.CopyAtom
    tQsQ: cute.Tensor
    tKsK: cute.Tensor
    tVsV: cute.Tensor
    tQrQ: cute.Tensor
    tKrK: cute.Tensor
    tVrV: cute.Tensor
    rQ: cute.Tensor
    rK: cute.Tensor
    rV: cute.Tensor
    o: cute.Tensor
    s: cute.Tensor
    scores: cute.Tensor
    o_rows: cute.Tensor
    s_rows: cute.Tensor
    limit: cute.Tensor
    total: cute.Tensor
    origins: cute.Tensor
    factors: cute.Tensor
    offsets: cute.Tensor
    of_queries: cute.Tensor
    of_keys: cute.Tensor
    count: cutlass.Int32
    clear: cutlass.Int32


class LiteForward(Tiles):
    """One CTA per (128 queries, head, sequence).

    | shared memory | shape | bytes at D=128 |
    |---|---|---|
    | q, later o | [128, D + 8]; in the place of k and v when q moves to registers | 34,816 |
    | of each of 128 threads, addresses of k and v | int64 [128, 2], in the padding behind q | 0 |
    | k, v | [64, D + 8] each, one stage | 17,408 each |
    | listed tiles | int16 [4104] | 8,208 |
    | votes of each warp, bit by visit | int32 [4, 128] | 2,048 |
    | tiles to keep | int32 [128] | 512 |

    All warps do the same, for 16 or 32 rows each. A step, with what hides behind the products in brackets:

        wait for k; S = q k^T [start to load v]; best scores; wait for v; O += exp2(S) v [exponentials, start to load k]

    The next tile is known from the list, so its load does not wait for this tile's decision. Probabilities and outputs
    are relative to an origin per row, which follows the row's best score only when that is 2^8 better: outputs are
    hardly ever rescaled after the first tile.
    """

    def __init__(self, config: ForwardConfig):
        self.config, self.problem = config, config.problem
        dtype, dim, threads = DTYPES[self.problem.dtype], self.problem.head_dim, 32 * config.warps
        super().__init__(dtype, dim, config.width, threads)
        # Rows of q and k, as 16-bit columns.
        columns = config.score_columns
        self.scored = Tiles(dtype, columns, columns, threads) if self.problem.int8 else self
        self.blocks = BLOCK_M // (16 * config.warps)  # of 16 rows per warp
        self.rows = 2 * self.blocks  # of a thread
        self.step = config.step
        self.steps = self.problem.block_n // config.step
        # Of the second product: the units by which v is read ahead from shared memory, and the part of it, in 32nds,
        # over which the next k is requested. Measured with 64 and 128 columns; other values cost 1 to 5 %.
        self.ahead, self.spread = (4, 10) if config.width == 128 else (3, 8)
        if self.problem.skip:
            self.ahead, self.spread = 2, 8

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        read: cute.Tensor,
        must_do: cute.Tensor,
        write: cute.Tensor,
        starts_q: cute.Tensor,
        starts_k: cute.Tensor,
        direction_at: cute.Tensor,
        query_scales: cute.Tensor,
        key_scales: cute.Tensor,
        lse_shift: cute.Tensor,
        scale_log2: cutlass.Float32,
        margin: cutlass.Float32,
        direction: cutlass.Int32,
        query_tiles: cutlass.Int32,
        sequences: cutlass.Int32,
        stream,
    ):
        """The arguments of `launch.forward_arguments`, which describes them; what the problem does not have is None."""
        mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(self.dtype, F32, (16, 8, 16)),
            cute.make_layout((self.config.warps, 1, 1)),
            permutation_mnk=(16 * self.config.warps, 16, 16),
        )
        mma8 = None
        if cutlass.const_expr(self.problem.int8):
            mma8 = cute.make_tiled_mma(SignedInt8Op(), (1, 1, 1))
        self.kernel(
            q, k, v, out, lse, read, must_do, write, starts_q, starts_k, direction_at,
            query_scales, key_scales, lse_shift, scale_log2, margin, direction,
            mma, mma8, self.tiled_load(), self.scored.tiled_load(),
        ).launch(
            grid=(query_tiles, q.shape[2], sequences), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        read: cute.Tensor,
        must_do: cute.Tensor,
        write: cute.Tensor,
        starts_q: cute.Tensor,
        starts_k: cute.Tensor,
        direction_at: cute.Tensor,
        query_scales: cute.Tensor,
        key_scales: cute.Tensor,
        lse_shift: cute.Tensor,
        scale_log2: cutlass.Float32,
        margin: cutlass.Float32,
        direction: cutlass.Int32,
        mma: cute.TiledMma,
        mma8: cute.TiledMma,
        load: cute.TiledCopy,
        load_scored: cute.TiledCopy,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        tile, head, sequence = cute.arch.block_idx()
        if cutlass.const_expr(self.problem.causal):  # those with the most keys first
            tiles, _, _ = cute.arch.grid_dim()
            tile = tiles - 1 - tile
        batch, first_q, length_q = tokens_of(sequence, starts_q, q)
        _, first_k, length_k = tokens_of(sequence, starts_k, k)
        if cutlass.const_expr(self.problem.on_device):
            direction = direction_at[0]

        smem = SmemAllocator()
        q_layout, k_layout = (self.scored.padded(rows) for rows in (BLOCK_M, self.step))
        v_layout = self.padded(self.step)
        place = smem.allocate_tensor(self.dtype, cute.make_layout(self.config.place), 128).iterator
        sQ, sO = cute.make_tensor(place, q_layout), cute.make_tensor(place, self.padded(BLOCK_M))
        if cutlass.const_expr(not self.config.query_in_registers):
            place = place + BLOCK_M * q_layout.stride[0]
        sK = cute.make_tensor(place, k_layout)
        sV = cute.make_tensor(place + cute.cosize(k_layout), v_layout)
        listed, kept, votes = None, None, None
        if cutlass.const_expr(self.problem.skip):
            listed = smem.allocate_tensor(cutlass.Int16, cute.make_layout(MAX_LISTED), 16)
            kept = smem.allocate_tensor(I32, cute.make_layout(MAX_WORDS), 16)
            votes = smem.allocate_tensor(
                I32, cute.make_layout((self.config.warps, MAX_WORDS), stride=(MAX_WORDS, 1)), 16
            )

        work = Tile(
            q=q, k=k, v=v, out=out, lse=lse, read=read, must_do=must_do, write=write,
            query_scales=query_scales, key_scales=key_scales, lse_shift=lse_shift,
            scale_log2=scale_log2, margin=margin, direction=direction,
            mma=mma, mma8=mma8, load=load, load_scored=load_scored,
            sQ=sQ, sK=sK, sV=sV, sO=sO, listed=listed, kept=kept, votes=votes,
            tidx=tidx, tile=tile, head=head, sequence=sequence, batch=batch,
            first_q=first_q, first_k=first_k, length_q=length_q, length_k=length_k,
        )  # fmt: skip
        if tile * BLOCK_M < length_q:
            self.attend(work)
        else:
            if cutlass.const_expr(self.problem.skip):
                for word in cutlass.range(tidx, write.shape[3], self.threads, unroll=1):
                    write[sequence, head, tile, word] = I32(0)

    @cute.jit
    def attend(self, work):
        """Computes a query tile that has rows."""
        tidx, tile, length_q, length_k = work.tidx, work.tile, work.length_q, work.length_k
        first_row = tile * BLOCK_M
        # Tiles of keys that any row of this query tile sees.
        reach = length_k
        if cutlass.const_expr(self.problem.causal):
            last_row = cutlass.min(first_row + BLOCK_M, length_q) - 1
            reach = cutlass.max(cutlass.min(length_k, last_row + length_k - length_q + 1), 0)
        tiles = cute.ceil_div(reach, self.problem.block_n)
        row_of_mask, bits = None, I32(0)
        if cutlass.const_expr(self.problem.skip):
            row_of_mask = work.read[work.sequence, work.head, tile, None]
            bits = self.listed_in(row_of_mask, tiles, work.direction, tidx % 32)
        self.scored.clear_padding(work.sQ, tidx)
        gQ = work.q[work.batch, None, work.head, None]
        self.scored.copy_async(
            work.load_scored, work.load_scored.get_slice(tidx), gQ, work.first_q + first_row, length_q - first_row,
            work.sQ,
        )  # fmt: skip
        if cutlass.const_expr(self.problem.skip):
            tiles, key = self.make_list(
                bits, row_of_mask, tiles, work.direction, work.listed, work.kept, tidx
            )
            key = key * self.problem.block_n
        count = tiles * self.steps
        if cutlass.const_expr(not self.problem.skip):
            key = (count - 1) * self.step
        if count > 0:
            self.walk(work, tiles, count, key)
        else:
            self.store_nothing(work)

    @cute.jit
    def walk(self, work, tiles, count, key):
        """Walks over at least one tile of keys, and stores the results."""
        tidx, tile, length_q, length_k = work.tidx, work.tile, work.length_q, work.length_k
        mma, sQ, sK, sV = work.mma, work.sQ, work.sK, work.sV
        first_row = tile * BLOCK_M
        head_k = work.head // (work.q.shape[2] // work.k.shape[2])
        load, load_scored = work.load, work.load_scored
        thr_load, thr_scored = load.get_slice(tidx), load_scored.get_slice(tidx)
        gK, gV = (t[work.batch, None, head_k, None] for t in (work.k, work.v))
        # All rows see the keys in front of this one.
        clear = length_k
        if cutlass.const_expr(self.problem.causal):
            clear = cutlass.max(cutlass.min(length_k, first_row + length_k - length_q + 1), 0)

        thr_mma = mma.get_slice(tidx)
        ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        ldmatrix_t = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), self.dtype)
        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0]))
        copy_q = cute.make_tiled_copy_A(ldmatrix, mma).get_slice(tidx)
        copy_k = cute.make_tiled_copy_B(ldmatrix, mma).get_slice(tidx)
        copy_v = cute.make_tiled_copy_B(ldmatrix_t, mma).get_slice(tidx)
        rQ = mma.make_fragment_A(thr_mma.partition_A(sQ))
        rK = mma.make_fragment_B(thr_mma.partition_B(sK))
        rV = mma.make_fragment_B(thr_mma.partition_B(sVt))
        tQsQ, tKsK, tVsV = (
            copy_q.partition_S(sQ),
            copy_k.partition_S(sK),
            copy_v.partition_S(sVt),
        )
        tQrQ, tKrK, tVrV = copy_q.retile(rQ), copy_k.retile(rK), copy_v.retile(rV)
        o = cute.make_rmem_tensor(thr_mma.partition_shape_C((BLOCK_M, self.width)), F32)
        scores = cute.make_rmem_tensor(
            thr_mma.partition_shape_C((BLOCK_M, self.step)), I32 if self.problem.int8 else F32
        )
        s = cute.recast_tensor(scores, F32) if self.problem.int8 else scores
        o_rows, s_rows = self.by_row(o, self.width), self.by_row(s, self.step)
        o.fill(0.0)
        total, origins = (cute.make_rmem_tensor(self.rows, F32) for _ in range(2))
        origins.fill(LOWEST)
        total.fill(0.0)
        if cutlass.const_expr(self.config.query_in_registers):
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            cute.copy(ldmatrix, tQsQ, tQrQ)
            cute.arch.sync_threads()
        self.scored.clear_padding(sK, tidx)
        starts = (
            self.start_of(thr_scored, gK, work.first_k, sK),
            self.start_of(thr_load, gV, work.first_k, sV),
        )
        keys = self.scored.lines_behind(starts[0], load_scored, thr_scored, gK, key, length_k, sK)
        self.scored.copy_part_async(keys, 0, 1)
        cute.arch.cp_async_commit_group()
        starts = self.store_addresses(starts, sQ, tidx)
        # What scores are multiplied by, per block of rows, and what is then taken away from them, per row.
        factors, offsets = cute.make_rmem_tensor(self.blocks, F32), origins
        factors.fill(work.scale_log2)
        of_queries, of_keys, key_scale = None, None, F32(1.0)
        if cutlass.const_expr(self.problem.int8):
            offsets = cute.make_rmem_tensor(self.rows, F32)
            of_queries, of_keys = self.scales(work, head_k)
            key_scale = of_keys[key // KEY_GROUP]
        limit = cute.make_rmem_tensor(1, F32)
        limit[0] = work.margin - math.inf
        regs = Registers(
            starts=starts, gK=gK, gV=gV, thr_load=thr_load, thr_scored=thr_scored,
            ldmatrix=ldmatrix, ldmatrix_t=ldmatrix_t, tQsQ=tQsQ, tKsK=tKsK, tVsV=tVsV, tQrQ=tQrQ, tKrK=tKrK, tVrV=tVrV,
            rQ=rQ, rK=rK, rV=rV,
            o=o, s=s, scores=scores, o_rows=o_rows, s_rows=s_rows, limit=limit, total=total, origins=origins,
            factors=factors, offsets=offsets, of_queries=of_queries, of_keys=of_keys,
            count=count, clear=clear,
        )  # fmt: skip
        flags = I32(0)
        for step in cutlass.range(count, unroll=1):
            key, key_scale, flags = self.visit(work, regs, step, key, key_scale, flags)
        # Where outputs go others may still read, or the last step's copy of a k may be on its way.
        if cutlass.const_expr(self.config.outputs_over_keys):
            cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.problem.skip):
            held = None
            if cutlass.const_expr(self.problem.must_do):
                held = work.must_do[work.sequence, work.head, tile, None]
            self.collect_kept(work.listed, work.votes, held, work.kept, tiles, tidx)
        self.store_results(work, o, o_rows, origins, total)
        cute.arch.sync_threads()
        gO = work.out[work.batch, None, work.head, None]
        self.store(load, thr_load, gO, work.first_q + first_row, length_q - first_row, work.sO)
        if cutlass.const_expr(self.problem.skip):
            self.store_kept(work.write[work.sequence, work.head, tile, None], work.kept, tidx)
        if cutlass.const_expr(not self.config.outputs_over_keys):
            cute.arch.cp_async_wait_group(0)  # no CTA ends before its copies

    @cute.jit
    def store_nothing(self, work):
        """Stores the results of rows that see no key: outputs are zero."""
        tidx, first_row = work.tidx, work.tile * BLOCK_M
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        for i in cutlass.range(tidx, cute.size(work.sO), self.threads, unroll=1):
            work.sO[i // self.width, i % self.width] = self.dtype(0.0)
        cute.arch.sync_threads()
        gO, thr_load = work.out[work.batch, None, work.head, None], work.load.get_slice(tidx)
        self.store(
            work.load, thr_load, gO, work.first_q + first_row, work.length_q - first_row, work.sO
        )
        if tidx < cutlass.min(BLOCK_M, work.length_q - first_row):
            work.lse[work.batch, work.head, work.first_q + first_row + tidx] = F32(-math.inf)
        if cutlass.const_expr(self.problem.skip):
            self.store_kept(work.write[work.sequence, work.head, work.tile, None], work.kept, tidx)

    @cute.jit
    def store_addresses(self, starts, sQ, tidx):
        """Stores two addresses of a thread behind the rows of q, and returns where each step reads them.

        The compiler does not keep them in registers but computes them anew, with some twenty instructions each.
        """
        if cutlass.const_expr(self.config.query_in_registers or self.threads > BLOCK_M):
            return starts
        row = sQ.layout.stride[0]
        place = cute.recast_ptr(sQ.iterator + (row - PADDING), dtype=cutlass.Int64)
        behind = cute.make_tensor(place, cute.make_layout((BLOCK_M, 2), stride=(row // 4, 1)))
        both = cute.make_rmem_tensor(2, cutlass.Int64)
        both[0], both[1] = starts
        cute.autovec_copy(both, behind[tidx, None])
        return behind[tidx, None]

    @cute.jit
    def scales(self, work, head_k):
        """Returns the scales of 8-bit integers: of this thread's blocks of queries, in log2 units, and of all keys."""
        of_queries = cute.make_rmem_tensor(self.blocks, F32)
        slot, first_group = work.tile, 0
        if cutlass.const_expr(self.problem.packed):
            slot = work.first_q // BLOCK_M + work.sequence + work.tile
            first_group = work.first_k // KEY_GROUP + work.sequence
        for m in cutlass.range_constexpr(self.blocks):
            # Rows behind the end hold the last one, and have its scale.
            row = work.tidx // 32 * 16 + m * (16 * self.config.warps)
            row = cutlass.min(row, work.length_q - 1 - work.tile * BLOCK_M)
            group = slot * (BLOCK_M // QUERY_GROUP) + row // QUERY_GROUP
            of_queries[m] = work.query_scales[work.batch, work.head, group] * work.scale_log2
        of_keys = work.key_scales[work.batch, head_k, None]
        return of_queries, cute.domain_offset((first_group,), of_keys)

    @cute.jit
    def visit(self, work, regs, step, key, key_scale, flags):
        """Does one step, and returns the first key of the next one, its scale, and the votes of the last 32."""
        start_v = regs.starts[1]
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        next_step = step + 1
        if cutlass.const_expr(not self.problem.skip):
            next_step = cutlass.min(next_step, regs.count - 1)
        next_key = self.key_of(next_step, regs.count, work.listed)
        regs.scores.fill(EXACT_BITS if self.problem.int8 else 0.0)
        slices = self.config.score_columns // 16
        values = self.lines_behind(
            start_v, work.load, regs.thr_load, regs.gV, key, work.length_k, work.sV
        )
        for i in cutlass.range_constexpr(slices):
            if cutlass.const_expr(not self.config.query_in_registers):
                cute.copy(regs.ldmatrix, regs.tQsQ[None, None, i], regs.tQrQ[None, None, i])
            cute.copy(regs.ldmatrix, regs.tKsK[None, None, i], regs.tKrK[None, None, i])
            if cutlass.const_expr(self.problem.int8):
                multiply(work.mma8, regs.scores, regs.rQ[None, None, i], regs.rK[None, None, i])
            else:
                rQ, rK = regs.rQ[None, None, i], regs.rK[None, None, i]
                cute.gemm(work.mma, regs.s, rQ, rK, regs.s)
            self.copy_part_async(values, i, max(slices // 4, 1))
        cute.arch.cp_async_commit_group()
        for _ in cutlass.range(rarely(key + self.step > regs.clear, work.length_k), unroll=1):
            self.mask_scores(regs.s_rows, work.tile, key, work.length_q, work.length_k, work.tidx)
        if cutlass.const_expr(self.problem.int8):
            for m in cutlass.range_constexpr(self.blocks):
                # Not zero: hidden scores stay minus infinity.
                regs.factors[m] = cute.arch.fmax(regs.of_queries[m] * key_scale, F32(TINY))
            key_scale = regs.of_keys[cutlass.min(next_key, work.length_k - 1) // KEY_GROUP]
        start_k = regs.starts[0]
        most = self.rescale(regs, step)
        for c in cutlass.range_constexpr(4):
            for r in cutlass.range_constexpr(self.rows):
                self.exponentiate(regs, r, c)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        # The last step loads a k once more, where a branch would break up what the products hide.
        keys = self.scored.lines_behind(
            start_k, work.load_scored, regs.thr_scored, regs.gK, next_key, work.length_k, work.sK
        )
        blocks = self.blocks
        parts, units = self.step // 16, self.width // 16
        for u in cutlass.range_constexpr(self.ahead):
            self.load_v(regs, u, units)
        for i in cutlass.range_constexpr(parts):  # 16 keys
            scores = cute.make_tensor(
                regs.s.iterator + 8 * blocks * i, cute.make_layout(8 * blocks)
            )
            p = cute.make_rmem_tensor(8 * blocks, self.dtype)
            p.store(scores.load().to(self.dtype))
            a = cute.make_layout(((2, 2, 2), 1), stride=((1, 2, 4 * blocks), 0))
            c = cute.make_layout(((2, 2), 1, 1))
            for j in cutlass.range_constexpr(units):  # 16 columns
                u = i * units + j
                if cutlass.const_expr(u + self.ahead < parts * units):
                    self.load_v(regs, u + self.ahead, units)
                for n in cutlass.range_constexpr(2 * j, 2 * j + 2):
                    for m in cutlass.range_constexpr(blocks):
                        o = cute.make_tensor(regs.o.iterator + 4 * (blocks * n + m), c)
                        p_m = cute.make_tensor(p.iterator + 4 * m, a)
                        cute.gemm(work.mma, o, p_m, self.single(regs.rV, n, i), o)
                if cutlass.const_expr(i + 1 < parts):
                    every = 4 * self.rows
                    first, end = (min(every * k // (units - LEAD), every) for k in (j, j + 1))
                    for due in cutlass.range_constexpr(first, end):
                        self.exponentiate(regs, due % self.rows, 4 * (i + 1) + due // self.rows)
                self.scored.copy_part_async(keys, u, parts * units * self.spread // 32)
                if cutlass.const_expr(self.problem.skip and u == VOTE):
                    flags = self.vote(work, regs, step, most, flags)
        cute.arch.cp_async_commit_group()
        return next_key, key_scale, flags

    def load_v(self, regs, unit, units):
        """Loads 16 keys and 16 columns of v from shared memory."""
        part = (None, unit % units, unit // units)
        cute.copy(regs.ldmatrix_t, regs.tVsV[part], regs.tVrV[part])

    @cute.jit
    def exponentiate(self, regs, r, c):
        """Replaces a score by its exponential, and adds that to the row's sum."""
        regs.s_rows[r, c] = exp2_pinned(regs.s_rows[r, c] * regs.factors[r // 2] - regs.offsets[r])
        regs.total[r] = regs.total[r] + regs.s_rows[r, c]

    # ---- the list ---------------------------------------------------------------------------------------------------

    @cute.jit
    def listed_in(self, row, tiles, direction, number):
        """Returns the tiles below `tiles` of the word that is visited after `number` others, the first one lowest."""
        words = cute.ceil_div(tiles, 32)
        word = number if direction > 0 else words - 1 - number
        bits = I32(0)
        if number < words:
            bits = row[word]
            if tiles < 32 * word + 32:
                bits = bits & ((I32(1) << (tiles - 32 * word)) - 1)
        return bits if direction > 0 else cute.arch.brev(bits)

    @cute.jit
    def make_list(self, bits, row, tiles, direction, listed, kept, tidx):
        """Returns the number of listed tiles below `tiles`, and the first one.

        It stores all of them in the order of their visit, and behind the last one the first one again; the next barrier
        makes them visible. bits: this lane's first word.
        """
        lane, words = tidx % 32, cute.ceil_div(tiles, 32)
        for word in cutlass.range(tidx, MAX_WORDS, self.threads, unroll=1):
            kept[word] = I32(0)
        so_far, begin = I32(0), I32(0)
        for first in cutlass.range(0, words, 32, unroll=1):
            word = first + lane if direction > 0 else words - 1 - first - lane
            number = cute.arch.popc(bits)
            upto = number
            for i in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(upto, 1 << i, mask_and_clamp=0)
                upto = upto + other if lane >= 1 << i else upto
            at = so_far + upto - number
            before = so_far
            so_far = so_far + cute.arch.shuffle_sync(upto, 31)
            if (before == 0) & (so_far > 0):
                filled = I32(cute.arch.vote_ballot_sync(bits != 0))
                owner = 31 - cute.arch.clz(filled & -filled)
                bit = 31 - cute.arch.clz(bits & -bits)
                begin = I32(
                    cute.arch.shuffle_sync(32 * word + (bit if direction > 0 else 31 - bit), owner)
                )
            if tidx < 32:
                while bits != 0:
                    lowest = bits & -bits
                    bit = 31 - cute.arch.clz(lowest)
                    bit = bit if direction > 0 else 31 - bit
                    listed[at] = cutlass.Int16(32 * word + bit)
                    at = at + 1
                    bits = bits ^ lowest
            bits = self.listed_in(row, tiles, direction, first + 32 + lane)
        if tidx == 0:
            listed[so_far] = cutlass.Int16(begin)
        return so_far, begin

    @cute.jit
    def vote(self, work, regs, step, most, flags):
        """Returns the votes of this warp on the last 32 visits, with that on this step in the lowest bit.

        most: the best score of each row among those of this thread. A tile of two steps is judged twice, the second
        time by what is best after the first. That makes no difference, because margins are not positive: a first step
        that raised a row's best score was near.
        """
        best = self.own_row(most, work.tidx, cute.arch.fmax)
        near = best > regs.limit[0]
        regs.limit[0] = cute.arch.fmax(regs.limit[0], best + work.margin)
        visit = step // self.steps
        if cutlass.const_expr(self.steps == 1):
            flags = flags << 1
        else:
            flags = flags << I32(step % self.steps == 0)
        flags = flags | I32(cute.arch.vote_any_sync(near))
        if work.tidx % 32 == 0:
            work.votes[work.tidx // 32, visit // 32] = flags
        return flags

    @cute.jit
    def collect_kept(self, listed, votes, held, kept, tiles, tidx):
        """Collects the bits of tiles that were voted for, or that the caller holds."""
        for visit in cutlass.range(tidx, tiles, self.threads, unroll=1):
            number = I32(listed[visit])
            wanted = self.has_vote(votes, visit, tiles) | I32(visit == 0)
            if cutlass.const_expr(self.problem.must_do):
                wanted = wanted | ((held[number >> 5] >> (number & 31)) & 1)
            at = (kept.iterator + (number >> 5)).llvm_ptr
            cute.arch.atomic_or(at, wanted << (number & 31), scope="cta")

    @cute.jit
    def store_kept(self, row, kept, tidx):
        """Stores the list for the next call."""
        for word in cutlass.range(tidx, row.shape[0], self.threads, unroll=1):
            row[word] = kept[word]

    def has_vote(self, votes, visit, tiles):
        """Returns 1 if any warp voted for a visit; the last one of 32, or of all, is in the lowest bit."""
        place = cutlass.min((visit >> 5) * 32 + 32, tiles) - 1 - visit
        words = [votes[w, visit >> 5] for w in range(self.config.warps)]
        return (functools.reduce(operator.or_, words) >> place) & 1

    @cute.jit
    def key_of(self, step, count, listed):
        """Returns the first key of a step; without a list the last keys come first."""
        if cutlass.const_expr(self.problem.skip):
            tile = I32(listed[step // self.steps])
            return tile * self.problem.block_n + step % self.steps * self.step
        else:
            return (count - 1 - step) * self.step

    # ---- rows -------------------------------------------------------------------------------------------------------

    def by_row(self, acc, columns):
        """Returns a view of the mma's accumulators as [this thread's rows, columns]."""
        blocks = self.blocks
        layout = cute.make_layout(
            ((2, blocks), (2, columns // 8)), stride=((2, 4), (1, 4 * blocks))
        )
        return cute.make_tensor(acc.iterator, layout)

    @cute.jit
    def first_row_of(self, tile, tidx):
        """Returns this thread's first row of scores; others are 8 rows, and blocks of 16 rows per warp, further on."""
        return tile * BLOCK_M + tidx // 32 * 16 + tidx % 32 // 4

    @cute.jit
    def mask_scores(self, s_rows, tile, key, length_q, length_k, tidx):
        """Sets the scores of keys that a row does not see to minus infinity."""
        row, column = self.first_row_of(tile, tidx), key + tidx % 4 * 2
        for r in cutlass.range_constexpr(self.rows):
            seen = length_k
            if cutlass.const_expr(self.problem.causal):
                mine = row + r % 2 * 8 + r // 2 * (16 * self.config.warps)
                mine = cutlass.min(mine, length_q - 1)  # rows behind the end hold the last one
                seen = mine + length_k - length_q + 1
            for c in cutlass.range_constexpr(self.step // 4):
                s_rows[r, c] = (
                    s_rows[r, c] if column + c % 2 + c // 2 * 8 < seen else F32(-math.inf)
                )

    def largest(self, s_rows, r, first, end):
        """Returns the largest score of a row in some columns, compared in pairs."""
        if end - first == 1:
            return s_rows[r, first]
        middle = (first + end) // 2
        return cute.arch.fmax(
            self.largest(s_rows, r, first, middle), self.largest(s_rows, r, middle, end)
        )

    @cute.jit
    def rescale(self, regs, step):
        """Moves origins, and what is relative to them, where needed.

        It returns the best score of each row among those of this thread; it compares them with those of the three
        neighbours only where that matters.
        """
        rose = cutlass.Boolean(False)
        most = [self.largest(regs.s_rows, r, 0, self.step // 4) for r in range(self.rows)]
        if cutlass.const_expr(self.problem.int8):
            most = [(most[r] - EXACT) * regs.factors[r // 2] for r in range(self.rows)]
        tops = cute.make_rmem_tensor(self.rows, F32)
        for r in cutlass.range_constexpr(self.rows):
            tops[r] = most[r] if self.problem.int8 else most[r] * regs.factors[r // 2]
            rose = rose | (tops[r] - regs.origins[r] > SLACK)
        if cute.arch.vote_any_sync(rose):  # rare after the first tile
            self.combine_quad(tops, cute.arch.fmax)
            shrinks = cute.make_rmem_tensor(self.rows, F32)
            for r in cutlass.range_constexpr(self.rows):
                origin = cute.arch.fmax(regs.origins[r], tops[r])
                shrinks[r] = exp2_pinned(regs.origins[r] - origin)
                regs.origins[r] = origin
                regs.total[r] = regs.total[r] * shrinks[r]
            if step > 0:
                for r in cutlass.range_constexpr(self.rows):
                    for c in cutlass.range_constexpr(self.width // 4):
                        regs.o_rows[r, c] = regs.o_rows[r, c] * shrinks[r]
        if cutlass.const_expr(self.problem.int8):
            for r in cutlass.range_constexpr(self.rows):
                regs.offsets[r] = regs.origins[r] + EXACT * regs.factors[r // 2]
        return most

    def own_row(self, values, tidx, combine=None):
        """Returns, of a value per row, one row's for each of the four threads that share rows, combined over them.

        Of four rows the thread tidx has row tidx % 4, of two row tidx % 4 // 2.
        """
        for distance in (2, 1):
            half, upper = len(values) // 2, (tidx & distance) != 0
            if half:
                pairs = list(zip(values[:half], values[half:]))
                values = [self.chosen(upper, b, a) for a, b in pairs]
                others = [self.chosen(upper, a, b) for a, b in pairs]
            else:
                others = values
            if combine is not None:
                others = [cute.arch.shuffle_sync_bfly(other, distance) for other in others]
                values = [combine(a, b) for a, b in zip(values, others)]
        return values[0]

    @cute.jit
    def chosen(self, first, a, b):
        """Returns a if `first` holds, else b."""
        return a if first else b

    def combine_quad(self, values, combine):
        """Combines the values of the four threads that share rows."""
        for distance in (2, 1):
            others = [cute.arch.shuffle_sync_bfly(values[r], distance) for r in range(self.rows)]
            for r in range(self.rows):
                values[r] = combine(values[r], others[r])

    @cute.jit
    def store_results(self, work, o, o_rows, origins, total):
        """Stores outputs in shared memory, and the log-sum-exp where the caller wants it."""
        tidx, row = work.tidx, self.first_row_of(work.tile, work.tidx)
        self.combine_quad(total, lambda a, b: a + b)
        for r in cutlass.range_constexpr(self.rows):
            whole = total[r]
            inverse = cute.arch.rcp_approx(whole) if whole > 0.0 else F32(0.0)
            for c in cutlass.range_constexpr(self.width // 4):
                o_rows[r, c] = o_rows[r, c] * inverse
        r = tidx % 4 * self.rows // 4
        mine = row + r % 2 * 8 + r // 2 * (16 * self.config.warps)
        whole, origin = (
            self.own_row([x[r] for r in range(self.rows)], tidx) for x in (total, origins)
        )
        value = (origin + cute.math.log2(whole, fastmath=True)) * math.log(2)
        value = value if whole > 0.0 else F32(-math.inf)
        if mine < work.length_q:
            if cutlass.const_expr(self.problem.int8):
                value = value + work.lse_shift[work.batch, work.head, work.first_q + mine]
            work.lse[work.batch, work.head, work.first_q + mine] = value
        rounded = cute.make_rmem_tensor(o.shape, self.dtype)
        rounded.store(o.load().to(self.dtype))
        cute.autovec_copy(rounded, work.mma.get_slice(tidx).partition_C(work.sO))
