"""Items of work of the recurrence, which one warp announces to all others."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from ..config import CHUNK, PLACES

CARRIED = 2  # how an item begins or ends: with a state that goes from machine to machine
MAPPED = 3  # and more: with that of a segment, or its map


class Item(NamedTuple):
    """What is announced of an item of work. An item that is not valid means that there are no more.

    token, length: the tokens to walk through. chunk: number of the first one's in its sequence. row, target: of the
    states that the sequence begins and ends with, negative for padding. begins: 0 from zero, 1 from that state, CARRIED
    from the machine before, MAPPED + row from that of a segment. ends: CARRIED where the next machine goes on, MAPPED +
    row with the map of a segment, 1 with the sequence, else 0. place: the seat and its first tile, also of the last
    item. walked: steps of the machine before this item.
    """

    valid: cutlass.Int32
    token: cutlass.Int32
    chunk: cutlass.Int32
    length: cutlass.Int32
    sequence: cutlass.Int32
    row: cutlass.Int32
    target: cutlass.Int32
    begins: cutlass.Int32
    ends: cutlass.Int32
    head: cutlass.Int32
    place: cutlass.Int32
    walked: cutlass.Int32

    @property
    def seat(self):
        """Whose item it is: a head's of a machine."""
        return self.place // PLACES

    @property
    def tile(self):
        """The first tile: of V, or behind it of the map of the keys."""
        return self.place % PLACES

    @property
    def chunks(self):
        """Chunks to walk through; none for padding."""
        return cutlass.select_(self.row < 0, cutlass.Int32(0), cute.ceil_div(self.length, CHUNK))
