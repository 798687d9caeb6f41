"""What the kernels that compute the gradients of chunks share: inputs that a warp loads, as others give the memory of
the chunk before back, and the gradients that y and z alone decide."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import T, dsl_user_op

from ....cute.memory import by_token, load_tile, repeated, swizzled, view
from ....cute.output import GROUP
from ....cute.types import DTYPES, F32, I32
from ...config import CHUNK
from ...kernels.block import SQUARE

THREADS = 2 * GROUP  # that compute
WARPS = THREADS // 32
BARRIER = 1  # the named one of these threads


class Place(NamedTuple):
    """Where a chunk is. left: tokens from its first one to the end of the sequence."""

    batch: cutlass.Int32
    token: cutlass.Int32
    head: cutlass.Int32
    left: cutlass.Int32

    def rows(self, x: cute.Tensor):
        """Returns what a tensor [B, T, HV, ...] has of the head, from the first token on."""
        own = x[(self.batch, None, self.head, *(None,) * (cute.rank(x) - 3))]
        return cute.domain_offset((self.token, *(0,) * (cute.rank(own) - 1)), own)


@dsl_user_op
def renewed(x, *, loc=None, ip=None):
    """Returns an integer unchanged, of which the compiler does not know that: what it computes from it in a loop, it
    computes there, and keeps no registers for it around the loop; and what it is computed from, it computes here."""
    wide = isinstance(x, cutlass.Int64)
    kind, register, bits = (cutlass.Int64, "l", 64) if wide else (I32, "r", 32)
    return kind(
        llvm.inline_asm(
            T.i64() if wide else T.i32(),
            [kind(x).ir_value(loc=loc, ip=ip)],
            f"mov.b{bits} $0, $1;",
            f"={register},{register}",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def address_of(matrix: cute.Tensor, row, channel, apart: int):
    """Returns the address of an element of a row in global memory, and the bytes to that of the row `apart` further.

    Both are computed here, and not once more wherever a branch stores a row.
    """
    first = (matrix[row, None].iterator + channel).toint()
    step = matrix.stride[0] * (apart * matrix.element_type.width // 8)
    return renewed(cutlass.Int64(first)), renewed(cutlass.Int64(step))


def elements_at(matrix: cute.Tensor, address, size: int):
    """Returns so many neighbours of a row of a matrix, at an address that is a multiple of their bytes."""
    align = size * matrix.element_type.width // 8
    space = cute.AddressSpace.gmem
    pointer = cute.make_ptr(matrix.element_type, address, space, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(size))


class ChunkKernel:
    """Base of the kernels. shared: what a kernel has in shared memory; of it are read full and empty, barriers of every
    input, y, and factors [4, token] as `Tokens` writes them."""

    def __init__(self, config):
        self.config = config
        self.dtype, self.operand = DTYPES[config.dtype], DTYPES[config.operand]

    def tma(self, x, dtype, columns):
        """Returns how tiles of 64 tokens and so many channels are loaded, and the whole tensor seen so."""
        tile = (CHUNK, columns)
        load, layout = cpasync.CopyBulkTensorTileG2SOp(), swizzled(tile, "k", dtype)
        atom, whole = cpasync.make_tiled_tma_atom(load, by_token(x), layout, tile)
        return atom, whole

    @cute.jit
    def init_barriers(self, shared, inputs: cutlass.Constexpr, tidx):
        """Makes the barriers of so many inputs."""
        if tidx == 0:
            for i in cutlass.range_constexpr(inputs):
                cute.arch.mbarrier_init(shared.full + i, 1)
                cute.arch.mbarrier_init(shared.empty + i, THREADS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    @cute.jit
    def fill(self, shared, which: cutlass.Constexpr, size: cutlass.Constexpr, phase):
        """Waits until an input is given back, announces so many bytes and returns the barrier that hears of them."""
        cute.arch.mbarrier_wait(shared.empty + which, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(shared.full + which, size)
        return shared.full + which

    @cute.jit
    def load_tokens(self, tma, whole: cute.Tensor, head, batch, token, target: cute.Pointer, full):
        """Loads both panels of 64 channels of the chunk's tokens."""
        target = cute.recast_ptr(target, dtype=self.dtype)
        panels = repeated(target, (CHUNK, 64), "k", self.dtype, 2)
        for i in cutlass.range(2, unroll=1):  # fewer addresses, which the warp has no registers for
            load_tile(tma, whole, token, head, batch, i, panels[None, None, i], full)

    @cute.jit
    def load_image(self, source: cute.Tensor, target: cute.Pointer, full):
        """Loads what lies in memory as it does in shared memory."""
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), source.element_type)
        size = cute.size(source)
        with cute.arch.elect_one():
            cute.copy(
                bulk, view(source.iterator.align(128), 0, size), view(target.align(128), 0, size), mbar_ptr=full
            )  # fmt: skip

    def sync(self):
        """Waits for all threads that compute."""
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=THREADS)

    def wait(self, shared, which, phase):
        """Waits for an input."""
        cute.arch.mbarrier_wait(shared.full + which, phase)

    def give_back(self, shared, *inputs):
        """Says that the thread needs inputs no more, and has written what it wrote there."""
        cute.arch.fence_view_async_shared()
        for which in inputs:
            cute.arch.mbarrier_arrive(shared.empty + which)

    @cute.jit
    def store_strength(self, shared, d_beta: cute.Tensor, i, minus_yz):
        """Writes dbeta of a token, of -y . z."""
        root, given = view(shared.factors, i, 1)[0], view(shared.factors, 3 * CHUNK + i, 1)[0]
        most, result = 2.0 if self.config.neg_eigval else 1.0, -minus_yz / root
        if cutlass.const_expr(self.config.beta_sigmoid):
            result = result * given * (1.0 - root * given * (1.0 / most))
        else:
            result = result * most / root
        d_beta[i] = result.to(d_beta.element_type)

    @cute.jit
    def store_values(
        self, shared, dv: cute.Tensor, shrunk, left, tidx, threads: cutlass.Constexpr = THREADS
    ):
        """Writes dv = r y; by so many threads."""
        y, wide = cute.make_rmem_tensor(8, self.operand), cute.make_rmem_tensor(8, F32)
        rounded = cute.make_rmem_tensor(8, self.dtype)
        first, apart = tidx // 8, threads // 8
        address, step = address_of(dv, first, (tidx % 8 ^ first % 8) * 8, apart)
        for i in cutlass.range_constexpr(CHUNK // apart):
            row = first + apart * i
            if row < left:
                factor = -shrunk * view(shared.factors, 3 * CHUNK + row, 1)[0]
                for panel in cutlass.range_constexpr(2):
                    cute.autovec_copy(
                        view(shared.y, panel * SQUARE + 64 * row + tidx % 8 * 8, 8), y
                    )
                    wide.store(y.load().to(F32) * factor)
                    rounded.store(wide.load().to(self.dtype))
                    at = address + panel * 8 * self.dtype.width
                    cute.autovec_copy(rounded, elements_at(dv, at, 8))
            address = address + step
