"""Softmax attention over listed key tiles: cp.async, ldmatrix and mma.sync, 99 KB of shared memory.

One CTA has 128 queries of a head and walks over 64 keys at a time, FlashAttention's way (arXiv 2205.14135). With a list
it visits the listed key tiles only, and finds out which of them the next call needs (LiteAttention, arXiv 2511.11062).
"""

import math
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator

from .config import BLOCK_M, MAX_WORDS, PADDING, ForwardConfig

F32, I32 = cutlass.Float32, cutlass.Int32
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
INFINITY = math.inf


class LiteForward:
    """One CTA per (128 queries, head, sequence).

    | shared memory | shape | bytes at D=128 |
    |---|---|---|
    | q, later o | [128, D + 8]; in the place of k and v when q moves to registers | 34,816 |
    | k, v | [64, D + 8] each, one stage | 17,408 each |
    | listed tiles, their number | int16 [4096], int32 | 8,196 |
    | tiles to keep | int32 [128] | 512 |

    All warps do the same, for 16 or 32 rows each. A step: wait for k; load v; S = q k^T; wait for v; load the next k;
    softmax; O += P v. The next tile is known from the list, so its load does not wait for this tile's decision.
    """

    def __init__(self, config: ForwardConfig):
        self.config, self.problem = config, config.problem
        self.dtype = DTYPES[self.problem.dtype]
        self.dim, self.width = self.problem.head_dim, config.width
        self.threads = 32 * config.warps
        self.blocks = BLOCK_M // (16 * config.warps)  # of 16 rows per warp
        self.rows = 2 * self.blocks  # of a thread
        self.line = 64 if self.width % 64 == 0 else 32  # columns that neighbouring threads copy
        self.step = config.step
        self.steps = self.problem.block_n // config.step

    def padded(self, rows):
        """[rows, D] in shared memory. 16 bytes behind every row keep ldmatrix free of bank conflicts; unlike a swizzle
        this leaves every address a constant away from one register."""
        return cute.make_layout((rows, self.width), stride=(self.width + PADDING, 1))

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
        per_line = self.line // 8
        load = cute.make_tiled_copy_tv(
            cute.make_copy_atom(
                cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), self.dtype, num_bits_per_copy=128
            ),
            cute.make_layout((self.threads // per_line, per_line), stride=(per_line, 1)),
            cute.make_layout((1, 8)),
        )
        self.kernel(
            q, k, v, out, lse, read, must_do, write, starts_q, starts_k, direction_at, scale_log2, margin, direction,
            mma, load,
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
        scale_log2: cutlass.Float32,
        margin: cutlass.Float32,
        direction: cutlass.Int32,
        mma: cute.TiledMma,
        load: cute.TiledCopy,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        tile, head, sequence = cute.arch.block_idx()
        if cutlass.const_expr(self.problem.causal):  # those with the most keys first
            tiles, _, _ = cute.arch.grid_dim()
            tile = tiles - 1 - tile
        batch, first_q, first_k = sequence, I32(0), I32(0)
        length_q, length_k = I32(q.shape[1]), I32(k.shape[1])
        if cutlass.const_expr(self.problem.packed):
            batch = I32(0)
            first_q, first_k = I32(starts_q[sequence]), I32(starts_k[sequence])
            length_q = I32(starts_q[sequence + 1]) - first_q
            length_k = I32(starts_k[sequence + 1]) - first_k
        if cutlass.const_expr(self.problem.on_device):
            direction = direction_at[0]

        smem = SmemAllocator()
        q_layout, tile_layout = self.padded(BLOCK_M), self.padded(self.step)
        sQ = smem.allocate_tensor(self.dtype, q_layout, 128)
        if cutlass.const_expr(self.config.query_in_registers):
            sK = cute.make_tensor(sQ.iterator, tile_layout)
            sV = cute.make_tensor(sQ.iterator + self.step * (self.width + PADDING), tile_layout)
        else:
            sK = smem.allocate_tensor(self.dtype, tile_layout, 128)
            sV = smem.allocate_tensor(self.dtype, tile_layout, 128)
        listed, kept, count_at = None, None, None
        if cutlass.const_expr(self.problem.skip):
            listed = smem.allocate_tensor(cutlass.Int16, cute.make_layout(32 * MAX_WORDS), 16)
            kept = smem.allocate_tensor(I32, cute.make_layout(MAX_WORDS), 16)
            count_at = smem.allocate_tensor(I32, cute.make_layout(1), 16)

        first_row = tile * BLOCK_M
        if first_row < length_q:
            self.attend(
                q, k, v, out, lse, read, must_do, write, scale_log2, margin, direction, mma, load,
                sQ, sK, sV, listed, kept, count_at,
                tidx, tile, head, sequence, batch, first_q, first_k, length_q, length_k,
            )  # fmt: skip
        else:
            if cutlass.const_expr(self.problem.skip):
                for word in cutlass.range(tidx, write.shape[3], self.threads, unroll=1):
                    write[sequence, head, tile, word] = I32(0)

    @cute.jit
    def attend(
        self, q, k, v, out, lse, read, must_do, write, scale_log2, margin, direction, mma, load,
        sQ, sK, sV, listed, kept, count_at,
        tidx, tile, head, sequence, batch, first_q, first_k, length_q, length_k,
    ):  # fmt: skip
        """One query tile that has rows."""
        first_row = tile * BLOCK_M
        head_k = head // (q.shape[2] // k.shape[2])
        # Tiles of keys that any row of this query tile sees.
        reach = length_k
        if cutlass.const_expr(self.problem.causal):
            last_row = cutlass.min(first_row + BLOCK_M, length_q) - 1
            reach = cutlass.max(cutlass.min(length_k, last_row + length_k - length_q + 1), 0)
        thr_load = load.get_slice(tidx)
        self.clear_padding(sQ, tidx)
        gQ, gK, gV = (
            q[batch, None, head, None],
            k[batch, None, head_k, None],
            v[batch, None, head_k, None],
        )
        self.fetch(load, thr_load, gQ, first_q + first_row, length_q - first_row, sQ)

        # All rows see the keys in front of this one.
        clear = length_k
        if cutlass.const_expr(self.problem.causal):
            clear = cutlass.max(cutlass.min(length_k, first_row + length_k - length_q + 1), 0)
        tiles = cute.ceil_div(reach, self.problem.block_n)
        if cutlass.const_expr(self.problem.skip):
            self.make_list(
                read, sequence, head, tile, tiles, direction, listed, kept, count_at, tidx
            )
            tiles = count_at[0]
        count = tiles * self.steps

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
        s = cute.make_rmem_tensor(thr_mma.partition_shape_C((BLOCK_M, self.step)), F32)
        p = cute.make_rmem_tensor(s.shape, self.dtype)
        p_as_a = cute.make_tensor(
            p.iterator,
            cute.make_layout(
                ((2, 2, 2), self.blocks, self.step // 16),
                stride=((1, 2, 4 * self.blocks), 4, 8 * self.blocks),
            ),
        )
        o_rows, s_rows = self.by_row(o, self.width), self.by_row(s, self.step)
        o.fill(0.0)
        best, total = cute.make_rmem_tensor(self.rows, F32), cute.make_rmem_tensor(self.rows, F32)
        best.fill(-INFINITY)
        total.fill(0.0)
        if cutlass.const_expr(self.config.query_in_registers):
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            cute.copy(ldmatrix, tQsQ, tQrQ)
            cute.arch.sync_threads()
        self.clear_padding(sK, tidx)
        if count > 0:
            key = self.key_of(I32(0), count, listed)
            self.fetch(load, thr_load, gK, first_k + key, length_k - key, sK)
        cute.arch.cp_async_commit_group()
        x = SimpleNamespace(
            gK=gK, gV=gV, sK=sK, sV=sV, load=load, thr_load=thr_load, mma=mma, ldmatrix=ldmatrix, ldmatrix_t=ldmatrix_t,
            tQsQ=tQsQ, tKsK=tKsK, tVsV=tVsV, tQrQ=tQrQ, tKrK=tKrK, tVrV=tVrV, rQ=rQ, rK=rK, rV=rV,
            o=o, s=s, p=p, p_as_a=p_as_a, o_rows=o_rows, s_rows=s_rows, best=best, total=total,
            first_k=first_k, length_q=length_q, length_k=length_k,
            listed=listed, kept=kept, must_do=must_do, count=count, clear=clear,
            sequence=sequence, head=head, tile=tile, tidx=tidx, scale_log2=scale_log2, margin=margin,
        )  # fmt: skip
        for step in cutlass.range(count, unroll=1):
            self.take(x, step)
        self.finish(
            o, o_rows, best, total, mma, sQ, out, lse, scale_log2, batch, head, first_q, tile, length_q, tidx
        )  # fmt: skip
        if cutlass.const_expr(self.problem.skip):  # `finish` has met since the last decision
            for word in cutlass.range(tidx, write.shape[3], self.threads, unroll=1):
                write[sequence, head, tile, word] = kept[word]

    @cute.jit
    def take(self, x, step):
        """One step."""
        key = self.key_of(step, x.count, x.listed)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.fetch(x.load, x.thr_load, x.gV, x.first_k + key, x.length_k - key, x.sV)
        cute.arch.cp_async_commit_group()
        x.s.fill(0.0)
        for i in cutlass.range_constexpr(self.width // 16):
            if cutlass.const_expr(not self.config.query_in_registers):
                cute.copy(x.ldmatrix, x.tQsQ[None, None, i], x.tQrQ[None, None, i])
            cute.copy(x.ldmatrix, x.tKsK[None, None, i], x.tKrK[None, None, i])
            cute.gemm(x.mma, x.s, x.rQ[None, None, i], x.rK[None, None, i], x.s)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if step + 1 < x.count:
            next_key = self.key_of(step + 1, x.count, x.listed)
            self.fetch(x.load, x.thr_load, x.gK, x.first_k + next_key, x.length_k - next_key, x.sK)
        cute.arch.cp_async_commit_group()
        # A loop over nothing or once, by a number that tells the compiler neither: it would turn a branch into
        # instructions that every step executes.
        for _ in cutlass.range(I32(key + self.step > x.clear) - (x.length_k >> 31), unroll=1):
            self.hide(x.s_rows, x.tile, key, x.length_q, x.length_k, x.tidx)
        near = self.softmax(x.s_rows, x.o_rows, x.best, x.total, x.scale_log2, x.margin)
        if cutlass.const_expr(self.problem.skip):
            self.decide(near, step, key, x.must_do, x.sequence, x.head, x.tile, x.kept, x.tidx)
        x.p.store(x.s.load().to(self.dtype))
        for i in cutlass.range_constexpr(self.step // 16):
            cute.copy(x.ldmatrix_t, x.tVsV[None, None, i], x.tVrV[None, None, i])
            cute.gemm(x.mma, x.o, x.p_as_a[None, None, i], x.rV[None, None, i], x.o)

    # ---- the list ---------------------------------------------------------------------------------------------------

    @cute.jit
    def make_list(self, read, sequence, head, tile, tiles, direction, listed, kept, count_at, tidx):
        """Writes the listed tiles below `tiles` to shared memory in the order of their visit, and their number."""
        lane, words = tidx % 32, cute.ceil_div(tiles, 32)
        for word in cutlass.range(tidx, MAX_WORDS, self.threads, unroll=1):
            kept[word] = I32(0)
        if tidx < 32:
            so_far = I32(0)
            for first in cutlass.range(0, words, 32, unroll=1):
                word = first + lane if direction > 0 else words - 1 - first - lane
                bits = I32(0)
                if (word >= 0) & (word < words):
                    bits = read[sequence, head, tile, word]
                    if tiles < 32 * word + 32:
                        bits = bits & ((I32(1) << (tiles - 32 * word)) - 1)
                    bits = bits if direction > 0 else cute.arch.brev(bits)
                number = cute.arch.popc(bits)
                upto = number
                for i in cutlass.range_constexpr(5):
                    other = cute.arch.shuffle_sync_up(upto, 1 << i, mask_and_clamp=0)
                    upto = upto + other if lane >= 1 << i else upto
                at = so_far + upto - number
                while bits != 0:
                    lowest = bits & -bits
                    bit = 31 - cute.arch.clz(lowest)
                    bit = bit if direction > 0 else 31 - bit
                    listed[at] = cutlass.Int16(32 * word + bit)
                    at = at + 1
                    bits = bits ^ lowest
                so_far = so_far + cute.arch.shuffle_sync(upto, 31)
            if lane == 0:
                count_at[0] = so_far
        cute.arch.sync_threads()

    @cute.jit
    def key_of(self, step, count, listed):
        """First key of a step; without a list the last ones come first."""
        if cutlass.const_expr(self.problem.skip):
            tile = I32(listed[step // self.steps])
            return tile * self.problem.block_n + step % self.steps * self.step
        else:
            return (count - 1 - step) * self.step

    @cute.jit
    def decide(self, near, step, key, must_do, sequence, head, tile, kept, tidx):
        """Notes that the tile of this step stays, if any row of this warp wants it.

        A tile of two steps is judged twice, the second time by what is best after the first. That makes no difference,
        because margins are not positive: a first step that raised a row's best score was near.
        """
        keep = cute.arch.vote_any_sync(near) | (step == 0)
        number = key // self.problem.block_n
        if cutlass.const_expr(self.problem.must_do):
            keep = keep | ((must_do[sequence, head, tile, number // 32] >> (number % 32)) & 1 != 0)
        if keep & (tidx % 32 == 0):
            cute.arch.atomic_or(
                (kept.iterator + number // 32).llvm_ptr, I32(1) << (number % 32), scope="cta"
            )

    # ---- loads ------------------------------------------------------------------------------------------------------

    @cute.jit
    def fetch(self, load, thr_load, source, first, left, shared):
        """Starts the copy of rows of [T, D] from `first` on; rows from `left` on hold the last one before.

        Offsets of rows within a tile are 32-bit: strides of tokens are below 2^24.
        """
        target = thr_load.partition_D(shared)
        shape = (cute.size(shared, mode=[0]), self.width)
        where = thr_load.partition_S(cute.make_identity_tensor(shape))[0, None, None]
        row, column = where[0, 0]
        start = cute.domain_offset((first, 0), source).iterator + cute.assume(column, divby=8)
        pitch = I32(source.stride[0])
        for i in cutlass.range_constexpr(cute.size(target, mode=[1])):
            past = where[i, 0][0] - row
            at = cute.assume(cutlass.min(row + past, left - 1) * pitch, divby=8)
            for j in cutlass.range_constexpr(cute.size(target, mode=[2])):
                unit = cute.make_tensor(start + at + self.line * j, cute.make_layout(8))
                if cutlass.const_expr(self.dim == self.width):
                    cute.copy(load, unit, target[None, i, j])
                else:
                    if column + self.line * j < self.dim:
                        cute.copy(load, unit, target[None, i, j])

    @cute.jit
    def clear_padding(self, shared, tidx):
        """Zeroes the columns behind the head dimension, which no load writes."""
        if cutlass.const_expr(self.dim < self.width):
            padding = self.width - self.dim
            rows = cute.size(shared, mode=[0])
            for i in cutlass.range(tidx, rows * padding, self.threads, unroll=1):
                shared[i // padding, self.dim + i % padding] = self.dtype(0.0)

    # ---- rows -------------------------------------------------------------------------------------------------------

    def by_row(self, acc, columns):
        """Accumulators of the mma seen as [this thread's rows, columns]."""
        blocks = self.blocks
        layout = cute.make_layout(
            ((2, blocks), (2, columns // 8)), stride=((2, 4), (1, 4 * blocks))
        )
        return cute.make_tensor(acc.iterator, layout)

    @cute.jit
    def first_row_of(self, tile, tidx):
        """This thread's first row of scores; its others are 8 rows, and blocks of 16 rows per warp, further on."""
        return tile * BLOCK_M + tidx // 32 * 16 + tidx % 32 // 4

    @cute.jit
    def hide(self, s_rows, tile, key, length_q, length_k, tidx):
        """Scores of keys that a row does not see become minus infinity."""
        row, column = self.first_row_of(tile, tidx), key + tidx % 4 * 2
        for r in cutlass.range_constexpr(self.rows):
            seen = length_k
            if cutlass.const_expr(self.problem.causal):
                mine = row + r % 2 * 8 + r // 2 * (16 * self.config.warps)
                mine = cutlass.min(mine, length_q - 1)  # rows behind the end hold the last one
                seen = mine + length_k - length_q + 1
            for c in cutlass.range_constexpr(self.step // 4):
                s_rows[r, c] = (
                    s_rows[r, c] if column + c % 2 + c // 2 * 8 < seen else F32(-INFINITY)
                )

    @cute.jit
    def softmax(self, s_rows, o_rows, best, total, scale_log2, margin):
        """Scores to probabilities; what is there so far is rescaled. Whether the best score is near for any row."""
        near, rose = cutlass.Boolean(False), cutlass.Boolean(False)
        shrinks = cute.make_rmem_tensor(self.rows, F32)
        for r in cutlass.range_constexpr(self.rows):
            most = s_rows[r, 0]
            for c in cutlass.range_constexpr(1, self.step // 4):
                most = cute.arch.fmax(most, s_rows[r, c])
            most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, 2))
            most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, 1))
            if cutlass.const_expr(self.problem.skip):
                near = near | (most > best[r] + margin)
            new = cute.arch.fmax(best[r], most)
            origin = F32(0.0) if new == -INFINITY else new * scale_log2
            shrink = cute.arch.exp2(best[r] * scale_log2 - origin)
            best[r] = new
            subtotal = F32(0.0)
            for c in cutlass.range_constexpr(self.step // 4):
                s_rows[r, c] = cute.arch.exp2(s_rows[r, c] * scale_log2 - origin)
                subtotal = subtotal + s_rows[r, c]
            total[r] = total[r] * shrink + subtotal
            shrinks[r] = shrink
            rose = rose | (shrink < 1.0)
        if cute.arch.vote_any_sync(rose):  # rare after the first few tiles
            for r in cutlass.range_constexpr(self.rows):
                for c in cutlass.range_constexpr(self.width // 4):
                    o_rows[r, c] = o_rows[r, c] * shrinks[r]
        return near

    @cute.jit
    def finish(
        self, o, o_rows, best, total, mma, sQ, out, lse, scale_log2, batch, head, first_q, tile, length_q, tidx
    ):  # fmt: skip
        """Outputs and log-sum-exp; q's shared memory serves to store outputs in whole lines."""
        first_row, row = tile * BLOCK_M, self.first_row_of(tile, tidx)
        # Where outputs go others may still read v, or without any step q may still be on its way.
        if cutlass.const_expr(not self.config.query_in_registers):
            cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        for r in cutlass.range_constexpr(self.rows):
            whole = total[r]
            whole = whole + cute.arch.shuffle_sync_bfly(whole, 2)
            whole = whole + cute.arch.shuffle_sync_bfly(whole, 1)
            inverse = cute.arch.rcp_approx(whole) if whole > 0.0 else F32(0.0)
            for c in cutlass.range_constexpr(self.width // 4):
                o_rows[r, c] = o_rows[r, c] * inverse
            mine = row + r % 2 * 8 + r // 2 * (16 * self.config.warps)
            if (tidx % 4 == 0) & (mine < length_q):
                value = (best[r] * scale_log2 + cute.math.log2(whole)) * math.log(2)
                lse[batch, head, first_q + mine] = value if whole > 0.0 else F32(-INFINITY)
        rounded = cute.make_rmem_tensor(o.shape, self.dtype)
        rounded.store(o.load().to(self.dtype))
        part = mma.get_slice(tidx).partition_C(sQ)
        cute.autovec_copy(rounded, part)
        cute.arch.sync_threads()
        units = self.width // 8
        for i in cutlass.range_constexpr(BLOCK_M * units // self.threads):
            number = i * self.threads + tidx
            line, unit = number // units, number % units
            if (first_row + line < length_q) & (unit * 8 < self.dim):
                source = cute.local_tile(sQ, (1, 8), (line, unit))
                target = cute.local_tile(
                    out[batch, first_q + first_row + line, head, None], (8,), (unit,)
                )
                value = cute.make_rmem_tensor((1, 8), self.dtype)
                cute.autovec_copy(source, value)
                cute.autovec_copy(cute.make_tensor(value.iterator, cute.make_layout(8)), target)
