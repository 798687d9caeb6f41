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

from cula_core.cute.functions import discard, nanosleep
from cula_core.cute.memory import EVICT_FIRST, by_token, cache_policy, load_tile, swizzled, view
from cula_core.cute.output import GROUP
from cula_core.cute.types import DTYPES, F32, I32
from cula_core.cute.warp import prefix_sum
from cula_core.cute.widen import widened
from cula_core.cute.work import ITEM_WORDS, SLOTS, draw, post, receive

from ..config import (
    BLOCK,
    CHUNK,
    FADED,
    HEAD_DIM,
    LINE,
    PLACES,
    SUB,
    TABLES,
    TRIANGLE,
    V_TILE,
    V_TILES,
    RecurrenceConfig,
)
from .chain import CARRIED, MAPPED, TALL, Chain, Item, Memory, Stages
from .layout import BY_TOKEN, DECAY, GROWTH, INVERSE, PRODUCTS, SCALES, SQUARE, WIDE, panels
from .order import Order

LOOK = 8  # flags that are read at once
CONVERTERS = 2  # warps
# Per thread of a chain where there are two, and of the warpgroup that loads: 3 x 168 together.
REGISTERS = (232, 40)


class GatedDeltaRecurrence:
    """A CTA per machine and tiles of 64 columns of v; its items of work are chains and parts of chains (`Order`).

    | thread role | warps | work |
    |---|---|---|
    | tile t | 4 t ... | state and outputs of 64 columns |
    | load | the one behind | q, k and v by TMA, blocks by bulk copies |
    | announce | the next one | items of work |
    | convert | the next two | k of bf16 to fp16, in place |

    | shared memory | bytes | slots |
    |---|---|---|
    | k, q [64, 128], v [64, 64] per tile, T', Aqk [64, 64] | 49152 + 8192 tiles | 3 |
    | tables | 784 | 3 |
    | o [64, 64] | 8192 tiles | 2 |
    """

    def __init__(self, config: RecurrenceConfig):
        self.config, self.tiles = config, config.tiles
        self.per_seat = config.columns // config.tiles
        self.dtype, self.operand = DTYPES[config.dtype], DTYPES[config.operand]
        # A warpgroup per tile, and one for the other roles.
        self.threads = GROUP * (self.tiles + 1)
        self.stages = Stages(config)
        self.of_q = not config.scan  # whether outputs are wanted
        self.chain, self.order = Chain(config, self.stages), Order(config.packed)

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
        self.kernel(
            tma_q, mQ, tma_k, mK, tma_v, mV, tma_o, mO, out, initial, indices, targets, fresh, final, checkpoints,
            cu_seqlens, carried, blocks, flags, maps, marks, starts, null_slot, checkpoint_every, seats, together,
            share, segment,
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
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=smem.allocate_array(cutlass.Int64, 2 * stages.count),
            num_stages=stages.count,
            producer_group=pipeline.CooperativeGroup(thread),
            consumer_group=pipeline.CooperativeGroup(thread, 4 * self.tiles),
            tx_count=2
            * (self.of_q * (WIDE + TRIANGLE) + WIDE + self.tiles * TALL + TRIANGLE + 2 * TABLES),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )
        items = pipeline.PipelineAsync.create(
            barrier_storage=smem.allocate_array(cutlass.Int64, 2 * SLOTS),
            num_stages=SLOTS,
            producer_group=pipeline.CooperativeGroup(thread, 1),
            consumer_group=pipeline.CooperativeGroup(
                thread, GROUP * self.tiles + 32 + 64 * self.config.converts
            ),
            defer_sync=True,
        )
        ready = smem.allocate_array(cutlass.Int64, stages.count)
        if tidx < stages.count:
            cute.arch.mbarrier_init(ready + tidx, CONVERTERS)
        cute.arch.mbarrier_init_fence()
        self.clear(memory.stages, tidx)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()

        if warp_idx >= 4 * self.tiles:
            if cutlass.const_expr(self.tiles > 1):
                cute.arch.setmaxregister_decrease(REGISTERS[1])
            if warp_idx == 4 * self.tiles:
                self.load(
                    ring, items, memory, tma_q, mQ, tma_k, mK, tma_v, mV, blocks, flags, seats, share, out.shape[1]
                )  # fmt: skip
            if warp_idx == 4 * self.tiles + 1:
                self.announce(
                    items, memory, indices, targets, fresh, cu_seqlens, flags, blocks, marks, null_slot, together,
                    share, segment, self.order.total(cu_seqlens, blocks.shape[0], blocks.shape[1] // together),
                    blocks.shape[1] // together, out.shape[1],
                )  # fmt: skip
            if cutlass.const_expr(self.config.converts):
                if warp_idx >= 4 * self.tiles + 2:
                    self.convert(ring, ready, items, memory, warp_idx % CONVERTERS)
        else:
            if cutlass.const_expr(self.tiles > 1):
                cute.arch.setmaxregister_increase(REGISTERS[0])
            carried_flags = flags.iterator
            if cutlass.const_expr(self.config.waits):
                carried_flags = carried_flags + seats * (share + 1) * LINE
            self.chain.run(
                ring, ready, items, memory, tma_o, mO, out, initial, final, checkpoints, checkpoint_every, carried,
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
                        # The last segment is not scanned, and the first one begins with a state that is known.
                        wanted = (not at.whole) & ((at.first > 0) | (tile < V_TILES))
                        begins = cutlass.select_(at.first > 0, I32(0), begins)
                        ends = MAPPED + of_segment
                        if not at.whole:
                            enough = self.remembered(blocks, slot, head, at.first, at.last, lane)
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
    def load(
        self,
        ring,
        items,
        memory: Memory,
        tma_q,
        mQ: cute.Tensor,
        tma_k,
        mK: cute.Tensor,
        tma_v,
        mV: cute.Tensor,
        blocks: cute.Tensor,
        flags: cute.Tensor,
        seats: cutlass.Int32,
        share: cutlass.Int32,
        tokens: cutlass.Int32,
    ):
        """Loads the chunks of the items, ahead of the warps that hold the state."""
        lane = cute.arch.lane_idx()
        base, heads = memory.stages, blocks.shape[1]
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), self.operand)
        sQ = self.stages.wide(base, self.stages.q, self.dtype)
        sK = self.stages.wide(base, self.stages.k, self.dtype)
        of_heads = [(tma_k, mK, heads // mK.shape[2], sK)]
        if cutlass.const_expr(self.of_q):
            of_heads.append((tma_q, mQ, heads // mQ.shape[2], sQ))
        group_v = heads // mV.shape[2]
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages.count)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        item = receive(Item, items, item_at, memory.items)
        item_at.advance()
        first_flag = item.seat * share
        progress = flags.iterator + (seats * share + item.seat) * LINE
        if cutlass.const_expr(self.config.waits):
            # A scan may have skipped what comes first, or all.
            self.report(progress, item.walked, lane)
        while item.valid != 0:
            head, tile, batch = item.head, item.tile, I32(0)
            slot = item.token // CHUNK + item.sequence
            if cutlass.const_expr(not self.config.packed):
                batch = item.sequence
                slot = item.sequence * cute.ceil_div(tokens, CHUNK) + item.chunk
            ready = I32(0)
            for c in cutlass.range(item.chunks, unroll=1):
                here = item.token + c * CHUNK
                ring.producer_acquire(at)
                if cutlass.const_expr(self.config.waits):
                    self.report(progress, item.walked + c, lane)
                full = ring.producer_get_barrier(at)
                for tma, x, group, shared in of_heads:
                    place = shared[None, None, at.index]
                    load_tile(tma, x, here, head // group, batch, 0, place, full, EVICT_FIRST)
                for i in cutlass.range_constexpr(self.tiles):
                    sV = self.stages.values(base, i)[None, None, at.index]
                    # Beside the map of the keys there are no values; what is loaded then is not read.
                    column = tile % V_TILES + i
                    load_tile(
                        tma_v, mV, here, head // group_v, batch, column, sV, full, EVICT_FIRST
                    )
                if cutlass.const_expr(self.config.waits):
                    if c >= ready:
                        flag = first_flag + item.walked + c
                        ready = c + self.wait(flags, flag, item.chunks - c, lane)
                with cute.arch.elect_one():
                    self.fetch(bulk, blocks[slot + c, head, None], memory, at.index, full)
                if cutlass.const_expr(self.tiles == V_TILES and not self.config.scan):
                    # What held the stage before has been read for the last time.
                    if c >= self.stages.count:
                        self.give_up(blocks[slot + c - self.stages.count, head, None], lane)
                at.advance()
            item = receive(Item, items, item_at, memory.items)
            item_at.advance()
            if cutlass.const_expr(self.config.waits):
                # Also where the item before had nothing to load.
                self.report(progress, item.walked, lane)
        if cutlass.const_expr(self.config.waits):
            # The kernel behind this one in the stream waits for this one alone, but needs the end of both.
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def convert(self, ring, ready: cute.Pointer, items, memory: Memory, half):
        """Converts half of the channels of the keys of every stage, times a power of two where they are normalised.

        Keys past the end of a sequence become zeros. A lane has 8 channels of each of 16 neighbouring tokens.
        """
        lane = cute.arch.lane_idx()
        tokens = lane // 8 * SUB
        keys = memory.stages + cute.assume(
            half * (WIDE // 2) + (tokens * 8 + lane % 8) * 8, divby=8
        )
        scales = cute.recast_ptr(memory.tables.align(16) + SCALES, dtype=cutlass.BFloat16)
        given = cute.make_rmem_tensor(8, self.dtype)
        found = cute.make_rmem_tensor(8, self.operand)
        scale = cute.make_rmem_tensor(4, cutlass.BFloat16)
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages.count)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        item = receive(Item, items, item_at, memory.items)
        item_at.advance()
        while item.valid != 0:
            for c in cutlass.range(item.chunks, unroll=1):
                ring.consumer_wait(at)
                for part in cutlass.range(4, unroll=1):
                    if cutlass.const_expr(self.config.l2norm):
                        at_scale = at.index * (2 * TABLES) + tokens + 4 * part
                        cute.autovec_copy(view(scales, at_scale, 4), scale)
                        powers = widened(scale)
                    for i in cutlass.range_constexpr(4):
                        place = view(keys, at.index * self.stages.size + 256 * part + 64 * i, 8)
                        source = cute.recast_ptr(place.iterator, dtype=self.dtype)
                        cute.autovec_copy(cute.make_tensor(source, place.layout), given)
                        wide = widened(given)
                        if cutlass.const_expr(self.config.l2norm):
                            for j in cutlass.range_constexpr(8):
                                wide[j] = wide[j] * powers[i]
                        found.store(wide.load().to(self.operand))
                        cute.autovec_copy(found, place)
                if cutlass.const_expr(self.config.packed):
                    left = item.length - c * CHUNK
                    if left < CHUNK:
                        found.fill(0.0)
                        for i in cutlass.range(cutlass.max(left - tokens, 0), SUB, unroll=1):
                            cute.autovec_copy(
                                found, view(keys, at.index * self.stages.size + 64 * i, 8)
                            )
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(ready + at.index)
                at.advance()
            item = receive(Item, items, item_at, memory.items)
            item_at.advance()

    @cute.jit
    def report(self, progress, walked, lane):
        """Says how many steps lie behind the machine, to those who prepare the next ones."""
        if lane == 0:
            cute.arch.store(progress, walked, sem="relaxed", scope="gpu")

    @cute.jit
    def wait(self, flags: cute.Tensor, first, most, lane):
        """Waits for the block of flag `first`; returns how many of the next `most` are there, at most LOOK."""
        found = I32(0)
        while found == 0:
            flag = I32(0)
            if lane < cutlass.min(most, LOOK):
                flag = cute.arch.load(
                    flags.iterator + (first + lane) * LINE, I32, sem="relaxed", scope="gpu"
                )
            set_ = cute.arch.vote_ballot_sync(flag != 0)
            found = I32(cute.arch.popc(set_ & ~(set_ + 1)))  # the ones in front of a zero
            if found == 0:
                nanosleep(100)
        # Blocks are read through another proxy than flags, and by a lane that has not read all of those.
        cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_warp()
        cute.arch.fence_proxy("async.global")
        return found

    @cute.jit
    def fetch(self, bulk, block: cute.Tensor, memory: Memory, stage, barrier):
        """Loads a block into a stage."""
        source, first = block.iterator.align(128), stage * self.stages.size
        parts = [(INVERSE, self.stages.inverse)]
        if cutlass.const_expr(self.of_q):
            parts.append((PRODUCTS, self.stages.products))
        for offset, place in parts:
            for there, here, size in panels(offset):
                shared = view(memory.stages, first + place + here, size, unit=256)
                cute.copy(
                    bulk,
                    view(source, there, size, unit=256),
                    shared,
                    mbar_ptr=barrier,
                    cache_policy=cache_policy(EVICT_FIRST),
                )
        tables = memory.tables + cute.assume(stage * TABLES, divby=TABLES)
        tables = cute.recast_ptr(tables.align(16), dtype=self.operand)
        shared = view(tables, 0, 2 * TABLES)
        cute.copy(
            bulk,
            view(source, BY_TOKEN, 2 * TABLES, unit=64),
            shared,
            mbar_ptr=barrier,
            cache_policy=cache_policy(EVICT_FIRST),
        )

    @cute.jit
    def give_up(self, block: cute.Tensor, lane):
        """Keeps a block that nobody needs any more from being written to memory."""
        for i in cutlass.range_constexpr(-(-BLOCK // (64 * 32))):
            line = 32 * i + lane
            if line < BLOCK // 64:
                discard(block.iterator + 64 * line)

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
            begins = I32(fresh[sequence])
        return row, target, begins
