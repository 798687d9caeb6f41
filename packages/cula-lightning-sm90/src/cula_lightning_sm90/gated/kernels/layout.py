"""What the roles of the kernel share: slots of shared memory, tables over tokens, items of work."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from cula_core.cute.memory import repeated
from cula_core.cute.types import DTYPES

from ..config import CHUNK, HEAD_DIM, V_TILE, Config

# How many chunks each matrix is there for. Keys live longest: from the first product to the update of the state.
K_SLOTS, Q_SLOTS, V_SLOTS = 4, 3, 2
INVERSE_SLOTS, PRODUCT_SLOTS, GATE_SLOTS, TABLE_SLOTS = 3, 2, 4, 4
# Of what has the same number of slots, a consumer counts one: k, gates and tables, q and T', v and Aqk.
assert K_SLOTS == GATE_SLOTS == TABLE_SLOTS and Q_SLOTS == INVERSE_SLOTS
assert V_SLOTS == PRODUCT_SLOTS
WIDE, SQUARE, TALL = CHUNK * HEAD_DIM, CHUNK * CHUNK, CHUNK * V_TILE
# A slot of gates, fp32 per token: log2 decays summed up to and with the token, and behind it; write strength.
SUM, BEHIND, STRENGTH = 0, CHUNK, 2 * CHUNK
GATES = 3 * CHUNK
# A slot of tables, fp32 per token (`Products`): what products with the state, q and k are multiplied by. Then the
# decay of the whole chunk.
SEEN, READ, ADDED, NEAR, NORM, TOTAL = (i * CHUNK for i in range(6))
TABLES = TOTAL + 4
# Named barriers: of the outputs, of the products, of the two groups that invert.
BARRIER_OUTPUT, BARRIER_PRODUCTS, BARRIER_INVERSE = 1, 2, 3


class Item(NamedTuple):
    """What the loading warp announces about an item of work. An item that is not valid means that there are no more.

    token, batch, length: the tokens to walk through. sequence: whose they are. row, target: of the states that it
    begins and ends with, negative for padding. begins: whether there is a state to begin with. tile: of V.
    """

    valid: cutlass.Int32
    token: cutlass.Int32
    batch: cutlass.Int32
    length: cutlass.Int32
    sequence: cutlass.Int32
    row: cutlass.Int32
    target: cutlass.Int32
    begins: cutlass.Int32
    head: cutlass.Int32
    tile: cutlass.Int32

    @property
    def chunks(self):
        """Chunks to walk through; none for padding."""
        return cutlass.select_(self.row < 0, cutlass.Int32(0), cute.ceil_div(self.length, CHUNK))


class Memory(NamedTuple):
    """Where things lie in shared memory. k, q, v: chunks. inverse: T'. products: Aqk. o: outputs. gates, tables: fp32
    per token. items: of work. scratch: of the groups that invert."""

    k: cute.Pointer
    q: cute.Pointer
    v: cute.Pointer
    inverse: cute.Pointer
    products: cute.Pointer
    o: cute.Pointer
    gates: cute.Pointer
    tables: cute.Pointer
    items: cute.Pointer
    scratch: cute.Pointer


class Pipes(NamedTuple):
    """Who waits for whom: a pipeline for every kind of slot. The chain gives back all slots but those of gates."""

    k: object
    q: object
    v: object
    gates: object
    tables: object
    products: object
    inverse: object
    items: object


class Layout:
    """Static facts of a config, and views of its shared memory."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype, self.operand = DTYPES[config.dtype], DTYPES[config.operand]

    def keys(self, base, major="k"):
        """Returns k [64, 128] of every slot; with major "mn" its transpose."""
        shape = (CHUNK, HEAD_DIM) if major == "k" else (HEAD_DIM, CHUNK)
        return repeated(base, shape, major, self.dtype, K_SLOTS)

    def queries(self, base):
        """Returns q [64, 128] of every slot."""
        return repeated(base, (CHUNK, HEAD_DIM), "k", self.dtype, Q_SLOTS)

    def values(self, base, major="k"):
        """Returns v [64 tokens, 64] of every slot; with major "mn" its transpose."""
        return repeated(base, (CHUNK, V_TILE), major, self.dtype, V_SLOTS)

    def square(self, base, slots):
        """Returns T' or Aqk [64, 64] of every slot, panels of 16 columns."""
        return repeated(base, (CHUNK, CHUNK), "panels", self.operand, slots)

    def by_token(self, base, width, slots):
        """Returns tables over tokens as [width, slot]."""
        return cute.make_tensor(base, cute.make_layout((width, slots)))

    def by_column(self, base, width, slots, lane):
        """Returns tables over tokens as this thread's columns of an accumulator see them.

        They are [2 neighbours, 8 steps of 8 columns, table, slot].
        """
        shape = (2, 4, CHUNK // 8, width // CHUNK, slots)
        layout = cute.make_layout(shape, stride=(1, 2, 8, CHUNK, width))
        return cute.make_tensor(base.align(16), layout)[None, lane % 4, None, None, None]


def by_pairs(acc):
    """Returns an accumulator of 64 rows as [2 neighbours, 2 rows 8 apart, steps of 8 columns]."""
    return cute.make_tensor(acc.iterator, cute.make_layout((2, 2, cute.size(acc) // 4)))


@cute.jit
def commit(pipe, at):
    """Hands a slot over: by one lane, for what its warp has written."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        pipe.producer_commit(at)


@cute.jit
def release(pipe, at):
    """Gives a slot back: by one lane, for what its warp has read."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        give_back(pipe, at)


def give_back(pipe, at):
    """One arrival; `consumer_release` would be that of a lane of the pipeline's own choice where copies fill it."""
    cute.arch.mbarrier_arrive(pipe.sync_object_empty.get_barrier(at.index))
