"""16-bit numbers as fp32 in registers, and fp32 as 16-bit numbers in memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32


@cute.jit
def widened(rX, again: cutlass.Constexpr = False):
    """Returns the elements as fp32. again: by other instructions, so that the compiler does not keep what it widened
    before in registers."""
    rWide = cute.make_rmem_tensor(rX.shape, Float32)
    count = cute.size(rX)
    if cutlass.const_expr(rX.element_type not in (cutlass.BFloat16, cutlass.Float16) or count % 2):
        rWide.store(rX.load().to(Float32))
        return rWide
    pairs = cute.recast_tensor(cute.make_tensor(rX.iterator, cute.make_layout(count)), Uint32)
    flat = cute.make_tensor(rWide.iterator, cute.make_layout(count))
    if cutlass.const_expr(rX.element_type is cutlass.BFloat16):
        # One instruction for each element; the compiler takes two for the upper one of a pair.
        bits = cute.recast_tensor(flat, Uint32)
        for i in cutlass.range_constexpr(count // 2):
            if cutlass.const_expr(again):
                bits[2 * i] = Uint32(cute.arch.prmt(pairs[i], 0, 0x1044))
                bits[2 * i + 1] = Uint32(cute.arch.prmt(pairs[i], 0, 0x3244))
            else:
                bits[2 * i] = pairs[i] << Uint32(16)
                bits[2 * i + 1] = pairs[i] & Uint32(0xFFFF0000)
    elif cutlass.const_expr(again):
        rSwapped = cute.make_rmem_tensor(2, cutlass.Float16)
        for i in cutlass.range_constexpr(count // 2):
            cute.recast_tensor(rSwapped, Uint32)[0] = Uint32(cute.arch.prmt(pairs[i], 0, 0x1032))
            flat[2 * i], flat[2 * i + 1] = rSwapped[1].to(Float32), rSwapped[0].to(Float32)
    else:
        rWide.store(rX.load().to(Float32))
    return rWide


@cute.jit
def read(source: cute.Tensor, s: cute.Tensor):
    """Loads a thread's elements of memory, of any dtype, into fp32 registers."""
    if cutlass.const_expr(source.element_type is s.element_type):
        cute.autovec_copy(source, s)
    else:
        own = cute.make_rmem_tensor_like(s, source.element_type)
        cute.autovec_copy(source, own)
        s.store(own.load().to(s.element_type))


@cute.jit
def write(s: cute.Tensor, target: cute.Tensor):
    """Stores fp32 registers in a thread's elements of memory, rounded to the nearest of their dtype."""
    if cutlass.const_expr(target.element_type is s.element_type):
        cute.autovec_copy(s, target)
    else:
        own = cute.make_rmem_tensor_like(s, target.element_type)
        own.store(s.load().to(target.element_type))
        cute.autovec_copy(own, target)
