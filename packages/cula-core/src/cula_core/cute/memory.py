"""Views and copies of a few neighbouring elements, and layouts of tiles in shared memory."""

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup


def view(pointer, offset, size, unit=None):
    """Returns `size` neighbours behind a pointer as a tensor.

    The offset is a multiple of `unit` elements (of `size` if it is None). Said so, it keeps the pointer's alignment at
    no cost, where `align` would compute an address.
    """
    if not isinstance(offset, int):
        offset = cute.assume(offset, divby=size if unit is None else unit)
    return cute.make_tensor(pointer + offset, cute.make_layout(size))


@cute.jit
def copy_async(source: cute.Tensor, target: cute.Tensor):
    """Starts an asynchronous copy of 16 bytes from global to shared memory (cp.async)."""
    mode = cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL)
    copy = cute.make_copy_atom(mode, source.element_type, num_bits_per_copy=128)
    cute.copy(copy, source, target)


def swizzled(shape, major, dtype):
    """Returns the swizzled layout of a matrix in shared memory, as TMA writes it and tensor cores read it.

    major: the contiguous mode, "k" or "mn" with the 128-byte swizzle, or "panels", which are 16 columns of k wide and
    have the 32-byte swizzle.
    """
    kinds = warpgroup.SmemLayoutAtomKind
    kind = {"k": kinds.K_SW128, "mn": kinds.MN_SW128, "panels": kinds.K_SW32}[major]
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, shape, order=(1, 0) if major == "mn" else (0, 1))


def by_token(x):
    """Returns [B, T, H, D] seen as (T, D, H, B), so that a tile of tokens and channels comes first."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))
