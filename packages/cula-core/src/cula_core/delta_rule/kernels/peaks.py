"""The largest magnitude of rows, as bits of fp32: a maximum in any order is the same."""

import cutlass
import cutlass.cute as cute

from ...cute.memory import view
from ...cute.types import F32, I32


@cute.jit
def raise_peak(x: cute.Tensor, peaks: cute.Tensor, head, rows, channel, lane):
    """Raises the head's peak to the largest magnitude of 16 bytes of each row from the channel on, among all lanes of a
    warp. x: 16-bit rows [T, 128]. A NaN is larger than infinity."""
    count = 128 // x.element_type.width
    words = cute.make_rmem_tensor((count // 2, len(rows)), I32)
    for j in cutlass.range_constexpr(len(rows)):
        target = cute.recast_tensor(words[None, j], x.element_type)
        cute.autovec_copy(view(x[rows[j], None].iterator, channel, count), target)
    largest = I32(0)
    for i in cutlass.range_constexpr(cute.size(words)):
        largest = cutlass.max(largest, words[i] & 0x7FFF)
        largest = cutlass.max(largest, words[i] >> 16 & 0x7FFF)
    largest = cute.arch.warp_redux_sync(largest, "max")
    if lane == 0:
        bits = cute.make_rmem_tensor(1, I32)
        bits[0] = largest
        value = cute.make_rmem_tensor(1, F32)
        value[0] = cute.recast_tensor(bits, x.element_type)[0].to(F32)
        peak = cute.recast_tensor(value, I32)[0]
        cute.arch.atomic_max((peaks.iterator + head).llvm_ptr, peak)
