"""Outputs of the recurrence: tiles of 64 tokens and 64 columns, which one warp sends to global memory.

The warpgroup that computes a tile only stores it to shared memory; it never waits for a copy.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import cpasync

from cula_core.cute.memory import EVICT_FIRST, cache_policy, repeated
from cula_core.cute.output import row_units
from cula_core.cute.work import SLOTS, receive

from ..config import CHUNK, V_TILE
from .items import Item
from .layout import Place, release

TALL = CHUNK * V_TILE
WARP = 32


class Outputs:
    """Slots of a tile's outputs, `SLOTS` per tile. A full chunk is sent by TMA, another one by ordinary stores."""

    def __init__(self, dtype, tiles: int, packed: bool):
        self.dtype, self.tiles, self.packed = dtype, tiles, packed

    def make_pipe(self, smem):
        """Returns the pipeline of all tiles' slots: filled by four warps, emptied by one."""

        def warps(count):
            return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)

        slots = SLOTS * self.tiles
        return pipeline.PipelineAsync.create(
            barrier_storage=smem.allocate_array(cutlass.Int64, 2 * slots),
            num_stages=slots,
            producer_group=warps(4),
            consumer_group=warps(1),
            defer_sync=True,
        )

    def slots(self, base: cute.Pointer, tile, major="k"):
        """Returns outputs [64 tokens, 64] of a tile's slots; with major "mn" their transpose."""
        own = base + cute.assume(tile * (SLOTS * TALL), divby=SLOTS * TALL)
        return repeated(own, (CHUNK, V_TILE), major, self.dtype, SLOTS)

    def place(self, at, tile):
        """Returns a state of a tile's own slots as one of the pipeline of all tiles."""
        return Place(tile * SLOTS + at.index, at.phase)

    @cute.jit
    def store(self, at, copy, o: cute.Tensor, target: cute.Tensor):
        """Rounds an accumulator and stores it to a tile's slot; by its warpgroup."""
        rounded = cute.make_rmem_tensor(o.shape, self.dtype)
        rounded.store(o.load().to(self.dtype))
        cute.copy(copy, copy.retile(rounded), target[None, None, None, at.index])
        cute.arch.sync_warp()

    @cute.jit
    def commit(self, pipe, at, tile):
        """Hands a tile's slot over to who sends it; by its warpgroup."""
        with cute.arch.elect_one():
            pipe.producer_commit(self.place(at, tile))

    @cute.jit
    def send(
        self, pipe, items, item_words: cute.Pointer, base: cute.Pointer, tma, mO: cute.Tensor, out: cute.Tensor
    ):  # fmt: skip
        """Sends the outputs of all items; by a warp."""
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        item = receive(Item, items, item_at, item_words)
        item_at.advance()
        while item.valid != 0:
            batch = cutlass.Int32(0)
            if cutlass.const_expr(not self.packed):
                batch = item.sequence
            if item.row < 0:
                for tile in cutlass.range_constexpr(self.tiles):
                    self.clear(out, batch, item, item.tile + tile)
            rows = cute.domain_offset((item.token, 0), mO[None, None, item.head, batch])
            for c in cutlass.range(item.chunks, unroll=1):
                left = item.length - c * CHUNK
                for tile in cutlass.range_constexpr(self.tiles):
                    place, column = self.place(at, tile), item.tile + tile
                    source = self.slots(base, tile)[None, None, at.index]
                    pipe.consumer_wait(place)
                    if left >= CHUNK:
                        # For those who have stored: they do not wait for it.
                        cute.arch.fence_view_async_shared()
                        target = cute.local_tile(rows, (CHUNK, V_TILE), (c, column))
                        s, g = cpasync.tma_partition(
                            tma, 0, cute.make_layout(1), cute.group_modes(source, 0, 2),
                            cute.group_modes(target, 0, 2),
                        )  # fmt: skip
                        cute.copy(tma, s, g, cache_policy=cache_policy(EVICT_FIRST))
                        cute.arch.cp_async_bulk_commit_group()
                    else:
                        units, found = self.rows(out, batch, item, c, column)
                        self.copy_rows(units.partition_S(source), found, left)
                for tile in cutlass.range_constexpr(self.tiles):
                    cute.arch.cp_async_bulk_wait_group(self.tiles - 1 - tile, read=True)
                    release(pipe, self.place(at, tile))
                at.advance()
            item = receive(Item, items, item_at, item_words)
            item_at.advance()
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def clear(self, out: cute.Tensor, batch, item: Item, column):
        """Writes zeros: the outputs of a skipped sequence."""
        for c in cutlass.range(cute.ceil_div(item.length, CHUNK), unroll=1):
            _, target = self.rows(out, batch, item, c, column)
            held = cute.make_rmem_tensor(target[None, 0, 0].shape, self.dtype)
            held.fill(0.0)
            zeros = cute.make_tensor(
                held.iterator, cute.make_layout(target.shape, stride=((1, 0), 0, 0))
            )
            self.copy_rows(zeros, target, item.length - c * CHUNK)

    def rows(self, out, batch, item, c, column):
        """Returns a copy by 16 bytes, and the lane's part of a chunk in global memory."""
        units = row_units(self.dtype, cute.arch.lane_idx(), WARP)
        tokens = cute.domain_offset((item.token + c * CHUNK, 0), out[batch, None, item.head, None])
        return units, units.partition_D(cute.local_tile(tokens, (CHUNK, V_TILE), (0, column)))

    @cute.jit
    def copy_rows(self, source: cute.Tensor, target: cute.Tensor, left):
        """Copies the lane's part of the first `left` rows: those behind them are other tokens'."""
        held = cute.make_rmem_tensor(target[None, 0, 0].shape, self.dtype)
        rows = cutlass.min(cutlass.max(left, 0), CHUNK)
        for i in cutlass.range(cute.ceil_div(rows, WARP // 8), unroll=1):
            if cute.arch.lane_idx() // 8 + WARP // 8 * i < rows:
                cute.autovec_copy(source[None, i, 0], held)
                cute.autovec_copy(held, target[None, i, 0])
