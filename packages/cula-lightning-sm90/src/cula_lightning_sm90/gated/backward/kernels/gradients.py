"""The gradients of a chunk in which all channels of a head decay alike, from what the walks of the backward pass left.

With normalized keys k^ and the roots r of strengths, k~ = r k^, queries q~ that have the scale, G the running sum of
log2 decays in the chunk, Gamma_ij = 2^(G_i - G_j) for j <= i and else zero, S the state before the chunk, D the
gradient of the state behind it:

    dA  = do z^T      dM  = -strict_tril(y z^T)      dbeta = diag(y z^T) / r^2
    dq~ = 2^G do S^T + (dA Gamma) k~
    dk~ = -2^G y S^T + 2^(G_L - G) z D^T + (dM Gamma) k~ + (dA Gamma)^T q~ + (dM Gamma)^T k~

The gradient of the log decay of token t sums what is written before t, or was in S, and is read from t on, or leaves in
D. Pairs of tokens add W = dA Aqk + dM M, element by element below the diagonal, with Aqk = (q~ k~^T) Gamma and M =
(k~ k~^T) Gamma: sums over i >= t of the rows i of W less its columns i, in which what does not count cancels.

Gradients are scaled by a power of two (`scaling`), and dA, dM of a chunk by another one, by their own largest.
"""

from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.memory import SmemAllocator

from cula_core.cute.functions import exp2
from cula_core.cute.memory import repeated, view
from cula_core.cute.output import GROUP
from cula_core.cute.types import F32, I32
from cula_core.cute.warp import all_sums, reduce_scatter
from cula_core.cute.wgmma import as_operand, issue, mma
from cula_core.cute.widen import widened
from cula_core.delta_rule.backward.config import FACTORS
from cula_core.delta_rule.backward.kernels.chunk import (
    BARRIER,
    THREADS,
    WARPS,
    ChunkKernel,
    Place,
    address_of,
    elements_at,
    renewed,
)
from cula_core.delta_rule.backward.kernels.scaling import scale_of
from cula_core.delta_rule.config import CHUNK, HEAD_DIM, SUB
from cula_core.delta_rule.kernels.block import SQUARE, WIDE, find_chunk_of_sequence

from .decays import sum_decays, sums_before, sums_behind

FIRST_GROUP = BARRIER + 1  # of the named barriers, one for each of two groups
TILES = CHUNK // 8
# Where matrices begin in shared memory, in elements of 16 bits.
DO, Y, Z, Q, K, S, D, PAIRS, GIVEN, END = (i * WIDE for i in (0, 1, 2, 3, 4, 5, 7, 9, 10, 13))


class Input(IntEnum):
    """What is loaded together, and given back together, in this order."""

    TOKENS = 0  # q, k, do, factors
    ROWS = 1  # z, y
    STATES = 2  # S, D


class Token(IntEnum):
    """Numbers of tokens that are summed up for the decay."""

    ROWS_OF_Q = 0  # of W
    ROWS_OF_K = 1
    Q_BY_STATE = 2
    K_BY_STATE = 3
    BY_D_STATE = 4


class Shared(NamedTuple):
    """Shared memory of a CTA.

    full, empty: barriers of every `Input`. begun, done: of sums of decays, and of what the decay's gradient is
    summed from. given: q, k and do as they are loaded; the next chunk's as soon as q, k, do are made of them, which
    are operands. y, z, s, d: what is loaded. pairs: dA and dM by rows, times Gamma. At last dq replaces do, and dk
    the pairs. largest [warp]: bits of the largest of dA or dM.

    There are two places for what follows, and for begun and done; see `of_turn`. factors [4, token]: as
    `Tokens` writes them. sums [token, 2]: see `sum_decays`. columns [warp, token]: of W, of the warp's
    rows. numbers [Token, token]. kept [warp]: the sum of S D. peak: bits of the largest gradient.
    """

    full: cute.Pointer
    empty: cute.Pointer
    begun: cute.Pointer
    done: cute.Pointer
    do: cute.Pointer
    y: cute.Pointer
    z: cute.Pointer
    q: cute.Pointer
    k: cute.Pointer
    s: cute.Pointer
    d: cute.Pointer
    pairs: cute.Pointer
    given: cute.Pointer
    factors: cute.Pointer
    sums: cute.Tensor
    columns: cute.Pointer
    numbers: cute.Tensor
    largest: cute.Tensor
    kept: cute.Tensor
    peak: cute.Tensor


class Thread(NamedTuple):
    """tidx: of those that compute. group: of 128. w: the warp of the group. row: the first of its two, which are 8
    apart. column: the first of its two of every 8."""

    tidx: cutlass.Int32
    lane: cutlass.Int32
    group: cutlass.Int32
    w: cutlass.Int32
    row: cutlass.Int32
    column: cutlass.Int32


def thread_of(tidx):
    """Returns where a thread is."""
    lane, group = tidx % 32, cute.arch.make_warp_uniform(tidx // GROUP)
    w = cute.arch.make_warp_uniform(tidx % GROUP // 32)
    return Thread(tidx, lane, group, w, SUB * w + lane // 4, lane % 4 * 2)


class SoFar(NamedTuple):
    """Sums over value heads of what belongs to a head of q and k.

    own: the thread's place for its accumulators, [part, 4 numbers]. begun: whether it holds those of the value heads
    before. ends: whether this is the last one.
    """

    own: cute.Tensor
    begun: cutlass.Boolean
    ends: cutlass.Boolean


class ChunkGradients(ChunkKernel):
    """Persistent CTAs over pairs of a chunk and a head of q and k, first chunks first. The value heads of a pair follow
    one another.

    | warps | work |
    |---|---|
    | 0-3 | dA; dq; dv |
    | 4-7 | dM; dk |
    | 8 | loads the inputs of the next chunk as memory is given back |
    | 9 | sums of the next chunk's decays; the gradient of decays of the chunk before |

    | shared memory | bytes |
    |---|---|
    | do, q, k, as they are given and as operands | 98,304 |
    | y, z | 32,768 |
    | S, D | 65,536 |
    | dA, dM | 16,384 |
    | factors of tokens, sums over tokens | 9472 |
    """

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mG: cute.Tensor,
        mDo: cute.Tensor,
        factors: cute.Tensor,
        peaks: cute.Tensor,
        states: cute.Tensor,
        d_states: cute.Tensor,
        z: cute.Tensor,
        minus_y: cute.Tensor,
        cu_seqlens: cute.Tensor,
        mDq: cute.Tensor,
        mDk: cute.Tensor,
        mDv: cute.Tensor,
        mDg: cute.Tensor,
        mDbeta: cute.Tensor,
        sums: cute.Tensor,
        scale: cutlass.Float32,
        slots: cutlass.Int32,
        ctas: cutlass.Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `build.gradients_arguments`."""
        per_row = None
        if cutlass.const_expr(cu_seqlens is None):
            per_row = cute.fast_divmod_create_divisor_v2(cute.ceil_div(mQ.shape[1], CHUNK))
        by_head = cute.fast_divmod_create_divisor_v2(mQ.shape[2])
        tokens = tuple(self.tma(x, self.dtype, 64) for x in (mQ, mK, mDo))
        self.kernel(
            tokens, mG, factors, peaks, states, d_states, z, minus_y, cu_seqlens, per_row, by_head, mDq, mDk, mDv,
            mDg, mDbeta, sums, scale, slots,
        ).launch(
            grid=(ctas, 1, 1), block=(THREADS + GROUP, 1, 1), min_blocks_per_mp=1, stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tokens: tuple,
        mG: cute.Tensor,
        factors: cute.Tensor,
        peaks: cute.Tensor,
        states: cute.Tensor,
        d_states: cute.Tensor,
        z: cute.Tensor,
        minus_y: cute.Tensor,
        cu_seqlens: cute.Tensor,
        per_row: cute.FastDivmodDivisorV2,
        by_head: cute.FastDivmodDivisorV2,
        mDq: cute.Tensor,
        mDk: cute.Tensor,
        mDv: cute.Tensor,
        mDg: cute.Tensor,
        mDbeta: cute.Tensor,
        sums: cute.Tensor,
        scale: cutlass.Float32,
        slots: cutlass.Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        first, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        shared = self.allocate()
        if tidx == 0:
            for i in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(shared.begun + i, 32)
                cute.arch.mbarrier_init(shared.done + i, THREADS)
        self.init_barriers(shared, len(Input), tidx)
        heads, length = mDq.shape[2], mG.shape[1]
        group = mG.shape[2] // heads
        turn = I32(0)  # chunks and value heads so far
        if warp_idx >= WARPS:
            cute.arch.setmaxregister_decrease(40)
            if warp_idx < WARPS + 2:
                past = Place(I32(0), I32(0), I32(0), I32(0))
                for number in cutlass.range(first, slots * heads, ctas, unroll=1):
                    slot, head_k = divmod(number, by_head)
                    sequence, token, left = find_chunk_of_sequence(
                        cu_seqlens, per_row, slot, length
                    )
                    if left > 0:
                        batch = sequence if cutlass.const_expr(cu_seqlens is None) else I32(0)
                        for member in cutlass.range(group, unroll=1):
                            head = head_k * group + member
                            place = Place(batch, token, head, left)
                            if warp_idx == WARPS:
                                images = tuple(
                                    x[slot, head, None, None] for x in (states, d_states, z, minus_y, factors)
                                )  # fmt: skip
                                self.load(tokens, images, head_k, place, shared, turn)
                            else:
                                peak = peaks[sequence, head]
                                self.begin(shared, place.rows(mG), peak, left, turn, tidx % 32)
                                if turn > 0:
                                    self.store_decays(shared, past, mDg, turn - 1, tidx % 32)
                            past, turn = place, turn + 1
                if (warp_idx > WARPS) & (turn > 0):
                    self.store_decays(shared, past, mDg, turn - 1, tidx % 32)
        else:
            cute.arch.setmaxregister_increase(232)
            for number in cutlass.range(first, slots * heads, ctas, unroll=1):
                slot, head_k = divmod(number, by_head)
                sequence, token, left = find_chunk_of_sequence(cu_seqlens, per_row, slot, length)
                if left > 0:
                    batch = sequence if cutlass.const_expr(cu_seqlens is None) else I32(0)
                    keys = Place(batch, token, head_k, left)
                    for member in cutlass.range(group, unroll=1):
                        head = head_k * group + member
                        place = keys._replace(head=head)
                        thread = thread_of(renewed(tidx))
                        so_far = None
                        if cutlass.const_expr(self.config.grouped):
                            so_far = SoFar(
                                sums[first, thread.group, None, tidx % GROUP, None], member > 0, member + 1 == group
                            )  # fmt: skip
                        self.compute(
                            self.of_turn(shared, turn), place, keys, mDq, mDk, mDv, mDbeta, so_far, scale, turn, thread
                        )  # fmt: skip
                        turn = turn + 1

    def allocate(self):
        """Returns the shared memory of the CTA."""
        smem = SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * len(Input) + 4, byte_alignment=16)
        base = smem.allocate_array(self.operand, END, byte_alignment=1024)
        sums, of_warps = cute.make_layout((CHUNK, 2, 2)), cute.make_layout((WARPS, 2))
        numbers = cute.make_layout((len(Token), CHUNK, 2), stride=(CHUNK, 1, len(Token) * CHUNK))
        return Shared(
            full=barriers,
            empty=barriers + len(Input),
            begun=barriers + 2 * len(Input),
            done=barriers + (2 * len(Input) + 2),
            do=base + DO,
            y=base + Y,
            z=base + Z,
            q=base + Q,
            k=base + K,
            s=base + S,
            d=base + D,
            pairs=base + PAIRS,
            given=base + GIVEN,
            factors=smem.allocate_array(F32, 2 * FACTORS * CHUNK, byte_alignment=128),
            sums=smem.allocate_tensor(F32, sums, byte_alignment=16),
            columns=smem.allocate_array(F32, 2 * WARPS * CHUNK, byte_alignment=16),
            numbers=smem.allocate_tensor(F32, numbers, byte_alignment=16),
            largest=smem.allocate_tensor(I32, cute.make_layout(WARPS), byte_alignment=16),
            kept=smem.allocate_tensor(F32, of_warps, byte_alignment=16),
            peak=smem.allocate_tensor(I32, cute.make_layout((1, 2)), byte_alignment=16),
        )

    # ---- loads ------------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, tokens, images, head_k, place, shared, turn):
        """Loads the inputs of a chunk, as the ones before are given back; by a warp."""
        phase, batch, token = turn & 1, place.batch, place.token
        (tma_q, mQ), (tma_k, mK), (tma_do, mDo) = tokens
        states, d_states, z, minus_y, factors = images
        full = self.fill(shared, Input.TOKENS, 6 * WIDE + 4 * FACTORS * CHUNK, phase)
        self.load_tokens(tma_q, mQ, head_k, batch, token, shared.given, full)
        self.load_tokens(tma_k, mK, head_k, batch, token, shared.given + WIDE, full)
        self.load_tokens(tma_do, mDo, place.head, batch, token, shared.given + 2 * WIDE, full)
        self.load_image(factors, self.of_turn(shared, turn).factors, full)
        full = self.fill(shared, Input.ROWS, 4 * WIDE, phase)
        self.load_image(z, shared.z, full)
        self.load_image(minus_y, shared.y, full)
        full = self.fill(shared, Input.STATES, 8 * WIDE, phase)
        self.load_image(states, shared.s, full)
        self.load_image(d_states, shared.d, full)

    def of_turn(self, shared, turn):
        """Returns shared memory with the one of two places that belongs to a chunk."""
        place = turn & 1
        return shared._replace(
            begun=shared.begun + place,
            done=shared.done + place,
            factors=shared.factors + cute.assume(place * (FACTORS * CHUNK), divby=FACTORS * CHUNK),
            sums=shared.sums[None, None, place],
            columns=shared.columns + cute.assume(place * (WARPS * CHUNK), divby=WARPS * CHUNK),
            numbers=shared.numbers[None, None, place],
            kept=shared.kept[None, place],
            peak=shared.peak[None, place],
        )

    # ---- the chunk --------------------------------------------------------------------------------------------------

    @cute.jit
    def compute(
        self, shared, place, keys, mDq: cute.Tensor, mDk: cute.Tensor, mDv: cute.Tensor, mDbeta: cute.Tensor, so_far,
        scale, turn, thread,
    ):  # fmt: skip
        """Computes the gradients of a chunk. place, keys: where it is among value heads, and among those of q and k."""
        left, phase = place.left, turn & 1
        cute.arch.mbarrier_wait(shared.begun, turn // 2 & 1)
        grown, shrunk = scale_of(shared.peak[0])
        self.wait(shared, Input.TOKENS, phase)
        given, norms = shared.given, shared.factors + CHUNK
        self.convert(given, shared.q, view(norms, 0, CHUNK), scale, left, thread.tidx)
        self.convert(given + WIDE, shared.k, view(norms, CHUNK, CHUNK), F32(1.0), left, thread.tidx)
        self.convert(given + 2 * WIDE, shared.do, None, grown, left, thread.tidx)
        self.give_back(shared, Input.TOKENS)
        self.sync()
        self.wait(shared, Input.ROWS, phase)
        own, factor = self.pairs(shared, place.rows(mDbeta), shrunk, left, thread)
        self.sync()
        self.wait(shared, Input.STATES, phase)
        if thread.group == 0:
            dq, dv = keys.rows(mDq), place.rows(mDv)
            self.queries(shared, own, so_far, factor, scale, shrunk, dq, dv, left, thread)
        else:
            self.keys(shared, own, so_far, factor, shrunk, keys.rows(mDk), left, thread)
        cute.arch.mbarrier_arrive(shared.done)
        self.sync()

    @cute.jit
    def convert(self, given: cute.Pointer, matrix: cute.Pointer, factors, common, left, tidx):
        """Makes operands of tokens: times a factor, and one of each token where `factors` are given; zero past the
        end."""
        source, units = cute.recast_ptr(given, dtype=self.dtype), WIDE // (8 * THREADS)
        x, y = cute.make_rmem_tensor((8, units), self.dtype), cute.make_rmem_tensor(8, self.operand)
        for i in cutlass.range_constexpr(units):
            cute.autovec_copy(view(source, 8 * (tidx + THREADS * i), 8), x[None, i])
        for i in cutlass.range_constexpr(units):
            unit, factor = tidx + THREADS * i, common
            if cutlass.const_expr(factors is not None):
                factor = factor * factors[unit // 8 % CHUNK]
            y.store((widened(x[None, i]).load() * factor).to(self.operand))
            cute.autovec_copy(y, view(matrix, 8 * unit, 8))
        if left < CHUNK:
            y.fill(0.0)
            for i in cutlass.range(tidx, WIDE // 8, THREADS, unroll=1):
                if i // 8 % CHUNK >= left:
                    cute.autovec_copy(y, view(matrix, 8 * i, 8))

    # ---- products ---------------------------------------------------------------------------------------------------

    @cute.jit
    def multiply(
        self, acc: cute.Tensor, a: cute.Pointer, a_major: cutlass.Constexpr, b: cute.Pointer,
        b_major: cutlass.Constexpr, b_step: cutlass.Constexpr, tiles: cutlass.Constexpr, zero: cutlass.Constexpr, tidx,
    ):  # fmt: skip
        """Issues acc (+)= A B^T over `tiles` of 64, all from shared memory. b_step: between tiles of B."""
        n = 2 * cute.size(acc)  # in 128 threads
        majors = {"k": OperandMajorMode.K, "mn": OperandMajorMode.MN}
        op = warpgroup.MmaF16BF16Op(
            self.operand, F32, (64, n, 16), warpgroup.OperandSource.SMEM, majors[a_major], majors[b_major]
        )  # fmt: skip
        tiled = cute.make_tiled_mma(cute.make_mma_atom(op), cute.make_layout((1, 1, 1)))
        part = tiled.get_slice(tidx % GROUP)
        left = repeated(a, (64, 64), a_major, self.operand, tiles)
        right = repeated(b, (n, 64), b_major, self.operand, tiles, b_step)
        for tile in cutlass.range_constexpr(tiles):
            x = tiled.make_fragment_A(part.partition_A(left[None, None, tile]))
            y = tiled.make_fragment_B(part.partition_B(right[None, None, tile]))
            issue(tiled, acc, x, y, zero and tile == 0)

    def accumulator(self, columns):
        """Returns registers for [64, columns]."""
        return cute.make_rmem_tensor(((2, 2, columns // 8), 1, 1), F32)

    @cute.jit
    def pairs(self, shared, d_beta: cute.Tensor, shrunk, left, thread):
        """Computes dA (first group) or dM of the chunk, times Gamma: writes it for products with its columns, and
        returns it times r of the column as the first operand of a product with its rows; and the power of two by which
        both are too small. Writes dbeta, and the sums of W."""
        lane, group, row, column = thread.lane, thread.group, thread.row, thread.column
        x, p = self.accumulator(CHUNK), self.accumulator(CHUNK)
        first = shared.do + cute.assume(group * (Y - DO), divby=WIDE)
        second = shared.q + cute.assume(group * (K - Q), divby=WIDE)
        warpgroup.fence()
        self.multiply(x, first, "k", shared.z, "k", SQUARE, 2, True, thread.tidx)
        self.multiply(p, second, "k", shared.k, "k", SQUARE, 2, True, thread.tidx)
        warpgroup.wait_group(0)
        own = cute.make_tensor(x.iterator, cute.make_layout((2, 2, TILES)))
        products = cute.make_tensor(p.iterator, own.layout)
        bits = cute.recast_tensor(own, I32)
        upto, root = cute.make_rmem_tensor(2, F32), cute.make_rmem_tensor(2, F32)
        diagonal, of_rows = cute.make_rmem_tensor(2, F32), cute.make_rmem_tensor(2, F32)
        of_columns = cute.make_rmem_tensor((2, TILES), F32)
        for half in cutlass.range_constexpr(2):
            upto[half] = shared.sums[row + 8 * half, 0]
            strength = view(shared.factors, row + 8 * half, 1)[0]
            root[half] = strength if group == 1 else F32(1.0)
        diagonal.fill(0.0)
        of_rows.fill(0.0)
        of_columns.fill(0.0)
        before, roots = cute.make_rmem_tensor(2, F32), cute.make_rmem_tensor(2, F32)
        largest = I32(0)
        for n in cutlass.range_constexpr(TILES):
            cute.autovec_copy(view(shared.sums.iterator, 8 * n + column, 2), before)
            cute.autovec_copy(view(shared.factors, 8 * n + column, 2), roots)
            for half in cutlass.range_constexpr(2):
                for b in cutlass.range_constexpr(2):
                    i, j = row + 8 * half, 8 * n + column + b
                    value = own[b, half, n]
                    diagonal[half] = value if i == j else diagonal[half]
                    gamma = exp2(upto[half] - before[b])
                    weighed = value * gamma
                    pair = weighed * (products[b, half, n] * root[half] * roots[b])
                    pair = pair if j < i else F32(0.0)
                    of_rows[half] = of_rows[half] + pair
                    of_columns[b, n] = of_columns[b, n] + pair
                    own[b, half, n] = weighed if j < i + 1 - group else F32(0.0)
                    largest = cutlass.max(largest, bits[b, half, n] & 0x7FFFFFFF)
        largest = cute.arch.warp_redux_sync(largest, "max")
        if lane == 0:
            shared.largest[thread.tidx // 32] = largest
        if (group == 1) & (lane % 4 == lane // 8):
            for half in cutlass.range_constexpr(2):
                if row + 8 * half < left:
                    self.store_strength(shared, d_beta, row + 8 * half, diagonal[half] * shrunk)
        self.note(shared, Token.ROWS_OF_Q + group, of_rows, thread)
        values = [of_columns[b, n] for n in range(TILES) for b in range(2)]
        index, _, sums = reduce_scatter(values, 8, 4)
        two = cute.make_rmem_tensor(2, F32)
        two[0], two[1] = sums[0], sums[1]
        at = thread.tidx // 32 * CHUNK + 4 * index + column
        cute.autovec_copy(two, view(shared.columns, at, 2))
        self.sync()
        for w in cutlass.range_constexpr(WARPS):
            largest = cutlass.max(largest, shared.largest[w])
        grown, factor = scale_of(largest)

        tiled = mma(self.operand, HEAD_DIM, OperandMajorMode.MN)
        fragment = tiled.make_fragment_A(tiled.partition_shape_A((CHUNK, CHUNK)))
        rounded = cute.make_rmem_tensor(x.shape, self.operand)
        for n in cutlass.range_constexpr(TILES):
            cute.autovec_copy(view(shared.factors, 8 * n + column, 2), roots)
            for half in cutlass.range_constexpr(2):
                for b in cutlass.range_constexpr(2):
                    own[b, half, n] = own[b, half, n] * grown
                    products[b, half, n] = own[b, half, n] * root[half]
                    own[b, half, n] = own[b, half, n] * roots[b]
        fragment.store(as_operand(x, fragment).load().to(self.operand))
        rounded.store(p.load().to(self.operand))
        target = shared.pairs + cute.assume(group * SQUARE, divby=SQUARE)
        self.stage(rounded, target, CHUNK, thread.tidx)
        cute.arch.fence_view_async_shared()
        return fragment, factor

    @cute.jit
    def note(self, shared, which, values: cute.Tensor, thread):
        """Writes numbers of the thread's two rows, summed over the four threads of a row."""
        sums = all_sums([values[0], values[1]], 4)
        if thread.lane % 4 == 0:
            for half in cutlass.range_constexpr(2):
                shared.numbers[which, thread.row + 8 * half] = sums[half]

    @cute.jit
    def stage(self, rounded: cute.Tensor, target: cute.Pointer, columns: cutlass.Constexpr, tidx):
        """Writes accumulators, rounded to 16 bits, to a matrix of panels by rows."""
        dtype = rounded.element_type
        tiled = mma(self.operand, columns, OperandMajorMode.MN)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        store = cute.make_tiled_copy_C(atom, tiled).get_slice(tidx % GROUP)
        matrix = repeated(cute.recast_ptr(target, dtype=dtype), (CHUNK, columns), "k", dtype, 1)
        cute.copy(store, store.retile(rounded), store.partition_D(matrix)[None, None, None, 0])

    @cute.jit
    def queries(
        self, shared, own: cute.Tensor, so_far, factor, scale, shrunk, dq: cute.Tensor, dv: cute.Tensor, left, thread
    ):  # fmt: skip
        """Computes dq and dv, and the sum of S D; by the first group."""
        acc, pairs = self.accumulator(HEAD_DIM), self.accumulator(HEAD_DIM)
        warpgroup.fence()
        self.multiply(acc, shared.do, "k", shared.s, "mn", WIDE, 2, True, thread.tidx)
        self.multiply_own(pairs, own, shared.k, thread.tidx)
        self.sum_states(shared, thread)
        self.store_values(shared, dv, shrunk, left, thread.tidx, GROUP)
        self.give_back(shared, Input.ROWS)
        before = self.recall(so_far)
        warpgroup.wait_group(1)
        self.give_back(shared, Input.STATES)
        grown = self.of_rows(shared.sums, 0, thread)
        self.weigh(acc, grown)
        self.note(shared, Token.Q_BY_STATE, self.dots(acc, shared.q, thread), thread)
        warpgroup.wait_group(0)
        self.add(acc, pairs, factor)
        inverse = F32(0.0) if scale == 0.0 else 1.0 / scale
        acc.store(acc.load() * (scale * shrunk))
        self.finish(acc, so_far, before, shared, 1, shared.q, inverse, shared.do, dq, left, thread)

    @cute.jit
    def keys(self, shared, own: cute.Tensor, so_far, factor, shrunk, dk: cute.Tensor, left, thread):
        """Computes dk; by the second group."""
        acc, other = self.accumulator(HEAD_DIM), self.accumulator(HEAD_DIM)
        warpgroup.fence()
        self.multiply(acc, shared.y, "k", shared.s, "mn", WIDE, 2, True, thread.tidx)
        self.multiply(other, shared.z, "k", shared.d, "mn", WIDE, 2, True, thread.tidx)
        warpgroup.wait_group(2)
        roots = cute.make_rmem_tensor(2, F32)
        for half in cutlass.range_constexpr(2):
            roots[half] = view(shared.factors, thread.row + 8 * half, 1)[0]
        self.weigh(acc, self.of_rows(shared.sums, 0, thread))
        dots = self.dots(acc, shared.k, thread)
        dots.store(dots.load() * roots.load())
        self.note(shared, Token.K_BY_STATE, dots, thread)
        warpgroup.wait_group(0)
        self.give_back(shared, Input.ROWS, Input.STATES)
        self.weigh(other, self.of_rows(shared.sums, 1, thread))
        dots = self.dots(other, shared.k, thread)
        dots.store(dots.load() * roots.load())
        self.note(shared, Token.BY_D_STATE, dots, thread)
        self.add(acc, other, F32(1.0))
        self.multiply_own(other, own, shared.k, thread.tidx)
        dA, dM = shared.pairs, shared.pairs + SQUARE
        self.multiply(other, dA, "mn", shared.q, "mn", WIDE, 1, False, thread.tidx)
        self.multiply(other, dM, "mn", shared.k, "mn", WIDE, 1, False, thread.tidx)
        before = self.recall(so_far)
        warpgroup.wait_group(0)
        self.add(acc, other, factor)
        for half in cutlass.range_constexpr(2):
            given = view(shared.factors, 3 * CHUNK + thread.row + 8 * half, 1)[0]
            roots[half] = given * shrunk
        self.weigh(acc, roots)
        self.finish(
            acc, so_far, before, shared, 2, shared.k, F32(1.0), shared.pairs, dk, left, thread
        )

    @cute.jit
    def multiply_own(self, acc: cute.Tensor, own: cute.Tensor, k: cute.Pointer, tidx):
        """Issues acc = own k^, for a first operand in registers, which need a fence of their own."""
        tiled = mma(self.operand, HEAD_DIM, OperandMajorMode.MN)
        keys = repeated(k, (HEAD_DIM, CHUNK), "mn", self.operand, 1)[None, None, 0]
        right = tiled.make_fragment_B(tiled.get_slice(tidx % GROUP).partition_B(keys))
        warpgroup.fence()
        issue(tiled, acc, own, right, True)

    # ---- rows of accumulators ---------------------------------------------------------------------------------------

    @cute.jit
    def of_rows(self, sums: cute.Tensor, which: cutlass.Constexpr, thread):
        """Returns 2^sum of the thread's two rows."""
        found = cute.make_rmem_tensor(2, F32)
        for half in cutlass.range_constexpr(2):
            found[half] = exp2(sums[thread.row + 8 * half, which])
        return found

    @cute.jit
    def weigh(self, acc: cute.Tensor, factors: cute.Tensor):
        """Multiplies the thread's two rows by a factor of each."""
        x = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, HEAD_DIM // 8)))
        for half in cutlass.range_constexpr(2):
            x[None, half, None].store(x[None, half, None].load() * factors[half])

    @cute.jit
    def add(self, acc: cute.Tensor, other: cute.Tensor, factor):
        acc.store(acc.load() + other.load() * factor)

    @cute.jit
    def row_of(self, matrix: cute.Pointer, n, half, thread, x: cute.Tensor):
        """Loads two neighbours of a row of tokens, where an accumulator has them."""
        unit = (n % 8) ^ (thread.lane // 4)
        at = n // 8 * SQUARE + (thread.row + 8 * half) * 64 + unit * 8 + thread.column
        two = cute.make_rmem_tensor(2, matrix.dtype)
        cute.autovec_copy(view(matrix, at, 2), two)
        x.store(two.load().to(F32))

    @cute.jit
    def dots(self, acc: cute.Tensor, matrix: cute.Pointer, thread):
        """Returns the thread's part of the products of its two rows with those of a matrix."""
        x = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, HEAD_DIM // 8)))
        found, two = cute.make_rmem_tensor(2, F32), cute.make_rmem_tensor(2, F32)
        found.fill(0.0)
        for n in cutlass.range_constexpr(HEAD_DIM // 8):
            for half in cutlass.range_constexpr(2):
                self.row_of(matrix, n, half, thread, two)
                for b in cutlass.range_constexpr(2):
                    found[half] = found[half] + x[b, half, n] * two[b]
        return found

    @cute.jit
    def sum_states(self, shared, thread):
        """Writes the sum of S D over the warp's part; by the first group."""
        s, d = (cute.make_rmem_tensor(8, self.operand) for _ in range(2))
        total = F32(0.0)
        for i in cutlass.range_constexpr(2 * WIDE // (8 * GROUP)):
            at = 8 * (thread.tidx + GROUP * i)
            cute.autovec_copy(view(shared.s, at, 8), s)
            cute.autovec_copy(view(shared.d, at, 8), d)
            for c in cutlass.range_constexpr(8):
                total = total + s[c].to(F32) * d[c].to(F32)
        total = all_sums([total], 32)[0]
        if thread.lane == 0:
            shared.kept[thread.w] = total

    @cute.jit
    def recall(self, so_far):
        """Loads the sums over the value heads before, zeros for the first one."""
        before = None
        if cutlass.const_expr(so_far is not None):
            before = cute.make_rmem_tensor((4, CHUNK * HEAD_DIM // (4 * GROUP)), F32)
            before.fill(0.0)
            if so_far.begun:
                for i in cutlass.range_constexpr(cute.size(before, mode=[1])):
                    cute.autovec_copy(so_far.own[i, None], before[None, i])
        return before

    @cute.jit
    def finish(
        self, acc: cute.Tensor, so_far, before, shared, which: cutlass.Constexpr, matrix: cute.Pointer, inverse,
        slot: cute.Pointer, target: cute.Tensor, left, thread,
    ):  # fmt: skip
        """Adds the gradient of normalized q or k to those of the value heads before, and behind the last one writes dq
        or dk. See `SoFar` and `recall`, and `store_rows` for the other arguments."""
        if cutlass.const_expr(so_far is None):
            self.store_rows(acc, shared, which, matrix, inverse, slot, target, left, thread)
        else:
            parts = cute.make_tensor(acc.iterator, before.layout)
            parts.store(parts.load() + before.load())
            if so_far.ends:
                self.store_rows(acc, shared, which, matrix, inverse, slot, target, left, thread)
            else:
                for i in cutlass.range_constexpr(cute.size(parts, mode=[1])):
                    cute.autovec_copy(parts[None, i], so_far.own[i, None])

    @cute.jit
    def store_rows(
        self, acc: cute.Tensor, shared, which: cutlass.Constexpr, matrix: cute.Pointer, inverse, slot: cute.Pointer,
        target: cute.Tensor, left, thread,
    ):  # fmt: skip
        """Writes dq or dk from the gradient of normalized ones; by a group. which: the row of factors that holds
        1 / norm. matrix: operands, which times `inverse` are what was normalized. slot: memory for the rows."""
        x = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, HEAD_DIM // 8)))
        if cutlass.const_expr(self.config.l2norm):
            dots = self.dots(acc, matrix, thread)
            dots = all_sums([dots[0], dots[1]], 4)
            two = cute.make_rmem_tensor(2, F32)
            for half in cutlass.range_constexpr(2):
                norm = view(shared.factors, CHUNK * which + thread.row + 8 * half, 1)[0]
                along = dots[half] * inverse * inverse
                for n in cutlass.range_constexpr(HEAD_DIM // 8):
                    self.row_of(matrix, n, half, thread, two)
                    for b in cutlass.range_constexpr(2):
                        x[b, half, n] = (x[b, half, n] - along * two[b]) * norm
        rounded = cute.make_rmem_tensor(acc.shape, self.dtype)
        rounded.store(acc.load().to(self.dtype))
        barrier = FIRST_GROUP + which - 1
        cute.arch.barrier(barrier_id=barrier, number_of_threads=GROUP)
        self.stage(rounded, slot, HEAD_DIM, thread.tidx)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=GROUP)
        staged = cute.recast_ptr(slot, dtype=self.dtype)
        line = cute.make_rmem_tensor(8, self.dtype)
        # A thread's rows are 8 apart, so that their units are swapped alike.
        first, unit = thread.tidx % GROUP // 16, thread.tidx % 16
        at = unit // 8 * SQUARE + first * 64 + (unit % 8 ^ first) * 8
        address, step = address_of(target, first, 8 * unit, GROUP // 16)
        for i in cutlass.range_constexpr(WIDE // (8 * GROUP)):
            if first + 8 * i < left:
                cute.autovec_copy(view(staged, at + 8 * 64 * i, 8), line)
                cute.autovec_copy(line, elements_at(target, address, 8))
            address = address + step

    # ---- decays -----------------------------------------------------------------------------------------------------

    @cute.jit
    def begin(self, shared, g: cute.Tensor, peak, left, turn, lane):
        """Sums the decays of a chunk, and hands on its peak, where those of the one before the last have been; by a
        warp."""
        own = self.of_turn(shared, turn)
        cute.arch.sync_warp()
        sum_decays(g, own.sums, left, lane)
        if lane == 0:
            own.peak[0] = peak
        cute.arch.mbarrier_arrive(own.begun)

    @cute.jit
    def store_decays(self, shared, place, mDg: cute.Tensor, turn, lane):
        """Writes dg of a chunk, once all is there that it is summed from; by a warp, whose lanes have two tokens
        each."""
        shared, dg, left = self.of_turn(shared, turn), place.rows(mDg), place.left
        cute.arch.mbarrier_wait(shared.done, turn // 2 & 1)
        _, shrunk = scale_of(shared.peak[0])
        read, written = cute.make_rmem_tensor(2, F32), cute.make_rmem_tensor(2, F32)
        two = cute.make_rmem_tensor(2, F32)
        read.fill(0.0)
        for which in cutlass.range_constexpr(4):
            cute.autovec_copy(view(shared.numbers.iterator, which * CHUNK + 2 * lane, 2), two)
            read.store(read.load() + two.load())
        for w in cutlass.range_constexpr(WARPS):
            cute.autovec_copy(view(shared.columns, w * CHUNK + 2 * lane, 2), two)
            read.store(read.load() - two.load())
        cute.autovec_copy(
            view(shared.numbers.iterator, Token.BY_D_STATE * CHUNK + 2 * lane, 2), written
        )
        behind = sums_behind(read[0] + read[1], lane)
        before = sums_before(written[0] + written[1], lane)
        kept = shared.kept[0] + shared.kept[1] + shared.kept[2] + shared.kept[3]
        rest = before + behind + kept * exp2(shared.sums[CHUNK - 1, 0])
        two[0] = rest + read[0] + read[1]
        two[1] = rest + read[1] + written[0]
        for i in cutlass.range_constexpr(2):
            if 2 * lane + i < left:
                dg[2 * lane + i] = (two[i] * shrunk).to(dg.element_type)
