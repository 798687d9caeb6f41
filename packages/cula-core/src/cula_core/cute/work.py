"""Items of work of persistent CTAs: one warp hands them out, the others learn of them through shared memory."""

import cutlass
import cutlass.cute as cute

from .types import I32

SLOTS = 2  # of items, and of outputs
ITEM_WORDS = 12  # of an item: whole 16-byte units


@cute.jit
def draw(counter: cute.Tensor, lane: cutlass.Int32):
    """Returns the number of the next item, which nobody else gets; every lane of a warp calls it."""
    number = I32(0)
    if lane == 0:
        number = cute.arch.atomic_add(counter.iterator.llvm_ptr, I32(1))
    return cute.arch.shuffle_sync(number, 0)


@cute.jit
def post(items, at, item_words: cute.Pointer, make: cutlass.Constexpr, lane):
    """Tells the other warps the fields of an item, which `make` returns, once they have read the one before the last.

    Only the lane that writes the fields computes them.
    """
    words = cute.make_tensor(item_words, cute.make_layout((ITEM_WORDS, SLOTS)))
    items.producer_acquire(at)
    if lane == 0:
        values = make()
        for i in cutlass.range_constexpr(len(values)):
            words[i, at.index] = I32(values[i])
        items.producer_commit(at)


@cute.jit
def receive(kind: cutlass.Constexpr, items, at, item_words: cute.Pointer):
    """Returns the next item as a `kind`, a NamedTuple of 32-bit integers."""
    items.consumer_wait(at)
    words = cute.make_tensor(item_words, cute.make_layout((ITEM_WORDS, SLOTS)))
    item = kind(*(words[i, at.index] for i in range(len(kind._fields))))
    items.consumer_release(at)
    return item
