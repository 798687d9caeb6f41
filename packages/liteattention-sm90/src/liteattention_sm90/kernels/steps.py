"""Which keys a CTA visits: from the lists of its query tiles to one stream of steps, and back to the next lists."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from cula_core.cute.types import I32

from ..config import BLOCK_M, MAX_WORDS, STEP, UNIT, ForwardConfig
from .shared import Layout

NONE = -1
FIRST, MASK, END = 1, 2, 4  # flags of a step
SLOT = 3  # the bit above them, from which on there is the slot of the queries
ROUNDS = MAX_WORDS // 32


class Place(NamedTuple):
    """A query tile: whether it is one, its number, head, batch, first row, and the tiles that its list holds."""

    valid: cutlass.Int32
    tile: cutlass.Int32
    head: cutlass.Int32
    batch: cutlass.Int32
    listed: cutlass.Int32


class PackedPlace(NamedTuple):
    """The same, `batch` the number of a packed sequence, and where that lies."""

    valid: cutlass.Int32
    tile: cutlass.Int32
    head: cutlass.Int32
    batch: cutlass.Int32
    listed: cutlass.Int32
    first_q: cutlass.Int32
    length_q: cutlass.Int32
    first_k: cutlass.Int32
    length_k: cutlass.Int32


class Steps(Layout):
    """Static facts of a config, and what warps of the loading warpgroup find out about lists.

    A step is 128 keys in two units of 64: two listed tiles of 64, or one of 128. Units are counted from the first key.
    """

    def __init__(self, config: ForwardConfig):
        super().__init__(config)
        self.per_tile = config.block_n // UNIT if config.skip else STEP // UNIT  # units
        self.kind = Place if config.packed is None else PackedPlace

    @property
    def nowhere(self):
        """What there is behind the last query tile."""
        return self.kind(*(0,) * len(self.kind._fields))

    def sequences_of(self, place, length_q, length_k):
        """Returns the sequences of queries and of keys of a place; of a batch they all have these lengths."""
        if self.config.packed is None:
            return (None, length_q), (None, length_k)
        return (place.first_q, place.length_q), (place.first_k, place.length_k)

    @cute.jit
    def place(self, number, heads, tiles):
        """Returns (tile, head, batch) of a number: a head's query tiles are neighbours."""
        tile, rest = number % tiles, number // tiles
        if cutlass.const_expr(self.config.causal):  # those with the most keys first
            tile = tiles - 1 - tile
        return tile, rest % heads, rest // heads

    @cute.jit
    def reach(self, tile, length_q, length_k):
        """Returns in front of which key all keys lie that any row of a query tile sees, and those that all rows see."""
        reach, clear = length_k, length_k
        if cutlass.const_expr(self.config.causal):
            first, behind = tile * BLOCK_M, length_k - length_q
            last = cutlass.min(first + BLOCK_M, length_q) - 1
            reach = cutlass.max(cutlass.min(length_k, last + behind + 1), 0)
            clear = cutlass.max(cutlass.min(length_k, first + behind + 1), 0)
        return reach, clear

    @cute.jit
    def word(self, row: cute.Tensor, tiles, direction, number):
        """Returns the tiles below `tiles` of the word that is visited after `number` others, the first one lowest."""
        words = cute.ceil_div(tiles, 32)
        at = number if direction > 0 else words - 1 - number
        bits = I32(0)
        if number < words:
            bits = row[at]
            if tiles < 32 * at + 32:
                bits = bits & ((I32(1) << (tiles - 32 * at)) - 1)
        return bits if direction > 0 else cute.arch.brev(bits)

    @cute.jit
    def tile_of(self, number, bit, tiles, direction):
        """Returns the tile of a bit of the word that is visited after `number` others."""
        ahead = 32 * number + bit
        return ahead if direction > 0 else 32 * cute.ceil_div(tiles, 32) - 1 - ahead
