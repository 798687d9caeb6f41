"""Sums over the threads of a warp."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

_WARP = 32


@cute.jit
def prefix_sum(value, lane):
    """Returns the sum of the values of this lane and those below it."""
    for i in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << i, mask_and_clamp=0)
        value = value + below if lane >= 1 << i else value
    return value


@cute.jit
def reduce_scatter(
    values,
    count: cutlass.Constexpr,
    step: cutlass.Constexpr,
    neighbours_first: cutlass.Constexpr = False,
):
    """Sums lists over `count` threads that lie `step` lanes apart.

    While there are values to halve, each exchange keeps half of them, so that a thread ends with a few finished sums:
    returns the number of the first one, whether this thread is the one to write them, and the sums. The values are as
    many as a power of two. neighbours_first: threads that are `step` lanes apart exchange first, and those that are
    farthest apart last.
    """
    lane = cute.arch.lane_idx()
    index, owner = Int32(0), Boolean(True)
    offset = step if neighbours_first else count * step // 2
    while cutlass.const_expr(step <= offset < count * step):
        upper = (lane & offset) != 0
        half = len(values) // 2
        if cutlass.const_expr(half > 0):
            kept = []
            for i in cutlass.range_constexpr(half):
                mine = cutlass.select_(upper, values[half + i], values[i])
                other = cutlass.select_(upper, values[i], values[half + i])
                kept.append(mine + cute.arch.shuffle_sync_bfly(other, offset=offset))
            index = index + cutlass.select_(upper, Int32(half), Int32(0))
            values = kept
        else:
            values = [values[0] + cute.arch.shuffle_sync_bfly(values[0], offset=offset)]
            owner = owner and not upper
        offset = offset * 2 if neighbours_first else offset // 2
    return index, owner, values


@cute.jit
def all_sums(values, count: cutlass.Constexpr):
    """Returns the sums of a list over `count` neighbouring threads, to each of them."""
    total = 1 << (len(values) - 1).bit_length()
    padded = list(values) + [values[0] * 0.0] * (total - len(values))
    _, _, kept = reduce_scatter(padded, count, 1)
    clamp = ((_WARP - count) << 8) | (_WARP - 1)
    sums = []
    for i in cutlass.range_constexpr(len(values)):
        # The thread that has number i: in every exchange the upper half of the threads keeps the upper half of values.
        source, half, offset = 0, total // 2, count // 2
        while half > 0 and offset > 0:
            source, half, offset = source + (offset if i & half else 0), half // 2, offset // 2
        own = kept[i % len(kept)]
        sums.append(cute.arch.shuffle_sync(own, source, mask_and_clamp=clamp))
    return sums
