"""What the roles of the prefill kernel share: constants, layouts of shared memory, items of work."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from cula_core.cute.functions import exp2_pinned
from cula_core.cute.memory import repeated
from cula_core.cute.types import DTYPES, F32, I32
from cula_core.cute.work import SLOTS

from ..config import CHUNK, V_TILE, Config

GATE_SLOTS = 4  # of summed gates
PAIR_SLOTS = 8  # of gates as they are stored, where two CTAs load them for each other
# One token's log2 decay is held at or above this: 2^-150 is zero in fp32, and sums over a chunk stay exact enough.
FLOOR = -150.0
# Contributions to a state that have decayed to less than 2^-REACH are nothing in fp32.
REACH = 126.0
# Floats of a slot of weights: of o, of v, total decay and padding.
TABLE = 2 * CHUNK + 4
BARRIER_WEIGHTS, BARRIER_TILE = 1, 2
# Coefficients of 2^x - 1 from the highest power down to the first.
EXPM1_SERIES = tuple(math.log(2) ** k / math.factorial(k) for k in range(10, 0, -1))


class Item(NamedTuple):
    """What the loading warp announces about an item of work. An item that is not valid means that there are no more.

    row: of its sequence's state, negative for padding. begins: 0 where the sequence begins from zero.
    """

    valid: cutlass.Int32
    token: cutlass.Int32
    batch: cutlass.Int32
    length: cutlass.Int32
    sequence: cutlass.Int32
    slot: cutlass.Int32
    part: cutlass.Int32
    parts: cutlass.Int32
    head: cutlass.Int32
    tile: cutlass.Int32
    row: cutlass.Int32
    begins: cutlass.Int32


@cute.jit
def floored(x):
    """Returns a log2 decay, raised to FLOOR if it is below."""
    return FLOOR if x < FLOOR else x


@cute.jit
def exp2_in_two(x):
    """Returns 2^x for x <= 0 as a sum of two numbers: what a single fp32 loses adds up over thousands of chunks."""
    x = -126.0 if x < -126.0 else x  # below, the smallest normal number stands for zero
    whole = x.to(I32)  # towards zero, so that the rest lies in (-1, 0]
    rest = x - F32(whole)
    series = F32(0.0)
    for k in cutlass.range_constexpr(len(EXPM1_SERIES)):
        series = (series + EXPM1_SERIES[k]) * rest
    high = series + F32(1.0)
    low = (F32(1.0) - high) + series
    power = exp2_pinned(F32(whole))
    return high * power, low * power


class Layout:
    """Static facts of a config, and views of its shared memory.

    A stage holds q (but for a prescan) and k, [64 tokens, K], v of every tile, [64 tokens, 64], and as much for dots.
    """

    def __init__(self, config: Config):
        self.config, self.problem = config, config.problem
        self.dtype = DTYPES[self.problem.dtype]
        self.dim_k, self.tiles, self.stages = self.problem.head_dim_k, config.tiles, config.stages
        self.v_tiles = self.problem.head_dim_v // V_TILE
        self.gate = self.problem.gate_dtype is not None
        self.forward = not config.prescan
        self.reverse = self.problem.reverse
        # Whether a prescan works on pieces of segments.
        self.pieces = self.problem.forgets and not self.problem.packed
        self.k_at = CHUNK * self.dim_k if self.forward else 0  # elements within a stage
        self.v_at = self.k_at + CHUNK * self.dim_k
        self.dots_at = self.v_at + CHUNK * V_TILE * self.tiles
        self.dots = self.problem.dots and self.forward
        self.stage = self.dots_at + CHUNK * V_TILE * self.tiles * self.dots

    def staged(self, base, offset, shape, major):
        """Returns a matrix of every stage, as [rows, columns, stage]."""
        return repeated(base + offset, shape, major, self.dtype, self.stages, self.stage)

    def slots(self, base, shape, major):
        """Returns a matrix of every slot, as [rows, columns, slot]."""
        return repeated(base, shape, major, self.dtype, SLOTS)

    def token_table(self, tables, offset, lane):
        """Returns a table over tokens as this thread's columns of an accumulator see it: [2 neighbours, 8, slot]."""
        whole = cute.make_tensor(
            (tables + offset).align(16), cute.make_layout((2, 4, 8, SLOTS), stride=(1, 2, 8, TABLE))
        )
        return whole[None, lane % 4, None, None]

    def place(self, c, chunks):
        """Returns which of an item's chunks comes as number c."""
        return chunks - 1 - c if self.reverse else c

    @cute.jit
    def slope(self, head_decay: cute.Tensor, head, decay_factor):
        """Returns the log2 decay per token of a head."""
        # Without decay no constant: what the compiler makes of 2^0 in the factors takes more registers than there are.
        slope = decay_factor * F32(0.0)
        if cutlass.const_expr(self.problem.decay):
            slope = floored(head_decay[head] * decay_factor)
        return slope

    def pieces_of(self, segment_tokens, piece_tokens):
        """Returns the number of pieces of a segment."""
        return cute.ceil_div(segment_tokens, piece_tokens) if self.pieces else 1

    @cute.jit
    def first_that_counts(self, head_decay: cute.Tensor, head, decay_factor, segment_tokens):
        """Returns the first token of a segment that counts behind it: the first of a chunk; 0 unless a head forgets."""
        first = I32(0)
        if cutlass.const_expr(self.problem.forgets):
            slope = self.slope(head_decay, head, decay_factor)
            if slope * F32(segment_tokens) < -REACH:
                first = segment_tokens - I32(-REACH / slope)
                first = cutlass.max(first - 1, 0) // CHUNK * CHUNK
        return first
