"""The kernel that computes the state in front of every segment of a sequence.

A segment turns S into M S + A. `maps` holds A transposed, [128 V, 128 K], and behind it M^T [128, 128 K] of every
segment; of the first of a sequence only A, started from the initial state, of the last nothing. So

    S_1 = A_0        S_(p+1)^T = S_p^T M_p^T + A_p^T

in tf32 products of three terms, which lose a few times as much as fp32 does, one term a thousand times.

Gradients D of states go back, from the last segment to the first. A segment turns the D behind it into M^T D + B, and
`maps` holds B^T [128 V, 128 K] behind M^T; of the last of a sequence only B, started from what is given behind it. So

    D_(P-2) = B_(P-1)        D_(p-1)^T = D_p^T M_p + B_p^T        with D_p behind segment p of P

Where segments may be marked, M of a marked one is zero and not there. S behind it is A, which is not copied to `starts`
where the next one is marked too.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from ...cute.memory import view
from ...cute.types import F32, I32
from ..config import HAS_STATE, HEAD_DIM, MergeConfig

ROWS = 16  # of S^T per CTA
THREADS = 256
COLUMNS = HEAD_DIM // (THREADS // 32)  # of a warp: two tiles, of which a lane has neighbours
STEPS = HEAD_DIM // 8
# Of a row in shared memory, whose elements have two parts each: two rows fall on all banks.
STRIDE = 2 * HEAD_DIM + 16
GROUPS = HEAD_DIM // ROWS


class KdaMerge:
    """One CTA per 16 rows of a transposed state, which stay in its shared memory.

    Products may sum in any order, as long as both operands agree, and tiles may have any columns. So a lane's elements
    are neighbours: of the state two, of a map two, and four sums of a row.
    """

    def __init__(self, config: MergeConfig):
        self.config = config
        # The row of a map where what it adds begins.
        self.added = 2 * HEAD_DIM if config.back else 0

    @cute.jit
    def __call__(
        self,
        maps: cute.Tensor,
        marks: cute.Tensor,
        starts: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        fresh: cute.Tensor,
        cu_seqlens: cute.Tensor,
        null_slot: cutlass.Int32,
        sequences: cutlass.Int32,
        tokens: cutlass.Int32,
        segment_tokens: cutlass.Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `launch.merge_arguments`; what the config lacks is None."""
        self.kernel(
            maps,
            marks,
            starts,
            initial,
            indices,
            fresh,
            cu_seqlens,
            null_slot,
            tokens,
            segment_tokens,
        ).launch(
            grid=(sequences * maps.shape[1] * GROUPS, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        maps: cute.Tensor,
        marks: cute.Tensor,
        starts: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        fresh: cute.Tensor,
        cu_seqlens: cute.Tensor,
        null_slot: cutlass.Int32,
        tokens: cutlass.Int32,
        segment_tokens: cutlass.Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        heads = maps.shape[1]
        rows, head, sequence = (
            block % GROUPS * ROWS,
            block // GROUPS % heads,
            block // GROUPS // heads,
        )
        start, length = sequence * tokens, tokens
        if cutlass.const_expr(self.config.index_dtype is not None):
            start = I32(cu_seqlens[sequence])
            length = I32(cu_seqlens[sequence + 1]) - start
        parts = cutlass.max(cute.ceil_div(length, segment_tokens), 1)
        segment = sequence * parts
        if cutlass.const_expr(self.config.index_dtype is not None):
            segment = start // segment_tokens + sequence
        row = sequence
        if cutlass.const_expr(self.config.indexed):
            row = indices[sequence]
            row = cutlass.select_(row == null_slot, I32(-1), row)
        given = cutlass.Boolean(True)
        if cutlass.const_expr(self.config.fresh):
            given = (I32(fresh[sequence]) & HAS_STATE) != 0
        smem = SmemAllocator()
        # [row, column, leading or remaining bits]
        halves = cute.make_layout((ROWS, HEAD_DIM, 2), stride=(STRIDE, 2, 1))
        sS = smem.allocate_tensor(F32, halves, byte_alignment=16)
        if row >= 0:
            self.store_first(
                starts[self.place(segment, 0, parts), head, None, None], initial, given, row, head, rows, tidx
            )  # fmt: skip
            if parts > 1:
                for i in cutlass.range_constexpr(ROWS * HEAD_DIM // THREADS):
                    at = i * THREADS + tidx
                    v, k = at // HEAD_DIM, at % HEAD_DIM
                    state = maps[self.place(segment, 0, parts), head, self.added + rows + v, k]
                    self.split(sS[v, k, None], state)
                    starts[self.place(segment, 1, parts), head, rows + v, k] = state
                # The thread's share of a map, loaded while the one before it is applied.
                mapped = cute.make_rmem_tensor((2, 2, STEPS), F32)  # [tile, half of the sum, step]
                added = cute.make_rmem_tensor((4, 2), F32)  # [column, 8 rows further]
                mark = self.mark_of(marks, segment, head, 1, parts)
                next_mark = self.mark_of(marks, segment, head, 2, parts)
                if parts > 2:
                    source = maps[self.place(segment, 1, parts), head, None, None]
                    self.load_added(source, added, self.added + rows, tidx)
                    if mark == 0:
                        for step in cutlass.range_constexpr(STEPS):
                            self.load_step(source, mapped, step, HEAD_DIM, tidx)
                for part in cutlass.range(1, parts - 1, unroll=1):
                    acc = cute.make_rmem_tensor((4, 2, 3), F32)  # [register, tile, term]
                    acc.fill(0.0)
                    for r in cutlass.range_constexpr(2):
                        for i in cutlass.range_constexpr(2):
                            for tile in cutlass.range_constexpr(2):
                                acc[2 * r + i, tile, 0] = added[2 * i + tile, r]
                    own_mark, mark = mark, next_mark
                    next_mark = self.mark_of(marks, segment, head, part + 2, parts)
                    source = maps[self.place(segment, part + 1, parts), head, None, None]
                    more = (part + 2 < parts) & self.any_clear(mark, next_mark)
                    if more:
                        self.load_added(source, added, self.added + rows, tidx)
                    needed = self.any_clear(own_mark, mark)
                    if needed:
                        cute.arch.sync_threads()
                    for step in cutlass.range_constexpr(STEPS):
                        if own_mark == 0:
                            self.apply(sS, mapped, acc, step, tidx)
                        if more & (mark == 0):
                            self.load_step(source, mapped, step, HEAD_DIM, tidx)
                    if needed:
                        cute.arch.sync_threads()
                        self.store_state(
                            sS, starts[self.place(segment, part + 1, parts), head, None, None], acc, rows, tidx
                        )  # fmt: skip

    def place(self, segment, part, parts):
        """Returns the number of the segment that is a sequence's `part` in the order of the merge. segment: that of its
        first one."""
        return segment + (parts - 1 - part if self.config.back else part)

    @cute.jit
    def store_first(self, start: cute.Tensor, initial: cute.Tensor, given, row, head, rows, tidx):
        """Writes this CTA's rows of the transposed initial state, or zeros if none is given."""
        for i in cutlass.range_constexpr(ROWS * HEAD_DIM // THREADS):
            at = i * THREADS + tidx
            v, k = rows + at // HEAD_DIM, at % HEAD_DIM
            value = F32(0.0)
            if cutlass.const_expr(self.config.initial_state):
                if given:
                    if cutlass.const_expr(self.config.state_v_first):
                        value = F32(initial[row, head, v, k])
                    else:
                        value = F32(initial[row, head, k, v])
            start[v, k] = value

    @cute.jit
    def mark_of(self, marks: cute.Tensor, segment, head, part, parts):
        """Returns what is not zero where a part of a sequence has no M, which begins at `segment`."""
        mark = I32(0)
        if cutlass.const_expr(self.config.fades):
            mark = I32(1)
            if part < parts - 1:
                mark = marks[segment + part, head]
        return mark

    def any_clear(self, mark, other):
        """Returns whether a segment or the next one has an M: otherwise nothing is to be done."""
        return (mark == 0) | (other == 0) if self.config.fades else cutlass.Boolean(True)

    @cute.jit
    def load_added(self, source: cute.Tensor, added: cute.Tensor, begin, tidx):
        """Loads four columns of two rows of A^T, or B^T. begin: this CTA's first row of it in `source`."""
        lane, first = tidx % 32, tidx // 32 * COLUMNS
        for r in cutlass.range_constexpr(2):
            row = source[begin + lane // 4 + 8 * r, None]
            cute.autovec_copy(view(row.iterator, first + lane % 4 * 4, 4), added[None, r])

    @cute.jit
    def load_step(
        self,
        source: cute.Tensor,
        mapped: cute.Tensor,
        step: cutlass.Constexpr,
        begin: cutlass.Constexpr,
        tidx,
    ):
        """Loads the second operands of one step of both tiles, of M^T or M. begin: the first row of M^T in `source`."""
        lane, first = tidx % 32, tidx // 32 * COLUMNS
        k, n = 8 * step + lane % 4 * 2, first + lane // 4 * 2
        pair = cute.make_rmem_tensor(2, F32)
        for i in cutlass.range_constexpr(2):
            if cutlass.const_expr(self.config.back):
                row = source[begin + n + i, None]
                cute.autovec_copy(view(row.iterator, k, 2), pair)
                mapped[i, 0, step], mapped[i, 1, step] = pair[0], pair[1]
            else:
                row = source[begin + k + i, None]
                cute.autovec_copy(view(row.iterator, n, 2), pair)
                mapped[0, i, step], mapped[1, i, step] = pair[0], pair[1]

    @cute.jit
    def apply(self, sS: cute.Tensor, mapped, acc: cute.Tensor, step: cutlass.Constexpr, tidx):
        """Adds a step of 16 rows of S^T M^T to the sums [register, tile, term]."""
        tf32 = cute.make_mma_atom(warp.MmaTF32Op((16, 8, 8)))
        lane = tidx % 32
        a = cute.make_rmem_tensor((2, 2, 2), F32)  # [8 rows further, half of the sum, bits]
        b = cute.make_rmem_tensor((2, 2), F32)  # [half of the sum, bits]
        own = cute.make_rmem_tensor((2, 2), F32)  # [bits, half of the sum]
        left = cute.recast_tensor(a, cutlass.TFloat32)
        right = cute.recast_tensor(b, cutlass.TFloat32)
        for r in cutlass.range_constexpr(2):
            at = (lane // 4 + 8 * r) * STRIDE + 16 * step + lane % 4 * 4
            flat = cute.make_tensor(own.iterator, cute.make_layout(4))
            cute.autovec_copy(view(sS.iterator, at, 4), flat)
            for i in cutlass.range_constexpr(2):
                for bits in cutlass.range_constexpr(2):
                    a[r, i, bits] = own[bits, i]
        for tile in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(2):
                self.split(b[i, None], mapped[tile, i, step])
            for term in cutlass.range_constexpr(3):
                first = cute.make_tensor(
                    left.iterator + 4 * (term % 2), cute.make_layout(((2, 2), 1, 1))
                )
                second = cute.make_tensor(
                    right.iterator + 2 * (term // 2), cute.make_layout((2, 1, 1))
                )
                sums = cute.make_tensor(
                    acc.iterator + 4 * tile + 8 * term, cute.make_layout(((2, 2), 1, 1))
                )
                cute.gemm(tf32, sums, first, second, sums)

    @cute.jit
    def split(self, into: cute.Tensor, value):
        """Writes the bits of a value that tf32 has, and the rest of it."""
        bits = cute.make_rmem_tensor(1, F32)
        bits[0] = value
        word = cute.recast_tensor(bits, I32)
        word[0] = word[0] & I32(-8192)
        into[0] = bits[0]
        into[1] = value - bits[0]

    @cute.jit
    def store_state(self, sS: cute.Tensor, start: cute.Tensor, acc: cute.Tensor, rows, tidx):
        """Writes the sums of the three terms to shared memory, split for the next product, and to global memory."""
        lane, first = tidx % 32, tidx // 32 * COLUMNS
        four = cute.make_rmem_tensor(4, F32)
        parts = cute.make_rmem_tensor((2, 4), F32)
        for r in cutlass.range_constexpr(2):
            v, k = lane // 4 + 8 * r, first + lane % 4 * 4
            for i in cutlass.range_constexpr(2):
                for tile in cutlass.range_constexpr(2):
                    own, c = acc[2 * r + i, tile, None], 2 * i + tile
                    four[c] = own[0] + (own[1] + own[2])
                    self.split(parts[None, c], four[c])
            cute.autovec_copy(four, view(start[rows + v, None].iterator, k, 4))
            for i in cutlass.range_constexpr(2):
                two = cute.make_tensor(parts.iterator + 4 * i, cute.make_layout(4))
                cute.autovec_copy(two, view(sS.iterator, v * STRIDE + 2 * k + 4 * i, 4))
