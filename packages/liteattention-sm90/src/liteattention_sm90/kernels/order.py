"""The order in which tiles are worked on: those with long lists first, so that none of them is the last one."""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from cula_core.cute.schedule import THREADS, SegmentTable
from cula_core.cute.types import I32

from ..config import ARRIVED, BLOCK_M, CLASSES, NUMBERS, STEP, UNIT, OrderConfig
from .packed import sequence_of
from .shared import lowest
from .steps import Steps

WARPS = THREADS // 32
TILES = 32  # of a CTA, one per lane of the warp that sorts them


class LiteOrder(Steps):
    """Sorts tiles into classes by the lengths of their lists, and leaves them in their order within a class.

    They are query tiles, or tiles of 128 keys with the query tiles of all heads that list them.

    So neighbours mostly belong to one head, and read the same keys. Each CTA finds the classes of 32 tiles, and
    the last one to do so the places of all. A class begins at 3/8, 3/32, 3/128 or none of all there are: hardly where
    the lengths of many lists are. Tiles behind the end of a packed sequence have none.
    """

    def __init__(self, config: OrderConfig):
        self.config, self.per_tile = config, config.block_n // UNIT
        self.table = SegmentTable(1)

    @cute.jit
    def __call__(
        self,
        read: cute.Tensor,
        work: cute.Tensor,
        starts_q: cute.Tensor,
        starts_k: cute.Tensor,
        length_q: cutlass.Int32,
        length_k: cutlass.Int32,
        group: cutlass.Int32,
        stream,
    ):
        """The arguments of `build.order_arguments`, which describes them."""
        rows = cute.ceil_div(length_q, BLOCK_M)
        if cutlass.const_expr(self.config.of_keys):
            rows = cute.ceil_div(length_k, STEP)
        total = read.shape[0] * (read.shape[1] // group) * rows
        self.kernel(read, work, starts_q, starts_k, length_q, length_k, group, total).launch(
            grid=(cute.ceil_div(total, TILES), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        read: cute.Tensor,
        work: cute.Tensor,
        starts_q: cute.Tensor,
        starts_k: cute.Tensor,
        length_q: cutlass.Int32,
        length_k: cutlass.Int32,
        group: cutlass.Int32,
        total: cutlass.Int32,
    ):
        smem = SmemAllocator()
        lengths = cute.make_tensor(
            smem.allocate_array(I32, TILES, byte_alignment=16), cute.make_layout(TILES)
        )
        shared = cute.make_tensor(
            smem.allocate_array(I32, WARPS + 1, byte_alignment=16), cute.make_layout(WARPS + 1)
        )
        block, _, _ = cute.arch.block_idx()
        chunks, _, _ = cute.arch.grid_dim()
        tidx, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        for i in cutlass.range_constexpr(TILES // WARPS):
            own = warp * (TILES // WARPS) + i
            number = block * TILES + own
            listed = I32(0)
            if number < total:
                if cutlass.const_expr(self.config.of_keys):
                    listed = self.queries(
                        read, starts_q, starts_k, length_q, length_k, group, number, lane
                    )
                else:
                    listed = self.keys(read, starts_q, starts_k, length_q, length_k, number, lane)
            listed = cute.arch.warp_reduction_sum(listed)
            if lane == 0:
                lengths[own] = listed
        cute.arch.sync_threads()
        # Of each class, a bit per query tile.
        found = cute.make_tensor(
            work.iterator + NUMBERS + total, cute.make_layout((chunks, CLASSES))
        )
        if warp == 0:
            number, listed = block * TILES + lane, lengths[lane]
            tiles = cute.ceil_div(length_k, self.per_tile * UNIT)
            if cutlass.const_expr(self.config.of_keys):
                tiles = cute.ceil_div(length_q, BLOCK_M) * group
            which = I32(0)
            for c in cutlass.range_constexpr(CLASSES - 1):
                which = which + I32(listed << (2 * c + 3) < 3 * tiles)
            for c in cutlass.range_constexpr(CLASSES):
                of_class = cute.arch.vote_ballot_sync((number < total) & (which == c))
                if lane == c:
                    found[block, c] = I32(of_class)
                    cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_warp()
            if lane == 0:
                shared[WARPS] = cute.arch.atomic_add((work.iterator + ARRIVED).llvm_ptr, I32(1))
        cute.arch.sync_threads()
        if shared[WARPS] == chunks - 1:
            cute.arch.fence_acq_rel_gpu()
            self.sort(found, work, chunks, shared, tidx)

    @cute.jit
    def sort(self, found: cute.Tensor, work: cute.Tensor, chunks, shared: cute.Tensor, tidx):
        """Writes the numbers of all query tiles, those of the first class first."""
        done = I32(0)
        for c in cutlass.range_constexpr(CLASSES):
            for first in cutlass.range(0, chunks, THREADS, unroll=1):
                chunk = first + tidx
                bits = found[chunk, c] if chunk < chunks else I32(0)
                before, all_of_them = self.table.scan(cute.arch.popc(bits), shared, tidx)
                at = NUMBERS + done + before
                while bits != 0:
                    work[at] = chunk * TILES + lowest(bits)
                    bits = bits & (bits - 1)
                    at = at + 1
                done = done + all_of_them

    @cute.jit
    def keys(self, read: cute.Tensor, starts_q, starts_k, length_q, length_k, number, lane):
        """Returns how many key tiles a query tile lists in words of this lane."""
        listed = I32(0)
        tile, head, batch = self.place(number, read.shape[1], cute.ceil_div(length_q, BLOCK_M))
        _, queries = sequence_of(batch, starts_q, length_q)
        _, keys = sequence_of(batch, starts_k, length_k)
        reach, _ = self.reach(tile, queries, keys)
        tiles = cute.ceil_div(reach, self.per_tile * UNIT)
        if cutlass.const_expr(self.config.packed is not None):
            tiles = tiles if tile * BLOCK_M < queries else I32(0)
        row = read[batch, head, tile, None]
        for word in cutlass.range(lane, cute.ceil_div(tiles, 32), 32, unroll=1):
            listed = listed + cute.arch.popc(self.word(row, tiles, I32(1), word))
        return listed

    @cute.jit
    def queries(
        self, across: cute.Tensor, starts_q, starts_k, length_q, length_k, group, number, lane
    ):
        """Returns how many query tiles of all heads of a group list any of 128 keys in words of this lane."""
        listed = I32(0)
        rows = cute.ceil_div(length_k, STEP)
        tile, rest = number % rows, number // rows
        first, batch = rest % (across.shape[1] // group) * group, rest // (across.shape[1] // group)
        _, queries = sequence_of(batch, starts_q, length_q)
        words = cute.ceil_div(cute.ceil_div(queries, BLOCK_M), 32)
        if cutlass.const_expr(self.config.packed is not None):
            _, keys = sequence_of(batch, starts_k, length_k)
            words = words if tile * STEP < keys else I32(0)
        per_step = 2 // self.per_tile
        for i in cutlass.range(lane, group * words, 32, unroll=1):
            bits = I32(0)
            for half in cutlass.range_constexpr(per_step):
                row = tile * per_step + half
                if row < across.shape[2]:
                    bits = bits | across[batch, first + i // words, row, i % words]
            listed = listed + cute.arch.popc(bits)
        return listed
