"""The warpgroups that hold the state: 64 columns of v each, outputs, final states and checkpoints."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from cula_core.cute.checkpoints import Checkpoints
from cula_core.cute.functions import exp2_pinned
from cula_core.cute.output import OutputTiles
from cula_core.cute.types import F32, I32
from cula_core.cute.warp import reduce_scatter
from cula_core.cute.wgmma import as_operand, issue, mma
from cula_core.cute.widen import read, write
from cula_core.cute.work import SLOTS, receive

from ..config import CHUNK, V_TILE, WARPS, Config
from .layout import BARRIER_TILE, TABLE, Item, Layout

MAX_F16 = 65504.0


class Tiles(Layout):
    """The state of 64 columns of v, transposed, [64, K] in fp32, in one warpgroup's registers from end to end."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.outputs = OutputTiles(self.dtype, BARRIER_TILE)
        problem = config.problem
        self.kept = Checkpoints(problem.checkpoints, problem.placed, problem.packed, CHUNK)

    @cute.jit
    def attend(
        self,
        ring,
        weights,
        items,
        base: cute.Pointer,
        p_base: cute.Pointer,
        o_base: cute.Pointer,
        tables: cute.Pointer,
        item_words: cute.Pointer,
        tma_o,
        mO: cute.Tensor,
        out: cute.Tensor,
        dots: cute.Tensor,
        initial: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        checkpoint_rows: cute.Tensor,
        checkpoint_offsets: cute.Tensor,
        states: cute.Tensor,
        decays: cute.Tensor,
        head_decay: cute.Tensor,
        decay_factor: cutlass.Float32,
        segment_tokens: cutlass.Int32,
        piece_tokens: cutlass.Int32,
        checkpoint_every: cutlass.Int32,
        tile: cutlass.Int32,
        tidx: cutlass.Int32,
    ):
        """Computes the states and outputs of 64 columns of v, item after item."""
        if cutlass.const_expr(self.config.split):  # the prescan's states are there
            cute.arch.griddepcontrol_wait()
        lane = tidx % 32
        mma_o = mma(self.dtype, CHUNK, OperandMajorMode.K)
        mma_s = mma(self.dtype, self.dim_k, OperandMajorMode.MN)
        part_o, part_s = mma_o.get_slice(tidx), mma_s.get_slice(tidx)
        tOrQ = mma_o.make_fragment_B(
            part_o.partition_B(self.staged(base, 0, (CHUNK, self.dim_k), "k"))
        )
        tOrP = mma_o.make_fragment_B(part_o.partition_B(self.slots(p_base, (CHUNK, CHUNK), "k")))
        tSrK = mma_s.make_fragment_B(
            part_s.partition_B(self.staged(base, self.k_at, (self.dim_k, CHUNK), "mn"))
        )
        load_v, tVsV = self.values(base, self.v_at, mma_o, tile, tidx)
        if cutlass.const_expr(self.dots):
            _, tXsX = self.values(base, self.dots_at, mma_o, tile, tidx)
        store_o = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype), mma_o
        ).get_slice(tidx)
        own_o = o_base + tile * (SLOTS * CHUNK * V_TILE)
        sO = self.slots(own_o, (CHUNK, V_TILE), "k")
        tOsO = store_o.partition_D(self.slots(own_o, (V_TILE, CHUNK), "mn"))
        o_weights = self.token_table(tables, 0, lane)
        v_weights = self.token_table(tables, CHUNK, lane)
        totals = cute.make_tensor(
            tables + 2 * CHUNK, cute.make_layout((2, SLOTS), stride=(1, TABLE))
        )

        s = cute.make_rmem_tensor(mma_s.partition_shape_C((V_TILE, self.dim_k)), F32)
        o = cute.make_rmem_tensor(mma_o.partition_shape_C((V_TILE, CHUNK)), F32)
        s_a = mma_s.make_fragment_A(mma_s.partition_shape_A((V_TILE, self.dim_k)))
        v_a = mma_o.make_fragment_A(mma_o.partition_shape_A((V_TILE, CHUNK)))
        w_a = mma_o.make_fragment_A(mma_o.partition_shape_A((V_TILE, CHUNK)))
        rest_a = mma_o.make_fragment_A(mma_o.partition_shape_A((V_TILE, CHUNK)))
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        weights_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        turn = I32(0)  # chunks sent so far: which output slot is next

        item = receive(Item, items, item_at, item_words)
        item_at.advance()
        while item.valid != 0:
            token, batch, length, sequence, slot, part, parts, head = item[1:9]
            column, row = item.tile + tile, item.row
            chunks = cute.ceil_div(length, CHUNK)
            if row < 0:
                chunks = 0
                self.outputs.clear(out, batch, token, length, head, column, tidx)
            self.start(
                s, part_s, initial, states, decays, head_decay, decay_factor, segment_tokens, piece_tokens, slot, part,
                parts, head, column, row, item.begins, tidx,
            )  # fmt: skip
            rows = cute.domain_offset((token, 0), mO[None, None, head, batch])
            gO = cute.local_tile(rows, (CHUNK, V_TILE), (None, column))
            if cutlass.const_expr(self.problem.checkpoints is not None):
                begun = self.place(part, parts) * segment_tokens
                if cutlass.const_expr(self.reverse):
                    due = self.kept.last(checkpoint_every, begun, chunks)
                else:
                    due = self.kept.first(sequence, checkpoint_offsets, checkpoint_every, begun)
            for c in cutlass.range(chunks, unroll=1):
                left = cutlass.min(length - self.place(c, chunks) * CHUNK, CHUNK)
                ring.consumer_wait(at)
                weights.consumer_wait(weights_at)
                self.load_values(load_v, tVsV[None, None, None, at.index], v_a, left, lane)
                self.weigh_values(v_weights[None, None, weights_at.index], v_a, w_a, rest_a)
                s_a.store(as_operand(s, s_a).load().to(self.dtype))
                self.decay(s, totals[None, weights_at.index])
                warpgroup.fence()
                issue(mma_o, o, s_a, tOrQ[None, None, None, at.index], True)
                issue(mma_s, s, w_a, tSrK[None, None, None, at.index], False)
                if cutlass.const_expr(self.problem.exact_state):
                    issue(mma_s, s, rest_a, tSrK[None, None, None, at.index], False)
                if c > 0:
                    if cutlass.const_expr(
                        self.reverse
                    ):  # the first chunk that comes may be a partial one
                        self.outputs.finish(
                            tma_o, gO, sO, out, batch, token, length, head, column, chunks + 1 - c, turn - 1, tile, tidx
                        )  # fmt: skip
                    else:
                        self.outputs.send(tma_o, gO, sO, c - 1, turn - 1, tile, tidx)
                by_token = cute.make_rmem_tensor((2, CHUNK // 8), F32)
                cute.autovec_copy(o_weights[None, None, weights_at.index], by_token)
                warpgroup.wait_group(2 if self.problem.exact_state else 1)
                by_pairs = cute.make_tensor(o.iterator, cute.make_layout((2, 2, CHUNK // 8)))
                for n in cutlass.range_constexpr(CHUNK // 8):
                    for b in cutlass.range_constexpr(2):
                        for a in cutlass.range_constexpr(2):
                            by_pairs[a, b, n] = by_pairs[a, b, n] * by_token[a, n]
                if cutlass.const_expr(self.dots):
                    first = token + self.place(c, chunks) * CHUNK
                    part_of = dots[batch, head, column * WARPS + tidx // 32, None, None]
                    found = cute.domain_offset((0, first), part_of)
                    self.dot(
                        load_v, tXsX[None, None, None, at.index], o, found[0, None], left, lane
                    )
                # With all this in flight two tiles have no registers to keep v in.
                if cutlass.const_expr(self.problem.exact_state and self.tiles > 1):
                    self.load_values(load_v, tVsV[None, None, None, at.index], v_a, left, lane)
                warpgroup.fence()
                issue(mma_o, o, v_a, tOrP[None, None, None, weights_at.index], False)
                warpgroup.wait_group(0)
                if cutlass.const_expr(self.dots):
                    self.dot(
                        load_v, tXsX[None, None, None, at.index], o, found[1, None], left, lane
                    )
                self.release(ring, weights, at, weights_at)
                at.advance()
                weights_at.advance()
                self.outputs.store(store_o, o, tOsO[None, None, None, turn % SLOTS])
                turn = turn + 1
                if cutlass.const_expr(self.problem.checkpoints is not None):
                    # A state behind a whole chunk, or against time in front of any but a sequence's first one.
                    here = self.place(c, chunks)
                    done = begun + (here + int(not self.reverse)) * CHUNK
                    if (here == due) & (done > 0 if self.reverse else left == CHUNK):
                        at_row = self.kept.row(
                            sequence, token - begun, out.shape[1], checkpoint_rows, checkpoint_every, done
                        )  # fmt: skip
                        if at_row >= 0:
                            self.put(s, part_s, checkpoints, at_row, head, column)
                        step = -checkpoint_every if self.reverse else checkpoint_every
                        due = self.kept.following(due, step)
            if chunks > 0:
                last = self.place(chunks - 1, chunks)
                self.outputs.finish(
                    tma_o, gO, sO, out, batch, token, length, head, column, last + 1, turn - 1, tile, tidx
                )  # fmt: skip
            if cutlass.const_expr(self.problem.final_state):
                self.save(s, part_s, final, sequence, part, parts, head, column, row)
            item = receive(Item, items, item_at, item_words)
            item_at.advance()
        if tidx < 32:
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def scan(
        self,
        ring,
        weights,
        items,
        base: cute.Pointer,
        tables: cute.Pointer,
        item_words: cute.Pointer,
        initial: cute.Tensor,
        states: cute.Tensor,
        tile: cutlass.Int32,
        tidx: cutlass.Int32,
    ):
        """Computes what a segment adds to the state, from zero, or for the first of a sequence from its start."""
        lane = tidx % 32
        mma_v = mma(self.dtype, CHUNK, OperandMajorMode.K)
        mma_s = mma(self.dtype, self.dim_k, OperandMajorMode.MN)
        part_s = mma_s.get_slice(tidx)
        tSrK = mma_s.make_fragment_B(
            part_s.partition_B(self.staged(base, self.k_at, (self.dim_k, CHUNK), "mn"))
        )
        load_v, tVsV = self.values(base, self.v_at, mma_v, tile, tidx)
        v_weights = self.token_table(tables, CHUNK, lane)
        totals = cute.make_tensor(
            tables + 2 * CHUNK, cute.make_layout((2, SLOTS), stride=(1, TABLE))
        )
        s = cute.make_rmem_tensor(mma_s.partition_shape_C((V_TILE, self.dim_k)), F32)
        v_a = mma_v.make_fragment_A(mma_v.partition_shape_A((V_TILE, CHUNK)))
        w_a = mma_v.make_fragment_A(mma_v.partition_shape_A((V_TILE, CHUNK)))
        rest_a = mma_v.make_fragment_A(mma_v.partition_shape_A((V_TILE, CHUNK)))
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        weights_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        item = receive(Item, items, item_at, item_words)
        item_at.advance()
        while item.valid != 0:
            slot, head, column = item.slot, item.head, item.tile + tile
            s.fill(0.0)
            if cutlass.const_expr(self.problem.initial_state):
                if (item.part == 0) & (item.begins != 0):
                    self.get(s, part_s, initial, item.row, head, column)
                    if cutlass.const_expr(self.problem.in_place):
                        # The last segment may replace the pool's row before the first one is started.
                        self.spill(s, states, slot + item.parts - 1, head, column, tidx)
            chunks = cute.ceil_div(item.length, CHUNK)
            for c in cutlass.range(chunks, unroll=1):
                left = I32(CHUNK)
                if cutlass.const_expr(self.reverse):
                    left = cutlass.min(item.length - self.place(c, chunks) * CHUNK, CHUNK)
                ring.consumer_wait(at)
                weights.consumer_wait(weights_at)
                self.load_values(load_v, tVsV[None, None, None, at.index], v_a, left, lane)
                self.weigh_values(v_weights[None, None, weights_at.index], v_a, w_a, rest_a)
                self.decay(s, totals[None, weights_at.index])
                warpgroup.fence()
                issue(mma_s, s, w_a, tSrK[None, None, None, at.index], False)
                if cutlass.const_expr(self.problem.exact_state):
                    issue(mma_s, s, rest_a, tSrK[None, None, None, at.index], False)
                warpgroup.wait_group(0)
                self.release(ring, weights, at, weights_at)
                at.advance()
                weights_at.advance()
            self.spill(s, states, slot, head, column, tidx)
            item = receive(Item, items, item_at, item_words)
            item_at.advance()

    def values(self, base, offset, mma_v, tile, tidx):
        """Returns how v^T of this tile is loaded in the order of an accumulator, transposed on the way by ldmatrix.

        offset: of v of the first tile in a stage.
        """
        load_v = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), self.dtype), mma_v
        ).get_slice(tidx)
        sV = self.staged(base + tile * (CHUNK * V_TILE), offset, (V_TILE, CHUNK), "mn")
        return load_v, load_v.partition_S(sV)

    @cute.jit
    def release(self, ring, weights, at, weights_at):
        """Releases the stage of a chunk and the slot of its weights."""
        ring.consumer_release(at)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            weights.consumer_release(weights_at)
            if cutlass.const_expr(self.config.shared and self.forward):
                other = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) ^ 1
                cute.arch.mbarrier_arrive(
                    weights.sync_object_empty.get_barrier(weights_at.index), other
                )

    @cute.jit
    def load_values(self, load_v, source: cute.Tensor, v_a: cute.Tensor, left, lane):
        """Loads v^T of a chunk as an A operand."""
        v = cute.make_tensor(v_a.iterator, cute.make_layout((2, 2, CHUNK // 8)))
        whole = cute.make_tensor(v_a.iterator, cute.make_layout(((2, 2, CHUNK // 8), 1, 1)))
        cute.copy(load_v, source, load_v.retile(whole))
        if cutlass.const_expr(self.problem.packed and (self.forward or self.reverse)):
            if (
                left < CHUNK
            ):  # tokens of the next sequence may hold anything, and 0 * inf is no zero
                for n in cutlass.range_constexpr(CHUNK // 8):
                    for a in cutlass.range_constexpr(2):
                        for b in cutlass.range_constexpr(2):
                            beyond = 8 * n + lane % 4 * 2 + a >= left
                            v[a, b, n] = self.dtype(0.0) if beyond else v[a, b, n]

    @cute.jit
    def dot(self, load_x, source: cute.Tensor, o: cute.Tensor, found: cute.Tensor, left, lane):
        """Sums o times another tensor up over the 16 columns of a warp: to found [64], for `left` tokens of a chunk.

        A lane begins with two columns of tokens lane % 4 * 2 + 8n + {0, 1}, and ends with tokens 2 lane + {0, 1}.
        """
        pairs = cute.make_layout((2, 2, CHUNK // 8))
        whole = cute.make_rmem_tensor(((2, 2, CHUNK // 8), 1, 1), self.dtype)
        cute.copy(load_x, source, load_x.retile(whole))
        x, y = cute.make_tensor(whole.iterator, pairs), cute.make_tensor(o.iterator, pairs)
        sums = []
        for n in cutlass.range_constexpr(CHUNK // 8):
            for a in cutlass.range_constexpr(2):
                sums.append(x[a, 0, n].to(F32) * y[a, 0, n] + x[a, 1, n].to(F32) * y[a, 1, n])
        _, _, own = reduce_scatter(sums, 8, 4)
        for a in cutlass.range_constexpr(2):
            if 2 * lane + a < left:
                found[2 * lane + a] = own[a]

    @cute.jit
    def weigh_values(
        self, by_token: cute.Tensor, v_a: cute.Tensor, w_a: cute.Tensor, rest_a: cute.Tensor
    ):
        """Computes 2^(G_L - G_j) v^T as an A operand, and for exact_state what its rounding lost."""
        factors = cute.make_rmem_tensor((2, CHUNK // 8), F32)
        cute.autovec_copy(by_token, factors)
        exact = cute.make_rmem_tensor((2, 2, CHUNK // 8), F32)
        exact.store(cute.make_tensor(v_a.iterator, exact.layout).load().to(F32))
        for n in cutlass.range_constexpr(CHUNK // 8):
            for b in cutlass.range_constexpr(2):
                for a in cutlass.range_constexpr(2):
                    weighed = exact[a, b, n] * factors[a, n]
                    if cutlass.const_expr(self.problem.l2norm and self.dtype is cutlass.Float16):
                        # Over the norm of a tiny key v may leave fp16's range, and infinity times zero is no zero.
                        weighed = MAX_F16 if weighed > MAX_F16 else weighed
                        weighed = -MAX_F16 if weighed < -MAX_F16 else weighed
                    exact[a, b, n] = weighed
        w_a.store(as_operand(exact, w_a).load().to(self.dtype))
        if cutlass.const_expr(self.problem.exact_state):
            rounded = cute.make_tensor(w_a.iterator, exact.layout)
            exact.store(exact.load() - rounded.load().to(F32))
            rest_a.store(as_operand(exact, rest_a).load().to(self.dtype))

    @cute.jit
    def decay(self, s: cute.Tensor, total: cute.Tensor):
        factor = total[0]
        if cutlass.const_expr(self.problem.exact_state):
            lost = total[1]
            for i in cutlass.range_constexpr(cute.size(s)):
                s[i] = s[i] * factor + s[i] * lost
        else:
            for i in cutlass.range_constexpr(cute.size(s)):
                s[i] = s[i] * factor

    # ---- states -----------------------------------------------------------------------------------------------------

    def transposed(self, pool, row, head, column):
        """Returns 64 columns of v of a state as [V, K], whatever its layout."""
        state = pool[row, head, None, None]
        if not self.problem.state_v_first:
            state = cute.make_tensor(state.iterator, cute.select(state.layout, mode=[1, 0]))
        return cute.local_tile(state, (V_TILE, self.dim_k), (column, 0))

    @cute.jit
    def get(self, s: cute.Tensor, part_s, pool, row, head, column):
        read(part_s.partition_C(self.transposed(pool, row, head, column)), s)

    @cute.jit
    def put(self, s: cute.Tensor, part_s, pool, row, head, column):
        write(s, part_s.partition_C(self.transposed(pool, row, head, column)))

    def spilled(self, states, slot, head, column, tidx):
        """Returns a thread's part of what is kept in the workspace, in units of 16 bytes side by side for threads."""
        units = states[slot, head, column, None, tidx, None]
        return cute.make_tensor(units.iterator, cute.select(units.layout, mode=[1, 0]))

    def in_units(self, s):
        return cute.make_tensor(s.iterator, cute.make_layout((4, cute.size(s) // 4)))

    @cute.jit
    def spill(self, s: cute.Tensor, states: cute.Tensor, slot, head, column, tidx):
        cute.autovec_copy(self.in_units(s), self.spilled(states, slot, head, column, tidx))

    @cute.jit
    def start(
        self,
        s: cute.Tensor,
        part_s,
        initial,
        states,
        decays,
        head_decay,
        decay_factor,
        segment_tokens,
        piece_tokens,
        slot,
        part,
        parts,
        head,
        column,
        row,
        begins,
        tidx,
    ):
        """Loads the state in front of an item: the initial one, or the sum over what segments before it added."""
        pieces = self.pieces_of(segment_tokens, piece_tokens)
        s.fill(0.0)
        if row >= 0:
            if cutlass.const_expr(self.problem.initial_state):
                if (part == 0) & (begins != 0):
                    if cutlass.const_expr(self.problem.in_place and self.config.split):
                        if parts > 1:
                            source = self.spilled(
                                states, (slot + parts - 1) * pieces, head, column, tidx
                            )
                            cute.autovec_copy(source, self.in_units(s))
                        else:
                            self.get(s, part_s, initial, row, head, column)
                    else:
                        self.get(s, part_s, initial, row, head, column)
            if cutlass.const_expr(self.config.split):
                first, end = (slot - part) * pieces, slot * pieces
                if part > 0:
                    since = self.first_that_counts(head_decay, head, decay_factor, segment_tokens)
                    if since > 0:  # of the segment before; those in front of it do not count
                        first = end - pieces + since // piece_tokens
                odd = (end - first) % 2
                if odd == 1:
                    self.add(s, states, decays, first, 1, head, column, tidx)
                for before in cutlass.range(first + odd, end, 2, unroll=1):
                    self.add(s, states, decays, before, 2, head, column, tidx)

    @cute.jit
    def add(self, s, states, decays, first, count: cutlass.Constexpr, head, column, tidx):
        """Adds so many pieces that follow each other, all on their way at once."""
        x = cute.make_rmem_tensor((4, cute.size(s) // 4, count), F32)
        factors = cute.make_rmem_tensor((count,), F32)
        for n in cutlass.range_constexpr(count):
            factors[n] = decays[first + n, head]
            source = self.spilled(states, first + n, head, column, tidx)
            cute.autovec_copy(source, x[None, None, n])
        for n in cutlass.range_constexpr(count):
            factor = exp2_pinned(factors[n])
            for i in cutlass.range_constexpr(cute.size(s)):
                s[i] = s[i] * factor + x[i + n * cute.size(s)]

    @cute.jit
    def save(self, s: cute.Tensor, part_s, final, sequence, part, parts, head, column, row):
        """Writes the state behind a sequence; for padding slots nothing in place, zero where results are separate."""
        if part + 1 == parts:
            if cutlass.const_expr(self.problem.in_place):
                if row >= 0:
                    self.put(s, part_s, final, row, head, column)
            else:
                self.put(s, part_s, final, sequence, head, column)
