"""How far attention over listed tiles is from dense attention: errors, dropped probability, and the best lists.

Dense attention and its probabilities are computed anew, some query tiles at a time, so that long sequences fit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import masks
from .config import BLOCK_M, BLOCK_N

__all__ = ["Quality", "check_shapes", "compare", "density"]

# Scores that are held at once; several such tensors live at a time.
_SCORES = 2**27


@dataclass(frozen=True)
class Quality:
    """How far a result is from dense attention on the same inputs, computed in float32 (float64 for float64 inputs).

    density: share of the tiles that some query sees, that were visited. l1: sum |out - dense| / sum |dense|, and
    worst_l1 that of the worst head of a batch row; l2: the same with squares, and the root of it. dropped: the
    probability on tiles that were not visited, mean over all rows, and dropped_p99 what 99 % of the rows do not exceed.

    inexact: relative L2 distance from exact attention over the visited tiles: what arithmetic, not skipping, costs.
    best_l1, best_l2, best_dropped: of exact attention, rounded to the dtype of the result, over as many tiles for every
    query tile, those that hold most probability: what no list of that density does much better than. None unless asked
    for.
    """

    density: float
    l1: float
    l2: float
    worst_l1: float
    dropped: float
    dropped_p99: float
    inexact: float | None = None
    best_l1: float | None = None
    best_l2: float | None = None
    best_dropped: float | None = None


@torch.no_grad()
def compare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: Sequence[tuple[Tensor, Tensor | None]],
    *,
    scale: float | None = None,
    causal: bool = False,
    deep: bool = False,
    block_m: int = BLOCK_M,
    block_n: int = BLOCK_N[0],
    scores: int = _SCORES,
) -> list[Quality]:
    """Measures results of one call, (out, read mask) each; None for the mask lists all tiles.

    Shapes as in `lite_attention`. deep: also `inexact` and `best_*`, for two more products per result. scores: how many
    scores are held at once. Waits for the device. ValueError if a shape does not fit.
    """
    extent = _Extent.of(q, k, v, causal, block_m, block_n)
    for out, mask in results:
        if out.shape != q.shape:
            raise ValueError(
                f"results: expected outputs of shape {list(q.shape)}, got {list(out.shape)}"
            )
        if mask is not None and tuple(mask.shape) != extent.mask_shape:
            raise ValueError(
                f"results: expected masks {list(extent.mask_shape)}, got {list(mask.shape)}"
            )
    scale = q.shape[3] ** -0.5 if scale is None else scale
    dense = _Distance(q)
    totals = [_Totals(q, deep) for _ in results]
    with _exact_products():
        for part in _parts(q, k, v, scale, extent, scores):
            whole = part.weights @ part.value
            dense.add(part, whole[:, : part.length])
            for total, (out, mask) in zip(totals, results):
                total.add(part, whole, out, mask)
    return [total.quality(dense) for total in totals]


def density(
    mask: Tensor | None,
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    block_m: int = BLOCK_M,
    block_n: int = BLOCK_N[0],
) -> float:
    """`Quality.density` of a read mask of a call with these q and k. Waits for the device."""
    extent = _Extent.of(q, k, k, causal, block_m, block_n)
    seen = extent.visible(q.device).sum() * extent.batch * extent.heads
    return int(extent.listed(mask, q.device).sum()) / max(int(seen), 1)


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """ValueError unless they are q, k and v of one call."""
    _Extent.of(q, k, v, False, BLOCK_M, BLOCK_N[0])


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """float32 products that are not rounded to TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class _Extent:
    batch: int
    heads: int
    rows: int
    keys: int
    causal: bool
    block_m: int
    block_n: int

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, causal: bool, block_m: int, block_n: int
    ) -> _Extent:
        shapes = [list(x.shape) for x in (q, k, v)]
        if any(len(shape) != 4 for shape in shapes):
            raise ValueError(f"q, k, v: expected [B, S, H, D] each, got {shapes}")
        (batch, rows, heads, dim), (batch_k, keys, heads_k, dim_k) = shapes[:2]
        if shapes[2] != shapes[1] or (batch, dim) != (batch_k, dim_k) or heads % max(heads_k, 1):
            raise ValueError(
                f"q, k, v: expected [B, Sq, Hq, D] and twice [B, Sk, Hkv, D], got {shapes}"
            )
        if not all((batch, rows, heads, dim, keys, heads_k)):
            raise ValueError(f"q, k, v: expected tensors that are not empty, got {shapes}")
        return cls(batch, heads, rows, keys, causal, block_m, block_n)

    @property
    def tiles(self) -> tuple[int, int]:
        return -(-self.rows // self.block_m), -(-self.keys // self.block_n)

    @property
    def mask_shape(self) -> tuple[int, ...]:
        return self.batch, self.heads, self.tiles[0], masks.words(self.tiles[1])

    def visible(self, device: torch.device) -> Tensor:
        """The tiles of which some query sees some key, bool [Mt, Nt]."""
        tiles = self.tiles
        if not self.causal:
            return torch.ones(tiles, dtype=torch.bool, device=device)
        last = (torch.arange(1, tiles[0] + 1, device=device) * self.block_m).clamp(max=self.rows)
        first = torch.arange(tiles[1], device=device) * self.block_n
        return first < last[:, None] + self.keys - self.rows

    def listed(self, mask: Tensor | None, device: torch.device) -> Tensor:
        """The visible tiles that are listed, bool [B, H, Mt, Nt]."""
        seen = self.visible(device)
        if mask is None:
            return seen.expand(self.batch, self.heads, *seen.shape)
        return masks.unpack(mask, self.tiles[1]) & seen


@dataclass(frozen=True)
class _Part:
    """Some query tiles of some heads of a batch row, padded to whole tiles."""

    extent: _Extent
    batch: int
    heads: slice
    first: int  # query token
    length: int  # query tokens
    weights: Tensor  # [h, mt * block_m, Nt * block_n], 0 where padded or invisible
    value: Tensor  # [h, Nt * block_n, D]
    mass: Tensor  # [h, mt, block_m, Nt], per row and tile
    visible: Tensor  # [mt, Nt]

    @property
    def tiles(self) -> slice:
        start = self.first // self.extent.block_m
        return slice(start, start + self.mass.shape[1])

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.length)

    def attend(self, listed: Tensor) -> Tensor:
        """Exact attention over the tiles listed [h, mt, Nt]; 0 for a row that sees none."""
        heads, tiles, size, keys = self.mass.shape
        chosen = self.weights.view(heads, tiles, size, keys, -1) * listed[:, :, None, :, None]
        total = (self.mass * listed[:, :, None]).sum(-1).view(heads, -1, 1)
        out = chosen.view(self.weights.shape) @ self.value
        return out / total.clamp(min=torch.finfo(total.dtype).tiny)


def _parts(
    q: Tensor, k: Tensor, v: Tensor, scale: float, extent: _Extent, budget: int
) -> Iterator[_Part]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    (_, key_tiles), size = extent.tiles, extent.block_m
    width = key_tiles * extent.block_n
    many = max(1, min(extent.heads, budget // (size * width)))
    step = max(1, budget // (many * width * size)) * size
    group, seen = extent.heads // k.shape[2], extent.visible(q.device)
    tokens = torch.arange(width, device=q.device)
    for b in range(extent.batch):
        for start in range(0, extent.heads, many):
            heads = slice(start, min(start + many, extent.heads))
            theirs = torch.arange(heads.start, heads.stop, device=k.device) // group
            key, value = (x[b, :, theirs].transpose(0, 1).to(dtype) for x in (k, v))
            key, value = (_padded(x, 0, width - extent.keys) for x in (key, value))
            for first in range(0, extent.rows, step):
                last = min(first + step, extent.rows)
                query = q[b, first:last, heads].transpose(0, 1).to(dtype) * scale
                hidden = tokens >= extent.keys
                if extent.causal:
                    rows = torch.arange(first, last, device=q.device)[:, None]
                    hidden = hidden | (tokens > rows + extent.keys - extent.rows)
                scores = query @ key.mT
                if extent.causal or width > extent.keys:
                    scores.masked_fill_(hidden, -math.inf)
                weights = scores.softmax(-1)
                if extent.causal:
                    weights.nan_to_num_(0)  # rows that see nothing
                weights = _padded(weights, 0, -(last - first) % size)
                mass = weights.unflatten(-1, (key_tiles, -1)).sum(-1).unflatten(1, (-1, size))
                place = slice(first // size, -(-last // size))
                yield _Part(
                    extent, b, heads, first, last - first, weights, value, mass, seen[place]
                )


def _padded(x: Tensor, columns: int, rows: int) -> Tensor:
    return F.pad(x, (0, columns, 0, rows)) if columns or rows else x


class _Distance:
    """Sums of |a - b| and (a - b)^2 per batch row and head."""

    def __init__(self, q: Tensor) -> None:
        self.sums = torch.zeros(2, q.shape[0], q.shape[2], dtype=torch.float64, device=q.device)

    def add(self, part: _Part, a: Tensor, b: Tensor | None = None) -> None:
        """a, b: [h, rows, D]; 0 for b without one."""
        gap = a if b is None else a - b
        for total, values in zip(self.sums, (gap.abs(), gap.square())):
            total[part.batch, part.heads] += values.sum((1, 2), dtype=torch.float64)

    def over(self, dense: _Distance) -> tuple[float, float, float]:
        """Relative L1, L2, and the L1 of the worst head."""
        l1, l2 = _ratio(self.sums.sum((1, 2)), dense.sums.sum((1, 2))).tolist()
        return l1, math.sqrt(l2), float(_ratio(self.sums[0], dense.sums[0]).max())


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 for 0 / 0."""
    return torch.where(a == 0, a, a / b)


class _Totals:
    """What accumulates for one result."""

    def __init__(self, q: Tensor, deep: bool) -> None:
        self.deep = deep
        self.error, self.inexact, self.exact, self.best = (_Distance(q) for _ in range(4))
        shape = (q.shape[0], q.shape[2], q.shape[1])
        self.dropped = torch.zeros(shape, device=q.device)
        self.best_mass = torch.zeros((), dtype=torch.float64, device=q.device)
        self.tiles = torch.zeros(2, dtype=torch.int64, device=q.device)

    def add(self, part: _Part, whole: Tensor, out: Tensor, mask: Tensor | None) -> None:
        place = (part.batch, part.heads)
        listed = part.visible.expand(part.mass.shape[0], *part.visible.shape)
        if mask is not None:
            listed = listed & masks.unpack(mask[place][:, part.tiles], part.extent.tiles[1])
        self.tiles += torch.stack([listed.sum(), part.visible.sum() * len(listed)])
        got = out[part.batch, part.rows, part.heads].transpose(0, 1).to(whole.dtype)
        dense = whole[:, : part.length]
        self.error.add(part, got, dense)
        # Summed over what is missing: 1 - (the sum over what is there) would be rounding noise.
        dropped = (part.mass * ~listed[:, :, None]).sum(-1).flatten(1)
        self.dropped[place][:, part.rows] = dropped[:, : part.length].float()
        if not self.deep:
            return
        exact = part.attend(listed)[:, : part.length]
        self.inexact.add(part, got, exact)
        self.exact.add(part, exact)
        mass = part.mass.sum(2)
        order = mass.argsort(dim=-1, descending=True, stable=True)
        ranks = torch.arange(mass.shape[-1], device=mass.device)
        chosen = ranks < listed.sum(-1, keepdim=True)
        best = torch.zeros_like(listed).scatter(-1, order, chosen)
        self.best_mass += (mass * ~best).sum(dtype=torch.float64)
        rounded = part.attend(best)[:, : part.length].to(out.dtype).to(whole.dtype)
        self.best.add(part, rounded, dense)

    def quality(self, dense: _Distance) -> Quality:
        l1, l2, worst = self.error.over(dense)
        listed, visible = self.tiles.tolist()
        flat = self.dropped.flatten()
        p99 = flat.kthvalue(math.ceil(0.99 * len(flat))).values
        more: dict[str, float] = {}
        if self.deep:
            best_l1, best_l2, _ = self.best.over(dense)
            more = {
                "inexact": self.inexact.over(self.exact)[1],
                "best_l1": best_l1,
                "best_l2": best_l2,
                "best_dropped": float(self.best_mass) / len(flat),
            }
        mean = float(flat.mean(dtype=torch.float64))
        return Quality(listed / max(visible, 1), l1, l2, worst, mean, float(p99), **more)
