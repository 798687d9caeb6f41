"""What the kernels share: the block that a chunk and value head occupies between them, and small device functions."""

import math

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from .config import CHUNK, HEAD_DIM, SUB, TRIANGLE

F16, F32, I32 = cutlass.Float16, cutlass.Float32, cutlass.Int32
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": F16, "float32": F32}
INDICES = {"int32": I32, "int64": cutlass.Int64}
LOG2_E = math.log2(math.e)

WIDE, SQUARE = CHUNK * HEAD_DIM, CHUNK * CHUNK
# Where the parts of a block begin, in elements of 16 bits. Wide matrices are panels of 64 columns in which row r has
# its units of 16 bytes at unit ^ (r % 8): the 128-byte swizzle that tensor cores read. T' and Aqk are panels of 16
# columns with the 32-byte swizzle, unit ^ (r / 4 % 2); panel p begins at the diagonal, with row 16 p.
QG, KH, KG, DECAY = 0, WIDE, 2 * WIDE, 3 * WIDE
T_PRIME = DECAY + 2 * HEAD_DIM
AQK = T_PRIME + TRIANGLE
BLOCK = AQK + TRIANGLE
PANEL = CHUNK * SUB
# Their whole panels in shared memory.
STAGED_AQK = T_PRIME + SQUARE
STAGED_BLOCK = STAGED_AQK + SQUARE


def runs(begin, end):
    """What a stage holds of a block, from `begin` to `end` there: (where in the block, where in the stage, elements).
    Between them are the rows that panels do not have."""
    found = [(begin, begin, T_PRIME - begin)]
    source, target = T_PRIME, T_PRIME
    while source < end:
        missing = (target - T_PRIME) // PANEL * SUB % CHUNK * SUB
        size = PANEL - missing
        if missing:
            found.append((source, target + missing, size))
        else:
            at, there, before = found.pop()
            found.append((at, there, before + size))
        source, target = source + size, target + PANEL
    return found


def swizzled(shape, major, dtype):
    """A matrix as it lies in shared memory. `major`: which mode is contiguous, "k" or "mn", or "panels" of 16 in k."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = {"k": kinds.K_SW128, "mn": kinds.MN_SW128, "panels": kinds.K_SW32}[major]
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, shape, order=(1, 0) if major == "mn" else (0, 1))


def view(pointer, offset, size, unit=None):
    """`size` neighbours behind a pointer, at a multiple of `unit` elements (of their number, unless told): the
    pointer's alignment is kept, where `align` would compute it."""
    if not isinstance(offset, int):
        offset = cute.assume(offset, divby=size if unit is None else unit)
    return cute.make_tensor(pointer + offset, cute.make_layout(size))


@cute.jit
def ask(source: cute.Tensor, target: cute.Tensor):
    """16 bytes to shared memory, asynchronously."""
    mode = cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL)
    copy = cute.make_copy_atom(mode, source.element_type, num_bits_per_copy=128)
    cute.copy(copy, source, target)


def by_token(x):
    """[B, T, H, D] seen as (T, D, H, B), so that a tile of tokens and channels comes first."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))


@cute.jit
def exp2(x):
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def sigmoid(x):
    return cute.arch.rcp_approx(1.0 + exp2(-LOG2_E * x))


@cute.jit
def first_slot_of(cu_seqlens: cute.Tensor, sequence):
    """Where the chunks of a packed sequence are kept: these ranges never meet, whatever the lengths."""
    return I32(cu_seqlens[sequence]) // CHUNK + sequence


@cute.jit
def find_chunk(cu_seqlens, per_row, slot, tokens):
    """(batch, first token, tokens from there to the end of the sequence) of a chunk slot; <= 0 tokens: it is unused.

    A dense batch has no cu_seqlens, but `per_row` chunks in every row."""
    if cutlass.const_expr(cu_seqlens is None):
        batch, chunk = divmod(slot, per_row)
        return batch, chunk * CHUNK, tokens - chunk * CHUNK
    else:
        # The last sequence whose chunks begin at or before the slot, found by all lanes of a warp together.
        lane = cute.arch.lane_idx()
        low, high = I32(0), I32(cute.size(cu_seqlens) - 1)
        while high - low > 1:
            step = cute.ceil_div(high - low, 32)
            probe = low + lane * step
            before = cutlass.Boolean(False)
            if probe < high:
                before = first_slot_of(cu_seqlens, probe) <= slot
            low = low + (I32(cute.arch.popc(cute.arch.vote_ballot_sync(before))) - 1) * step
            high = cutlass.min(high, low + step)
        start, end = I32(cu_seqlens[low]), I32(cu_seqlens[low + 1])
        past = (slot - first_slot_of(cu_seqlens, low)) * CHUNK
        return I32(0), start + past, end - start - past
