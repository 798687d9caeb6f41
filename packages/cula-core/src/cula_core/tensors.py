"""What callers of kernels do with tensors: alignment, layouts of states, and calls that need no dispatcher."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .dtypes import dtype_name

DENSE = torch.contiguous_format


def is_plain_cuda_call(x: Tensor) -> bool:
    """Whether a launcher may be called without the dispatcher: a real CUDA tensor, and nothing is being traced."""
    return (
        type(x) is Tensor
        and x.is_cuda
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def is_aligned(x: Tensor) -> bool:
    """Whether vectors of 16 bytes, and TMA, can address a real tensor: so are its address and all strides but the
    last."""
    size = x.element_size()
    return not x.data_ptr() % 16 and not any(s * size % 16 for s in x.stride()[:-1])


def aligned(x: Tensor) -> Tensor:
    """Returns the tensor, or a contiguous copy if vectors of 16 bytes cannot address it."""
    return x if is_aligned(x) else x.clone(memory_format=DENSE)


def longest_sequence(offsets: Tensor) -> int:
    """Returns the tokens of the longest of packed sequences; the offsets are on the CPU."""
    values = offsets.tolist()
    return max((b - a for a, b in zip(values[:-1], values[1:])), default=0)


def as_stored(states: Tensor | None) -> tuple[Tensor | None, bool]:
    """Returns states in the order of their memory, and whether that is the other layout, as in a transposed view."""
    if states is not None and states.stride(3) != 1 and states.stride(2) == 1:
        return states.transpose(2, 3), True
    return states, False


def stored_alike(states: Tensor | None, turned: bool) -> Tensor | None:
    """Returns states in the order of memory that those of `as_stored` have, a copy where they lie otherwise."""
    found, own = as_stored(states)
    return found if found is None or own == turned else found.mT.contiguous()


def put_back(found: Tensor | None, states: Tensor | None, turned: bool) -> None:
    """Writes what `stored_alike` has returned to where it came from, if it is a copy."""
    original, own = as_stored(states)
    if found is not None and original is not None and own != turned:
        original.copy_(found.mT)


def new_states(sequences: int, q: Tensor, v: Tensor, v_first: bool, like: Tensor | None) -> Tensor:
    """Returns memory for final states [N, HV, K, V], or V, K, in the dtype of the initial ones `like`."""
    matrix = (v.shape[3], q.shape[3]) if v_first else (q.shape[3], v.shape[3])
    if like is not None:
        dtype = like.dtype
    else:
        dtype = q.dtype if q.dtype == torch.float64 else torch.float32
    return torch.empty(sequences, v.shape[2], *matrix, dtype=dtype, device=q.device)


def states_dtype(*states: Tensor | None) -> str:
    """Returns the name of the dtype that all states of a call have which are there, float32 without any."""
    return next((dtype_name(x.dtype) for x in states if x is not None), "float32")


def kept_in(
    pool: Tensor | None, checkpoints: Tensor | None, offsets: Tensor | None, every: int | None
) -> Tensor | None:
    """Returns where states on the way are kept: `checkpoints`, or without them the pool, None if none are kept.

    offsets, every: after how many tokens; without both nothing is kept.
    """
    kept = offsets is not None or bool(every)
    return pool if kept and checkpoints is None else checkpoints


def live_rows(indices: Tensor, null_slot: int | None) -> Tensor:
    """Returns which rows are none of padding."""
    live = indices >= 0
    return live if null_slot is None else live & (indices != null_slot)


def gather_states(
    initial: Tensor | None,
    indices: Tensor | None,
    target: Tensor,
    null_slot: int | None = None,
    given: Tensor | None = None,
) -> Tensor:
    """Writes the initial states of all sequences to `target`, zero for padding, and returns it; reads nothing back.

    given [N]: False where a sequence begins from zero.
    """
    if initial is None or initial.shape[0] == 0:
        return target.zero_()
    rows = initial[: target.shape[0]] if indices is None else initial[indices.clamp(min=0).long()]
    if indices is not None:
        live = live_rows(indices, null_slot)
        given = live if given is None else given & live
    if given is not None:
        rows = torch.where(given[:, None, None, None], rows, 0.0)
    return target.copy_(rows)


def move_states(
    initial: Tensor | None,
    pool: Tensor | None,
    final: Tensor | None,
    indices: Tensor | None,
    targets: Tensor | None,
    null_slot: int | None,
    given: Tensor | None,
    sequences: int,
) -> None:
    """What a call without tokens does: states go where they belong. initial is the pool where one is updated."""
    if pool is None:
        if final is not None:
            gather_states(initial, indices, final, null_slot, given)
    elif pool.shape[0] and not (targets is None and given is None):
        states = pool.new_empty(sequences, *pool.shape[1:])
        gather_states(pool, indices, states, null_slot, given)
        scatter_states(pool, states, indices, targets, null_slot)


def scatter_states(
    pool: Tensor,
    states: Tensor,
    indices: Tensor | None,
    targets: Tensor | None,
    null_slot: int | None,
) -> None:
    """Writes final states to their rows of a pool, but those of padding; reads nothing back.

    indices: rows where sequences began, None for the first ones; targets: other rows for the final states.
    """
    if indices is None:
        indices = torch.arange(states.shape[0], device=pool.device)
    rows, live = indices, live_rows(indices, null_slot)
    if targets is not None:
        rows, live = targets, live & live_rows(targets, null_slot)
    # What is not kept goes to a row behind the pool.
    rows = torch.where(live, rows, pool.shape[0]).long()
    wider = torch.cat((pool, pool[:1])).index_copy(0, rows, states.to(pool.dtype))
    pool.copy_(wider[:-1])


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Returns how many multiprocessors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def dense_states(states: Tensor | None) -> Tensor | None:
    """Returns states in fp32, dense and at a multiple of 16 bytes."""
    return None if states is None else aligned(states.float().contiguous())
