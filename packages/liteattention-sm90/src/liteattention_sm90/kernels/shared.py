"""The shared memory of a CTA: tiles, barriers, and what its warps tell each other."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from cula_core.cute.memory import repeated, swizzled
from cula_core.cute.types import DTYPES, I32

from ..config import MAX_WORDS, STAGES, STEP, UNIT, ForwardConfig

# Barriers, each with a number of arrivals: of stages of k and v, slots of queries, outputs and votes, and of the list
# that waits.
BARRIERS = {
    "k_full": 1, "k_free": 8, "v_full": 1, "v_free": 8, "q_full": 1, "q_free": 1, "o_full": 256, "votes_full": 8,
    "votes_free": 1, "list_full": 32, "list_free": 1,
}  # fmt: skip


def barrier_counts(barriers: dict[str, int] = BARRIERS) -> list[int]:
    return [count for count in barriers.values() for _ in range(STAGES)]


PLACE_WORDS, PACKED_WORDS = 8, 12  # of a `Place`, whole 16-byte units
QUERIES, KEYS = 5, 7  # of a packed `Place`, the first of two words that are a sequence


@dataclass(frozen=True)
class Shared:
    """Pointers to shared memory."""

    barriers: cute.Pointer
    q: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    records: cute.Pointer
    places: cute.Pointer
    waiting: cute.Pointer
    votes: cute.Pointer


@cute.jit
def lowest(bits):
    """Returns the number of the lowest bit that is set."""
    return I32(31) - I32(cute.arch.clz(bits & -bits))


@cute.jit
def copy_out(tma, box: cute.Tensor, target: cute.Tensor):
    """Stores or adds a box by TMA."""
    s, g = cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(box, 0, 2), cute.group_modes(target, 0, 2)
    )
    cute.copy(tma, s, g)


class Layout:
    """Static facts of a config, and views of its shared memory."""

    barriers = BARRIERS

    def __init__(self, config: ForwardConfig):
        self.config, self.dtype, self.width = config, DTYPES[config.dtype], config.width
        self.place_words = PLACE_WORDS if config.packed is None else PACKED_WORDS
        self.waiting_words = self.place_words + MAX_WORDS

    def barrier(self, shared, name: str, number):
        """Returns the barrier of a stage or slot."""
        return shared.barriers + (STAGES * list(self.barriers).index(name) + number)

    def wait(self, shared, name: str, count, free: bool = False):
        """Waits for the use `count` of a barrier, or that the one before the last of its stage is over."""
        phase = (count // STAGES) % 2
        cute.arch.mbarrier_wait(
            self.barrier(shared, name, count % STAGES), phase ^ 1 if free else phase
        )

    def box(self, base, offset):
        """Returns a box [64, 64] as TMA writes it, so many boxes behind a pointer."""
        layout = swizzled((UNIT, UNIT), "k", self.dtype)
        pointer = base + cute.assume(offset * (UNIT * UNIT), divby=UNIT * UNIT)
        return cute.make_tensor(
            cute.recast_ptr(pointer.align(1024), layout.inner, dtype=self.dtype), layout.outer
        )

    def queries(self, shared):
        """Returns q, and later o, as [64, D, slot and half]."""
        return repeated(shared.q, (UNIT, self.width), "k", self.dtype, 2 * STAGES)

    def keys(self, shared):
        return repeated(shared.k, (STEP, self.width), "k", self.dtype, STAGES)

    def values(self, shared):
        return repeated(shared.v, (self.width, STEP), "mn", self.dtype, STAGES)

    def records(self, shared):
        """Returns the words of a step by stage: both units, and flags with the slot of the queries above them."""
        return cute.make_tensor(shared.records, cute.make_layout((4, STAGES)))

    def places(self, shared):
        """Returns the words of a `Place` by slot."""
        return cute.make_tensor(shared.places, cute.make_layout((self.place_words, STAGES)))

    def sequence(self, places, slot, at, length):
        """Returns the sequence of QUERIES or KEYS of a slot; of a batch they all have this length."""
        if self.config.packed is None:
            return None, length
        return places[at, slot], places[at + 1, slot]

    def waiting(self, shared):
        """Returns the next query tile: the words of a `Place`, and then those of its list as it is visited."""
        return cute.make_tensor(shared.waiting, cute.make_layout((self.waiting_words, 1)))

    def votes(self, shared):
        """Returns votes as [word, warp, slot]."""
        return cute.make_tensor(shared.votes, cute.make_layout((MAX_WORDS, 8, STAGES)))
