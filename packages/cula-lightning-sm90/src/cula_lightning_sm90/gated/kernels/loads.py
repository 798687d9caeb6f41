"""What fills the stages of the recurrence: one warp loads q, k and v, another one what was prepared.

The second one waits for flags, and the first one, which need not, runs ahead of it.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import cpasync

from cula_core.cute.functions import discard, nanosleep
from cula_core.cute.memory import EVICT_FIRST, cache_policy, load_tile, view
from cula_core.cute.types import I32
from cula_core.cute.work import SLOTS, receive

from ..config import BLOCK, CHUNK, LINE, TABLES, TRIANGLE, V_TILES, RecurrenceConfig
from .items import Item
from .layout import BY_TOKEN, INVERSE, PRODUCTS, WIDE, panels
from .outputs import TALL

LOOK = 8  # flags that are read at once


class Loads:
    """Loads of the chunks of the items, ahead of the warps that hold the state."""

    def __init__(self, config: RecurrenceConfig, stages):
        self.config, self.stages = config, stages
        self.dtype, self.operand = stages.dtype, stages.operand
        self.of_q = not config.scan  # whether outputs are wanted

    def make_ring(self, smem):
        """Returns the pipeline of stages: their tokens fill it, and every warp of every tile gives them back."""
        thread, tiles = pipeline.Agent.Thread, self.config.tiles
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=smem.allocate_array(cutlass.Int64, 2 * self.stages.count),
            num_stages=self.stages.count,
            producer_group=pipeline.CooperativeGroup(thread),
            consumer_group=pipeline.CooperativeGroup(thread, 4 * tiles),
            tx_count=2 * (WIDE * (1 + self.of_q) + tiles * TALL),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )

    @cute.jit
    def tokens(
        self, ring, items, memory, tma_q, mQ: cute.Tensor, tma_k, mK: cute.Tensor, tma_v, mV: cute.Tensor,
        blocks: cute.Tensor, flags: cute.Tensor, seats: cutlass.Int32, share: cutlass.Int32, tokens: cutlass.Int32,
    ):  # fmt: skip
        """Loads q, k and v of the chunks; by a warp.

        It also says how far the machine has come, and gives blocks up: who waits for flags would wait for that too.
        """
        lane, heads = cute.arch.lane_idx(), blocks.shape[1]
        sQ = self.stages.wide(memory.stages, self.stages.q, self.dtype)
        sK = self.stages.wide(memory.stages, self.stages.k, self.dtype)
        of_heads = [(tma_k, mK, heads // mK.shape[2], sK)]
        if cutlass.const_expr(self.of_q):
            of_heads.append((tma_q, mQ, heads // mQ.shape[2], sQ))
        group_v = heads // mV.shape[2]
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages.count)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        item = receive(Item, items, item_at, memory.items)
        item_at.advance()
        progress = flags.iterator + (seats * share + item.seat) * LINE
        if cutlass.const_expr(self.config.waits):
            # A scan may have skipped what comes first, or all.
            self.report(progress, item.walked, lane)
        while item.valid != 0:
            head, tile, batch = item.head, item.tile, I32(0)
            slot = self.slot(item, tokens)
            if cutlass.const_expr(not self.config.packed):
                batch = item.sequence
            for c in cutlass.range(item.chunks, unroll=1):
                here = item.token + c * CHUNK
                ring.producer_acquire(at)
                full = ring.producer_get_barrier(at)
                for tma, x, group, shared in of_heads:
                    place = shared[None, None, at.index]
                    load_tile(tma, x, here, head // group, batch, 0, place, full, EVICT_FIRST)
                for i in cutlass.range_constexpr(self.config.tiles):
                    sV = self.stages.values(memory.stages, i)[None, None, at.index]
                    # Beside the map of the keys there are no values; what is loaded then is not read.
                    column = tile % V_TILES + i
                    load_tile(
                        tma_v, mV, here, head // group_v, batch, column, sV, full, EVICT_FIRST
                    )
                if cutlass.const_expr(self.config.waits):
                    self.report(progress, item.walked + c, lane)
                if cutlass.const_expr(self.config.tiles == V_TILES and not self.config.scan):
                    # What held the stage before has been read for the last time.
                    if c >= self.stages.count:
                        self.give_up(blocks[slot + c - self.stages.count, head, None], lane)
                at.advance()
            item = receive(Item, items, item_at, memory.items)
            item_at.advance()
            if cutlass.const_expr(self.config.waits):
                # Also where the item before had nothing to load.
                self.report(progress, item.walked, lane)

    @cute.jit
    def blocks(
        self, ring, prepared: cute.Pointer, items, memory, blocks: cute.Tensor, flags: cute.Tensor,
        seats: cutlass.Int32, share: cutlass.Int32, tokens: cutlass.Int32,
    ):  # fmt: skip
        """Loads what was prepared for the chunks, once it is there; by a warp. prepared: barriers of what is loaded."""
        lane = cute.arch.lane_idx()
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), self.operand)
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages.count)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        item = receive(Item, items, item_at, memory.items)
        item_at.advance()
        first_flag = item.seat * share
        while item.valid != 0:
            head = item.head
            slot = self.slot(item, tokens)
            ready = I32(0)
            for c in cutlass.range(item.chunks, unroll=1):
                # While the stage is still read.
                if cutlass.const_expr(self.config.waits):
                    if c >= ready:
                        flag = first_flag + item.walked + c
                        ready = c + self.wait(flags, flag, item.chunks - c, lane)
                ring.sync_object_empty.wait(at.index, at.phase)
                with cute.arch.elect_one():
                    full = prepared + at.index
                    size = 2 * (TRIANGLE * (1 + self.of_q) + 2 * TABLES)
                    cute.arch.mbarrier_arrive_and_expect_tx(full, size)
                    self.fetch(bulk, blocks[slot + c, head, None], memory, at.index, full)
                at.advance()
            item = receive(Item, items, item_at, memory.items)
            item_at.advance()
        if cutlass.const_expr(self.config.waits):
            # The kernel behind this one in the stream waits for this one alone, but needs the end of both.
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def slot(self, item: Item, tokens):
        """Returns the slot of an item's first block."""
        if cutlass.const_expr(self.config.packed):
            return item.token // CHUNK + item.sequence
        else:
            return item.sequence * cute.ceil_div(tokens, CHUNK) + item.chunk

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
                    flags.iterator + (first + lane) * LINE, I32, sem="acquire", scope="gpu"
                )
            set_ = cute.arch.vote_ballot_sync(flag != 0)
            found = I32(cute.arch.popc(set_ & ~(set_ + 1)))  # the ones in front of a zero
            if found == 0:
                nanosleep(100)
        # Blocks are read through another proxy than flags, and by a lane that has not read all of those.
        cute.arch.sync_warp()
        cute.arch.fence_proxy("async.global")
        return found

    @cute.jit
    def fetch(self, bulk, block: cute.Tensor, memory, stage, barrier):
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
