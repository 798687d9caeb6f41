"""The gradients of a chunk on Hopper, from the states and gradients of states that the walks of the backward pass left.

With keys k~ that have the roots r of strengths, queries q~ that have the scale, G the running sum of log2 decays in the
chunk, S the state before it, D the gradient of the state behind it:

    dA  = tril(do z^T)      dM  = -strict_tril(y z^T)      dbeta = diag(y z^T) / r^2
    dq~ = 2^G do S^T + sum_(j <= i) dA_ij 2^(G_i - G_j) k~_j
    dk~ = -2^G y S^T + sum_(j < i) dM_ij 2^(G_i - G_j) k~_j
          + 2^(G_L - G) z D^T + sum_(i >= j) 2^(G_i - G_j) (dA_ij q~_i + dM_ij k~_i)

The gradient of a token's log decay sums the products of all pairs that its decay lies between, as sums over tokens of
what rows i (of q~, k~) and columns j (of k~) of dA and dM add. The true value may be smaller than either sum by any
factor, so both are made of the same products: the fp32 sums of the products, times their operand as it was rounded, and
never the product of a token with itself.

Sub-blocks of 16 tokens as in `prepare`: g runs inside one, e is its last value. Products of different sub-blocks are in
16 bits with factors of at most 1, those inside one in tf32. Gradients are scaled by a power of two (`scaling`), and dA,
dM of a chunk by another one, by their own largest.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator

from cula_core.constants import LOG2_E
from cula_core.cute.functions import exp2
from cula_core.cute.memory import load_tile, repeated, view
from cula_core.cute.output import GROUP
from cula_core.cute.types import DTYPES, F32, I32
from cula_core.cute.wgmma import issue
from cula_core.cute.widen import widened
from cula_core.delta_rule.backward.kernels.chunk import THREADS, WARPS, ChunkKernel, Place, renewed
from cula_core.delta_rule.backward.kernels.scaling import scale_of
from cula_core.delta_rule.config import CHUNK, HEAD_DIM, SUB
from cula_core.delta_rule.kernels.block import SQUARE, WIDE, find_chunk_of_sequence
from cula_core.delta_rule.kernels.tokens import FLOOR

from ..config import GradientsConfig
from .gradients_layout import (
    DO,
    END,
    GATES,
    SUB_INDICES,
    D,
    G,
    Input,
    K,
    Q,
    S,
    Shared,
    Thread,
    Y,
    Z,
)
from .gradients_products import Products
from .gradients_registers import (
    DA_STRIDE,
    INSIDE,
    INSIDE_STRIDE,
    OWN,
    OWN_SUB,
    SUBS,
    TILES,
    load_sub,
    products_of_states,
    sum_tokens,
    to_tf32,
    zeros,
)
from .gradients_rows import Rows, first_places, place_in


class KdaGradients(ChunkKernel):
    """Persistent CTAs over pairs of a chunk and a value head, first chunks first.

    | warps | work |
    |---|---|
    | 0-7 | 16 channels each |
    | 8 | loads the inputs of the next chunk as memory is given back |

    | shared memory | bytes |
    |---|---|
    | do, y, z, q, k | 81,920 |
    | S, D | 65,536 |
    | running sums of decays, and gates in fp32 before them | 32,768 |
    | gates in 16 bits | 16,384 |
    | dA and dM in 16 bits; their diagonal blocks | 27,648 |
    | factors of tokens, decays of sub-blocks | 6,144 |
    """

    def __init__(self, config: GradientsConfig):
        super().__init__(config)
        self.gate_dtype = DTYPES[config.gate_dtype]
        self.gate_columns = 1024 // self.gate_dtype.width  # 128 bytes
        self.apart = self.gate_dtype.width == 16  # gates have memory of their own
        self.rows, self.products = Rows(config), Products(config)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mG: cute.Tensor,
        mDo: cute.Tensor,
        rate: cute.Tensor,
        bias: cute.Tensor,
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
        rate_parts: cute.Tensor,
        bias_parts: cute.Tensor,
        scale: cutlass.Float32,
        lower_bound: cutlass.Float32,
        first_slot: cutlass.Int32,
        slots: cutlass.Int32,
        ctas: cutlass.Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `build.gradients_arguments`."""
        if cutlass.const_expr(bias is not None):
            layout = cute.make_layout((mG.shape[2], HEAD_DIM), stride=(HEAD_DIM, 1))
            bias = cute.make_tensor(bias.iterator, layout)
        per_row = None
        if cutlass.const_expr(cu_seqlens is None):
            per_row = cute.fast_divmod_create_divisor_v2(cute.ceil_div(mQ.shape[1], CHUNK))
        by_head = cute.fast_divmod_create_divisor_v2(mG.shape[2])
        by_group = cute.fast_divmod_create_divisor_v2(mG.shape[2] // mQ.shape[2])
        tokens = tuple(self.tma(x, self.dtype, 64) for x in (mQ, mK, mDo))
        gates = self.tma(mG, self.gate_dtype, self.gate_columns)
        self.kernel(
            tokens, gates, mG, rate, bias, factors, peaks, states, d_states, z, minus_y, cu_seqlens, per_row,
            by_head, by_group, mDq, mDk, mDv, mDg, mDbeta, rate_parts, bias_parts, scale, lower_bound,
            first_slot, slots,
        ).launch(
            grid=(ctas, 1, 1), block=(THREADS + GROUP, 1, 1), min_blocks_per_mp=1, stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tokens: tuple,
        gates: tuple,
        mG: cute.Tensor,
        rate: cute.Tensor,
        bias: cute.Tensor,
        factors: cute.Tensor,
        peaks: cute.Tensor,
        states: cute.Tensor,
        d_states: cute.Tensor,
        z: cute.Tensor,
        minus_y: cute.Tensor,
        cu_seqlens: cute.Tensor,
        per_row: cute.FastDivmodDivisorV2,
        by_head: cute.FastDivmodDivisorV2,
        by_group: cute.FastDivmodDivisorV2,
        mDq: cute.Tensor,
        mDk: cute.Tensor,
        mDv: cute.Tensor,
        mDg: cute.Tensor,
        mDbeta: cute.Tensor,
        rate_parts: cute.Tensor,
        bias_parts: cute.Tensor,
        scale: cutlass.Float32,
        lower_bound: cutlass.Float32,
        first_slot: cutlass.Int32,
        slots: cutlass.Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        first, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        shared = self.allocate()
        self.init_barriers(shared, len(Input), tidx)
        heads_v, length = mG.shape[2], mG.shape[1]
        phase = I32(0)
        if warp_idx >= WARPS:
            cute.arch.setmaxregister_decrease(40)
            if warp_idx == WARPS:
                for number in cutlass.range(first, slots * heads_v, ctas, unroll=1):
                    slot, head = divmod(number, by_head)
                    sequence, token, left = find_chunk_of_sequence(
                        cu_seqlens, per_row, first_slot + slot, length
                    )
                    if left > 0:
                        batch = sequence if cutlass.const_expr(cu_seqlens is None) else I32(0)
                        head_k, _ = divmod(head, by_group)
                        own = tuple(
                            x[slot, head, None, None] for x in (states, d_states, z, minus_y)
                        )
                        self.load(
                            tokens, gates, own, factors[slot, head, None, None], head_k, head, batch,
                            token, shared, phase,
                        )  # fmt: skip
                        phase = phase ^ 1
        else:
            cute.arch.setmaxregister_increase(232)
            ahead = cute.make_rmem_tensor(3, F32)
            self.fetch_gate(rate, bias, divmod(first, by_head)[1], ahead, tidx)
            for number in cutlass.range(first, slots * heads_v, ctas, unroll=1):
                slot, head = divmod(number, by_head)
                gate = cute.make_rmem_tensor(3, F32)
                gate.store(ahead.load())
                self.fetch_gate(rate, bias, divmod(number + ctas, by_head)[1], ahead, tidx)
                sequence, token, left = find_chunk_of_sequence(
                    cu_seqlens, per_row, first_slot + slot, length
                )
                if left > 0:
                    batch = sequence if cutlass.const_expr(cu_seqlens is None) else I32(0)
                    own = renewed(tidx)
                    lane, w = own % 32, cute.arch.make_warp_uniform(own // 32)
                    thread = Thread(own, lane, w, lane % 4 * 2)
                    place = Place(batch, token, head, left)
                    grown, shrunk = scale_of(peaks[sequence, head])
                    self.compute(
                        shared, place, mG, gate, bias, mDq, mDk, mDv, mDg, mDbeta, grown, shrunk, scale, lower_bound,
                        phase, thread,
                    )  # fmt: skip
                    if cutlass.const_expr(self.config.rate or self.config.bias):
                        self.sync()
                        self.rows.store_sums(shared.sums, rate_parts, bias_parts, slot, head, tidx)
                    phase = phase ^ 1
                else:
                    self.rows.store_sums(None, rate_parts, bias_parts, slot, head, tidx)

    def allocate(self):
        """Returns the shared memory of the CTA."""
        smem = SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * len(Input), byte_alignment=16)
        base = smem.allocate_array(self.operand, END if self.apart else GATES, byte_alignment=1024)
        inside = smem.allocate_array(F32, 2 * SUBS * INSIDE, byte_alignment=128)
        of_tokens = cute.make_layout((CHUNK, 2))
        return Shared(
            full=barriers,
            empty=barriers + len(Input),
            do=base + DO,
            y=base + Y,
            z=base + Z,
            s=base + S,
            d=base + D,
            q=cute.recast_ptr(base + Q, dtype=self.dtype),
            k=cute.recast_ptr(base + K, dtype=self.dtype),
            g=cute.recast_ptr(base + (GATES if self.apart else G), dtype=self.gate_dtype),
            planes=cute.recast_ptr(base + G, dtype=F32),
            factors=smem.allocate_array(F32, 4 * CHUNK, byte_alignment=128),
            scales=smem.allocate_tensor(F32, of_tokens, byte_alignment=16),
            dA=smem.allocate_array(self.operand, 2 * CHUNK * DA_STRIDE, byte_alignment=128),
            inside=inside,
            own=smem.allocate_tensor(F32, cute.make_layout((CHUNK, 2)), byte_alignment=16),
            ends=smem.allocate_tensor(
                F32, cute.make_layout((HEAD_DIM, SUBS, 2)), byte_alignment=16
            ),
            largest=smem.allocate_tensor(I32, cute.make_layout(WARPS), byte_alignment=16),
            sums=inside,
        )

    # ---- loads ------------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, tokens, gates, images, factors, head_k, head, batch, token, shared, phase):
        """Loads the inputs of a chunk, in the order in which those before are given back; by a warp."""
        (tma_q, mQ), (tma_k, mK), (tma_do, mDo) = tokens
        states, d_states, z, minus_y = images
        if cutlass.const_expr(self.apart):
            self.load_gates(gates, head, batch, token, shared, phase)
        full = self.fill(shared, Input.OUTPUTS, 4 * WIDE, phase)
        self.load_tokens(tma_do, mDo, head, batch, token, shared.do, full)
        self.load_image(minus_y, shared.y, full)
        full = self.fill(shared, Input.Z, 2 * WIDE, phase)
        self.load_image(z, shared.z, full)
        full = self.fill(shared, Input.D_STATES, 4 * WIDE, phase)
        self.load_image(d_states, shared.d, full)
        full = self.fill(shared, Input.STATES, 4 * WIDE, phase)
        self.load_image(states, shared.s, full)
        full = self.fill(shared, Input.TOKENS, 4 * WIDE + 4 * 4 * CHUNK, phase)
        self.load_tokens(tma_q, mQ, head_k, batch, token, shared.q, full)
        self.load_tokens(tma_k, mK, head_k, batch, token, shared.k, full)
        self.load_image(factors, shared.factors, full)
        if cutlass.const_expr(not self.apart):
            self.load_gates(gates, head, batch, token, shared, phase)

    @cute.jit
    def load_gates(self, gates, head, batch, token, shared, phase):
        """Loads the gates of a chunk."""
        tma, whole = gates
        panels = HEAD_DIM // self.gate_columns
        full = self.fill(shared, Input.GATES, WIDE * self.gate_dtype.width // 8, phase)
        target = repeated(shared.g, (CHUNK, self.gate_columns), "k", self.gate_dtype, panels)
        for i in cutlass.range(panels, unroll=1):
            load_tile(tma, whole, token, head, batch, i, target[None, None, i], full)

    # ---- the chunk --------------------------------------------------------------------------------------------------

    @cute.jit
    def compute(
        self, shared, place, mG: cute.Tensor, gate: cute.Tensor, bias, mDq: cute.Tensor, mDk: cute.Tensor,
        mDv: cute.Tensor, mDg: cute.Tensor, mDbeta: cute.Tensor, grown, shrunk, scale, lower_bound, phase, thread,
    ):  # fmt: skip
        """Computes the gradients of a chunk. gate: from `fetch_gate`."""
        tidx, lane, w, left = thread.tidx, thread.lane, thread.w, place.left
        rate = gate[2]
        g = self.decays(shared, gate, lower_bound, left, phase, thread)
        if cutlass.const_expr(self.apart):
            self.give_back(shared, Input.GATES)
        sum_tokens(g, lane, inside=True)
        if lane % 4 == 3:
            for i in cutlass.range_constexpr(SUBS):
                for half in cutlass.range_constexpr(2):
                    channel, end = 16 * w + lane // 4 + 8 * half, g[1, half, 2 * i + 1]
                    shared.ends[channel, i, 0], shared.ends[channel, i, 1] = end, exp2(end)
        self.wait(shared, Input.OUTPUTS, phase)
        self.wait(shared, Input.TOKENS, phase)
        self.prepare_tokens(shared, grown, scale, left, tidx)
        self.sync()
        self.wait(shared, Input.Z, phase)
        # do z^T by the first warpgroup, -y z^T by the second one.
        first = shared.do + cute.assume(w // 4 * (Y - DO), divby=WIDE)
        products = self.multiply("k", first, SQUARE, shared.z, tidx)
        for n in cutlass.range_constexpr(TILES):
            own = cute.make_tensor(g.iterator + 4 * n, cute.make_layout(4))
            cute.autovec_copy(own, view(shared.planes, 4 * (THREADS * n + tidx), 4))
        self.store_values(shared, place.rows(mDv), shrunk, left, tidx)
        warpgroup.wait_group(0)
        factor = self.store_pairs(shared, products, thread)
        self.store_strengths(shared, place.rows(mDbeta), shrunk, left, tidx)
        sums = zeros(OWN)
        places = first_places(w, lane)
        panel = cute.assume(w // 4 * SQUARE, divby=SQUARE)
        self.wait(shared, Input.STATES, phase)
        to_state = self.multiply("mn", shared.s + panel, WIDE, shared.do, tidx)
        of_keys = self.multiply("mn", shared.s + panel, WIDE, shared.y, tidx)
        self.wait(shared, Input.D_STATES, phase)
        kept = products_of_states(shared.s, shared.d, w, lane)
        warpgroup.wait_group(0)
        self.sync()
        rounded = self.products.add_rows(
            shared, (to_state, of_keys), sums, factor, places, left, thread
        )
        self.sync()
        handed = self.multiply("mn", shared.d + panel, WIDE, shared.z, tidx)
        norms = cute.make_tensor(shared.factors, cute.make_layout((CHUNK, 4)))
        matrix = cute.recast_ptr(shared.do, dtype=F32)
        self.rows.store_inputs(
            matrix, shared.q, scale * shrunk, None, norms[None, 1], place.rows(mDq), left, w, lane
        )
        self.give_back(shared, Input.OUTPUTS)
        warpgroup.wait_group(0)
        self.give_back(shared, Input.Z, Input.D_STATES)
        decay = self.products.add_columns(
            shared, rounded, handed, sums, factor, places, left, thread
        )
        sum_tokens(sums, lane, back=True)
        sum_tokens(handed, lane, exclusive=True)
        own_bias = bias[place.head, None] if self.config.bias else None
        gates, shift = self.rows.load_gates(place.rows(mG), own_bias, left, w, lane)
        self.sync()
        for half in cutlass.range_constexpr(2):
            for n in cutlass.range_constexpr(TILES):
                for b in cutlass.range_constexpr(2):
                    total = sums[b, half, n] + handed[b, half, n] + decay[half] * kept[half]
                    place_in(shared.planes, places, b, half, n)[0] = total * shrunk
        self.sync()
        matrix = cute.recast_ptr(shared.s, dtype=F32)
        self.rows.store_inputs(
            matrix, shared.k, shrunk, norms[None, 3], norms[None, 2], place.rows(mDk), left, w, lane
        )
        self.give_back(shared, Input.STATES, Input.TOKENS)
        self.rows.store_gates(
            shared.planes,
            gates,
            shift,
            rate,
            lower_bound,
            place.rows(mDg),
            left,
            shared.sums,
            w,
            lane,
        )
        if cutlass.const_expr(not self.apart):
            self.give_back(shared, Input.GATES)

    @cute.jit
    def fetch_gate(self, rate, bias, head, gate: cute.Tensor, tidx):
        """Loads what gates are computed with of a head, while the chunk before is computed: dt_bias of the thread's two
        channels, and A_log; zeros where there are none."""
        gate.fill(0.0)
        channel = tidx // 32 * 16 + tidx % 32 // 4
        if cutlass.const_expr(self.config.bias):
            for half in cutlass.range_constexpr(2):
                gate[half] = bias[head, channel + 8 * half]
        if cutlass.const_expr(self.config.rate):
            gate[2] = rate[head]

    @cute.jit
    def decays(self, shared, gate, lower_bound, left, phase, thread):
        """Waits for the gates and returns own elements of the log2 decays; zero past the end."""
        lane, w = thread.lane, thread.w
        speed = F32(1.0)
        if cutlass.const_expr(self.config.rate):
            speed = exp2(gate[2] * LOG2_E)
        speed = speed * -LOG2_E
        self.wait(shared, Input.GATES, phase)
        g = cute.make_rmem_tensor(OWN, F32)
        places = cute.make_rmem_tensor(
            (2, 2), I32
        )  # of the first token and channel, and of those beside them
        first = 4 * (w % 2) + lane // 16
        for half in cutlass.range_constexpr(2):
            for b in cutlass.range_constexpr(2):
                row = thread.token + b
                unit = first + 2 * half ^ row
                places[b, half] = w // 2 * (CHUNK * 32) + row * 32 + unit * 4 + lane // 4 % 4
        for sub in cutlass.range_constexpr(SUBS):
            x = cute.make_rmem_tensor(OWN_SUB, F32)
            if cutlass.const_expr(self.gate_dtype is F32):
                for b, half, m in SUB_INDICES:
                    x[b, half, m] = view(shared.g, places[b, half] + (SUB * sub + 8 * m) * 32, 1)[0]
            else:
                x = widened(load_sub(shared.g, sub, w, lane))
            for b, half, m in SUB_INDICES:
                row = SUB * sub + 8 * m + thread.token + b
                if cutlass.const_expr(self.config.gate == "safe"):
                    y = x[b, half, m] * speed + gate[half] * speed
                    step = (lower_bound * LOG2_E) * cute.arch.rcp_approx(1.0 + exp2(y))
                elif cutlass.const_expr(self.config.gate == "softplus"):
                    y = (x[b, half, m] + gate[half]) * LOG2_E
                    grown = cute.math.log2(1.0 + exp2(-cute.math.absf(y)), fastmath=True)
                    step = (speed / LOG2_E) * (grown + cutlass.max(y, F32(0.0)))
                else:
                    step = x[b, half, m] * LOG2_E
                if cutlass.const_expr(not self.config.bounded):
                    step = cutlass.max(step, F32(FLOOR))
                g[b, half, 2 * sub + m] = step if row < left else F32(0.0)
        return g

    @cute.jit
    def prepare_tokens(self, shared, grown, scale, left, tidx):
        """Replaces do by scaled operands and writes the factors of q~ and k~ of every token. Rows of q, k and do past
        the end become zeros."""
        source = cute.recast_ptr(shared.do, dtype=self.dtype)
        units = WIDE // (8 * THREADS)
        x = cute.make_rmem_tensor((8, units), self.dtype)
        y = cute.make_rmem_tensor(8, self.operand)
        for i in cutlass.range_constexpr(units):
            cute.autovec_copy(view(source, 8 * (tidx + THREADS * i), 8), x[None, i])
        for i in cutlass.range_constexpr(units):
            wide = widened(x[None, i])
            y.store((wide.load() * grown).to(self.operand))
            cute.autovec_copy(y, view(shared.do, 8 * (tidx + THREADS * i), 8))
        if tidx < CHUNK:
            norms = cute.make_tensor(shared.factors, cute.make_layout((CHUNK, 4)))
            shared.scales[tidx, 0] = norms[tidx, 1] * scale
            shared.scales[tidx, 1] = norms[tidx, 2] * norms[tidx, 0]
        if left < CHUNK:
            y.fill(0.0)
            for i in cutlass.range(tidx, WIDE // 8, THREADS, unroll=1):
                if i // 8 % CHUNK >= left:
                    for matrix in (shared.q, shared.k, shared.do):
                        target = cute.recast_ptr(matrix, dtype=self.operand)
                        cute.autovec_copy(y, view(target, 8 * i, 8))
        cute.arch.fence_view_async_shared()

    # ---- products ---------------------------------------------------------------------------------------------------

    @cute.jit
    def multiply(
        self,
        a_major: cutlass.Constexpr,
        a: cute.Pointer,
        a_step: cutlass.Constexpr,
        b: cute.Pointer,
        tidx,
    ):
        """Returns A B^T over both tiles of V, all from shared memory, as own elements, once the caller has waited.
        a_step: between tiles of A."""
        op = warpgroup.MmaF16BF16Op(
            self.operand, F32, (64, 64, 16), warpgroup.OperandSource.SMEM,
            OperandMajorMode.MN if a_major == "mn" else OperandMajorMode.K, OperandMajorMode.K,
        )  # fmt: skip
        mma = cute.make_tiled_mma(cute.make_mma_atom(op), cute.make_layout((1, 1, 1)))
        part = mma.get_slice(tidx % GROUP)
        acc = cute.make_rmem_tensor(((2, 2, TILES), 1, 1), F32)
        left = repeated(a, (64, 64), a_major, self.operand, 2, a_step)
        right = repeated(b, (64, 64), "k", self.operand, 2)
        warpgroup.fence()
        for tile in cutlass.range_constexpr(2):
            x = mma.make_fragment_A(part.partition_A(left[None, None, tile]))
            y = mma.make_fragment_B(part.partition_B(right[None, None, tile]))
            issue(mma, acc, x, y, tile == 0)
        return cute.make_tensor(acc.iterator, cute.make_layout(OWN))

    @cute.jit
    def store_pairs(self, shared, x: cute.Tensor, thread):
        """Writes own elements of do z^T (first warpgroup) and -y z^T as operands, and their diagonals.

        The operands may be read behind the next `sync`. Returns the power of two by which they are too small.
        """
        lane, group, sub = thread.lane, thread.w // 4, thread.w % 4
        bits = cute.recast_tensor(x, I32)
        largest = I32(0)
        for half in cutlass.range_constexpr(2):
            i = SUB * sub + lane // 4 + 8 * half
            for n in cutlass.range_constexpr(TILES):
                for b in cutlass.range_constexpr(2):
                    j = 8 * n + thread.token + b
                    if cutlass.const_expr(n % 2 == half):
                        if i == j:
                            shared.own[i, group] = x[b, half, n]
                    x[b, half, n] = x[b, half, n] if j < i else F32(0.0)
                    largest = cutlass.max(largest, bits[b, half, n] & 0x7FFFFFFF)
        largest = cute.arch.warp_redux_sync(largest, "max")
        if lane == 0:
            shared.largest[thread.w] = largest
        self.sync()
        for w in cutlass.range_constexpr(WARPS):
            largest = cutlass.max(largest, shared.largest[w])
        grown, factor = scale_of(largest)
        two, rounded = cute.make_rmem_tensor(2, F32), cute.make_rmem_tensor(2, self.operand)
        for half in cutlass.range_constexpr(2):
            i = SUB * sub + lane // 4 + 8 * half
            for n in cutlass.range_constexpr(TILES):
                two.store(x[None, half, n].load() * grown)
                rounded.store(two.load().to(self.operand))
                at = (group * CHUNK + i) * DA_STRIDE + 8 * n + thread.token
                cute.autovec_copy(rounded, view(shared.dA, at, 2))
                if n // 2 == sub:
                    for b in cutlass.range_constexpr(2):
                        two[b] = to_tf32(two[b])
                    at = (
                        (group * SUBS + sub) * INSIDE
                        + i % SUB * INSIDE_STRIDE
                        + n % 2 * 8
                        + thread.token
                    )
                    cute.autovec_copy(two, view(shared.inside, at, 2))
        return factor

    @cute.jit
    def store_strengths(self, shared, d_beta: cute.Tensor, shrunk, left, tidx):
        """Writes dbeta of the tokens, from the diagonal of -y z^T."""
        if tidx < cutlass.min(left, I32(CHUNK)):
            self.store_strength(shared, d_beta, tidx, shared.own[tidx, 1] * shrunk)
