"""The order in which query tiles are drawn: those with long lists first, so that none of them is the last one."""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from cula_core.cute.types import I32

from ..config import BLOCK_M, CLASSES, COUNTS, NUMBERS, UNIT, OrderConfig
from .steps import Steps

WARPS = 8
TILES = 32  # of a CTA, one per lane of the warp that sorts them


class LiteOrder(Steps):
    """Sorts query tiles by the length of their lists into classes: from a half of all key tiles, an eighth, a 32th, 0.

    Within a class CTAs leave their tiles as they come, which is about the order that they have: the query tiles of a
    head are near each other, as they read the same keys. One CTA has 32 query tiles.
    """

    def __init__(self, config: OrderConfig):
        self.config, self.per_tile = config, config.block_n // UNIT

    @cute.jit
    def __call__(
        self,
        read: cute.Tensor,
        work: cute.Tensor,
        length_q: cutlass.Int32,
        length_k: cutlass.Int32,
        stream,
    ):
        """The arguments of `build.order_arguments`, which describes them."""
        total = read.shape[0] * read.shape[1] * cute.ceil_div(length_q, BLOCK_M)
        self.kernel(read, work, length_q, length_k, total).launch(
            grid=(cute.ceil_div(total, TILES), 1, 1), block=(32 * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        read: cute.Tensor,
        work: cute.Tensor,
        length_q: cutlass.Int32,
        length_k: cutlass.Int32,
        total: cutlass.Int32,
    ):
        lengths = cute.make_tensor(
            SmemAllocator().allocate_array(I32, TILES, byte_alignment=16), cute.make_layout(TILES)
        )
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        for i in cutlass.range_constexpr(TILES // WARPS):
            own = warp * (TILES // WARPS) + i
            self.count(read, length_q, length_k, block * TILES + own, total, lengths, own, lane)
        cute.arch.sync_threads()
        if warp == 0:
            number, listed = block * TILES + lane, lengths[lane]
            tiles = cute.ceil_div(length_k, self.per_tile * UNIT)
            which = I32(0)
            for c in cutlass.range_constexpr(CLASSES - 1):
                which = which + I32(listed << (2 * c + 1) < tiles)
            same, first = I32(0), I32(0)
            for c in cutlass.range_constexpr(CLASSES):
                of_class = I32(cute.arch.vote_ballot_sync((number < total) & (which == c)))
                same = of_class if which == c else same
                first = cute.arch.popc(of_class) if lane == c else first
            if lane < CLASSES:
                first = cute.arch.atomic_add((work.iterator + COUNTS + lane).llvm_ptr, first)
            first = cute.arch.shuffle_sync(first, which)
            if number < total:
                before = cute.arch.popc(same & ((I32(1) << lane) - 1))
                work[NUMBERS + which * total + first + before] = number

    @cute.jit
    def count(
        self, read: cute.Tensor, length_q, length_k, number, total, lengths: cute.Tensor, own, lane
    ):
        """Counts the tiles that a query tile's list holds."""
        listed = I32(0)
        if number < total:
            tile, head, batch = self.place(number, read.shape[1], cute.ceil_div(length_q, BLOCK_M))
            reach, _ = self.reach(tile, length_q, length_k)
            tiles = cute.ceil_div(reach, self.per_tile * UNIT)
            row = read[batch, head, tile, None]
            for word in cutlass.range(lane, cute.ceil_div(tiles, 32), 32, unroll=1):
                listed = listed + cute.arch.popc(self.word(row, tiles, I32(1), word))
        listed = cute.arch.warp_reduction_sum(listed)
        if lane == 0:
            lengths[own] = listed
