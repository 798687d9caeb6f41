"""Loads of a recurrence that runs beside the kernel that prepares its chunks: stages in parts, once flags are set."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import cpasync

from ...cute.functions import discard, nanosleep
from ...cute.memory import EVICT_FIRST, cache_policy, view
from ...cute.types import I32
from ...cute.work import SLOTS, post
from ..config import CHUNK, HEAD_DIM, TRIANGLE, UNCUT
from .block import AQK, BLOCK, DECAY, KG, KH, QG, STAGED_AQK, T_PRIME, WIDE, panels
from .flags import progress_of, ready_flag
from .items import Item, Loader
from .order import Order

LOOK = 8  # flags at a time
# Of a stage, loaded and freed one by one: kh, decays and v; qg and T'; kg and Aqk.
PARTS = 3
# Words by which the warps of a machine tell each other how many of its first steps have their blocks, and how many of
# its chunks have been read for the last time.
READY, READ = 0, 1


def parts_of(tiles, v_tile):
    """Returns of each part of a stage its runs, as `block.runs` does, and how many bytes are loaded."""
    values = 2 * CHUNK * v_tile * tiles
    return (
        ([(KH, KH, WIDE), (DECAY, DECAY, 2 * HEAD_DIM)], 2 * WIDE + 4 * HEAD_DIM + values),
        ([(QG, QG, WIDE), *panels(T_PRIME, T_PRIME)], 2 * (WIDE + TRIANGLE)),
        ([(KG, KG, WIDE), *panels(AQK, STAGED_AQK)], 2 * (WIDE + TRIANGLE)),
    )


class MachineLoader(Loader):
    """The warps that find a machine's items of work, watch flags, load chunks and give blocks up.

    there: READY, which the one that watches tells the one that loads, and READ, which that one tells the one that gives
    blocks up. parts: barriers [stage, part of a stage, full or empty].
    """

    def __init__(self, config, stages, states):
        super().__init__(config, stages, states)
        self.order = Order(config.packed, by_head=True)
        # One of two readers does not know whether the other one is done.
        self.gives_up = config.tiles == config.v_tiles

    @cute.jit
    def load_machine(
        self,
        parts: cute.Pointer,
        items,
        base: cute.Pointer,
        item_words: cute.Pointer,
        blocks: cute.Tensor,
        tma_v,
        mV: cute.Tensor,
        indices: cute.Tensor,
        targets: cute.Tensor,
        fresh: cute.Tensor,
        cu_seqlens: cute.Tensor,
        flags: cute.Tensor,
        there: cute.Tensor,
        null_slot: cutlass.Int32,
        machines: cutlass.Int32,
        ticket: cutlass.Int32,
        share: cutlass.Int32,
        tokens: cutlass.Int32,
    ):
        """Announces the machine's items to the other warps and loads their chunks, ahead of them; by a warp."""
        lane = cute.arch.lane_idx()
        machine, tile = self.place(ticket)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), self.stages.operand)
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages.count)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, SLOTS)
        heads = blocks.shape[1]
        begin, rest, cut, end = self.bounds(cu_seqlens, machine, share, blocks, tokens)
        progress = progress_of(flags, machines, share, machine)
        walked, seen, read = I32(0), I32(0), I32(-self.stages.count)
        while walked < end - begin:
            step = self.order.walked_within(walked, begin, rest, cut, end)
            here = self.order.find(cu_seqlens, step, heads, tokens, UNCUT, True)
            batch, start, length, slot = self.order.tokens_of(cu_seqlens, here.sequence, tokens)
            steps = cutlass.min(here.last - here.chunk, end - step)
            token = start + here.chunk * CHUNK
            length = cutlass.min(length - here.chunk * CHUNK, steps * CHUNK)
            row, target, begins = self.states.rows_of(
                here.sequence, indices, targets, fresh, null_slot
            )
            post(
                items, item_at, item_words,
                lambda: Item(
                    valid=1, token=token, chunk=here.chunk, length=length, sequence=here.sequence, row=row,
                    target=target, segment=machine, first=begins, last=here.chunk + steps == here.last, head=here.head,
                    tile=tile,
                ),
                lane,
            )  # fmt: skip
            item_at.advance()
            chunks = cutlass.select_(row < 0, I32(0), cute.ceil_div(length, CHUNK))
            for c in cutlass.range(chunks, unroll=1):
                if walked + c >= seen:
                    seen = self.wait(there, READY, walked + c)
                    # Blocks are read through another proxy than flags, and by another warp than has read those.
                    cute.arch.fence_proxy("async.global")
                self.fetch_parts(
                    parts, bulk, blocks[slot + here.chunk + c, here.head, None], base, at, tma_v, mV, token + c * CHUNK,
                    here.head, batch, tile,
                )  # fmt: skip
                self.report(progress, walked + c + 1, tile, lane)
                at.advance()
                read = self.tell(there, read + 1, lane)
            walked = walked + steps
            self.report(progress, walked, tile, lane)
        post(items, item_at, item_words, lambda: (0,), lane)
        if cutlass.const_expr(self.gives_up):
            for _ in cutlass.range_constexpr(self.stages.count):
                self.wait_for_room(parts, PARTS - 1, at)
                at.advance()
                read = self.tell(there, read + 1, lane)
        # The kernel behind this one in the stream waits for this one alone, but needs the end of both.
        cute.arch.griddepcontrol_wait()

    @cute.jit
    def fetch_parts(
        self, parts: cute.Pointer, bulk, block: cute.Tensor, base: cute.Pointer, at, tma_v, mV, token, head, batch,
        tile,
    ):  # fmt: skip
        """Loads the parts of a stage, each as soon as its place is free."""
        for part, (found, size) in enumerate(parts_of(self.config.tiles, self.config.v_tile)):
            full = parts + part * self.stages.count + at.index
            self.wait_for_room(parts, part, at)
            source = block.iterator.align(128)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, size)
                for there, here, length in found:
                    place = at.index * self.stages.size + here - self.stages.begin
                    cute.copy(
                        bulk, view(source, there, length), view(base, place, length, unit=128), mbar_ptr=full,
                        cache_policy=cache_policy(EVICT_FIRST),
                    )  # fmt: skip
            if cutlass.const_expr(part == 0):
                self.fetch_values(tma_v, mV, token, head, batch, tile, base, at.index, full)

    def wait_for_room(self, parts, part, at):
        """Waits until a part of a stage has been read."""
        cute.arch.mbarrier_wait(parts + (PARTS + part) * self.stages.count + at.index, at.phase)

    def place(self, ticket):
        """Returns the machine, and the CTA's first tile of v."""
        per_machine = self.config.v_tiles // self.config.tiles
        return ticket // per_machine, ticket % per_machine * self.config.tiles

    def bounds(self, cu_seqlens, machine, share, blocks, tokens):
        total = self.order.total(cu_seqlens, blocks.shape[0], blocks.shape[1])
        return self.order.bounds(
            cu_seqlens, machine, share, total, blocks.shape[1], tokens, UNCUT, True
        )

    @cute.jit
    def report(self, progress, walked, tile, lane):
        """Says how many steps the machine has begun, to those who prepare the next ones."""
        if (lane == 0) & (tile == 0):
            cute.arch.store(progress, walked, sem="relaxed", scope="gpu")

    @cute.jit
    def tell(self, there: cute.Tensor, read, lane):
        """Says how many chunks have been read for the last time; returns that."""
        if cutlass.const_expr(self.gives_up):
            if lane == 0:
                cute.arch.store(there.iterator + READ, read, sem="release", scope="cta", ss="cta")
        return read

    @cute.jit
    def wait(self, there: cute.Tensor, which: cutlass.Constexpr, number):
        """Waits until one of the words is greater than a number; returns it."""
        word = there.iterator + which
        seen = cute.arch.load(word, I32, sem="acquire", scope="cta", ss="cta")
        while seen <= number:
            nanosleep(50)
            seen = cute.arch.load(word, I32, sem="acquire", scope="cta", ss="cta")
        return seen

    @cute.jit
    def watch(
        self, there: cute.Tensor, blocks: cute.Tensor, cu_seqlens: cute.Tensor, flags: cute.Tensor, machines, ticket,
        share, tokens,
    ):  # fmt: skip
        """Says in `there` how many of the machine's first steps have their blocks.

        By a warp of its own: the fence behind flags waits for whatever else its warp has asked of the memory.
        """
        lane = cute.arch.lane_idx()
        machine, _ = self.place(ticket)
        begin, _, _, end = self.bounds(cu_seqlens, machine, share, blocks, tokens)
        seen = I32(0)
        while seen < end - begin:
            flag = I32(0)
            if lane < cutlass.min(end - begin - seen, LOOK):
                number = machine * share + seen + lane
                flag = cute.arch.load(ready_flag(flags, number), I32, sem="relaxed", scope="gpu")
            ready = cute.arch.vote_ballot_sync(flag != 0)
            found = I32(cute.arch.popc(ready & ~(ready + 1)))  # the ones in front of a zero
            if found == 0:
                nanosleep(100)
            else:
                cute.arch.fence_acq_rel_gpu()
                cute.arch.fence_proxy("async.global")
                cute.arch.sync_warp()
                seen = seen + found
                if lane == 0:
                    cute.arch.store(
                        there.iterator + READY, seen, sem="release", scope="cta", ss="cta"
                    )

    @cute.jit
    def give_up(
        self, there: cute.Tensor, blocks: cute.Tensor, indices: cute.Tensor, targets: cute.Tensor, fresh: cute.Tensor,
        cu_seqlens: cute.Tensor, null_slot, ticket, share, tokens,
    ):  # fmt: skip
        """Keeps blocks that the machine has walked through from being written to memory; by a warp of its own.

        It counts chunks instead of waiting for barriers of stages: nobody waits for it, so these might have two phases
        behind them before it looks.
        """
        lane = cute.arch.lane_idx()
        machine, _ = self.place(ticket)
        begin, rest, cut, end = self.bounds(cu_seqlens, machine, share, blocks, tokens)
        walked, read, given = I32(0), I32(0), I32(0)
        while walked < end - begin:
            step = self.order.walked_within(walked, begin, rest, cut, end)
            here = self.order.find(cu_seqlens, step, blocks.shape[1], tokens, UNCUT, True)
            _, _, length, slot = self.order.tokens_of(cu_seqlens, here.sequence, tokens)
            steps = cutlass.min(here.last - here.chunk, end - step)
            row, _, _ = self.states.rows_of(here.sequence, indices, targets, fresh, null_slot)
            chunks = cutlass.min(cute.ceil_div(length, CHUNK) - here.chunk, steps)
            chunks = cutlass.select_(row < 0, I32(0), chunks)
            for c in cutlass.range(chunks, unroll=1):
                if given >= read:
                    read = self.wait(there, READ, given)
                given = given + 1
                block = blocks[slot + here.chunk + c, here.head, None]
                for i in cutlass.range_constexpr(-(-BLOCK // (64 * 32))):
                    line = 32 * i + lane
                    if line < BLOCK // 64:
                        discard(block.iterator + 64 * line)
            walked = walked + steps
