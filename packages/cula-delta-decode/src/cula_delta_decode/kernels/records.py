"""The rings of records that the states of a pool do not hold yet."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..config import Config
from .operands import NORM, Row, Staged, neighbours

# A cursor packs three numbers of 8 bits, as in `cula_core.reference.delta_decode`.
BYTE = 8
COLUMNS = 8
# Records that are brought to shared memory at a time, and elements of one read.
CHUNK = 8
WIDTH = 4


class Rings(NamedTuple):
    """mK [pool, L, H, K], mU [pool, L, HV, V], mDecay [pool, L, HV, K] or [pool, L, HV], mCursor [pool, HV, V / 8]."""

    mK: cute.Tensor
    mU: cute.Tensor
    mDecay: cute.Tensor
    mCursor: cute.Tensor


class Ring(NamedTuple):
    """The ring of one slot. first: where the records of this call go. full: the state has to be stored before."""

    gK: cute.Tensor
    gU: cute.Tensor
    gDecay: cute.Tensor
    begin: Int32
    count: Int32
    first: Int32
    full: Boolean
    last: Int32


class Fetched(NamedTuple):
    """Shared memory that holds records, fp32: sK [CHUNK, K], sU [CHUNK, tile_v], sDecay [CHUNK, K] or [CHUNK, 1]."""

    sK: cute.Tensor
    sU: cute.Tensor
    sDecay: cute.Tensor


class Records:
    """Every CTA keeps the cursor of its own columns of V, so that none depends on when another one runs."""

    def __init__(self, config: Config):
        self.cursors = config.tile_v // COLUMNS
        self.tile_v, self.threads = config.tile_v, config.threads
        self.dim_k, self.channels = config.problem.head_dim_k, config.problem.gate.channels
        self.convolved = config.problem.fused.convolution is not None

    @cute.jit
    def cursor(self, rings: Rings, slot, row: Row):
        """Returns the cursors of the CTA's columns of V, and the word that stands in all of them."""
        own = cute.domain_offset((row.tile * self.cursors,), rings.mCursor[slot, row.head, None])
        return own, own[0]

    @cute.jit
    def open(self, rings: Rings, slot, row: Row, cursor, accepted, empties=False):
        """Returns the ring of a slot, and moves its cursor past the records of this call; all threads of the CTA.

        cursor: what `cursor` returned. empties: the state is going to be stored, whatever there is.
        """
        own, word = cursor
        length = rings.mU.shape[1]
        mask = (1 << BYTE) - 1
        begin, count, pending = word & mask, (word >> BYTE) & mask, word >> 2 * BYTE
        if cutlass.const_expr(accepted is not None):
            pending = cutlass.min(pending, cutlass.max(accepted, Int32(0)))
        count = count + pending
        first = (begin + count) & (length - 1)
        full = Boolean(True) if empties else count + row.length > length // 2
        # Nobody may see the new cursor in place of the old one.
        cute.arch.sync_threads()
        if row.tidx < self.cursors:
            kept = cutlass.select_(full, first, begin | (count << BYTE))
            own[row.tidx] = kept | (row.length << 2 * BYTE)
        gU = cute.domain_offset((0, row.tile * self.tile_v), rings.mU[slot, None, row.head, None])
        gK = rings.mK[slot, None, row.head_k, None]
        if cutlass.const_expr(self.channels):
            gDecay = rings.mDecay[slot, None, row.head, None]
        else:
            gDecay = rings.mDecay[slot, None, row.head]
        return Ring(gK, gU, gDecay, begin, count, first, full, length - 1)

    def allocate(self):
        """Returns the shared memory of some records."""
        smem = cutlass.memory.SmemAllocator()

        def matrix(width):
            layout = cute.make_ordered_layout((CHUNK, width), order=(1, 0))
            return smem.allocate_tensor(cutlass.Float32, layout, 16)

        return Fetched(
            matrix(self.dim_k), matrix(self.tile_v), matrix(self.dim_k if self.channels else 1)
        )

    @cute.jit
    def fetch(self, ring: Ring, row: Row, first):
        """Returns the thread's share of the certain records from `first` on, and of others if they are fewer."""
        k = self.read(ring.gK, self.dim_k, ring, row, first)
        u = self.read(ring.gU, self.tile_v, ring, row, first)
        if cutlass.const_expr(self.channels):
            return k, u, self.read(ring.gDecay, self.dim_k, ring, row, first)
        return k, u, ring.gDecay[self.number(ring, first + row.tidx % CHUNK)]

    @cute.jit
    def keep(self, share, fetched: Fetched, row: Row):
        """Writes what `fetch` returned to shared memory; a barrier must follow."""
        k, u, decay = share
        if cutlass.const_expr(self.channels):
            self.write(decay, fetched.sDecay, self.dim_k, row)
        elif row.tidx < CHUNK:
            fetched.sDecay[row.tidx, 0] = decay
        self.write(k, fetched.sK, self.dim_k, row)
        self.write(u, fetched.sU, self.tile_v, row)

    @cute.jit
    def number(self, ring: Ring, certain):
        """Returns where a certain record is in the ring; past the last one, that of the last one."""
        return (ring.begin + cutlass.min(certain, ring.count - 1)) & ring.last

    @cute.jit
    def read(self, gX: cute.Tensor, width: cutlass.Constexpr, ring: Ring, row: Row, first):
        """Returns the thread's share of some records, all of it on its way before any is used."""
        vectors = []
        for i in cutlass.range_constexpr(self.reads(width)):
            e = cutlass.min(i * self.threads + row.tidx, Int32(CHUNK * width // WIDTH - 1)) * WIDTH
            at = self.number(ring, first + e // width)
            vectors.append(neighbours(gX[at, None], e % width, WIDTH))
        return vectors

    @cute.jit
    def write(self, vectors, sX: cute.Tensor, width: cutlass.Constexpr, row: Row):
        """Writes what `read` returned to shared memory."""
        for i in cutlass.range_constexpr(self.reads(width)):
            e = (i * self.threads + row.tidx) * WIDTH
            if e < CHUNK * width:
                for n in cutlass.range_constexpr(WIDTH):
                    sX[e // width, e % width + n] = vectors[i][n].to(cutlass.Float32)

    def reads(self, width):
        """Returns how many vectors of some records a thread has."""
        return (CHUNK * width // WIDTH + self.threads - 1) // self.threads

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
