"""In which order chunks are prepared: every chain of a set finds its first chunk before any finds its second.

A chain is a sequence and a state head. Chains come in sets, as many as are walked through at once, the longest first.
The chunks of a set are numbered chunk by chunk, through all of its chains; the numbers of one set follow those of the
one before. A chain may be shorter than its set's number of chunks: then it has numbers that nobody needs.
"""

import cutlass
import cutlass.cute as cute

from cula_core.cute.schedule import THREADS as BUCKETS

from ..config import CHUNK
from .layout import describe


class Order:
    """The sets of a call. packed: of packed sequences, whose lengths are in a segment table."""

    def __init__(self, packed: bool):
        self.packed = packed

    @cute.jit
    def set_at(self, segments, first, machines, heads, sequences, tokens):
        """Returns how many chains the set has that begins with chain `first`, and their number of chunks.

        machines: chains at once.
        """
        width = cutlass.min(machines, sequences * heads - first)
        chunks = cute.ceil_div(tokens, CHUNK)
        if cutlass.const_expr(self.packed):
            if width > 0:
                _, _, length, _ = describe(True, segments, first // heads, tokens)
                # The table sorts by buckets, and a chain behind the first one may be longer by a bucket.
                more = cute.ceil_div(chunks, BUCKETS - 1)
                chunks = cutlass.min(chunks, cute.ceil_div(length, CHUNK) + more)
        return width, chunks
