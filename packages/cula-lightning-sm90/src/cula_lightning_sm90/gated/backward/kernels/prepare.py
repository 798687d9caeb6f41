"""The chunk-parallel kernel of the backward pass where all channels of a head decay alike.

It writes the blocks that KDA's kernel writes for a backward pass, from products of q and k as they are: with G the
running sum of log2 decays in the chunk, and factors f of tokens, which are those of norms times the scale (of q) or the
root of the strength (of k),

    qg  = 2^G f q        kh = 2^G f k        kg = 2^(G_L - G) f k        decay = 2^G_L
    Aqk = f_i f_j (q k^T)_ij 2^(G_i - G_j), j <= i        M = f_i f_j (k k^T)_ij 2^(G_i - G_j), j < i
    T'  = (I + M)^-1
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from cula_core.cute.functions import exp2
from cula_core.cute.memory import view
from cula_core.cute.schedule import SegmentTable
from cula_core.cute.types import F32, I32
from cula_core.delta_rule.config import CHUNK, HEAD_DIM, SUB
from cula_core.delta_rule.kernels.block import DECAY, KG, KH, QG, find_chunk_of_sequence
from cula_core.delta_rule.kernels.fragments import (
    LINE,
    OF_WARP,
    ROUNDS,
    UNIT,
    fetch_first,
    fetch_second,
    place_in_line,
    rows_by_rows,
    unit_of_panel,
)
from cula_core.delta_rule.kernels.inverse import INVERSE_BYTES, SUBS
from cula_core.delta_rule.kernels.peaks import raise_peak
from cula_core.delta_rule.kernels.prepare import PLACES, THREADS, KdaPrepare

from .decays import sum_decays

BLOCKS_PER_MP = 3


class Shared(NamedTuple):
    """Shared memory of a CTA.

    raw: q and k as they are loaded, by units [channel, place, q or k]. base: INVERSE_BYTES for the inverse. norms:
    squares [half of the channels, token, q or k]. betas: roots of strengths [token]. factors: of tokens [token, q or
    k]. sums: of log2 decays [token, up to it or behind it].
    """

    raw: cute.Tensor
    base: cute.Pointer
    norms: cute.Tensor
    betas: cute.Tensor
    factors: cute.Tensor
    sums: cute.Tensor


class ChunkPrepare(KdaPrepare):
    """One CTA per chunk and value head. For packed sequences there is one more, which makes the table of segments.

    | warps | work |
    |---|---|
    | all | norms |
    | 0-3 | Aqk; results but T' |
    | 4-7 | M; inverse |
    | all | T' |

    | shared memory | bytes |
    |---|---|
    | q, k as they are loaded | 32,768 |
    | M and its inverse | 19,712 |
    | norms, strengths, factors and sums of decays of tokens | 2304 |
    """

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        cu_seqlens: cute.Tensor,
        segments: cute.Tensor,
        blocks: cute.Tensor,
        mDo: cute.Tensor,
        factors: cute.Tensor,
        peaks: cute.Tensor,
        scale: cutlass.Float32,
        segment_tokens: cutlass.Int32,
        slots: cutlass.Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `build.prepare_arguments`."""
        per_row = None
        if cutlass.const_expr(cu_seqlens is None):
            per_row = cute.fast_divmod_create_divisor_v2(cute.ceil_div(mQ.shape[1], CHUNK))
        self.kernel(
            mQ, mK, mG, mBeta, cu_seqlens, segments, per_row, blocks, mDo, factors, peaks, scale, segment_tokens
        ).launch(
            grid=(mG.shape[2] // mQ.shape[2], mQ.shape[2], slots + int(segments is not None)),
            block=(THREADS, 1, 1), min_blocks_per_mp=BLOCKS_PER_MP, preferred_smem_carveout=100, stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        cu_seqlens: cute.Tensor,
        segments: cute.Tensor,
        per_row: cute.FastDivmodDivisorV2,
        blocks: cute.Tensor,
        mDo: cute.Tensor,
        factors: cute.Tensor,
        peaks: cute.Tensor,
        scale: cutlass.Float32,
        segment_tokens: cutlass.Int32,
    ):
        member, head_k, number = cute.arch.block_idx()
        group, _, layers = cute.arch.grid_dim()
        head = head_k * group + member
        # The last chunk first: what is written last is still in the L2 when the walks begin.
        slot = layers - 1 - number
        sequence, token, left = find_chunk_of_sequence(cu_seqlens, per_row, slot, mQ.shape[1])
        batch = sequence if cutlass.const_expr(cu_seqlens is None) else I32(0)
        lanes = self.thread()
        shared = self.allocate()
        inhabited = left > 0
        if cutlass.const_expr(segments is not None):
            inhabited = inhabited & (number > 0)  # the first CTAs of packed sequences have no chunk
        if inhabited:
            thread = lanes.with_tokens()
            # Rows past the end read the last one; their factors are zero.
            inside = (
                F32(1.0) if thread.row < left else F32(0.0),
                F32(1.0) if thread.row + 1 < left else F32(0.0),
            )
            rows, channel = self.tokens.lines(token, left, thread)
            for which, x in enumerate((mQ, mK)):
                source = x[batch, None, head_k, None]
                self.tokens.load(source, shared.raw[None, None, which], rows, channel, thread)
            cute.arch.cp_async_commit_group()
            incoming = mDo[batch, None, head, None]
            raise_peak(incoming, peaks[sequence, None], head, rows, channel, lanes.lane)
            own, strengths = factors[slot, head, None, None], mBeta[batch, None, head]
            self.tokens.strengths(strengths, shared.betas, own, token, left, thread.tidx)
            if thread.tidx >= THREADS - 32:
                decays = cute.domain_offset((token,), mG[batch, None, head])
                sum_decays(decays, shared.sums, left, thread.lane)
            cute.arch.cp_async_wait_group(0)
            norm = cute.make_rmem_tensor((2, 2), F32)  # [token, q or k]
            self.tokens.normalize(shared, norm, scale, inside, thread)
            if (thread.half == 0) & (thread.lane % 4 == 0):
                for r in cutlass.range_constexpr(2):
                    for which in cutlass.range_constexpr(2):
                        shared.factors[thread.row + r, which] = norm[r, which]
            cute.arch.sync_threads()
            block = blocks[slot, head, None]
            self.hand_on(shared, norm, block, left, thread)
            self.tokens.write_norms(shared, own, thread.tidx)
        else:
            if cutlass.const_expr(segments is not None):
                if number + head == 0:
                    memory = cute.recast_ptr(shared.base, dtype=I32)
                    SegmentTable(CHUNK).make(
                        cu_seqlens, segments, segment_tokens, segment_tokens, memory
                    )

    def allocate(self):
        """Returns the shared memory of the CTA."""
        smem = SmemAllocator()
        raw = cute.make_layout((UNIT, PLACES, 2))
        of_tokens = cute.make_layout((CHUNK, 2))
        return Shared(
            raw=smem.allocate_tensor(self.dtype, raw, byte_alignment=128),
            base=smem.allocate_array(F32, INVERSE_BYTES // 4, byte_alignment=128),
            norms=smem.allocate_tensor(F32, cute.make_layout((2, CHUNK, 2)), byte_alignment=16),
            betas=smem.allocate_tensor(F32, cute.make_layout(CHUNK), byte_alignment=16),
            factors=smem.allocate_tensor(F32, of_tokens, byte_alignment=16),
            sums=smem.allocate_tensor(F32, of_tokens, byte_alignment=16),
        )

    @cute.jit
    def hand_on(self, shared, norm: cute.Tensor, block, left, thread):
        """Writes the block: Aqk and the operands by the first half of the threads, while the second inverts."""
        half, sub, lane, tidx = thread.half, thread.sub, thread.lane, thread.tidx
        acc = self.multiply(shared, norm, thread)
        near = cute.make_tensor(acc.iterator, cute.make_layout((4, 2)))
        far = cute.make_tensor(acc.iterator + 8, cute.make_layout((4, 2, SUBS - 1)))
        if half == 0:
            self.attend(block, None, near, far, sub, lane, thread.row, left)
            target = cute.recast_ptr(block.iterator + DECAY, dtype=F32)
            cute.make_tensor(target, cute.make_layout(HEAD_DIM))[tidx] = exp2(
                shared.sums[CHUNK - 1, 0]
            )
            self.store(shared, block, sub, lane)
        else:
            self.inverse.invert(
                shared.base, near, far, shared.betas, sub, lane, thread.row, tidx - THREADS // 2
            )
        cute.arch.sync_threads()
        self.inverse.store_tprime(shared.base, block, None, shared.betas, tidx, left)

    @cute.jit
    def multiply(self, shared, norm: cute.Tensor, thread):
        """Returns rows of Aqk (first half of the threads) or M of the sub-block, for columns of the sub-blocks up to
        it: [registers of C, tile, distance]. Above the diagonal they are undefined."""
        half, sub, lane, row = thread.half, thread.sub, thread.lane, thread.row
        mma = cute.make_mma_atom(warp.MmaF16BF16Op(self.dtype, F32, (16, 8, 16)))
        acc = cute.make_rmem_tensor((4, 2, SUBS), F32)
        acc.fill(0.0)
        a, b = (cute.make_rmem_tensor((2, 2, 2), self.dtype) for _ in range(2))
        left, right = shared.raw[None, None, half], shared.raw[None, None, 1]
        for side in cutlass.range_constexpr(2):
            lines = (side * SUBS + sub) * OF_WARP
            for m in cutlass.range_constexpr(2):
                for step in cutlass.range_constexpr(2):
                    fetch_first(left, lines, m, step, lane, a)
                    for d in cutlass.range_constexpr(SUBS):
                        if d <= sub:
                            fetch_second(right, lines - OF_WARP * d, m, step, lane, b)
                            rows_by_rows(mma, acc[None, None, d], a, b)
        factors, sums = cute.make_rmem_tensor(4, F32), cute.make_rmem_tensor(4, F32)
        for d in cutlass.range_constexpr(SUBS):
            if d <= sub:
                column = (sub - d) * SUB + lane % 4 * 4
                cute.autovec_copy(view(shared.factors.iterator, CHUNK + column, 4), factors)
                cute.autovec_copy(view(shared.sums.iterator, column, 4), sums)
                for r in cutlass.range_constexpr(2):
                    own = norm[r, 0] if half == 0 else norm[r, 1]
                    upto = shared.sums[row + r, 0]
                    for c in cutlass.range_constexpr(4):
                        at = (2 * r + c // 2, c % 2, d)
                        acc[at] = acc[at] * (own * factors[c]) * exp2(upto - sums[c])
        return acc

    @cute.jit
    def store(self, shared, block, sub, lane):
        """Writes kh, qg, kg of the sub-block, by lines."""
        raw = cute.make_rmem_tensor((UNIT, 2), self.dtype)
        wide, x = cute.make_rmem_tensor(UNIT, F32), cute.make_rmem_tensor(UNIT, self.operand)
        for j in cutlass.range_constexpr(ROUNDS):
            row = sub * SUB + lane // LINE + 4 * j
            grown, shrinking = exp2(shared.sums[row, 0]), exp2(shared.sums[row, 1])
            of_q, of_k = shared.factors[row, 0], shared.factors[row, 1]
            for side in cutlass.range_constexpr(2):
                at = (side * SUBS + sub) * OF_WARP + place_in_line(lane, j)
                for which in cutlass.range_constexpr(2):
                    cute.autovec_copy(shared.raw[None, at, which], raw[None, which])
                parts = ((QG, 0, of_q * grown), (KH, 1, of_k * grown), (KG, 1, of_k * shrinking))
                for offset, which, factor in parts:
                    wide.store(raw[None, which].load().to(F32) * factor)
                    x.store(wide.load().to(self.operand))
                    cute.autovec_copy(x, unit_of_panel(block, offset, side, sub, lane, j))
