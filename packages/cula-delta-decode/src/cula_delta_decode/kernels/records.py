"""The rings of records that the states of a pool do not hold yet."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..config import Config
from .operands import NORM, Row, Staged

# A cursor packs three numbers of 8 bits, as in `cula_core.reference.delta_decode`.
BYTE = 8
COLUMNS = 8
# Elements of one read of a record.
WIDTH = 4


class Rings(NamedTuple):
    """mK [pool, L, H, K], mU [pool, L, HV, V], mDecay [pool, L, HV, K] or [pool, L, HV], mCursor [pool, HV, V / 8]."""

    mK: cute.Tensor
    mU: cute.Tensor
    mDecay: cute.Tensor
    mCursor: cute.Tensor


class Ring(NamedTuple):
    """The ring of one slot. first: where the records of this call go. full: the state has to be stored before. whole:
    all of the ring is in shared memory."""

    gK: cute.Tensor
    gU: cute.Tensor
    gDecay: cute.Tensor
    begin: Int32
    count: Int32
    first: Int32
    full: Boolean
    whole: Boolean
    last: Int32


class Fetched(NamedTuple):
    """Shared memory that holds records, fp32: sK [chunk, K], sU [chunk, tile_v], sDecay [chunk, K] or [chunk, 1]."""

    sK: cute.Tensor
    sU: cute.Tensor
    sDecay: cute.Tensor


def chunk_of(tokens: int) -> int:
    """Returns how many records are brought to shared memory at a time: all of the smallest ring for so many tokens."""
    return 8 if tokens <= 4 else 16


class Records:
    """Every CTA keeps the cursor of its own columns of V, so that none depends on when another one runs."""

    def __init__(self, config: Config):
        self.cursors = config.tile_v // COLUMNS
        self.tile_v, self.threads = config.tile_v, config.threads
        self.dim_k, self.channels = config.problem.head_dim_k, config.problem.gate.channels
        self.convolved = config.problem.fused.convolution is not None
        self.chunk = chunk_of(config.problem.tokens)

    @cute.jit
    def open(
        self,
        rings: Rings,
        slot,
        row: Row,
        accepted,
        fetched: Fetched,
        empties: cutlass.Constexpr = False,
    ):
        """Returns the ring of a slot, and moves its cursor past the records of this call; all threads of the CTA.

        empties: the state is going to be stored, whatever there is. A small ring is fetched while the cursor is read.
        """
        own = cute.domain_offset((row.tile * self.cursors,), rings.mCursor[slot, row.head, None])
        word = own[0]
        gU = cute.domain_offset((0, row.tile * self.tile_v), rings.mU[slot, None, row.head, None])
        gK = rings.mK[slot, None, row.head_k, None]
        if cutlass.const_expr(self.channels):
            gDecay = rings.mDecay[slot, None, row.head, None]
        else:
            gDecay = rings.mDecay[slot, None, row.head]
        length = rings.mU.shape[1]
        last = length - 1
        whole = length <= self.chunk
        if whole:
            self.fetch(fetched, gK, gU, gDecay, Int32(0), length, last, row)
        mask = (1 << BYTE) - 1
        begin, count, pending = word & mask, (word >> BYTE) & mask, word >> 2 * BYTE
        if cutlass.const_expr(accepted is not None):
            pending = cutlass.min(pending, cutlass.max(accepted, Int32(0)))
        count = count + pending
        first = (begin + count) & last
        full = Boolean(True) if empties else count + row.length > length // 2
        # Nobody may see the new cursor in place of the old one. What was fetched is there, too.
        cute.arch.sync_threads()
        if row.tidx < self.cursors:
            kept = cutlass.select_(full, first, begin | (count << BYTE))
            own[row.tidx] = kept | (row.length << 2 * BYTE)
        return Ring(gK, gU, gDecay, begin, count, first, full, whole, last)

    def allocate(self):
        """Returns the shared memory of some records."""
        smem = cutlass.memory.SmemAllocator()

        def matrix(width):
            layout = cute.make_ordered_layout((self.chunk, width), order=(1, 0))
            return smem.allocate_tensor(cutlass.Float32, layout, 16)

        return Fetched(
            matrix(self.dim_k), matrix(self.tile_v), matrix(self.dim_k if self.channels else 1)
        )

    @cute.jit
    def fetch_next(self, fetched: Fetched, ring: Ring, first, row: Row):
        """Brings certain records from number `first` on to shared memory; a barrier must follow."""
        begin, count = ring.begin + first, ring.count - first
        self.fetch(fetched, ring.gK, ring.gU, ring.gDecay, begin, count, ring.last, row)

    @cute.jit
    def fetch(self, fetched: Fetched, gK, gU, gDecay, begin, count, last, row: Row):
        """Brings up to `count` records from `begin` on to shared memory; all reads are on their way before the first
        is waited for."""
        k = self.read(gK, self.dim_k, begin, count, last, row)
        u = self.read(gU, self.tile_v, begin, count, last, row)
        if cutlass.const_expr(self.channels):
            decay = self.read(gDecay, self.dim_k, begin, count, last, row)
            self.write(decay, fetched.sDecay, self.dim_k, row)
        elif row.tidx < cutlass.min(count, Int32(self.chunk)):
            fetched.sDecay[row.tidx, 0] = gDecay[(begin + row.tidx) & last]
        self.write(k, fetched.sK, self.dim_k, row)
        self.write(u, fetched.sU, self.tile_v, row)

    @cute.jit
    def read(self, gX: cute.Tensor, width: cutlass.Constexpr, begin, count, last, row: Row):
        """Returns the thread's share of some records."""
        vectors = []
        for i in cutlass.range_constexpr(self.reads(width)):
            e = (i * self.threads + row.tidx) * WIDTH
            rX = cute.make_rmem_tensor(WIDTH, gX.element_type)
            rX.fill(0.0)
            if e // width < cutlass.min(count, Int32(self.chunk)):
                self.wide(gX[(begin + e // width) & last, None], e % width, rX)
            vectors.append(rX)
        return vectors

    @cute.jit
    def wide(self, gX: cute.Tensor, first, rX: cute.Tensor):
        """Reads neighbouring elements by one access."""
        size = WIDTH * gX.element_type.width // 8
        address = (gX.iterator + cute.assume(first, divby=WIDTH)).toint()
        source = cute.make_ptr(gX.element_type, address, cute.AddressSpace.gmem, assumed_align=size)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(WIDTH)), rX)

    @cute.jit
    def write(self, vectors, sX: cute.Tensor, width: cutlass.Constexpr, row: Row):
        """Writes what `read` returned to shared memory."""
        for i in cutlass.range_constexpr(self.reads(width)):
            e = (i * self.threads + row.tidx) * WIDTH
            if e < self.chunk * width:
                rWide = cute.make_rmem_tensor(WIDTH, cutlass.Float32)
                rWide.store(vectors[i].load().to(cutlass.Float32))
                target = sX.iterator + cute.assume(e, divby=WIDTH)
                cute.autovec_copy(rWide, cute.make_tensor(target, cute.make_layout(WIDTH)))

    def reads(self, width):
        """Returns how many vectors of some records a thread has."""
        return (self.chunk * width // WIDTH + self.threads - 1) // self.threads

    @cute.jit
    def keys(self, ring: Ring, row: Row, t: cutlass.Constexpr, staged=None):
        """Writes the key of a token, once for all value heads that share it. Behind a convolution that is the staged
        one before it was normalized: a number of its dtype, so rounding finds it again."""
        at = (ring.first + t) & ring.last
        if row.tile == 0 and row.leads:
            for i in cutlass.range_constexpr((self.dim_k + self.threads - 1) // self.threads):
                e = i * self.threads + row.tidx
                if e < self.dim_k:
                    if cutlass.const_expr(self.convolved):
                        key = staged.sK[t, e] * (1.0 / staged.sNumbers[t, NORM])
                        ring.gK[at, e] = key.to(ring.gK.element_type)
                    else:
                        ring.gK[at, e] = row.gK[t, e]

    @cute.jit
    def factors(self, ring: Ring, row: Row, staged: Staged, t: cutlass.Constexpr):
        """Writes the factors of a token, once for all tiles of a state."""
        at = (ring.first + t) & ring.last
        if row.tile == 0:
            if cutlass.const_expr(self.channels):
                for i in cutlass.range_constexpr((self.dim_k + self.threads - 1) // self.threads):
                    e = i * self.threads + row.tidx
                    if e < self.dim_k:
                        ring.gDecay[at, e] = staged.sFactor[t, e]
            elif row.tidx == 0:
                ring.gDecay[at] = staged.sFactor[t, 0]
