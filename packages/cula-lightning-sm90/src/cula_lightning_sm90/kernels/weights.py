"""The warpgroup that makes decay weights and intra-chunk products, one chunk ahead of the tiles."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from cula_core.cute.functions import exp2_pinned
from cula_core.cute.memory import repeated, send_to_cta
from cula_core.cute.output import GROUP
from cula_core.cute.types import F32
from cula_core.cute.wgmma import issue, mma
from cula_core.cute.work import SLOTS, receive

from ..config import CHUNK, Config
from .chunks import clear_past
from .layout import BARRIER_WEIGHTS, GATE_SLOTS, TABLE, Item, Layout, exp2_in_two


class Weights(Layout):
    """P, and per token the factors of o and v. A thread's token in the tables is its number modulo 64.

    P is made transposed, [j, i]. Where two CTAs of a cluster have the same head, each makes it for 32 tokens i and
    sends that half to the other.
    """

    def __init__(self, config: Config):
        super().__init__(config)
        self.made = CHUNK // 2 if config.shared else CHUNK

    @cute.jit
    def run(
        self,
        ring,
        weights,
        items,
        gates,
        base: cute.Pointer,
        sums: cute.Pointer,
        p_base: cute.Pointer,
        tables: cute.Pointer,
        norms: cute.Pointer,
        item_words: cute.Pointer,
        head_decay: cute.Tensor,
        decays: cute.Tensor,
        scale: cutlass.Float32,
        decay_factor: cutlass.Float32,
        tidx: cutlass.Int32,
    ):
        """Computes the decay tables and intra-chunk products of every chunk, one slot ahead of the tiles."""
        lane, mine = tidx % 32, tidx % CHUNK
        # Of the accumulator's first element.
        row, column = tidx // 32 * 16 + lane // 4, lane % 4 * 2
        sK = self.staged(base, self.k_at, (CHUNK, self.dim_k), "k")
        # This CTA's tokens i of P: all of them, or the half that its partner does not make.
        first = cutlass.Int32(0)
        if cutlass.const_expr(self.forward):
            if cutlass.const_expr(self.config.shared):
                rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
                first = rank * self.made
            product = mma(self.dtype, self.made, OperandMajorMode.K, warpgroup.OperandSource.SMEM)
            part = product.get_slice(tidx)
            sQ = self.staged(base, 0, (CHUNK, self.dim_k), "k")
            if cutlass.const_expr(self.config.shared):
                sQ = cute.local_tile(sQ, (self.made, self.dim_k), (rank, 0, None))
            tPrK = product.make_fragment_A(part.partition_A(sK))
            tPrQ = product.make_fragment_B(part.partition_B(sQ))
            acc = cute.make_rmem_tensor(product.partition_shape_C((CHUNK, self.made)), F32)
            store = cute.make_tiled_copy_C(
                cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype), product
            ).get_slice(tidx)
            shape = (CHUNK, self.made)
            sP = repeated(p_base + first * CHUNK, shape, "mn", self.dtype, SLOTS, CHUNK * CHUNK)
            tPsP = store.partition_D(sP)
            p = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, self.made // 8)))
        factors = cute.make_rmem_tensor((2, 2, self.made // 8), F32)
        factors.fill(0.0)
        table = cute.make_tensor(tables, cute.make_layout((TABLE, SLOTS)))
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        out_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, SLOTS)
        gate_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, GATE_SLOTS)
        sums_by_token = cute.make_tensor(sums, cute.make_layout((2 * CHUNK, GATE_SLOTS)))
        sums_by_column = cute.make_tensor(
            (sums + first).align(16),
            cute.make_layout((2, 4, self.made // 8, GATE_SLOTS), stride=(1, 2, 8, 2 * CHUNK)),
        )[None, lane % 4, None, None]

        item = receive(Item, items, item_at, item_words)
        item_at.advance()
        while item.valid != 0:
            length, head = item.length, item.head
            chunks = cute.ceil_div(length, CHUNK)
            if item.row < 0:
                chunks = 0
            slope = self.slope(head_decay, head, decay_factor)
            if cutlass.const_expr(self.forward and not self.gate):
                self.decay_factors(factors, slope, row, first + column, scale)
            total = F32(0.0)
            for c in cutlass.range(chunks, unroll=1):
                left = cutlass.min(length - self.place(c, chunks) * CHUNK, CHUNK)
                ring.consumer_wait(at)
                # A prescan ends with whole chunks, and against time it begins with the end of a sequence.
                if cutlass.const_expr(self.problem.packed and (self.forward or self.reverse)):
                    if left < CHUNK:
                        clear_past(sK[None, None, at.index], left, BARRIER_WEIGHTS, tidx)
                if cutlass.const_expr(self.forward):
                    warpgroup.fence()
                    tQ, tK = tPrQ[None, None, None, at.index], tPrK[None, None, None, at.index]
                    issue(product, acc, tK, tQ, True)
                # log2 decays summed up to and with this thread's token, over the chunk, and behind the token.
                if cutlass.const_expr(self.gate):
                    gates.consumer_wait(gate_at)
                    here = sums_by_token[mine, gate_at.index]
                    last = sums_by_token[CHUNK - 1, gate_at.index]
                    to_end = sums_by_token[CHUNK + mine, gate_at.index]
                else:
                    here = F32(mine + 1) * slope
                    last = F32(left) * slope
                    to_end = F32(cutlass.max(left - 1 - mine, 0)) * slope
                if cutlass.const_expr(self.reverse):
                    here, to_end = to_end, here
                own = F32(1.0)
                if cutlass.const_expr(self.problem.l2norm):
                    own = self.inverse_norm(base + at.index * self.stage, tidx)
                    norm = cute.make_tensor(norms, cute.make_layout((GROUP, SLOTS)))
                    norm[tidx, out_at.index] = own
                weight = exp2_pinned(here if tidx < CHUNK else to_end) * own
                weight = weight * scale if tidx < CHUNK else weight
                whole, lost = exp2_pinned(last), F32(0.0)
                if cutlass.const_expr(self.problem.exact_state):
                    whole, lost = exp2_in_two(last)
                total = total + last
                if cutlass.const_expr(self.gate and self.forward):
                    by_token = sums_by_token[None, gate_at.index]
                    by_column = sums_by_column[None, None, gate_at.index]
                    self.gate_factors(factors, by_token, by_column, row, first, column, scale)
                # Also keeps ptxas from moving the exponentials behind the wait for the product.
                weights.producer_acquire(out_at)
                table[tidx, out_at.index] = weight
                if tidx == 0:
                    table[2 * CHUNK, out_at.index] = whole
                    if cutlass.const_expr(self.problem.exact_state):
                        table[2 * CHUNK + 1, out_at.index] = lost
                if cutlass.const_expr(self.forward):
                    if cutlass.const_expr(self.problem.l2norm):
                        cute.arch.barrier(barrier_id=BARRIER_WEIGHTS, number_of_threads=GROUP)
                    warpgroup.wait_group(0)
                    for i in cutlass.range_constexpr(cute.size(p)):
                        p[i] = p[i] * factors[i]
                    if cutlass.const_expr(self.problem.l2norm):
                        self.scale_by_norms(p, norms, out_at.index, row, first, lane)
                    rounded = cute.make_rmem_tensor(acc.shape, self.dtype)
                    rounded.store(acc.load().to(self.dtype))
                    cute.copy(store, store.retile(rounded), tPsP[None, None, None, out_at.index])
                    cute.arch.fence_view_async_shared()
                    if cutlass.const_expr(self.config.shared):
                        cute.arch.barrier(barrier_id=BARRIER_WEIGHTS, number_of_threads=GROUP)
                        if tidx == 0:
                            made = p_base + out_at.index * (CHUNK * CHUNK) + first * CHUNK
                            self.send(weights, out_at.index, made, rank)
                cute.arch.sync_warp()
                ring.consumer_release(at)
                with cute.arch.elect_one():
                    weights.producer_commit(out_at)
                    if cutlass.const_expr(self.gate):
                        gates.consumer_release(gate_at)
                if cutlass.const_expr(self.gate):
                    gate_at.advance()
                at.advance()
                out_at.advance()
            if cutlass.const_expr(not self.forward):
                if (tidx == 0) & (item.tile == 0):
                    decays[item.slot, head] = total
            item = receive(Item, items, item_at, item_words)
            item_at.advance()

    @cute.jit
    def send(self, weights, slot, own: cute.Pointer, rank):
        """Copies this CTA's half of P to its partner, whose tiles wait for both halves as we do."""
        size = self.made * CHUNK * 2
        full = weights.sync_object_full.get_barrier(slot)
        cute.arch.mbarrier_expect_tx(full, size)
        send_to_cta(own, full, rank ^ 1, size)

    @cute.jit
    def decay_factors(self, factors: cute.Tensor, slope, row, column, scale):
        """Computes scale 2^(|i - j| slope) where j <= i (reversed: j >= i), else 0; rows of the accumulator are j."""
        for n in cutlass.range_constexpr(self.made // 8):
            for b in cutlass.range_constexpr(2):
                for a in cutlass.range_constexpr(2):
                    distance = column + 8 * n + a - (row + 8 * b)
                    if cutlass.const_expr(self.reverse):
                        distance = -distance
                    factor = exp2_pinned(F32(distance) * slope) * scale
                    factors[a, b, n] = factor if distance >= 0 else F32(0.0)

    @cute.jit
    def gate_factors(
        self,
        factors: cute.Tensor,
        by_token: cute.Tensor,
        by_column: cute.Tensor,
        row,
        first,
        column,
        scale,
    ):
        """Computes scale 2^(-|G_i - G_j|) where j <= i (reversed: j >= i), else 0; rows of the accumulator are j.

        Blocks of 16 columns before the 16 rows of a warp (reversed: behind them) are never touched: zeros stay there.
        """
        column_sums = cute.make_rmem_tensor((2, self.made // 8), F32)
        cute.autovec_copy(by_column, column_sums)
        row_sums = (by_token[row], by_token[row + 8])
        diagonal = row // 16 - first // 16
        for block in cutlass.range_constexpr(self.made // 16):
            if (block <= diagonal) if self.reverse else (block >= diagonal):
                for n in cutlass.range_constexpr(2 * block, 2 * block + 2):
                    for b in cutlass.range_constexpr(2):
                        for a in cutlass.range_constexpr(2):
                            between = column_sums[a, n] - row_sums[b]
                            past = first + column + 8 * n + a >= row + 8 * b
                            if cutlass.const_expr(self.reverse):
                                between = -between
                                past = first + column + 8 * n + a <= row + 8 * b
                            factor = exp2_pinned(between) * scale
                            factors[a, b, n] = factor if past else F32(0.0)

    @cute.jit
    def inverse_norm(self, stage: cute.Pointer, tidx):
        """Returns 1 / |x| of one token: of q in threads 0-63, of k in the others."""
        row = tidx % CHUNK
        offset = row * CHUNK
        if cutlass.const_expr(self.forward):
            offset = offset + tidx // CHUNK * self.k_at
        squares = F32(0.0)
        for panel in cutlass.range_constexpr(self.dim_k // CHUNK):
            for unit in cutlass.range_constexpr(CHUNK // 8):
                at = offset + panel * CHUNK * CHUNK + (unit ^ (row % 8)) * 8
                source = cute.make_tensor((stage + at).align(16), cute.make_layout(8))
                x = cute.make_rmem_tensor(8, self.dtype)
                cute.autovec_copy(source, x)
                for i in cutlass.range_constexpr(8):
                    squares = squares + x[i].to(F32) * x[i].to(F32)
        return cute.math.rsqrt(squares + 1e-6)

    @cute.jit
    def scale_by_norms(self, p: cute.Tensor, norms: cute.Pointer, slot, row, first, lane):
        rows = cute.make_tensor(norms + CHUNK, cute.make_layout((CHUNK, SLOTS), stride=(1, GROUP)))
        columns = cute.make_tensor(
            (norms + first).align(16),
            cute.make_layout((2, 4, self.made // 8, SLOTS), stride=(1, 2, 8, GROUP)),
        )
        by_column = cute.make_rmem_tensor((2, self.made // 8), F32)
        cute.autovec_copy(columns[None, lane % 4, None, slot], by_column)
        for b in cutlass.range_constexpr(2):
            by_row = rows[row + 8 * b, slot]
            for n in cutlass.range_constexpr(self.made // 8):
                for a in cutlass.range_constexpr(2):
                    p[a, b, n] = p[a, b, n] * by_row * by_column[a, n]
