"""Packed sequences: lengths, masks, `cu_seqlens`, packing and the chunk schedule of variable-length kernels.

A packed batch of N sequences is one tensor `[1, total, ...]` and `cu_seqlens`, the N + 1 cumulative lengths
`[0, l0, l0 + l1, ..., total]` in int32 or int64. Prepare these tensors once per batch and hand the same ones to every
layer: each kernel takes them as they are. Empty sequences are legal everywhere.

Nothing here reads a tensor of a device back to the host, with one exception, `host_lengths`, whose purpose that is.
Where a result's shape depends on the lengths (`pack`, `sequence_ids`, `positions`, `chunk_indices`), the caller gives
that number; it may be left out only when `cu_seqlens` lies on the CPU. Nothing is cached. docs/varlen.md has the
contract with pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from cula_core import arguments
from cula_core.arguments import is_readable
from cula_core.dtypes import dtype_name

__all__ = [
    "capacity",
    "chunk_indices",
    "chunk_offsets",
    "cu_seqlens_from_lengths",
    "cu_seqlens_from_mask",
    "host_lengths",
    "lengths_from_cu_seqlens",
    "mask_from_cu_seqlens",
    "pack",
    "pad_cu_seqlens",
    "positions",
    "sequence_ids",
    "uniform_cu_seqlens",
    "unpack",
]

Padding = Literal["left", "right"]


def cu_seqlens_from_lengths(
    lengths: Sequence[int] | Tensor,
    *,
    dtype: torch.dtype = torch.int32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Cumulative lengths `[N+1]` of N sequences.

    Args:
        lengths: a list of ints >= 0, or an integer tensor `[N]`, which stays on its device unless `device` is given.
        dtype: torch.int32 or torch.int64.
        device: where the result goes; by default the tensor's device, or the CPU for a list.

    Raises:
        TypeError, ValueError: a wrong type or dtype, a negative length (seen in lists and CPU tensors only), or a
            total that the dtype cannot hold (lists only).

    Example:
        >>> from cula import varlen
        >>> varlen.cu_seqlens_from_lengths([3, 0, 1]).tolist()
        [0, 3, 3, 4]
    """
    _index_dtype("dtype", dtype)
    if isinstance(lengths, Tensor):
        _index_vector("lengths", lengths)
        if is_readable(lengths) and lengths.numel() and int(lengths.min()) < 0:
            raise ValueError(f"lengths: expected values >= 0, got {int(lengths.min())}")
        result = torch.nn.functional.pad(lengths.cumsum(0, dtype=dtype), (1, 0))
        return result if device is None else result.to(device)
    ends = [0]
    for i, length in enumerate(lengths):
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"lengths: expected ints, got {type(length).__name__} at position {i}")
        if length < 0:
            raise ValueError(f"lengths: expected values >= 0, got {length} at position {i}")
        ends.append(ends[-1] + length)
    if ends[-1] > torch.iinfo(dtype).max:
        raise ValueError(f"lengths: expected a total that {dtype} can hold, got {ends[-1]}")
    return torch.tensor(ends, dtype=dtype, device=device)


def lengths_from_cu_seqlens(cu_seqlens: Tensor) -> Tensor:
    """Lengths `[N]` on the device and in the dtype of `cu_seqlens` `[N+1]`.

    Example:
        >>> from cula import varlen
        >>> cu_seqlens = varlen.cu_seqlens_from_lengths([3, 0, 1])
        >>> varlen.lengths_from_cu_seqlens(cu_seqlens).tolist()
        [3, 0, 1]
    """
    _cu_seqlens(cu_seqlens)
    return cu_seqlens.diff()


def host_lengths(cu_seqlens: Tensor) -> list[int]:
    """Lengths as a Python list. Waits for the device when `cu_seqlens` is not on the CPU.

    Example:
        >>> from cula import varlen
        >>> cu_seqlens = varlen.cu_seqlens_from_lengths([3, 0, 1])
        >>> varlen.host_lengths(cu_seqlens)
        [3, 0, 1]
    """
    _cu_seqlens(cu_seqlens)
    return cu_seqlens.diff().tolist()


def cu_seqlens_from_mask(mask: Tensor, *, dtype: torch.dtype = torch.int32) -> Tensor:
    """Cumulative lengths `[B+1]` of the rows of a padding mask.

    Args:
        mask: bool or integer `[B, T]`, nonzero where there is a token. Only the number of tokens in each row counts.
        dtype: torch.int32 or torch.int64.

    Example:
        >>> import torch
        >>> from cula import varlen
        >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
        >>> varlen.cu_seqlens_from_mask(mask).tolist()
        [0, 3, 4]
    """
    _index_dtype("dtype", dtype)
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: expected a torch.Tensor, got {type(mask).__name__}")
    if mask.dim() != 2:
        raise ValueError(f"mask: expected shape [B, T], got {list(mask.shape)}")
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"mask: expected a bool or integer dtype, got {mask.dtype}")
    return cu_seqlens_from_lengths(mask.ne(0).sum(1), dtype=dtype)


def mask_from_cu_seqlens(
    cu_seqlens: Tensor, max_length: int, *, padding: Padding = "right"
) -> Tensor:
    """Bool mask `[N, max_length]`, true where there is a token.

    Args:
        cu_seqlens: int32 or int64 `[N+1]`.
        max_length: number of columns, at least the longest length.
        padding: the side of the padding.

    Example:
        >>> from cula import varlen
        >>> cu_seqlens = varlen.cu_seqlens_from_lengths([3, 0, 1])
        >>> varlen.mask_from_cu_seqlens(cu_seqlens, 3).int().tolist()
        [[1, 1, 1], [0, 0, 0], [1, 0, 0]]
    """
    lengths = lengths_from_cu_seqlens(cu_seqlens)
    return _columns(lengths, cu_seqlens, max_length, padding)[1]


def uniform_cu_seqlens(
    batch: int,
    length: int,
    *,
    dtype: torch.dtype = torch.int32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Cumulative lengths `[batch+1]` of `batch` sequences of `length` tokens, written on the device by one kernel.

    Example:
        >>> from cula import varlen
        >>> varlen.uniform_cu_seqlens(3, 5).tolist()
        [0, 5, 10, 15]
    """
    _index_dtype("dtype", dtype)
    _count("batch", batch)
    _count("length", length)
    if batch * length > torch.iinfo(dtype).max:
        raise ValueError(
            f"length: expected batch * length that {dtype} can hold, got {batch * length}"
        )
    if length == 0:
        return torch.zeros(batch + 1, dtype=dtype, device=device)
    return torch.arange(0, batch * length + 1, length, dtype=dtype, device=device)


def pad_cu_seqlens(cu_seqlens: Tensor, num_seqs: int) -> Tensor:
    """`cu_seqlens` with empty sequences appended up to `num_seqs`, so that a captured CUDA graph sees one shape.

    Args:
        cu_seqlens: int32 or int64 `[N+1]` with N <= num_seqs.
        num_seqs: number of sequences of the result `[num_seqs+1]`.

    Example:
        >>> from cula import varlen
        >>> cu_seqlens = varlen.cu_seqlens_from_lengths([3, 0, 1])
        >>> varlen.pad_cu_seqlens(cu_seqlens, 5).tolist()
        [0, 3, 3, 4, 4, 4]
    """
    _cu_seqlens(cu_seqlens)
    _count("num_seqs", num_seqs)
    missing = num_seqs + 1 - cu_seqlens.shape[0]
    if missing < 0:
        raise ValueError(
            f"num_seqs: expected at least N = {cu_seqlens.shape[0] - 1}, got {num_seqs}"
        )
    return torch.cat((cu_seqlens, cu_seqlens[-1:].expand(missing)))


def sequence_ids(cu_seqlens: Tensor, total: int | None = None) -> Tensor:
    """Number of the sequence that each token belongs to, `[total]` in the dtype of `cu_seqlens`.

    Args:
        cu_seqlens: int32 or int64 `[N+1]`.
        total: number of rows. Needed unless `cu_seqlens` is on the CPU. Rows past the last sequence get -1.

    Example:
        >>> from cula import varlen
        >>> cu_seqlens = varlen.cu_seqlens_from_lengths([3, 0, 1])
        >>> varlen.sequence_ids(cu_seqlens, 6).tolist()
        [0, 0, 0, 2, -1, -1]
    """
    total = _total(cu_seqlens, total)
    rows = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    ids = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True).to(cu_seqlens.dtype)
    return ids.masked_fill(ids >= cu_seqlens.shape[0] - 1, -1)


def positions(cu_seqlens: Tensor, total: int | None = None) -> Tensor:
    """Position of each token within its own sequence, `[total]` in the dtype of `cu_seqlens`.

    Args:
        cu_seqlens: int32 or int64 `[N+1]`.
        total: number of rows. Needed unless `cu_seqlens` is on the CPU. Rows past the last sequence get -1.

    Example:
        >>> from cula import varlen
        >>> cu_seqlens = varlen.cu_seqlens_from_lengths([3, 0, 1])
        >>> varlen.positions(cu_seqlens).tolist()
        [0, 1, 2, 0]
    """
    return _locate(cu_seqlens, _total(cu_seqlens, total))[1]


def pack(
    x: Tensor, cu_seqlens: Tensor, total: int | None = None, *, padding: Padding = "right"
) -> Tensor:
    """Packs a padded batch `[N, T, ...]` into `[1, total, ...]`. Differentiable in `x`.

    Args:
        x: padded batch; row n holds sequence n at its left end, or at its right end with padding="left".
        cu_seqlens: int32 or int64 `[N+1]` on the device of x, no length over T.
        total: number of packed tokens, `cu_seqlens[-1]`. Needed unless `cu_seqlens` is on the CPU. Rows past the last
            sequence are zero.
        padding: the side of the padding.

    Example:
        >>> import torch
        >>> from cula import varlen
        >>> cu_seqlens = varlen.cu_seqlens_from_lengths([3, 0, 1])
        >>> x = torch.randn(3, 5, 2)  # [N, T, ...], padding on the right
        >>> packed = varlen.pack(x, cu_seqlens)
        >>> packed.shape, torch.equal(packed[0, :3], x[0, :3]), torch.equal(packed[0, 3], x[2, 0])
        (torch.Size([1, 4, 2]), True, True)
    """
    _batch(x, "[N, T, ...]")
    _cu_seqlens(cu_seqlens, x)
    _side(padding)
    batch, width = x.shape[:2]
    if cu_seqlens.shape[0] != batch + 1:
        raise ValueError(
            f"cu_seqlens: expected N + 1 = {batch + 1} entries as x has N rows, got {cu_seqlens.shape[0]}"
        )
    _fits("x", cu_seqlens, width)
    total = _total(cu_seqlens, total)
    if batch * width == 0:
        return _filled(x, (1, total, *x.shape[2:]), 0)
    ids, column = _locate(cu_seqlens, total)
    real, ids = ids >= 0, ids.clamp(min=0)
    if padding == "left":
        column = column + width - cu_seqlens.diff()[ids]
    index = (ids.long() * width + column).where(real, 0).clamp(0, batch * width - 1)
    rows = x.reshape(batch * width, *x.shape[2:]).index_select(0, index)
    return rows.where(_like(real, rows), 0).unsqueeze(0)


def unpack(
    x: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    *,
    padding: Padding = "right",
    value: float = 0.0,
) -> Tensor:
    """Spreads a packed batch `[1, total, ...]` into rows `[N, max_length, ...]`. Differentiable in `x`.

    Args:
        x: packed batch.
        cu_seqlens: int32 or int64 `[N+1]` on the device of x.
        max_length: number of columns, at least the longest length (checked when `cu_seqlens` is on the CPU; elsewhere
            the tokens that do not fit are left out).
        padding: the side of the padding.
        value: what the padding holds.

    Example:
        >>> import torch
        >>> from cula import varlen
        >>> cu_seqlens = varlen.cu_seqlens_from_lengths([3, 0, 1])
        >>> x = torch.randn(1, 4, 2)
        >>> rows = varlen.unpack(x, cu_seqlens, max_length=3)
        >>> rows.shape, torch.equal(varlen.pack(rows, cu_seqlens), x)
        (torch.Size([3, 3, 2]), True)
    """
    _batch(x, "[1, total, ...]")
    if x.shape[0] != 1:
        raise ValueError(f"x: expected shape [1, total, ...], got {list(x.shape)}")
    _cu_seqlens(cu_seqlens, x)
    lengths = cu_seqlens.diff()
    column, mask = _columns(lengths, cu_seqlens, max_length, padding)
    if x.shape[1] == 0:
        return _filled(x, (*mask.shape, *x.shape[2:]), value)
    index = (cu_seqlens[:-1, None].long() + column).where(mask, 0).clamp(0, x.shape[1] - 1)
    rows = x[0].index_select(0, index.reshape(-1)).reshape(*mask.shape, *x.shape[2:])
    return rows.where(_like(mask, rows), value)


def capacity(tokens: int, num_seqs: int, chunk_size: int) -> int:
    """The most chunks that `tokens` tokens in `num_seqs` sequences can make, from the shapes alone.

    A sequence of l tokens has ceil(l / chunk_size) chunks. The worst packing gives one token to as many sequences as
    there are tokens for and all the others to one of them: `min(T, N) + (T - min(T, N)) // chunk_size`. A kernel whose
    grid has this size serves every packing of that shape.

    Example:
        >>> from cula import varlen
        >>> varlen.capacity(tokens=9, num_seqs=4, chunk_size=2)
        6
    """
    _count("tokens", tokens)
    _count("num_seqs", num_seqs)
    _chunk_size(chunk_size)
    if num_seqs == 0 and tokens > 0:
        raise ValueError(f"num_seqs: expected at least 1 for {tokens} tokens, got 0")
    first = min(tokens, num_seqs)
    return first + (tokens - first) // chunk_size


def chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """Chunks before each sequence, `[N+1]` in the dtype of `cu_seqlens`; the last entry is their number NT.

    Example:
        >>> from cula import varlen
        >>> cu_seqlens = varlen.cu_seqlens_from_lengths([3, 0, 1])
        >>> varlen.chunk_offsets(cu_seqlens, 2).tolist()
        [0, 2, 2, 3]
    """
    _cu_seqlens(cu_seqlens)
    _chunk_size(chunk_size)
    counts = (cu_seqlens.diff() + (chunk_size - 1)).div(chunk_size, rounding_mode="floor")
    return cu_seqlens_from_lengths(counts, dtype=cu_seqlens.dtype)


def chunk_indices(cu_seqlens: Tensor, chunk_size: int, num_chunks: int | None = None) -> Tensor:
    """Sequence and chunk within it, for every chunk in order: `[num_chunks, 2]` in the dtype of `cu_seqlens`.

    Args:
        cu_seqlens: int32 or int64 `[N+1]`.
        chunk_size: tokens in a full chunk.
        num_chunks: number of rows, usually `capacity(...)`. Needed unless `cu_seqlens` is on the CPU, where it defaults
            to the exact number. Rows past the last chunk hold (-1, -1).

    Example:
        >>> from cula import varlen
        >>> cu_seqlens = varlen.cu_seqlens_from_lengths([3, 0, 1])
        >>> varlen.chunk_indices(cu_seqlens, 2).tolist()
        [[0, 0], [0, 1], [2, 0]]
    """
    offsets = chunk_offsets(cu_seqlens, chunk_size)
    if num_chunks is None and not is_readable(offsets):
        raise ValueError(_needs_number("num_chunks", cu_seqlens))
    ids, chunk = _locate(
        offsets, int(offsets[-1]) if num_chunks is None else _count("num_chunks", num_chunks)
    )
    return torch.stack((ids, chunk), 1)


def _locate(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Sequence id and position of each of `total` rows; -1 in both for rows past the end."""
    ids = sequence_ids(cu_seqlens, total)
    rows = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return ids, (rows - cu_seqlens[ids.clamp(min=0)]).masked_fill(ids < 0, -1)


def _columns(
    lengths: Tensor, cu_seqlens: Tensor, width: int, padding: Padding
) -> tuple[Tensor, Tensor]:
    """For every cell [N, width] of a padded batch: which token of its sequence it holds, and whether it holds one."""
    _side(padding)
    _count("max_length", width)
    _fits("max_length", cu_seqlens, width)
    column = torch.arange(width, dtype=lengths.dtype, device=lengths.device).expand(
        lengths.shape[0], width
    )
    if padding == "left":
        column = column - (width - lengths)[:, None]
    return column, (column >= 0) & (column < lengths[:, None])


def _filled(empty: Tensor, shape: tuple[int, ...], value: float) -> Tensor:
    """A constant that autograd still traces to the tensor without elements it stands for."""
    return empty.new_full(shape, value) + empty.sum(dtype=empty.dtype)


def _like(mask: Tensor, x: Tensor) -> Tensor:
    return mask.reshape(*mask.shape, *(1,) * (x.dim() - mask.dim()))


def _needs_number(name: str, cu_seqlens: Tensor) -> str:
    return f"{name}: expected an int because cu_seqlens is on {cu_seqlens.device} and is not read back, got None"


def _total(cu_seqlens: Tensor, total: int | None) -> int:
    _cu_seqlens(cu_seqlens)
    if total is not None:
        return _count("total", total)
    if not is_readable(cu_seqlens):
        raise ValueError(_needs_number("total", cu_seqlens))
    return int(cu_seqlens[-1])


def _cu_seqlens(cu_seqlens: Tensor, x: Tensor | None = None) -> None:
    _index_vector("cu_seqlens", cu_seqlens)
    _index_dtype("cu_seqlens", cu_seqlens.dtype)
    if cu_seqlens.shape[0] == 0:
        raise ValueError(
            "cu_seqlens: expected at least one entry (N + 1 for N sequences), got none"
        )
    if x is not None:
        arguments.device("cu_seqlens", cu_seqlens, x, "x")


def _index_vector(name: str, x: Tensor) -> None:
    arguments.tensor(name, x)
    if x.dim() != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {list(x.shape)}")
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name}: expected an integer dtype, got {x.dtype}")


def _index_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in arguments.OFFSETS:
        arguments.type_error(name, arguments.names(arguments.OFFSETS), dtype_name(dtype))


def _batch(x: Tensor, shape: str) -> None:
    arguments.tensor("x", x)
    if x.dim() < 2:
        raise ValueError(f"x: expected shape {shape}, got {list(x.shape)}")


def _fits(name: str, cu_seqlens: Tensor, width: int) -> None:
    if is_readable(cu_seqlens) and cu_seqlens.shape[0] > 1:
        longest = int(cu_seqlens.diff().max())
        if longest > width:
            raise ValueError(
                f"{name}: expected room for the longest sequence, {longest} tokens, got {width}"
            )


def _side(padding: str) -> None:
    if padding not in ("left", "right"):
        raise ValueError(f"padding: expected 'left' or 'right', got {padding!r}")


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name}: expected an int >= 0, got {value}")
    return value


def _chunk_size(value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"chunk_size: expected an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"chunk_size: expected an int >= 1, got {value}")
