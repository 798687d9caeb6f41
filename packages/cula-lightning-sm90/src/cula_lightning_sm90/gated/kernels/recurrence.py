"""The recurrence: it computes what needs the state, and begins as soon as the first blocks are there.

It is launched while `prepare` runs, on the multiprocessors that it leaves free, and waits for the flag of every block.
All CTAs of `prepare` have started by then, and none waits for it for ever, so that no order of work can stop both.

Where sequences are cut, it runs alone, and a scan before it, for which a segment is a map: it turns a state S into
M S + A. The scan walks from zero for A, and from the identity, with values of zero, for M. The states in front of
segments follow from these (`cula_core.delta_rule.kernels.merge`), and the recurrence walks through all segments side by
side. If what comes before some of a segment's last chunks has faded behind them, M is zero, and the scan walks through
these chunks alone.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cula_core.cute.memory import by_token, swizzled, view
from cula_core.cute.output import GROUP
from cula_core.cute.types import DTYPES, F32, I32
from cula_core.cute.warp import prefix_sum
from cula_core.cute.work import ITEM_WORDS, SLOTS, draw, post
from cula_core.delta_rule.config import COMES_ON, GOES_ON, HAS_STATE
from cula_core.delta_rule.kernels.order import Order

from ..config import (
    CHUNK,
    ENDS,
    FADED,
    HEAD_DIM,
    LINE,
    PLACES,
    TABLES,
    V_TILE,
    V_TILES,
    RecurrenceConfig,
)
from .chain import Chain, Memory, Stages
from .items import CARRIED, MAPPED, Item
from .keys import CONVERTERS, Keys
from .layout import BY_TOKEN, DECAY, GROWTH, SQUARE
from .loads import Loads
from .outputs import TALL, Outputs
from .workspace import blocks_in, carried_in

# Per thread of a chain, by their number, and of the other roles.
REGISTERS = {1: (232, 48), 2: (224, 32)}


class GatedDeltaRecurrence:
    """A CTA per machine and tiles of 64 columns of v; its items of work are chains and parts of chains (`Order`).

    | thread role | warps | work |
    |---|---|---|
    | tile t | 4 t ... | state and outputs of 64 columns |
    | load | the one behind | q, k and v by TMA |
    | announce | the next one | items of work |
    | load | the next one | blocks by bulk copies, once they are there |
    | send | the next one | outputs by TMA |
    | convert | the last four | k of bf16 to fp16, in place |

    | shared memory | bytes | slots |
    |---|---|---|
    | k, q [64, 128], v [64, 64] per tile, T', Aqk [64, 64] | 49152 + 8192 tiles | 3 |
    | tables | 928 | 3 |
    | o [64, 64] | 8192 tiles | 2 |
    """

    def __init__(self, config: RecurrenceConfig):
        self.config, self.tiles = config, config.tiles
        self.per_seat = config.columns // config.tiles
        self.dtype, self.operand = DTYPES[config.dtype], DTYPES[config.operand]
        # A warpgroup per tile, and two for the other roles.
        self.threads = GROUP * (self.tiles + 2)
        self.stages = Stages(config)
        self.outputs = Outputs(self.dtype, self.tiles, config.packed)
        self.chain = Chain(config, self.stages, self.outputs)
        self.keys, self.loads = Keys(config, self.stages), Loads(config, self.stages)
        self.order = Order(config.packed, ENDS)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        targets: cute.Tensor,
        fresh: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        checkpoint_rows: cute.Tensor,
        checkpoint_offsets: cute.Tensor,
        cu_seqlens: cute.Tensor,
        workspace: cute.Tensor,
        maps: cute.Tensor,
        marks: cute.Tensor,
        starts: cute.Tensor,
        null_slot: cutlass.Int32,
        checkpoint_every: cutlass.Int32,
        flag_count: cutlass.Int32,
        first_flag: cutlass.Int32,
        own_flags: cutlass.Int32,
        slots: cutlass.Int32,
        seats: cutlass.Int32,
        together: cutlass.Int32,
        share: cutlass.Int32,
        segment: cutlass.Int32,
        ctas: cutlass.Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `launch.recurrence_arguments`; what the config lacks is None."""
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        wide = swizzled((CHUNK, HEAD_DIM), "k", self.dtype)
        tall = swizzled((CHUNK, V_TILE), "k", self.dtype)
        tma_q, mQ = cpasync.make_tiled_tma_atom(load, by_token(q), wide, (CHUNK, HEAD_DIM))
        tma_k, mK = cpasync.make_tiled_tma_atom(load, by_token(k), wide, (CHUNK, HEAD_DIM))
        tma_v, mV = cpasync.make_tiled_tma_atom(load, by_token(v), tall, (CHUNK, V_TILE))
        tma_o, mO = cpasync.make_tiled_tma_atom(store, by_token(out), tall, (CHUNK, V_TILE))
        blocks = blocks_in(workspace, flag_count, slots, out.shape[2], self.operand)
        carried = carried_in(blocks, seats, self.config.columns * V_TILE)
        flags = cute.make_tensor(workspace.iterator + first_flag, cute.make_layout((own_flags,)))
        self.kernel(
            tma_q, mQ, tma_k, mK, tma_v, mV, tma_o, mO, out, initial, indices, targets, fresh, final, checkpoints,
            checkpoint_rows, checkpoint_offsets, cu_seqlens, carried, blocks, flags, maps, marks, starts, null_slot,
            checkpoint_every, seats, together, share, segment,
        ).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream,
            use_pdl=self.config.waits,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        out: cute.Tensor,
        initial: cute.Tensor,
        indices: cute.Tensor,
        targets: cute.Tensor,
        fresh: cute.Tensor,
        final: cute.Tensor,
        checkpoints: cute.Tensor,
        checkpoint_rows: cute.Tensor,
        checkpoint_offsets: cute.Tensor,
        cu_seqlens: cute.Tensor,
        carried: cute.Tensor,
        blocks: cute.Tensor,
        flags: cute.Tensor,
        maps: cute.Tensor,
        marks: cute.Tensor,
        starts: cute.Tensor,
        null_slot: cutlass.Int32,
        checkpoint_every: cutlass.Int32,
        seats: cutlass.Int32,
        together: cutlass.Int32,
        share: cutlass.Int32,
        segment: cutlass.Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        thread, stages = pipeline.Agent.Thread, self.stages
        memory = Memory(
            stages=smem.allocate_array(
                self.operand, stages.count * stages.size, byte_alignment=1024
            ),
            o=smem.allocate_array(self.dtype, SLOTS * self.tiles * TALL, byte_alignment=1024),
            tables=smem.allocate_array(F32, stages.count * TABLES, byte_alignment=16),
            items=smem.allocate_array(I32, SLOTS * ITEM_WORDS, byte_alignment=16),
        )
        ring = self.loads.make_ring(smem)
        items = pipeline.PipelineAsync.create(
            barrier_storage=smem.allocate_array(cutlass.Int64, 2 * SLOTS),
            num_stages=SLOTS,
            producer_group=pipeline.CooperativeGroup(thread, 1),
            consumer_group=pipeline.CooperativeGroup(
                thread,
                (4 * self.tiles + 2 + self.loads.of_q + CONVERTERS * self.config.converts) * 32,
            ),
            defer_sync=True,
        )
        stored = self.outputs.make_pipe(smem)
        prepared = smem.allocate_array(cutlass.Int64, stages.count)
        ready = smem.allocate_array(cutlass.Int64, stages.count)
        if tidx < stages.count:
            cute.arch.mbarrier_init(prepared + tidx, 1)
            cute.arch.mbarrier_init(ready + tidx, CONVERTERS)
        cute.arch.mbarrier_init_fence()
        self.clear(memory.stages, tidx)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()

        if warp_idx >= 4 * self.tiles:
            role = warp_idx - 4 * self.tiles
            cute.arch.setmaxregister_decrease(REGISTERS[self.tiles][1])
            if role == 0:
                self.loads.tokens(
                    ring, items, memory, tma_q, mQ, tma_k, mK, tma_v, mV, blocks, flags, seats, share, out.shape[1]
                )  # fmt: skip
            if role == 2:
                self.loads.blocks(
                    ring, prepared, items, memory, blocks, flags, seats, share, out.shape[1]
                )
            if role == 1:
                self.announce(
                    items, memory, indices, targets, fresh, cu_seqlens, flags, blocks, marks, null_slot, together,
                    share, segment, self.order.total(cu_seqlens, blocks.shape[0], blocks.shape[1] // together),
                    blocks.shape[1] // together, out.shape[1],
                )  # fmt: skip
            if cutlass.const_expr(self.loads.of_q):
                if role == 3:
                    self.outputs.send(stored, items, memory.items, memory.o, tma_o, mO, out)
            if cutlass.const_expr(self.config.converts):
                if role >= 8 - CONVERTERS:
                    self.keys.convert(ring, prepared, ready, items, memory, role - (8 - CONVERTERS))
        else:
            cute.arch.setmaxregister_increase(REGISTERS[self.tiles][0])
            carried_flags = flags.iterator
            if cutlass.const_expr(self.config.waits):
                carried_flags = carried_flags + seats * (share + 1) * LINE
            self.chain.run(
                ring, prepared, ready, items, stored, memory, out, initial, final, checkpoints, checkpoint_rows,
                checkpoint_offsets, checkpoint_every, carried,
                cute.make_tensor(carried_flags, cute.make_layout(PLACES * seats)), together, maps, marks, starts,
                warp_idx // 4, tidx % GROUP,
            )  # fmt: skip

    @cute.jit
    def clear(self, base: cute.Pointer, tidx):
        """Writes zeros where T' and Aqk will be: nothing overwrites those above the diagonal."""
        zeros = cute.make_rmem_tensor(8, self.operand)
        zeros.fill(0.0)
        for stage in cutlass.range_constexpr(self.stages.count):
            first = stage * self.stages.size + self.stages.inverse
            for unit in cutlass.range(tidx, 2 * SQUARE // 8, self.threads, unroll=1):
                cute.autovec_copy(zeros, view(base, first + 8 * unit, 8))

    # ---- items of work ----------------------------------------------------------------------------------------------

    @cute.jit
    def announce(
        self,
        items,
        memory: Memory,
        indices: cute.Tensor,
        targets: cute.Tensor,
        fresh: cute.Tensor,
        cu_seqlens: cute.Tensor,
        flags: cute.Tensor,
        blocks: cute.Tensor,
        marks: cute.Tensor,
        null_slot: cutlass.Int32,
        together: cutlass.Int32,
        share: cutlass.Int32,
        segment: cutlass.Int32,
        total: cutlass.Int32,
        heads: cutlass.Int32,
        tokens: cutlass.Int32,
    ):
        """Finds the machine's items of work, and announces them to the other warps ahead of time."""
        lane = cute.arch.lane_idx()
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, SLOTS)
        # A ticket, because a machine waits for the one before it, which has to be there by then.
        counter = cute.make_tensor(flags.iterator + (flags.shape[0] - 1), cute.make_layout(1))
        ticket = draw(counter, lane)
        seat, tile = ticket // self.per_seat, ticket % self.per_seat * self.tiles
        place = seat * PLACES + tile
        begin, rest, cut, end = self.order.bounds(
            cu_seqlens, seat // together, share, total, heads, tokens, segment
        )
        step, until, walked = cut, end, I32(0)
        while step >= 0:
            if step < until:
                at = self.order.find(cu_seqlens, step, heads, tokens, segment)
                _, start, length, slot = self.order.tokens_of(cu_seqlens, at.sequence, tokens)
                row, target, begins = self.states_of(
                    at.sequence, indices, targets, fresh, null_slot
                )
                head = at.head * together + seat % together
                steps = cutlass.min(until - step, at.last - at.chunk)
                behind = at.chunk + steps
                chunk, carried, ends, wanted = at.chunk, at.chunk > at.first, I32(1), True
                if cutlass.const_expr(self.config.scan or self.config.cut):
                    of_segment = self.order.row_of_segments(
                        at.sequence, start, at.first, tokens, segment
                    )
                    if cutlass.const_expr(self.config.scan):
                        # The last segment's map is needed by others alone, and the first one begins with a state that
                        # is known, unless the sequence is a slice of a longer one.
                        more, mapped = not at.whole, at.first > 0
                        if cutlass.const_expr(self.config.fresh):
                            bits = I32(fresh[at.sequence])
                            more = more | ((bits & GOES_ON) != 0)
                            mapped = mapped | ((bits & COMES_ON) != 0)
                        wanted = more & (mapped | (tile < V_TILES))
                        begins = cutlass.select_(at.first > 0, I32(0), begins)
                        ends = MAPPED + of_segment
                        if more:
                            # Steps behind the last token have no blocks.
                            filled = cutlass.min(at.last, cute.ceil_div(length, CHUNK))
                            enough = self.remembered(blocks, slot, head, at.first, filled, lane)
                            if enough >= 0:
                                wanted = (tile < V_TILES) & (enough < behind)
                                chunk = cutlass.max(chunk, enough)
                                carried = chunk > enough
                                begins = I32(0)
                            if (tile == 0) & (behind == at.last) & (lane == 0):
                                marks[of_segment, head] = cutlass.select_(
                                    enough >= 0, I32(1), I32(0)
                                )
                    else:
                        begins = cutlass.select_(at.first > 0, MAPPED + of_segment, begins)
                        ends = cutlass.select_(at.whole, I32(1), I32(0))
                first = start + chunk * CHUNK
                length = cutlass.max(
                    cutlass.min(length - chunk * CHUNK, (behind - chunk) * CHUNK), 0
                )
                begins = cutlass.select_(carried, I32(CARRIED), begins)
                ends = cutlass.select_(behind < at.last, I32(CARRIED), ends)
                if wanted:
                    post(
                        items, item_at, memory.items,
                        lambda: Item(
                            1, first, chunk, length, at.sequence, row, target, begins, ends, head, place, walked
                        ),
                        lane,
                    )  # fmt: skip
                    item_at.advance()
                walked, step = walked + steps, step + steps
            else:
                # The next of the three parts, or none.
                if until == end:
                    step, until, end = rest, cut, I32(-1)
                elif until == cut:
                    step, until, cut = begin, rest, I32(-1)
                else:
                    step = I32(-1)
        post(
            items, item_at, memory.items, lambda: (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, place, walked), lane
        )  # fmt: skip

    @cute.jit
    def remembered(self, blocks: cute.Tensor, slot, head, first, last, lane):
        """Returns the last of a segment's chunks first ... last - 1 so that what came before it has faded behind the
        segment, or -1. slot: of the sequence's first chunk."""
        enough, sum_, behind = I32(-1), F32(0.0), last
        while (enough < 0) & (behind > first):
            chunk = behind - 1 - lane
            own = F32(0.0)
            if chunk >= first:
                # The decays, and by how much the writes may enlarge a state.
                table = cute.recast_ptr(
                    blocks[slot + chunk, head, None].iterator.align(128) + BY_TOKEN, dtype=F32
                )
                growth = view(table, GROWTH, 4, unit=4).load()
                own = table[DECAY] + ((growth[0] + growth[1]) + (growth[2] + growth[3]))
            own = prefix_sum(own, lane)
            hidden = cute.arch.vote_ballot_sync((chunk >= first) & (sum_ + own <= FADED))
            if hidden != 0:
                enough = behind - 1 - I32(cute.arch.popc(~hidden & (hidden - 1)))
            sum_ = sum_ + cute.arch.shuffle_sync(own, 31)
            behind = behind - 32
        return enough

    @cute.jit
    def states_of(self, sequence, indices, targets, fresh, null_slot):
        """Returns (row, target, begins) of an item."""
        row = sequence
        if cutlass.const_expr(self.config.indexed):
            row = indices[sequence]
            row = cutlass.select_(row == null_slot, I32(-1), row)
        target = row
        if cutlass.const_expr(self.config.redirected):
            target = targets[sequence]
            target = cutlass.select_(target == null_slot, I32(-1), target)
        begins = I32(1)
        if cutlass.const_expr(self.config.fresh):
            begins = I32(fresh[sequence]) & HAS_STATE
        return row, target, begins
