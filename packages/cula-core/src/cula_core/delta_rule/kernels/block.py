"""The block of memory that a chunk and value head occupies between the kernels, and which chunk a block belongs to."""

import cutlass
import cutlass.cute as cute

from ...cute.types import I32
from ..config import CHUNK, HEAD_DIM, SUB, TRIANGLE

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


def panels(source, target):
    """Returns runs (place in the block, place in the stage, elements) of a triangle, from these places on. Between them
    are the rows that panels do not have."""
    found = []
    for panel in range(CHUNK // SUB):
        missing = panel * SUB * SUB
        found.append((source, target + missing, PANEL - missing))
        source, target = source + PANEL - missing, target + PANEL
    return found


def runs(begin, end):
    """Returns what a stage holds of a block, from `begin` to `end` of the block, in as few runs as possible."""
    found = [(begin, begin, T_PRIME - begin)]
    for run in panels(T_PRIME, T_PRIME) + (panels(AQK, STAGED_AQK) if end > AQK else []):
        source, target, size = found[-1]
        if (source + size, target + size) == run[:2]:
            found[-1] = source, target, size + run[2]
        else:
            found.append(run)
    return found


@cute.jit
def first_slot_of(cu_seqlens: cute.Tensor, sequence):
    """Returns the first slot of a packed sequence: the slots of two sequences never overlap, whatever the lengths."""
    return I32(cu_seqlens[sequence]) // CHUNK + sequence


def find_chunk(cu_seqlens, per_row, slot, tokens):
    """Returns (batch, first token, tokens from there to the end of the sequence) of a chunk slot.

    A slot with no token (<= 0) is unused. A dense batch has no cu_seqlens, but `per_row` chunks in every row.
    """
    sequence, token, left = find_chunk_of_sequence(cu_seqlens, per_row, slot, tokens)
    return sequence if cu_seqlens is None else I32(0), token, left


@cute.jit
def find_chunk_of_sequence(cu_seqlens, per_row, slot, tokens):
    """Returns the same as `find_chunk`, but in place of the batch the number of the sequence."""
    if cutlass.const_expr(cu_seqlens is None):
        sequence, chunk = divmod(slot, per_row)
        return sequence, chunk * CHUNK, tokens - chunk * CHUNK
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
        return low, start + past, end - start - past
