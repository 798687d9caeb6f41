"""What the roles of both kernels share: a chunk's block in global memory, tables over tokens, views and barriers."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from cula_core.cute.memory import repeated

from ..config import CHUNK, SUB, TRIANGLE

WIDE, SQUARE = CHUNK * 128, CHUNK * CHUNK
PANEL = CHUNK * SUB
# Where the parts of a block begin, in elements of 16 bits. T' and Aqk are panels of 16 columns as shared memory has
# them; panel p begins at the diagonal, with row 16 p.
INVERSE, PRODUCTS, BY_TOKEN = 0, TRIANGLE, 2 * TRIANGLE
# Tables, fp32 per token: what products with the state, q and k are multiplied by. Then the decay of the whole chunk
# and, where sequences are cut, its log2 and what the writes of each warp's tokens may add to that of a state's size.
# Last the powers of two by which keys that are normalised are multiplied before they are converted, in bf16.
SEEN, READ, ADDED, TOTAL = (i * CHUNK for i in range(4))
DECAY, GROWTH, SCALES = TOTAL + 1, TOTAL + 4, TOTAL + 8


class Place(NamedTuple):
    """A slot of one of many that share a pipeline, in the pipeline's own count."""

    index: cutlass.Int32
    phase: cutlass.Int32


def panels(offset):
    """Returns what a triangle holds of a square matrix, as (place in the block, place in the square, elements)."""
    found = []
    for panel in range(CHUNK // SUB):
        missing = panel * SUB * SUB
        found.append((offset, panel * PANEL + missing, PANEL - missing))
        offset += PANEL - missing
    return found


def square(base, operand, slots, stride=None):
    """Returns T' or Aqk [64, 64] of every slot, panels of 16 columns."""
    return repeated(base, (CHUNK, CHUNK), "panels", operand, slots, stride)


def by_pairs(acc):
    """Returns an accumulator of 64 rows as [2 neighbours, 2 rows 8 apart, steps of 8 columns]."""
    return cute.make_tensor(acc.iterator, cute.make_layout((2, 2, cute.size(acc) // 4)))


@cute.jit
def release(pipe, at):
    """Gives a slot back: by one lane, for what its warp has read.

    One arrival; `consumer_release` would be that of a lane of the pipeline's own choice where copies fill it.
    """
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(pipe.sync_object_empty.get_barrier(at.index))
