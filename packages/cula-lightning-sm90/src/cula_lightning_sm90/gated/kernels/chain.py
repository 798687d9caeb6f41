"""The warpgroups that hold the state: what needs it, chunk after chunk, for 64 columns of v each.

With the state S [K, V] before a chunk, and what `prepare` has made of its tokens:

    x_i = v_i - 2^G_i r(k_i) S^T k_i        u = T' x        o_i = scale 2^G_i r(q_i) S^T q_i + (Aqk u)_i
    S   <- 2^G_L S + sum_j k_j (2^(G_L - G_j) r(k_j) u_j)^T

The state is transposed, S^T [64 V x 128 K] in fp32, and every product takes its first operand from registers: neither
it nor x and u ever touch shared memory, and q and k enter all products as they were loaded.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from cula_core.cute.checkpoints import Checkpoints
from cula_core.cute.memory import repeated
from cula_core.cute.output import GROUP
from cula_core.cute.types import DTYPES, F32, I32
from cula_core.cute.wgmma import as_operand, issue, mma
from cula_core.cute.widen import read, widened, write
from cula_core.cute.work import SLOTS, receive

from ...kernels.chunks import clear_past
from ..config import CHUNK, HEAD_DIM, PLACES, TABLES, V_TILE, V_TILES, RecurrenceConfig
from .items import CARRIED, MAPPED, Item
from .layout import ADDED, READ, SEEN, SQUARE, TOTAL, WIDE, by_pairs, release, square
from .outputs import TALL, Outputs

BARRIER = 1  # the first tile's
MAX_F16 = 65504.0


class Memory(NamedTuple):
    """Where things lie in shared memory: stages, and behind them tables, fp32 per token, of every stage; outputs; items
    of work."""

    stages: cute.Pointer
    tables: cute.Pointer
    o: cute.Pointer
    items: cute.Pointer


class Stages:
    """A stage holds what is loaded for a chunk: k, q, v of every tile, T', Aqk. Sizes are in elements of 16 bits."""

    count = 3

    def __init__(self, config: RecurrenceConfig):
        self.config = config
        self.dtype, self.operand = DTYPES[config.dtype], DTYPES[config.operand]
        self.k, self.q, self.v = 0, WIDE, 2 * WIDE
        self.inverse = self.v + config.tiles * TALL
        self.products = self.inverse + SQUARE
        self.size = self.products + SQUARE

    def wide(self, base, offset, dtype, major="k"):
        """Returns k or q [64, 128] of every stage; with major "mn" its transpose."""
        shape = (CHUNK, HEAD_DIM) if major == "k" else (HEAD_DIM, CHUNK)
        return repeated(base + offset, shape, major, dtype, self.count, self.size)

    def values(self, base, tile, major="k"):
        """Returns v [64 tokens, 64] of a tile of every stage; with major "mn" its transpose."""
        offset = self.v + tile * TALL
        if not isinstance(offset, int):
            offset = cute.assume(offset, divby=TALL)
        return repeated(base + offset, (CHUNK, V_TILE), major, self.dtype, self.count, self.size)

    def square(self, base, offset):
        """Returns T' or Aqk [64, 64] of every stage."""
        return square(base + offset, self.operand, self.count, self.size)


class Chain:
    """The state of 64 columns of v, transposed, [64, K] in fp32, in one warpgroup's registers from end to end."""

    def __init__(self, config: RecurrenceConfig, stages: Stages, outputs: Outputs):
        self.config, self.stages = config, stages
        self.dtype, self.operand = stages.dtype, stages.operand
        self.outputs = outputs
        self.kept = Checkpoints(config.checkpoints, config.placed, config.packed, CHUNK)

    @cute.jit
    def run(
        self,
        ring,
        prepared: cute.Pointer,
        ready: cute.Pointer,
        items,
        stored,
        memory: Memory,
        out: cute.Tensor,
        initial: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        checkpoint_rows: cute.Tensor,
        checkpoint_offsets: cute.Tensor,
        checkpoint_every: cutlass.Int32,
        carried: cute.Tensor,
        carried_flags: cute.Tensor,
        together: cutlass.Int32,
        maps: cute.Tensor,
        marks: cute.Tensor,
        starts: cute.Tensor,
        group: cutlass.Int32,
        tidx: cutlass.Int32,
    ):
        """Computes the states and outputs of all items, of their tile `group`.

        ready: barriers of stages whose keys are converted, which are waited for instead of those of what is loaded.
        prepared: barriers of stages' blocks. carried [seats, 128 V, 128 K], of a scan [seats, 256, 128]: states that
        machines leave to the next one, each with a flag per tile. maps [segments, heads, 256, 128], which a scan
        writes: A^T, and behind it M^T. marks [segments, heads]: not zero where M is zero. starts [segments, heads,
        128 V, 128 K]: states in front of segments, but for those behind marked ones: they are A.
        """
        stages, base = self.stages, memory.stages
        lane = tidx % 32
        mma_x = mma(self.operand, CHUNK, OperandMajorMode.K)
        mma_o = mma(self.dtype, CHUNK, OperandMajorMode.K)
        mma_s = mma(self.operand, HEAD_DIM, OperandMajorMode.MN)
        part_x, part_o, part_s = (m.get_slice(tidx) for m in (mma_x, mma_o, mma_s))
        sK = stages.wide(base, stages.k, self.operand)
        k = mma_x.make_fragment_B(part_x.partition_B(sK))
        q = mma_o.make_fragment_B(part_o.partition_B(stages.wide(base, stages.q, self.dtype)))
        turned = stages.wide(base, stages.k, self.operand, "mn")
        kt = mma_s.make_fragment_B(part_s.partition_B(turned))
        inverse = mma_x.make_fragment_B(part_x.partition_B(stages.square(base, stages.inverse)))
        aqk = mma_x.make_fragment_B(part_x.partition_B(stages.square(base, stages.products)))
        load_v = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), self.dtype), mma_o
        ).get_slice(tidx)
        v_source = load_v.partition_S(stages.values(base, group, "mn"))
        # As this thread's columns of an accumulator see them: [2 neighbours, steps of 8 columns, table, stage].
        shape = (2, 4, CHUNK // 8, 3, stages.count)
        layout = cute.make_layout(shape, stride=(1, 2, 8, CHUNK, TABLES))
        tables = cute.make_tensor(memory.tables.align(16), layout)[None, lane % 4, None, None, None]
        totals = cute.make_tensor(memory.tables, cute.make_layout((TABLES, stages.count)))
        store_o = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype), mma_o
        ).get_slice(tidx)
        tOsO = store_o.partition_D(self.outputs.slots(memory.o, group, "mn"))

        s = cute.make_rmem_tensor(mma_s.partition_shape_C((V_TILE, HEAD_DIM)), F32)
        o = cute.make_rmem_tensor(mma_x.partition_shape_C((V_TILE, CHUNK)), F32)
        x = cute.make_rmem_tensor(mma_x.partition_shape_C((V_TILE, CHUNK)), F32)
        w = cute.make_rmem_tensor((2, 2, CHUNK // 8), F32)
        s_k = s_q = mma_x.make_fragment_A(mma_x.partition_shape_A((V_TILE, HEAD_DIM)))
        if cutlass.const_expr(self.config.converts):
            s_q = mma_o.make_fragment_A(mma_o.partition_shape_A((V_TILE, HEAD_DIM)))
        x_a = mma_x.make_fragment_A(mma_x.partition_shape_A((V_TILE, CHUNK)))
        w_a = mma_s.make_fragment_A(mma_s.partition_shape_A((V_TILE, CHUNK)))
        v = cute.make_rmem_tensor(x.shape, self.dtype)
        o.fill(0.0)
        o_pairs, x_pairs = by_pairs(o), by_pairs(x)
        factor = cute.make_rmem_tensor((2, CHUNK // 8), F32)
        consumer = pipeline.PipelineUserType.Consumer
        at = pipeline.make_pipeline_state(consumer, stages.count)
        item_at = pipeline.make_pipeline_state(consumer, SLOTS)
        out_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, SLOTS)
        partly = self.config.partly

        item = receive(Item, items, item_at, memory.items)
        item_at.advance()
        while item.valid != 0:
            length, chunks = item.length, item.chunks
            head, column = item.head, item.tile + group
            due = None
            if cutlass.const_expr(self.config.checkpoints is not None):
                due = self.kept.first(
                    item.sequence, checkpoint_offsets, checkpoint_every, item.chunk * CHUNK
                )
            self.start(
                s, initial, carried, carried_flags, together, maps, marks, starts, item, column, part_s
            )  # fmt: skip
            s_k.store(as_operand(s, s_k).load().to(self.operand))
            # A chunk that is not full has code of its own: its branches would hold up all others.
            first, last = I32(0), chunks
            if cutlass.const_expr(partly):
                last = cutlass.min(chunks, length // CHUNK)
            if chunks > 0:
                self.wait_for(ring, ready, at)
            for partial in cutlass.range_constexpr(1 + partly):
                for c in cutlass.range(first, last, unroll=1):
                    stage, left = at.index, length - c * CHUNK
                    if cutlass.const_expr(partial and not self.config.converts):
                        self.clear_past(sK[None, None, stage], left, group, tidx)
                    # Nothing runs here; the compiler would not know.
                    warpgroup.wait_group(0)
                    warpgroup.fence()
                    issue(mma_x, x, s_k, k[None, None, None, stage], True)
                    # While it runs.
                    self.load_values(
                        load_v, v_source[None, None, None, stage], v, left, lane, partial
                    )
                    if cutlass.const_expr(not self.config.scan):
                        # Those of the chunk before. In the first chunk there are none, and nothing is committed.
                        self.outputs.store(out_at, store_o, o, tOsO)
                        if c > 0:
                            self.outputs.commit(stored, out_at, group)
                            out_at.advance()
                    if cutlass.const_expr(not self.config.converts or not self.config.l2norm):
                        cute.arch.mbarrier_wait(prepared + at.index, at.phase)
                    table = tables[None, None, None, stage]
                    total = totals[TOTAL, stage]
                    cute.autovec_copy(table[None, None, SEEN // CHUNK], factor)
                    if cutlass.const_expr(self.config.scan):
                        if column >= V_TILES:
                            v.fill(0.0)
                    warpgroup.wait_group(0)
                    v_pairs = by_pairs(widened(v))
                    for n in cutlass.range_constexpr(CHUNK // 8):
                        for a in cutlass.range_constexpr(2):
                            for b in cutlass.range_constexpr(2):
                                seen = factor[a, n] * x_pairs[a, b, n]
                                x_pairs[a, b, n] = v_pairs[a, b, n] - seen
                    x_a.store(as_operand(x, x_a).load().to(self.operand))
                    warpgroup.fence()
                    issue(mma_x, x, x_a, inverse[None, None, None, stage], True)
                    if cutlass.const_expr(not self.config.scan):
                        if cutlass.const_expr(self.config.converts):
                            s_q.store(as_operand(s, s_q).load().to(self.dtype))
                            warpgroup.fence()
                        issue(mma_o, o, s_q, q[None, None, None, stage], True)
                    for i in cutlass.range_constexpr(cute.size(s)):
                        s[i] = s[i] * total
                    if cutlass.const_expr(not self.config.scan):
                        stored.producer_acquire(self.outputs.place(out_at, group))
                    cute.autovec_copy(table[None, None, ADDED // CHUNK], factor)
                    warpgroup.wait_group(0 if self.config.scan else 1)
                    self.scale(w, x_pairs, factor)
                    if cutlass.const_expr(self.config.l2norm and self.dtype is cutlass.Float16):
                        self.clamp(w)
                    w_a.store(as_operand(w, w_a).load().to(self.operand))
                    warpgroup.fence()
                    issue(mma_s, s, w_a, kt[None, None, None, stage], False)
                    if cutlass.const_expr(not self.config.scan):
                        x_a.store(as_operand(x, x_a).load().to(self.operand))
                        cute.autovec_copy(table[None, None, READ // CHUNK], factor)
                        warpgroup.wait_group(1)
                        self.scale(o_pairs, o_pairs, factor)
                        warpgroup.fence()
                        issue(mma_x, o, x_a, aqk[None, None, None, stage], False)
                    warpgroup.wait_group(0 if self.config.scan else 1)
                    if cutlass.const_expr(self.config.checkpoints is not None and not partial):
                        if (c == due) & (left >= CHUNK):
                            row = self.kept.row(
                                item.sequence, item.token - item.chunk * CHUNK, out.shape[1], checkpoint_rows,
                                checkpoint_every, (item.chunk + c + 1) * CHUNK,
                            )  # fmt: skip
                            if row >= 0:
                                self.put(s, part_s, checkpoints, row, head, column)
                            due = self.kept.following(due, checkpoint_every)
                    s_k.store(as_operand(s, s_k).load().to(self.operand))
                    if cutlass.const_expr(not partial):
                        following = at.clone()
                        following.advance()
                        if c + 1 < chunks:
                            self.wait_for(ring, ready, following)
                    if cutlass.const_expr(not self.config.scan):
                        warpgroup.wait_group(0)
                    # At the end: a copy may overtake reads before an arrival that comes right behind them.
                    release(ring, at)
                    at.advance()
                first, last = last, chunks
            if cutlass.const_expr(not self.config.scan):
                if chunks > 0:
                    self.outputs.store(out_at, store_o, o, tOsO)
                    self.outputs.commit(stored, out_at, group)
                    out_at.advance()
                    # The first chunk of the next item stores to this slot, too, before it asks for one.
                    stored.producer_acquire(self.outputs.place(out_at, group))
            if item.ends == CARRIED:
                self.hand_over(s, carried, carried_flags, item, column, group, part_s, tidx)
            else:
                if cutlass.const_expr(self.config.scan):
                    found = maps[item.ends - MAPPED, head, None, None]
                    own = cute.local_tile(found, (V_TILE, HEAD_DIM), (column, 0))
                    cute.autovec_copy(s, part_s.partition_C(own))
                if cutlass.const_expr(self.config.final_state):
                    if item.ends == 1:
                        self.save(s, final, item, column, part_s)
            item = receive(Item, items, item_at, memory.items)
            item_at.advance()

    @cute.jit
    def wait_for(self, ring, ready, at):
        """Waits for a stage, and for its keys where they are converted."""
        if cutlass.const_expr(self.config.converts):
            cute.arch.mbarrier_wait(ready + at.index, at.phase)
        else:
            ring.consumer_wait(at)

    @cute.jit
    def scale(self, scaled: cute.Tensor, pairs: cute.Tensor, factor: cute.Tensor):
        """Multiplies columns, as `by_pairs` sees them, by a factor each."""
        for n in cutlass.range_constexpr(CHUNK // 8):
            for a in cutlass.range_constexpr(2):
                for b in cutlass.range_constexpr(2):
                    scaled[a, b, n] = pairs[a, b, n] * factor[a, n]

    @cute.jit
    def clamp(self, w: cute.Tensor):
        """Holds w in fp16's range: over the norm of a tiny key it may leave it, and infinity times zero is no zero."""
        for i in cutlass.range_constexpr(cute.size(w)):
            w[i] = MAX_F16 if w[i] > MAX_F16 else w[i]
            w[i] = -MAX_F16 if w[i] < -MAX_F16 else w[i]

    @cute.jit
    def load_values(
        self, load_v, source: cute.Tensor, v: cute.Tensor, left, lane, partial: cutlass.Constexpr
    ):
        """Loads v^T of a chunk in the order of an accumulator; it is zero past the end."""
        cute.copy(load_v, source, load_v.retile(v))
        if cutlass.const_expr(partial):
            # Tokens of the next sequence may hold anything, and 0 * inf is no zero.
            values = by_pairs(v)
            for n in cutlass.range_constexpr(CHUNK // 8):
                for a in cutlass.range_constexpr(2):
                    for b in cutlass.range_constexpr(2):
                        beyond = 8 * n + lane % 4 * 2 + a >= left
                        values[a, b, n] = self.dtype(0.0) if beyond else values[a, b, n]

    @cute.jit
    def clear_past(self, keys: cute.Tensor, left, group, tidx):
        """Writes zeros over the keys past the end, which all tiles have in common."""
        if group == 0:
            clear_past(keys, left, BARRIER, tidx)
        if cutlass.const_expr(self.config.tiles > 1):
            threads = GROUP * self.config.tiles
            cute.arch.barrier(barrier_id=BARRIER + self.config.tiles, number_of_threads=threads)

    # ---- states -----------------------------------------------------------------------------------------------------

    def transposed(self, pool, row, head, column):
        """Returns 64 columns of v of a state as [V, K], whatever its layout."""
        state = pool[row, head, None, None]
        if not self.config.state_v_first:
            state = cute.make_tensor(state.iterator, cute.select(state.layout, mode=[1, 0]))
        return cute.local_tile(state, (V_TILE, HEAD_DIM), (column, 0))

    @cute.jit
    def put(self, s: cute.Tensor, part_s, pool, row, head, column):
        write(s, part_s.partition_C(self.transposed(pool, row, head, column)))

    @cute.jit
    def start(
        self, s: cute.Tensor, initial, carried: cute.Tensor, flags: cute.Tensor, together, maps, marks, starts,
        item: Item, column, part_s,
    ):  # fmt: skip
        """Sets the registers to the state in front of an item; those of a map of keys to the identity."""
        s.fill(0.0)
        if cutlass.const_expr(self.config.scan):
            if column >= V_TILES:
                places = part_s.partition_C(cute.make_identity_tensor((V_TILE, HEAD_DIM)))
                for i in cutlass.range_constexpr(cute.size(s)):
                    row, key = places[i]
                    s[i] = cutlass.select_(
                        (column - V_TILES) * V_TILE + row == key, F32(1.0), F32(0.0)
                    )
        if item.row >= 0:
            if item.begins == CARRIED:
                before = item.seat - together
                flag = flags.iterator + (PLACES * before + column)
                there = cute.arch.load(flag, I32, sem="acquire", scope="gpu")
                while there == 0:
                    there = cute.arch.load(flag, I32, sem="acquire", scope="gpu")
                own = cute.local_tile(carried[before, None, None], (V_TILE, HEAD_DIM), (column, 0))
                cute.autovec_copy(part_s.partition_C(own), s)
            if cutlass.const_expr(self.config.cut):
                if item.begins >= MAPPED:
                    row = item.begins - MAPPED
                    start = starts[row, item.head, None, None]
                    if marks[row - 1, item.head] != 0:
                        added = maps[row - 1, item.head, None, None]
                        start = cute.make_tensor(added.iterator, start.layout)
                    own = cute.local_tile(start, (V_TILE, HEAD_DIM), (column, 0))
                    cute.autovec_copy(part_s.partition_C(own), s)
            if cutlass.const_expr(self.config.initial_state):
                if item.begins == 1:
                    own = self.transposed(initial, item.row, item.head, column)
                    read(part_s.partition_C(own), s)

    @cute.jit
    def hand_over(
        self, s: cute.Tensor, carried: cute.Tensor, flags: cute.Tensor, item: Item, column, group, part_s, tidx
    ):  # fmt: skip
        """Leaves the state to the machine that has the rest of the chain."""
        if item.row >= 0:
            own = cute.local_tile(carried[item.seat, None, None], (V_TILE, HEAD_DIM), (column, 0))
            cute.autovec_copy(s, part_s.partition_C(own))
            cute.arch.fence_acq_rel_gpu()
            cute.arch.barrier(barrier_id=BARRIER + group, number_of_threads=GROUP)
            if tidx == 0:
                flag = flags.iterator + (PLACES * item.seat + column)
                cute.arch.store(flag, I32(1), sem="release", scope="gpu")

    @cute.jit
    def save(self, s: cute.Tensor, final, item: Item, column, part_s):
        """Writes the state behind a sequence; of padding nothing in place, zero where results are separate."""
        if cutlass.const_expr(self.config.in_place):
            if (item.row >= 0) & (item.target >= 0):
                self.put(s, part_s, final, item.target, item.head, column)
        else:
            self.put(s, part_s, final, item.sequence, item.head, column)
