"""Tile bitmasks: which key tiles a query tile visits, as int32 words.

A mask is an int32 tensor [..., W] with W = ceil(Nt / 32): bit n % 32 of word n // 32 is set when key tile n is listed,
and the bits from Nt on are zero. The attention functions use [B, H, Mt, W]; everything here takes any leading
dimensions. Only shapes are read on the host, except where a function says otherwise, so that masks may be handled
inside a CUDA graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from cula_core import arguments
from cula_core.dtypes import dtype_name

__all__ = [
    "count",
    "density",
    "from_ranges",
    "full",
    "pack",
    "tiles_of_tokens",
    "to_ranges",
    "transpose",
    "unpack",
    "words",
]

_BITS = 32
# The count of an alternating list is Nt + 1 for an odd Nt and must be an int16 too.
_MAX_LIST_TILES = 2**15 - 2
_UNUSED = 2**15 - 1
_FLAT = "a flat list of ints [s0, e0, s1, e1, ...]"


def words(tiles: int) -> int:
    """Number of 32-bit words that hold `tiles` bits, ceil(tiles / 32).

    Raises TypeError unless `tiles` is an int, ValueError if it is negative.

    Example:
        >>> from liteattention_sm89 import masks
        >>> masks.words(32), masks.words(33)
        (1, 2)
    """
    return -(-_size("tiles", tiles) // _BITS)


def full(
    batch: int,
    heads: int,
    Mt: int,
    Nt: int,
    device: torch.device | str | int | None = None,
) -> Tensor:
    """The mask that lists every tile: int32 [batch, heads, Mt, words(Nt)] on `device`, contiguous, zero from bit Nt on.

    Raises TypeError unless the sizes are ints, ValueError if one is negative.

    Example:
        >>> from liteattention_sm89 import masks
        >>> mask = masks.full(batch=1, heads=2, Mt=3, Nt=5)
        >>> mask.shape, mask.unique().tolist()  # five bits
        (torch.Size([1, 2, 3, 1]), [31])
    """
    sizes = (_size("batch", batch), _size("heads", heads), _size("Mt", Mt))
    return _full_words(Nt, device).expand(*sizes, -1).contiguous()


def pack(bits: Tensor) -> Tensor:
    """bool [..., Nt] (True: listed) to a mask, int32 [..., words(Nt)], contiguous.

    Raises TypeError unless `bits` is a bool tensor, ValueError if it has no dimension.

    Example:
        >>> import torch
        >>> from liteattention_sm89 import masks
        >>> masks.pack(torch.tensor([[True, False, True], [False, False, True]])).tolist()
        [[5], [4]]
    """
    _check_tensor("bits", bits, torch.bool)
    Nt = bits.shape[-1]
    padded = F.pad(bits, (0, words(Nt) * _BITS - Nt)).unflatten(-1, (words(Nt), _BITS))
    # Bit 31 weighs -2^31, so no sum of a word's weights leaves the range of int32.
    return (padded * _weights(bits.device)).sum(-1, dtype=torch.int32)


def unpack(mask: Tensor, Nt: int) -> Tensor:
    """A mask, int32 [..., words(Nt)], to bool [..., Nt] (True: listed), contiguous. Bits from Nt on are ignored.

    Raises TypeError unless `mask` is an int32 tensor and Nt an int, ValueError unless `mask` has words(Nt) words.

    Example:
        >>> import torch
        >>> from liteattention_sm89 import masks
        >>> masks.unpack(torch.tensor([5], dtype=torch.int32), 3).tolist()
        [True, False, True]
    """
    _check_mask(mask, Nt)
    bits = (mask.unsqueeze(-1) & _weights(mask.device)) != 0
    return bits.flatten(-2)[..., :Nt].contiguous()


def count(mask: Tensor) -> Tensor:
    """Number of listed tiles per row: int32 [..., W] to int64 [...]. Every set bit counts, wherever Nt lies.

    Raises TypeError unless `mask` is an int32 tensor, ValueError if it has no dimension.

    Example:
        >>> import torch
        >>> from liteattention_sm89 import masks
        >>> masks.count(torch.tensor([[5], [4], [-1]], dtype=torch.int32)).tolist()
        [2, 1, 32]
    """
    _check_tensor("mask", mask, torch.int32)
    # In 64 bits no step carries into the sign. Each line adds neighbours: bits, pairs, nibbles, bytes.
    x = mask.to(torch.int64)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101 >> 24) & 0xFF).sum(-1)


def density(mask: Tensor, Nt: int) -> Tensor:
    """The listed fraction of all tiles, in [0, 1]: float32 scalar tensor on the mask's device.

    mask: int32 [..., words(Nt)]; bits from Nt on are ignored. A mask without rows or tiles has density 0.
    Raises TypeError unless `mask` is an int32 tensor and Nt an int, ValueError unless `mask` has words(Nt) words.

    Example:
        >>> import torch
        >>> from liteattention_sm89 import masks
        >>> masks.density(torch.tensor([[5], [4]], dtype=torch.int32), 4).item()  # three of eight tiles
        0.375
    """
    _check_mask(mask, Nt)
    listed = count(mask & _full_words(Nt, mask.device))
    # In fp64, so that a full mask has density 1 also where a GPU divides by multiplying with the reciprocal.
    return (listed.sum().to(torch.float64) / max(listed.numel() * Nt, 1)).to(torch.float32)


def transpose(mask: Tensor, Mt: int, Nt: int) -> Tensor:
    """The same tiles listed per key tile: int32 [..., Mt, words(Nt)] to int32 [..., Nt, words(Mt)], contiguous.

    Bit m of row n of the result is bit n of row m of `mask`; bits from Nt on are ignored.
    Raises TypeError unless `mask` is an int32 tensor and Mt, Nt are ints, ValueError unless its last dimensions are
    Mt and words(Nt).

    Example:
        >>> import torch
        >>> from liteattention_sm89 import masks
        >>> listed = torch.tensor([[True, False, True], [False, False, True]])  # [Mt, Nt]
        >>> turned = masks.transpose(masks.pack(listed), Mt=2, Nt=3)
        >>> masks.unpack(turned, 2).tolist()
        [[True, False], [False, False], [True, True]]
    """
    _check_mask(mask, Nt)
    if mask.dim() < 2 or mask.shape[-2] != _size("Mt", Mt):
        arguments.value_error("mask", f"[..., Mt, W] with Mt = {Mt} rows", list(mask.shape))
    return pack(unpack(mask, Nt).transpose(-1, -2))


def tiles_of_tokens(
    ranges: Iterable[int] | Tensor,
    Sk: int,
    block_n: int,
    inward: bool,
    device: torch.device | str | int | None = None,
) -> Tensor:
    """Ranges of key tokens to the tiles they cover: int32 words [W] with W = words(ceil(Sk / block_n)), on `device`.

    ranges: flat [s0, e0, s1, e1, ...], ends exclusive, in any order; ranges that touch or overlap count as one. An
    integer tensor [n] is taken too. Sk: keys; block_n: keys of a tile, the last one may be ragged. Works on the host:
    a tensor of ranges is read there, and the words are copied to the device.
    inward: True lists the tiles all of whose tokens are in a range (what must be skipped), False those with a token in
    one (what must be computed).
    Raises TypeError unless the ranges and sizes are ints and `inward` a bool, ValueError for an odd number of entries,
    a range that is empty, reversed or not inside [0, Sk], and a block_n below 1.

    Example:
        >>> from liteattention_sm89 import masks
        >>> ranges = [0, 100, 200, 256]  # the tokens 0 to 99 and 200 to 255
        >>> touched = masks.tiles_of_tokens(ranges, Sk=256, block_n=64, inward=False)
        >>> covered = masks.tiles_of_tokens(ranges, Sk=256, block_n=64, inward=True)
        >>> masks.unpack(touched, 4).int().tolist(), masks.unpack(covered, 4).int().tolist()
        ([1, 1, 0, 1], [1, 0, 0, 0])
    """
    if _size("block_n", block_n) == 0:
        arguments.value_error("block_n", "at least 1", block_n)
    arguments.booleans(inward=inward)
    tiles = -(-_size("Sk", Sk) // block_n)
    bits = 0
    for start, end in _merged(_pairs(ranges, Sk)):
        first = -(-start // block_n) if inward else start // block_n
        # The end of the keys closes the last tile, however short that tile is.
        last = tiles if end == Sk else end // block_n if inward else -(-end // block_n)
        if first < last:
            bits |= (1 << last) - (1 << first)
    row = [bits >> shift & 0xFFFFFFFF for shift in range(0, tiles, _BITS)]
    return torch.tensor(row, dtype=torch.int64, device=device).to(torch.int32)


def to_ranges(mask: Tensor, Nt: int, descending: bool = False) -> Tensor:
    """A mask, int32 [..., words(Nt)], to LiteAttention's lists: int16 [..., Nt + 2], contiguous.

    A row holds the number of entries that follow, then a pair (start, exclusive end) for every run of listed tiles as
    a pass in that direction meets them: ascending [2, 0, Nt] and descending [2, Nt - 1, -1] list every tile. Entries
    that are not used are zero. LiteAttention reads a list against the direction that wrote it, and cannot read a row
    without entries. Bits from Nt on are ignored.
    Raises TypeError unless `mask` is an int32 tensor, Nt an int and `descending` a bool, ValueError unless `mask` has
    words(Nt) words, or for more than 32766 tiles, whose lists int16 cannot hold.

    Example:
        >>> import torch
        >>> from liteattention_sm89 import masks
        >>> mask = masks.pack(torch.tensor([True, True, False, True]))
        >>> masks.to_ranges(mask, 4).tolist()  # four entries: tiles 0 and 1, then tile 3
        [4, 0, 2, 3, 4, 0]
        >>> masks.to_ranges(mask, 4, descending=True).tolist()
        [4, 3, 2, 1, -1, 0]
    """
    _check_list_extent(Nt, descending)
    bits = unpack(mask, Nt)
    if descending:
        bits = bits.flip(-1)
    edges = F.pad(bits, (1, 0)) != F.pad(bits, (0, 1))
    steps = torch.arange(Nt + 1, dtype=torch.int16, device=mask.device)
    entries = torch.where(edges, steps, _UNUSED).sort(-1).values
    tiles = Nt - 1 - entries if descending else entries
    length = edges.sum(-1, keepdim=True, dtype=torch.int16)
    return torch.cat((length, torch.where(entries == _UNUSED, 0, tiles)), -1)


def from_ranges(lists: Tensor, Nt: int, descending: bool = False) -> Tensor:
    """LiteAttention's lists, int16 [..., Nt + 2] as `to_ranges` describes them, to a mask, int32 [..., words(Nt)].

    descending: the direction of the pass that wrote the lists. Ranges may touch, as LiteAttention writes them when the
    list it read had touching ranges; what lies behind the counted entries is ignored. Waits for the device: the lists
    are checked.
    Raises TypeError unless `lists` is an int16 tensor, Nt an int and `descending` a bool, ValueError unless it is
    Nt + 2 wide and every row has an even count up to Nt + 1 and ranges that are not empty, lie inside the Nt tiles, do
    not overlap and follow each other in that direction, or for more than 32766 tiles.

    Example:
        >>> import torch
        >>> from liteattention_sm89 import masks
        >>> lists = torch.tensor([4, 3, 2, 1, -1, 0], dtype=torch.int16)  # of a descending pass over four tiles
        >>> masks.unpack(masks.from_ranges(lists, 4, descending=True), 4).tolist()
        [True, True, False, True]
    """
    _check_list_extent(Nt, descending)
    _check_tensor("lists", lists, torch.int16)
    if lists.shape[-1] != Nt + 2:
        arguments.value_error("lists", f"[..., Nt + 2] with Nt = {Nt} tiles", list(lists.shape))
    length, entries = lists[..., :1].long(), lists[..., 1:].long()
    # Steps of the traversal: tile n is step n of an ascending pass and step Nt - 1 - n of a descending one.
    steps = Nt - 1 - entries if descending else entries
    slots = torch.arange(Nt + 1, device=lists.device)
    used = slots < length
    legal = (length % 2 == 0) & (length >= 0) & (length <= Nt + 1)
    legal = legal & (~used | ((steps >= 0) & (steps <= Nt))).all(-1, keepdim=True)
    # From a start to its end at least one step, from there to the next start none.
    gaps = (steps[..., 1:] - steps[..., :-1]) >= (slots[1:] % 2)
    legal = (legal & (~used[..., 1:] | gaps).all(-1, keepdim=True)).squeeze(-1)
    if not legal.all():
        writer = "a descending" if descending else "an ascending"
        row = lists[~legal][0].tolist()
        arguments.value_error(
            "lists", f"[count, start, end, ...] of {writer} pass over {Nt} tiles", row
        )
    # A tile is inside a range when an odd number of starts and ends lie at or before its step.
    edges = torch.where(used, steps, Nt + 1).contiguous()
    each = slots[:Nt].expand(*edges.shape[:-1], Nt).contiguous()
    bits = torch.searchsorted(edges, each, right=True) % 2 == 1
    return pack(bits.flip(-1) if descending else bits)


def _full_words(Nt: int, device: torch.device | str | int | None) -> Tensor:
    """int32 [words(Nt)]: every bit below Nt. Made on the device, because a copy from the host would wait for it."""
    first = torch.arange(0, words(_size("Nt", Nt)) * _BITS, _BITS, device=device)
    valid = (Nt - first).clamp(max=_BITS)
    return ((torch.ones_like(valid) << valid) - 1).to(torch.int32)


def _weights(device: torch.device) -> Tensor:
    """int32 [32]: the word with only bit i set."""
    shifts = torch.arange(_BITS, device=device)
    return (torch.ones_like(shifts) << shifts).to(torch.int32)


def _pairs(ranges: Iterable[int] | Tensor, Sk: int) -> list[tuple[int, int]]:
    """The token ranges, checked one by one."""
    if isinstance(ranges, Tensor):
        if ranges.dtype not in (torch.int16, torch.int32, torch.int64):
            arguments.type_error("ranges", "integers", f"a {dtype_name(ranges.dtype)} tensor")
        if ranges.dim() != 1:
            arguments.value_error("ranges", "a flat list", f"a tensor {list(ranges.shape)}")
        ranges = ranges.tolist()
    if isinstance(ranges, (str, bytes)) or not isinstance(ranges, Iterable):
        arguments.type_error("ranges", _FLAT, type(ranges).__name__)
    flat = [_token(value) for value in ranges]
    if len(flat) % 2:
        arguments.value_error("ranges", "an even number of entries, start and end by turns", flat)
    pairs = list(zip(flat[::2], flat[1::2]))
    for start, end in pairs:
        if not 0 <= start < end <= Sk:
            arguments.value_error("ranges", f"0 <= start < end <= Sk = {Sk}", f"[{start}, {end}]")
    return pairs


def _token(value: object) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    arguments.type_error("ranges", _FLAT, f"an entry {value!r}")


def _merged(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same tokens as ascending ranges that do not touch."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(pairs):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _check_list_extent(Nt: int, descending: bool) -> None:
    if _size("Nt", Nt) > _MAX_LIST_TILES:
        arguments.value_error("Nt", f"at most {_MAX_LIST_TILES} tiles, for int16 lists", Nt)
    arguments.booleans(descending=descending)


def _size(name: str, value: int) -> int:
    arguments.integer(name, value)
    if value < 0:
        arguments.value_error(name, "a number that is not negative", value)
    return value


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    arguments.tensor(name, tensor)
    if tensor.dtype != dtype:
        arguments.type_error(name, dtype_name(dtype), dtype_name(tensor.dtype))
    if tensor.dim() == 0:
        arguments.value_error(name, "at least one dimension", "a scalar tensor")


def _check_mask(mask: Tensor, Nt: int) -> None:
    _check_tensor("mask", mask, torch.int32)
    if mask.shape[-1] != words(_size("Nt", Nt)):
        arguments.value_error(
            "mask", f"{words(Nt)} words in a row for Nt = {Nt} tiles", list(mask.shape)
        )
