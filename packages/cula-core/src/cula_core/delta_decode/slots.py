"""The argument contract of states and of the slots that rows have in them: shapes, and values on the CPU."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import arguments
from ..dtypes import dtype_name

STATES = {
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
    "cpu": arguments.FLOATING,
}
NO_BACKWARD = "decode has no backward; use torch.no_grad()"
_INT32 = range(-(1 << 31), 1 << 31)


class Limits(NamedTuple):
    """What kernels ask for beyond the contract: one of these K and V on a GPU, and at most so many rows and heads.

    They serve CUDA devices and the CPU, and read states at addresses that are multiples of 16 bytes.
    """

    head_dims: Collection[int]
    grid: int


class Sizes(NamedTuple):
    """What the sizes of a call are. tokens: the most of a row. lengths: the tokens of every row, where they are known.

    kind: "cuda" where dtypes are those of kernels. lead: the tensor whose device all others are on, and what it is
    called. heads_v, heads_name: the number of heads of a state, and the letters for it.
    """

    kind: str
    rows: int
    tokens: int
    heads: int
    heads_v: int
    dim_k: int
    dim_v: int
    lengths: Sequence[int] | None
    lead: Tensor
    lead_name: str = "k"
    limits: Limits | None = None
    heads_name: str = "HV"


def check_states(name: str, x: Tensor, v: Tensor, sizes: Sizes, state_v_first: bool) -> None:
    """Checks a pool of states for activations like v."""
    arguments.states(
        name, x, v, sizes.dim_k, state_v_first, dtypes=STATES[sizes.kind],
        aligned=sizes.limits is not None, lead_name=sizes.lead_name,
    )  # fmt: skip


def check_pool(state: Tensor, state_v_first: bool, limits: Limits | None) -> Sizes:
    """Checks a pool of states that no activations come with."""
    arguments.tensor("state", state)
    arguments.booleans(state_v_first=state_v_first)
    kind = kind_of("state", state, limits)
    if state.dim() != 4:
        letters = "V, K" if state_v_first else "K, V"
        arguments.value_error("state", f"[pool, HV, {letters}]", list(state.shape))
    pool, heads_v, rows, columns = state.shape
    dim_v, dim_k = (rows, columns) if state_v_first else (columns, rows)
    if heads_v == 0:
        arguments.value_error("state", "a number of heads HV of at least 1", heads_v)
    check_head_dims(kind, limits, ("state", "K", dim_k), ("state", "V", dim_v))
    sizes = Sizes(kind, pool, 0, 0, heads_v, dim_k, dim_v, None, state, "state", limits)
    like_v = state.permute(0, 3, 1, 2) if state_v_first else state.permute(0, 2, 1, 3)
    check_states("state", state, like_v, sizes, state_v_first)
    return sizes


def check_null_slot(x: int | None) -> None:
    """Refuses anything but a 32-bit integer or None."""
    if x is None:
        return
    if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
        arguments.type_error("null_slot", "an int or None", type(x).__name__)
    if isinstance(x, int) and x not in _INT32:
        arguments.value_error("null_slot", "a 32-bit integer", x)


def check_begins(
    state: Tensor,
    state_indices: Tensor | None,
    num_accepted: Tensor | None,
    replayed: bool,
    sizes: Sizes,
) -> None:
    """Checks where rows begin. replayed: num_accepted also counts records."""
    several = isinstance(state_indices, Tensor) and state_indices.dim() == 2
    if several:
        assert state_indices is not None
        shape = (sizes.rows, max(1, state_indices.shape[1]))
        check_indices("state_indices", state_indices, sizes, ("N", "slots"), shape)
        if num_accepted is None:
            arguments.value_error("num_accepted", "a tensor with [N, slots] state_indices", None)
    else:
        check_one_slot(state, state_indices, sizes)
    if num_accepted is not None:
        if not replayed and not several:
            expected = "None without replay or [N, slots] state_indices"
            arguments.value_error("num_accepted", expected, type(num_accepted).__name__)
        arguments.int32_vector(
            "num_accepted", num_accepted, "N", sizes.rows, sizes.lead, sizes.lead_name
        )


def check_one_slot(
    state: Tensor, state_indices: Tensor | None, sizes: Sizes, name: str = "state"
) -> None:
    """Checks state_indices of one slot per row, or that there are slots enough without. name: of the pool."""
    if state_indices is not None:
        check_indices("state_indices", state_indices, sizes, ("N",), (sizes.rows,))
    elif state.shape[0] < sizes.rows:
        expected = f"a pool of at least N = {sizes.rows} {name}s when there are no state_indices"
        arguments.value_error(name, expected, state.shape[0])


def check_indices(
    name: str, x: Tensor, sizes: Sizes, letters: Iterable[str], shape: tuple[int, ...]
) -> None:
    """Checks slots, of any stride."""
    arguments.tensor(name, x)
    check_dtype(name, x, (torch.int32,))
    if x.shape != shape:
        arguments.value_error(name, f"[{', '.join(letters)}] = {list(shape)}", list(x.shape))
    arguments.device(name, x, sizes.lead, sizes.lead_name)


def check_slot_values(
    state: Tensor,
    state_indices: Tensor | None,
    output_state_indices: Tensor | None,
    num_accepted: Tensor | None,
    token_states: Tensor | None,
    token_state_indices: Tensor | None,
    sizes: Sizes,
    commit: bool,
    null_slot: int | None,
    name: str = "state",
) -> None:
    """Checks the slots of rows, where they can be read: within the pool, and written by one row and once.

    name: of the pool.
    """
    tables = (state_indices, output_state_indices, token_state_indices, num_accepted)
    if not all(x is None or arguments.is_readable(x) for x in (sizes.lead, *tables)):
        return
    begins = _begin_slots(state_indices, num_accepted, sizes.rows, null_slot)
    _within("state_indices", begins, state, name)
    readers = _readers(begins)
    taken: set[int] = set()
    if commit:
        table, ends = "state_indices", begins
        if output_state_indices is not None:
            table, ends = "output_state_indices", _live(output_state_indices.tolist(), null_slot)
            _within(table, ends, state, name)
            ends = [-1 if begin < 0 else end for begin, end in zip(begins, ends)]
        _written_once(table, [[end] for end in ends], readers, taken)
    if token_state_indices is not None:
        table = "token_state_indices"
        used = _token_slots(token_state_indices, begins, sizes, null_slot)
        pool, pool_name = (state, name) if token_states is None else (token_states, "token_states")
        _within(table, [slot for row in used for slot in row], pool, pool_name)
        if token_states is None:
            _written_once(table, used, readers, taken)
        else:
            _written_once(table, used, {}, set())


def check_slots_once(
    state: Tensor, state_indices: Tensor | None, null_slot: int | None, name: str = "state"
) -> None:
    """Checks the values of state_indices, one per row, whose states are written. name: of the pool."""
    if state_indices is not None and arguments.is_readable(state_indices):
        slots = _live(state_indices.tolist(), null_slot)
        _within("state_indices", slots, state, name)
        _written_once("state_indices", [[slot] for slot in slots], {}, set())


def kind_of(name: str, x: Tensor, limits: Limits | None) -> str:
    """Returns whose dtypes a tensor may have, those of kernels ("cuda") or of plain torch ("cpu"); kernels serve no
    other device."""
    kind = x.device.type
    if kind in STATES:
        return kind
    if limits is not None:
        arguments.value_error(name, "a tensor on a CUDA device or the CPU", x.device)
    return "cpu"


def check_grid(name: str, rows: int, heads: int, what: str, limits: Limits | None) -> None:
    """Refuses more rows or heads than a kernel's grid has."""
    if limits is not None and (rows > limits.grid or heads > limits.grid):
        expected = f"at most {limits.grid} {what} and heads"
        arguments.value_error(name, expected, f"{rows} {what} of {heads} heads")


def check_head_dims(kind: str, limits: Limits | None, *dims: tuple[str, str, int]) -> None:
    """Checks head dimensions, each with the argument and the letter that it has."""
    for name, letter, dim in dims:
        if limits is not None and kind == "cuda" and dim not in limits.head_dims:
            arguments.value_error(name, f"a head dimension {letter} in {limits.head_dims}", dim)
        if dim == 0:
            arguments.value_error(name, f"a head dimension {letter} of at least 1", dim)


def check_dtype(name: str, x: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if x.dtype not in dtypes:
        arguments.type_error(name, arguments.names(dtypes), dtype_name(x.dtype))


def check_contiguous(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        arguments.value_error(name, "contiguous elements", f"strides {x.stride()}")


def _live(slots: Iterable[int], null_slot: int | None) -> list[int]:
    """The slots, -1 for padding."""
    return [-1 if slot == null_slot else max(slot, -1) for slot in slots]


def _begin_slots(
    state_indices: Tensor | None, num_accepted: Tensor | None, rows: int, null_slot: int | None
) -> list[int]:
    """The slot where every row begins, -1 for padding; what is readable is known to be so."""
    if state_indices is None:
        return _live(range(rows), null_slot)
    slots = state_indices.tolist()
    if state_indices.dim() == 2 and num_accepted is not None:
        last = state_indices.shape[1]
        accepted = num_accepted.tolist()
        slots = [row[min(max(count, 1), last) - 1] for row, count in zip(slots, accepted)]
    return _live(slots, null_slot)


def _token_slots(
    indices: Tensor, begins: list[int], sizes: Sizes, null_slot: int | None
) -> list[list[int]]:
    """The slots that the tokens of every row write; none for padding."""
    table = indices.tolist()
    if sizes.lengths is not None:
        table = [row[:length] for row, length in zip(table, sizes.lengths)]
    return [[] if begin < 0 else _live(row, null_slot) for begin, row in zip(begins, table)]


def _readers(begins: list[int]) -> dict[int, int]:
    """The row that begins at each slot, -1 where several do."""
    found: dict[int, int] = {}
    for row, slot in enumerate(begins):
        found[slot] = -1 if slot in found else row
    return found


def _within(name: str, slots: Iterable[int], pool: Tensor, pool_name: str = "state") -> None:
    highest = max(slots, default=-1)
    if highest >= pool.shape[0]:
        expected = f"values below the {pool.shape[0]} states of {pool_name}"
        arguments.value_error(name, expected, highest)


def _written_once(
    name: str, slots: list[list[int]], readers: dict[int, int], taken: set[int]
) -> None:
    """Refuses a slot that two would write (`taken`: already are), or that one row writes where another begins."""
    written = [(row, slot) for row, own in enumerate(slots) for slot in own if slot >= 0]
    for _, slot in written:
        if slot in taken:
            expected = "slots that differ because they are written"
            arguments.value_error(name, expected, f"{slot} twice")
        taken.add(slot)
    for row, slot in written:
        if readers.get(slot, row) != row:
            expected = "slots at which no other row begins"
            arguments.value_error(name, expected, f"{slot} in row {row}")
