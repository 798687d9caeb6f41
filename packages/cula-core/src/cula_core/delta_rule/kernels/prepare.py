"""The chunk-parallel kernel: it computes what does not need the state, for all chunks of 64 tokens and value heads.

With G the running sum of log2 decays inside the chunk, G_L the last of them, and q, k normalized if asked:

    kh  = 2^G k        qg = scale 2^G q        kg = 2^(G_L - G) k        decay = 2^G_L
    Aqk = scale (q k^T)_ij 2^(G_i - G_j), j <= i        Akk = beta_i (k k^T)_ij 2^(G_i - G_j), j < i
    T'  = (I + Akk)^-1 diag(beta)

A backward pass takes all of it for keys sqrt(beta) k and strengths of one (`rooted`): then T' is the inverse alone.

The chunk is cut into 4 sub-blocks of 16 tokens; g is the running sum inside one, e its last value. Warp w holds
channels 64 (w / 4) ... of sub-block w % 4, and a lane 2 neighbouring tokens and 2 units of 8 channels (`fragments`): so
2^g x and 2^-g k go from registers into the products, and results to memory 16 bytes at a time.

    inside a sub-block   (2^g x) (2^-g k)                                tf32: the factors span 2^+-115
    I after J            (2^g x) 2^(e of those between) (2^(e - g) k)    16 bits: every factor is <= 1
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from ...constants import LOG2_E
from ...cute.functions import exp2
from ...cute.memory import copy_async, view
from ...cute.schedule import SegmentTable
from ...cute.types import DTYPES, F32, I32
from ..config import CHUNK, HEAD_DIM, SUB, PrepareConfig
from .block import AQK, DECAY, KG, KH, QG, find_chunk_of_sequence
from .fragments import (
    LINE,
    OF_WARP,
    ROUNDS,
    UNIT,
    copy_sums,
    fetch_first,
    fetch_second,
    place_in_line,
    place_of,
    place_of_unit,
    row_of,
    rows_by_rows,
    rows_by_rows_tf32,
    unit_of,
    unit_of_panel,
    unit_of_triangle,
    widen_pair,
    write_columns,
)
from .inverse import GROUP, INVERSE_BYTES, SUBS, Barrier, Inverse, sync_team, tile_of
from .peaks import raise_peak
from .tokens import Gate, Tokens

THREADS = 2 * GROUP
PLACES = THREADS // 32 * OF_WARP  # of units, in shared memory
HALF = UNIT // 2
LANE_OF_UNIT = 0x031F  # of a shuffle: the two lowest bits of the lane's number stay
HALVINGS = 4  # until a half of a sub-block is a single row
# Three CTAs of 80 registers beat four of 64, which leave ptxas too little room to hide latencies.
BLOCKS_PER_MP = 3
# mma.sync cuts tf32 operands off, which takes 0.72 * 2^-11 of either away on average.
TF32_CUT = 1 + 1.44 * 2.0**-11


class Thread(NamedTuple):
    """Which tokens and channels a thread has.

    half, sub: the half of the channels and the sub-block of its warp. lines, place: where the units of its warp begin
    in shared memory, and its own. row, channel: its first token and channel; the others are the next token, and the
    channels 32 further on.
    """

    tidx: cutlass.Int32
    lane: cutlass.Int32
    half: cutlass.Int32
    sub: cutlass.Int32
    lines: cutlass.Int32
    place: cutlass.Int32
    row: cutlass.Int32 = None
    channel: cutlass.Int32 = None
    team: cutlass.Int32 | int = 0

    def with_tokens(self):
        """Returns the same with row and channel, which are computed for chunks that have tokens only."""
        row = self.sub * SUB + self.lane // 4 * 2
        channel = self.half * (HEAD_DIM // 2) + self.lane % 4 * UNIT
        return self._replace(row=row, channel=channel)


class Shared(NamedTuple):
    """Shared memory of a CTA.

    raw: q and k as they are loaded, by units [channel, place, q or k]. x: 2^g q, 2^g k and 2^(e - g) k, in their place.
    base: INVERSE_BYTES, which hold the gates by units of 16 bytes [channel, place] (of fp32 those of the second 32
    channels), then products for the other half of the channels, diag [register, thread, tile], each warp's where its
    own gates were, and at last what the inverse needs. ends: 2^e [channel, sub-block]. spans: decays [channel,
    sub-block, before or behind it]. norms: squares [half of the channels, token, q or k]. sums: running sums where
    decays have no bound [float, thread, plane, unit], else None.
    """

    raw: cute.Tensor
    x: cute.Tensor
    base: cute.Pointer
    gates: cute.Tensor
    diag: cute.Tensor
    ends: cute.Tensor
    spans: cute.Tensor
    norms: cute.Tensor
    bias: cute.Tensor
    betas: cute.Tensor
    sums: cute.Tensor


class KdaPrepare:
    """One CTA per chunk and value head. For packed sequences there is one more, which makes the table of segments.

    | warps | work |
    |---|---|
    | all | gates and norms; products inside a sub-block over their half of the channels |
    | 0-3 | Aqk over all channels; results but T' |
    | 4-7 | Akk over all channels; inverse |
    | all | T' |

    | shared memory | bytes |
    |---|---|
    | q, k as they are loaded; 2^g q, 2^g k, 2^(e - g) k | 49,152 |
    | gates, half of them if fp32; products inside a sub-block, for the other half; Akk and its inverse | 19,712 |
    | 2^e and products of them, norms, beta, dt_bias | 5,888 |
    """

    def __init__(self, config: PrepareConfig):
        self.config = config
        self.dtype, self.operand = DTYPES[config.dtype], DTYPES[config.operand]
        self.tokens, self.inverse = Tokens(config), Inverse(config)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        rate: cute.Tensor,
        bias: cute.Tensor,
        cu_seqlens: cute.Tensor,
        segments: cute.Tensor,
        blocks: cute.Tensor,
        mAqk: cute.Tensor,
        mAkk: cute.Tensor,
        mDo: cute.Tensor,
        factors: cute.Tensor,
        peaks: cute.Tensor,
        scale: cutlass.Float32,
        lower_bound: cutlass.Float32,
        segment_tokens: cutlass.Int32,
        longest: cutlass.Int32,
        first_slot: cutlass.Int32,
        slots: cutlass.Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `build.prepare_arguments`."""
        if cutlass.const_expr(bias is not None):
            layout = cute.make_layout((mG.shape[2], HEAD_DIM), stride=(HEAD_DIM, 1))
            bias = cute.make_tensor(bias.iterator, layout)
        per_row = None
        if cutlass.const_expr(cu_seqlens is None):
            per_row = cute.fast_divmod_create_divisor_v2(cute.ceil_div(mQ.shape[1], CHUNK))
        self.kernel(
            mQ,
            mK,
            mG,
            mBeta,
            rate,
            bias,
            cu_seqlens,
            segments,
            per_row,
            blocks,
            mAqk,
            mAkk,
            mDo,
            factors,
            peaks,
            scale,
            lower_bound,
            segment_tokens,
            longest,
            first_slot,
        ).launch(
            grid=(mG.shape[2] // mQ.shape[2], mQ.shape[2], slots + int(segments is not None)),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=BLOCKS_PER_MP if self.config.bounded else 2,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        rate: cute.Tensor,
        bias: cute.Tensor,
        cu_seqlens: cute.Tensor,
        segments: cute.Tensor,
        per_row: cute.FastDivmodDivisorV2,
        blocks: cute.Tensor,
        mAqk: cute.Tensor,
        mAkk: cute.Tensor,
        mDo: cute.Tensor,
        factors: cute.Tensor,
        peaks: cute.Tensor,
        scale: cutlass.Float32,
        lower_bound: cutlass.Float32,
        segment_tokens: cutlass.Int32,
        longest: cutlass.Int32,
        first_slot: cutlass.Int32,
    ):
        member, head_k, number = cute.arch.block_idx()
        group, _, layers = cute.arch.grid_dim()
        head = head_k * group + member
        # The last chunk first: what is written last is still in the L2 when the recurrence begins.
        slot = layers - 1 - number
        sequence, token, left = find_chunk_of_sequence(
            cu_seqlens, per_row, first_slot + slot, mQ.shape[1]
        )
        batch = sequence if cutlass.const_expr(cu_seqlens is None) else I32(0)
        lanes = self.thread()
        shared = self.allocate()
        inhabited = left > 0
        if cutlass.const_expr(segments is not None):
            inhabited = inhabited & (number > 0)  # the first CTAs of packed sequences have no chunk
        if inhabited:
            thread = lanes.with_tokens()
            # Rows past the end read the last one; their decays, keys and queries are made zero.
            inside = (
                F32(1.0) if thread.row < left else F32(0.0),
                F32(1.0) if thread.row + 1 < left else F32(0.0),
            )
            rows, channel = self.tokens.lines(token, left, thread)
            for which, x in enumerate((mQ, mK)):
                source = x[batch, None, head_k, None]
                self.tokens.load(source, shared.raw[None, None, which], rows, channel, thread)
            gate = mG[batch, None, head, None]
            raw = self.tokens.load_gates(gate, shared, rows, channel, token, left, thread)
            self.load_bias(bias, head, shared, thread.tidx)
            cute.arch.cp_async_commit_group()
            if cutlass.const_expr(self.config.peaks):
                incoming = mDo[batch, None, head, None]
                raise_peak(incoming, peaks[sequence, None], head, rows, channel, lanes.lane)
            own = None
            if cutlass.const_expr(self.config.rooted):
                own = factors[slot, head, None, None]
            strengths = mBeta[batch, None, head]
            self.tokens.strengths(strengths, shared.betas, own, token, left, thread.tidx)
            speed = F32(1.0)
            if cutlass.const_expr(self.config.rate):
                speed = exp2(rate[head] * LOG2_E)
            speed = speed * -LOG2_E
            cute.arch.cp_async_wait_group(0)
            norm = cute.make_rmem_tensor((2, 2), F32)  # [token, q or k]
            self.tokens.normalize(shared, norm, scale, inside, thread)
            diag = self.transform(shared, raw, norm, speed, lower_bound, inside, thread)
            mine = self.exchange(diag, shared.diag, thread.half, thread.tidx)
            block = blocks[slot, head, None]
            aqk, akk = None, None
            if cutlass.const_expr(self.config.intra):
                aqk = cute.domain_offset((token, 0), mAqk[batch, None, head, None])
                akk = cute.domain_offset((token, 0), mAkk[batch, None, head, None])
            self.hand_on(shared, mine, block, aqk, akk, left, thread)
            if cutlass.const_expr(self.config.rooted):
                self.tokens.write_norms(shared, own, thread.tidx)
        else:
            if cutlass.const_expr(segments is not None):
                if number + head == 0:
                    memory = cute.recast_ptr(shared.base, dtype=I32)
                    SegmentTable(CHUNK).make(cu_seqlens, segments, segment_tokens, longest, memory)

    # ---- threads and memory -----------------------------------------------------------------------------------------

    def thread(self):
        """Returns where the thread is, before anything is known of its tokens."""
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tidx % 32
        half, sub = warp_idx // SUBS, warp_idx % SUBS
        lines = warp_idx * OF_WARP
        place = lines + place_of(lane // 4, lane % 4)
        return Thread(tidx, lane, half, sub, lines, place)

    def allocate(self):
        """Returns the shared memory of the CTA."""
        smem = SmemAllocator()
        x_base = smem.allocate_array(self.operand, 3 * UNIT * PLACES, byte_alignment=128)
        gate_dtype = DTYPES[self.config.gate_dtype]
        base = smem.allocate_array(F32, INVERSE_BYTES // 4, byte_alignment=128)
        gates = cute.make_tensor(
            cute.recast_ptr(base, dtype=gate_dtype),
            cute.make_layout((128 // gate_dtype.width, PLACES)),
        )
        exchanged = cute.make_layout((4, (32, THREADS // 32), 2), stride=(1, (4, 4 * OF_WARP), 128))
        ends = smem.allocate_tensor(F32, cute.make_layout((HEAD_DIM, SUBS)), byte_alignment=16)
        spans = smem.allocate_tensor(
            self.operand, cute.make_layout((HEAD_DIM, SUBS, 2)), byte_alignment=16
        )
        norms = smem.allocate_tensor(F32, cute.make_layout((2, CHUNK, 2)), byte_alignment=16)
        bias = smem.allocate_tensor(F32, cute.make_layout(HEAD_DIM), byte_alignment=16)
        betas = smem.allocate_tensor(F32, cute.make_layout(CHUNK), byte_alignment=16)
        units = cute.make_layout((UNIT, PLACES, 3))
        sums = None
        if cutlass.const_expr(not self.config.bounded):
            planes = cute.make_layout((4, THREADS, UNIT // 2, 2))
            sums = smem.allocate_tensor(F32, planes, byte_alignment=16)
        return Shared(
            raw=cute.make_tensor(cute.recast_ptr(x_base, dtype=self.dtype), units),
            x=cute.make_tensor(x_base, units),
            base=base,
            gates=gates,
            diag=cute.make_tensor(base, exchanged),
            ends=ends,
            spans=spans,
            norms=norms,
            bias=bias,
            betas=betas,
            sums=sums,
        )

    @cute.jit
    def load_bias(self, bias: cute.Tensor, head, shared, tidx):
        """Starts to load dt_bias of the head; zero where there is none, and nothing where no gate is computed."""
        if cutlass.const_expr(self.config.bias):
            if tidx < HEAD_DIM // 4:
                own = view(bias[head, None].iterator, 4 * tidx, 4)
                copy_async(own, view(shared.bias.iterator, 4 * tidx, 4))
        elif cutlass.const_expr(self.config.gate != "log"):
            if tidx < HEAD_DIM:
                shared.bias[tidx] = F32(0.0)

    # ---- roles ------------------------------------------------------------------------------------------------------

    @cute.jit
    def transform(self, shared, raw: cute.Tensor, norm, speed, lower_bound, inside, thread):
        """Computes decays, writes 2^g q, 2^g k and 2^(e - g) k, and returns the products inside the sub-block, of the
        warp's channels: [registers of C, tile, q or k]."""
        diag = cute.make_rmem_tensor((4, 2, 2), F32)
        diag.fill(0.0)
        earlier = tuple(thread.lane >= 4 << p for p in range(3))
        g = cute.make_rmem_tensor((UNIT, 2), F32)  # [channel, token]
        for m in cutlass.range_constexpr(2):
            self.tokens.fetch_gates(shared, raw, m, thread)
            bias = unit_of(shared.bias, thread.channel + 32 * m, UNIT)
            gate = Gate(raw, bias, speed, lower_bound, inside, earlier)
            if cutlass.const_expr(self.config.bounded):
                self.products(shared, norm, gate, g, diag, m, thread)
            else:
                for pair in cutlass.range_constexpr(UNIT // 2):
                    self.tokens.decays(gate, g, 2 * pair)
                copy_sums(g, shared.sums[None, thread.tidx, None, m], False)
        if cutlass.const_expr(not self.config.bounded):
            self.halve(shared, norm, g, diag, thread)
            for m in cutlass.range_constexpr(2):
                copy_sums(g, shared.sums[None, thread.tidx, None, m], True)
                self.products(shared, norm, None, g, diag, m, thread)
        return diag

    @cute.jit
    def hand_on(self, shared, mine: cute.Tensor, block, aqk, akk, left, thread):
        """Writes the block."""
        self.hand_most_on(shared, mine, block, aqk, left, thread)
        self.inverse.store_tprime(shared.base, block, akk, shared.betas, thread.tidx, left)

    @cute.jit
    def hand_most_on(
        self, shared, mine: cute.Tensor, block, aqk, left, thread, between=None, behind=None
    ):
        """Writes the block but T': Aqk and the operands by the first half of the threads, while the second inverts.

        between: what the last warp does while others substitute. behind: what the first half does after
        that, when nobody reads the operands any longer. Returns what `behind` does, and zero in the second half.
        """
        half, sub, lane, tidx = thread.half, thread.sub, thread.lane, thread.tidx
        first = len(Barrier) * thread.team
        held = F32(0.0)
        sync_team(thread.team)
        for i in cutlass.range_constexpr(2):
            other = shared.diag[None, tidx ^ GROUP, i].load()
            mine[None, i].store((mine[None, i].load() + other) * TF32_CUT)
        if half == 0:
            cute.arch.barrier_arrive(barrier_id=Barrier.HALF + first, number_of_threads=THREADS)
            self.span(shared.ends, shared.spans, block, tidx)
        acc = cute.make_rmem_tensor((4, 2, SUBS - 1), F32)  # [registers of C, tile, distance]
        acc.fill(0.0)
        self.multiply(shared.x, shared.ends, acc, sub, half, lane)
        if half == 0:
            self.attend(block, aqk, mine, acc, sub, lane, thread.row, left)
            cute.arch.barrier(barrier_id=Barrier.SPAN + first, number_of_threads=GROUP)
            self.store(shared.x, block, shared.spans, sub, lane)
            if cutlass.const_expr(behind is not None):
                cute.arch.barrier(barrier_id=Barrier.FREE + first, number_of_threads=THREADS)
                held = behind()
        else:
            meanwhile = None
            if cutlass.const_expr(behind is not None):
                meanwhile = lambda: self.pass_on(between, first, lane)
                if sub < SUBS - 1:
                    cute.arch.barrier_arrive(
                        barrier_id=Barrier.FREE + first, number_of_threads=THREADS
                    )
            cute.arch.barrier(barrier_id=Barrier.HALF + first, number_of_threads=THREADS)
            self.inverse.invert(
                shared.base,
                mine,
                acc,
                shared.betas,
                sub,
                lane,
                thread.row,
                tidx - GROUP,
                thread.team,
                meanwhile,
            )
        sync_team(thread.team)
        return held

    @cute.jit
    def pass_on(self, between, first, lane):
        """Does what a warp does between, and lets the first half of the threads know."""
        between()
        cute.arch.barrier_arrive(barrier_id=Barrier.FREE + first, number_of_threads=THREADS)

    # ---- operands and products --------------------------------------------------------------------------------------

    @cute.jit
    def products(self, shared, norm, gate, g, diag, m: cutlass.Constexpr, thread):
        """Writes 2^g q, 2^g k and 2^(e - g) k of a unit, and where decays are bounded adds its products inside the
        sub-block."""
        wide = cute.make_rmem_tensor((2, 2, 2), F32)
        last = cute.make_rmem_tensor(2, F32)
        end = cute.make_rmem_tensor(2, F32)
        x = cute.make_rmem_tensor((2, 2, 3), F32)  # [token, channel, 2^g q, 2^g k, 2^-g k]
        raw = self.own_unit(shared.raw, m, thread.place)
        # Half a unit at a time: whole ones would be faster to store, and do not fit into 80 registers.
        for part in cutlass.range_constexpr(2):
            rounded = cute.make_rmem_tensor((HALF, 2, 3), self.operand)
            for pair in cutlass.range_constexpr(HALF // 2):
                first = HALF * part + 2 * pair
                if cutlass.const_expr(self.config.bounded):
                    self.tokens.decays(gate, g, first)
                widen_pair(raw, first // 2, wide)
                if cutlass.const_expr(not self.config.bounded):
                    for i in cutlass.range_constexpr(2):
                        last[i] = cute.arch.shuffle_sync(
                            g[first + i, 1], 28, mask_and_clamp=LANE_OF_UNIT
                        )
                        end[i] = exp2(last[i])
                for r in cutlass.range_constexpr(2):
                    for i in cutlass.range_constexpr(2):
                        c = first + i
                        grown = exp2(g[c, r])
                        if cutlass.const_expr(self.config.bounded and r == 1):
                            end[i] = cute.arch.shuffle_sync(grown, 28, mask_and_clamp=LANE_OF_UNIT)
                        k = wide[i, r, 1] * norm[r, 1]
                        x[r, i, 0] = wide[i, r, 0] * norm[r, 0] * grown
                        x[r, i, 1] = k * grown
                        if cutlass.const_expr(self.config.bounded):
                            x[r, i, 2] = k * exp2(-g[c, r])
                        else:
                            x[r, i, 2] = k * exp2(last[i] - g[c, r])
                if thread.lane >= 28:
                    at = thread.sub * HEAD_DIM + thread.channel + 32 * m + first
                    cute.autovec_copy(end, view(shared.ends.iterator, at, 2))
                if cutlass.const_expr(self.config.bounded):
                    rows_by_rows_tf32(diag, x)
                    for r in cutlass.range_constexpr(2):
                        for i in cutlass.range_constexpr(2):
                            x[r, i, 2] = x[r, i, 2] * end[i]
                for which in cutlass.range_constexpr(3):
                    for r in cutlass.range_constexpr(2):
                        two = cute.make_rmem_tensor(2, F32)
                        two.store(x[r, None, which].load())
                        where = rounded.iterator + 2 * pair + HALF * (r + 2 * which)
                        here = cute.make_tensor(where, cute.make_layout(2))
                        here.store(two.load().to(self.operand))
            for which in cutlass.range_constexpr(3):
                for r in cutlass.range_constexpr(2):
                    unit = shared.x[None, place_of_unit(thread.place, m, r), which]
                    cute.autovec_copy(
                        rounded[None, r, which], view(unit.iterator, HALF * part, HALF)
                    )

    @cute.jit
    def own_unit(self, sRaw: cute.Tensor, m, place):
        """Returns unit m of the thread's queries and keys: [channel, token, q or k]."""
        raw = cute.make_rmem_tensor((UNIT, 2, 2), self.dtype)
        for which in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                unit = sRaw[None, place_of_unit(place, m, r), which]
                cute.autovec_copy(unit, raw[None, r, which])
        return raw

    @cute.jit
    def halve(self, shared, norm, g, diag: cute.Tensor, thread):
        """Computes products inside a sub-block where decays have no bound.

        Of two tokens in different halves of 16, 8, 4 or 2, both factors are taken relative to the last token of the
        first half, so that they are at most 1. The product of a token with itself needs no factor.
        """
        lane = thread.lane
        wide = cute.make_rmem_tensor((2, 2, 2), F32)
        x = cute.make_rmem_tensor((2, 2, 3), F32)  # [token, channel, q, k, k]
        for level in cutlass.range(HALVINGS + 1, unroll=1):
            half = (SUB // 2) >> level
            # Lanes 4 n ... have tokens 2 n and 2 n + 1.
            inside = half > 1
            first = lane // 4 & -half
            source = 4 * (first + half // 2 - 1) + lane % 4 if inside else lane
            apart_by = F32(-1.0) if half > 0 else F32(0.0)
            sums = cute.make_rmem_tensor((4, 2, 2), F32)
            sums.fill(0.0)
            for m in cutlass.range(2, unroll=1):
                raw = self.own_unit(shared.raw, m, thread.place)
                copy_sums(g, shared.sums[None, thread.tidx, None, m], True)
                for pair in cutlass.range_constexpr(UNIT // 2):
                    widen_pair(raw, pair, wide)
                    for i in cutlass.range_constexpr(2):
                        c = 2 * pair + i
                        last = g[c, 1] if inside else g[c, 0]
                        middle = cute.arch.shuffle_sync(last, source)
                        for r in cutlass.range_constexpr(2):
                            factor = exp2(apart_by * cute.math.absf(g[c, r] - middle))
                            x[r, i, 0] = wide[i, r, 0] * (norm[r, 0] * factor)
                            x[r, i, 1] = wide[i, r, 1] * (norm[r, 1] * factor)
                            x[r, i, 2] = x[r, i, 1]
                    rows_by_rows_tf32(sums, x)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(4):
                    apart = (lane // 4 * 2 + r) ^ (lane % 4 * 4 + c)
                    now = (apart < 2 * half) | (apart == 0)
                    for which in cutlass.range_constexpr(2):
                        at = (2 * r + c // 2, c % 2, which)
                        diag[at] = sums[at] if now else diag[at]

    @cute.jit
    def exchange(self, diag: cute.Tensor, sDiag: cute.Tensor, half, tidx):
        """Writes the products that the other half of the channels needs, and returns those that this half needs.

        The first half needs those of q, the second those of k.
        """
        mine = cute.make_rmem_tensor((4, 2), F32)
        given = cute.make_rmem_tensor((4, 2), F32)
        if cutlass.const_expr(not self.config.beside):
            cute.arch.sync_warp()  # gates of other lanes lie there
        for tile in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(4):
                q, k = diag[i, tile, 0], diag[i, tile, 1]
                mine[i, tile] = q if half == 0 else k
                given[i, tile] = k if half == 0 else q
            cute.autovec_copy(given[None, tile], sDiag[None, tidx, tile])
        return mine

    @cute.jit
    def span(self, ends, spans, block, tidx):
        """Writes the decays from the chunk's start to each sub-block, from behind it to the end, and of the chunk."""
        if tidx < HEAD_DIM:
            before, behind = F32(1.0), F32(1.0)
            for j in cutlass.range_constexpr(SUBS):
                spans[tidx, j, 0] = before.to(self.operand)
                before = before * ends[tidx, j]
                spans[tidx, SUBS - 1 - j, 1] = behind.to(self.operand)
                behind = behind * ends[tidx, SUBS - 1 - j]
            decay = cute.make_tensor(
                cute.recast_ptr(block.iterator + DECAY, dtype=F32),
                cute.make_layout(HEAD_DIM),
            )
            decay[tidx] = before

    @cute.jit
    def store(self, sX, block, spans, sub, lane):
        """Writes kh, qg, kg of the sub-block, by lines."""
        x = cute.make_rmem_tensor(UNIT, self.operand)
        factor = cute.make_rmem_tensor((UNIT, 2), self.operand)
        for side in cutlass.range_constexpr(2):
            for end in cutlass.range_constexpr(2):
                span = unit_of(
                    spans[None, sub, end], side * (HEAD_DIM // 2) + lane % LINE * UNIT, UNIT
                )
                cute.autovec_copy(span, factor[None, end])
            lines = (side * SUBS + sub) * OF_WARP
            for j in cutlass.range_constexpr(ROUNDS):
                for which in cutlass.range_constexpr(3):
                    cute.autovec_copy(sX[None, lines + place_in_line(lane, j), which], x)
                    x.store(x.load() * factor[None, which // 2].load())
                    unit = unit_of_panel(block, (QG, KH, KG)[which], side, sub, lane, j)
                    cute.autovec_copy(x, unit)

    @cute.jit
    def multiply(self, sX, ends, acc, sub, half, lane):
        """Adds products of the sub-block's q (first half) or k and k of the sub-blocks before it, over all channels."""
        mma = cute.make_mma_atom(warp.MmaF16BF16Op(self.operand, F32, (16, 8, 16)))
        a = cute.make_rmem_tensor((2, 2, 2, 2), self.operand)
        b = cute.make_rmem_tensor((2, 2, 2), self.operand)
        left = sX[None, None, half]
        right = sX[None, None, 2]
        rows = sub
        if cutlass.const_expr(self.config.beside):
            rows = SUBS - 1 if sub == 0 else sub
        for side in cutlass.range_constexpr(2):
            lines = (side * SUBS + rows) * OF_WARP
            for m in cutlass.range_constexpr(2):
                for step in cutlass.range_constexpr(2):
                    fetch_first(left, lines, m, step, lane, a[None, None, None, step])
                for d in cutlass.range_constexpr(SUBS - 1):
                    here, _, _ = tile_of(sub, 0, d + 1, self.config.beside)
                    if cutlass.const_expr(self.config.beside and 0 < d < SUBS - 2):
                        # The products of the last sub-block with the first have the decays of all between.
                        if sub == 0:
                            for step in cutlass.range_constexpr(2):
                                self.decay(a, ends, side, m, step, rows - d, lane)
                    if here:
                        for step in cutlass.range_constexpr(2):
                            if cutlass.const_expr(d > 0):
                                self.decay(a, ends, side, m, step, rows - d, lane)
                            before = lines - OF_WARP * (d + 1)
                            fetch_second(right, before, m, step, lane, b)
                            rows_by_rows(mma, acc[None, None, d], a[None, None, None, step], b)

    @cute.jit
    def decay(self, a: cute.Tensor, ends: cute.Tensor, side, m, step, sub, lane):
        """Multiplies 16 rows with the decays of a sub-block between."""
        for i in cutlass.range_constexpr(2):
            at = 32 * m + UNIT * (2 * step + i) + lane % 4 * 2
            end = view(ends[None, sub].iterator, side * (HEAD_DIM // 2) + at, 2)
            decay = end.load().to(self.operand)
            for r in cutlass.range_constexpr(2):
                own = a[None, r, i, step]
                own.store(own.load() * decay)

    @cute.jit
    def attend(self, block, aqk, diag, acc, sub, lane, row, left):
        """Writes 16 rows of Aqk up to the diagonal to the block, and whole rows to the caller's tensor."""
        own = cute.make_rmem_tensor(4, F32)
        rounded = cute.make_rmem_tensor(4, self.operand)
        column = lane % 4 * 4
        for d in cutlass.range_constexpr(SUBS):
            here, rows, block_column = tile_of(sub, row, d, self.config.beside)
            if here:
                unit = unit_of_triangle(rows, block_column * SUB + column // UNIT * UNIT)
                target = view(block.iterator, AQK + unit + column % UNIT, 4)
                for r in cutlass.range_constexpr(2):
                    for c in cutlass.range_constexpr(4):
                        if cutlass.const_expr(d == 0):
                            seen = column + c <= lane // 4 * 2 + r
                            own[c] = row_of(diag, r, c) if seen else F32(0.0)
                        else:
                            own[c] = row_of(acc[None, None, d - 1], r, c)
                    rounded.store(own.load().to(self.operand))
                    cute.autovec_copy(rounded, view(target.iterator, r * SUB, 4))
                    if cutlass.const_expr(self.config.intra):
                        at = block_column * SUB + column
                        write_columns(aqk, own, rows + r, at, left, self.dtype)
            elif cutlass.const_expr(self.config.intra):
                own.fill(0.0)
                for r in cutlass.range_constexpr(2):
                    # Behind the diagonal are sub-blocks sub + 1 ... 3, here d = 3 ... sub + 1.
                    write_columns(aqk, own, row + r, d * SUB + column, left, self.dtype)
