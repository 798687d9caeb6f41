"""Queries and keys on grids of 8-bit integers: another quantiser than the package's, and what attention of them is."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cula_testing.comparing import relative_rmse
from cula_testing.lite import Call, Empty, Inputs, Subject, make_inputs
from liteattention_sm89 import launch, reference

MAX_OUTPUT_ERROR = 4e-3  # beside the attention of what was rounded
MAX_LSE_ERROR = 1e-3
# What rounding may cost, beside exact attention: outputs by the root of the mean square, lse absolute.
MAX_ROUNDING_ERROR, MAX_LSE_ROUNDING_ERROR = 2e-2, 5e-2
BAND = 1e-3  # log2 units around the threshold where a tile may be kept or not


@dataclass(frozen=True)
class Grid:
    """integers [B, T, H, D] and, of the group of every row, scales [B, T, H]."""

    integers: Tensor
    scales: Tensor

    @property
    def values(self) -> Tensor:
        return self.integers.double() * self.scales.double()[..., None]


def on_grid(x: Tensor, group: int, starts: Tensor | None = None) -> Grid:
    """`group` rows of a head and sequence after another in fp64: the largest magnitude becomes 127."""
    x = x.double()
    grid = Grid(torch.zeros_like(x), x.new_zeros(x.shape[:3]))
    ends = [0, x.shape[1]] if starts is None else starts.tolist()
    for begin, end in itertools.pairwise(ends):
        for first in range(begin, end, group):
            rows = slice(first, min(first + group, end))
            scale = x[:, rows].abs().amax((1, 3), keepdim=True) / 127
            grid.scales[:, rows] = scale[..., 0]
            grid.integers[:, rows] = torch.where(scale > 0, x[:, rows] / scale, 0).round()
    return grid


def centred(x: Inputs) -> Tensor:
    """Keys of every head less their mean over the sequence."""
    lengths = None if x.starts_k is None else x.starts_k.diff()
    return x.k.double() - per_token(means_of(x), lengths)


def means_of(x: Inputs) -> Tensor:
    """[sequences, Hk, D] in fp64, 0 where there is no key."""
    if x.starts_k is None:
        return x.k.double().sum(1) / max(x.k.shape[1], 1)
    parts = x.k[0].double().split(x.starts_k.diff().tolist())
    return torch.stack([part.sum(0) / max(len(part), 1) for part in parts])


def per_token(means: Tensor, lengths: Tensor | None) -> Tensor:
    """[B, 1, Hk, D], or what packed tokens have, [1, T, Hk, D]."""
    return means[:, None] if lengths is None else means.repeat_interleave(lengths.long(), 0)[None]


def shift_of(x: Inputs, scale: float) -> Tensor:
    """What the mean of the keys adds to all scores of a row, natural log units, [B, Hq, Sq]."""
    means = means_of(x).repeat_interleave(x.q.shape[2] // x.k.shape[2], 1)
    mean = per_token(means, None if x.starts_q is None else x.starts_q.diff())
    return scale * torch.einsum("bqhd,bqhd->bhq", x.q.double(), mean.expand(x.q.shape))


def grids(x: Inputs) -> tuple[Grid, Grid]:
    return on_grid(x.q, 16, x.starts_q), on_grid(centred(x), 64, x.starts_k)


def with_offsets(x: Inputs, size: float) -> Inputs:
    """Channels of the keys moved by up to so much, the same for all tokens of a head."""
    offsets = size * torch.randn(x.k.shape[2:], generator=torch.Generator().manual_seed(7))
    return replace(x, k=(x.k.float() + offsets).to(x.k.dtype))


def double(x: Inputs) -> Inputs:
    return replace(x, q=x.q.double(), k=x.k.double(), v=x.v.double())


def exact_inputs(call: Call, seed: int = 0) -> Inputs:
    """Integers that reach 127 in every group, and offsets of the keys' channels, their mean: nothing is rounded."""
    generator = torch.Generator().manual_seed(seed)
    x = make_inputs(call)

    def integers(like: Tensor) -> Tensor:
        drawn = torch.randint(-90, 91, like.shape, generator=generator)
        drawn[..., 0] = 127
        return drawn

    assert call.keys % 2 == 0 and call.lengths is None
    first = integers(x.k[:, ::2])
    offsets = torch.randint(-100, 101, x.k.shape[2:], generator=generator)
    k = torch.stack((first, -first), 2).flatten(1, 2) + offsets
    return replace(x, q=integers(x.q).to(x.q.dtype), k=k.to(x.k.dtype))


def attention(
    call: Call, x: Inputs, q: Tensor, k: Tensor, scale: float, **changes: Any
) -> tuple[Tensor, ...]:
    """(out, lse, write mask) in fp64 for q and centred k; lse with what is missing in the scores of centred keys."""
    packed = {} if x.starts_q is None else {"max_seqlen_q": x.most[0], "max_seqlen_k": x.most[1]}
    more: dict[str, Any] = {
        "threshold": call.threshold, "direction": call.direction, "causal": call.causal, "must_do": x.held,
        "block_n": call.block_n, "cu_seqlens_q": x.starts_q, "cu_seqlens_k": x.starts_k,
    } | packed | changes  # fmt: skip
    out, lse, write = reference.lite_attention(
        q.double(), k.double(), x.v.double(), x.read, scale=scale, **more
    )
    return out, lse + shift_of(x, scale).view(lse.shape), write


def largest(difference: Tensor) -> float:
    """0 of nothing, NaN of NaN."""
    return difference.abs().max().item() if difference.numel() else 0.0


# ---- the kernels -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """What the kernels wrote; q, k: the grids that the attention kernel was handed. lse is [B, Hq, Sq]."""

    out: Tensor
    lse: Tensor
    write: Tensor | None
    q: Grid
    k: Grid
    shift: Tensor


def launched(
    call: Call,
    x: Inputs,
    empty: Empty,
    *,
    scale: float | None = None,
    **kernels: Any,
) -> Results:
    """What `launch.forward` makes the kernels do that it is given. empty: memory for results, NaN at first."""
    handed: list[tuple] = []
    kernel_for = kernels.pop("kernel_for")

    def remembering(config, arch):
        kernel = kernel_for(config, arch)
        return lambda *arguments: (handed.append(arguments), kernel(*arguments))

    if scale is not None:
        kernels["scale"] = scale
    out, lse, write = Subject(launch.forward, reference.lite_attention).forward(
        call, x, empty, int8=True, max_seqlen_k=x.most[1], kernel_for=remembering, **kernels
    )
    ((q, k, *_),) = handed
    of_queries, of_keys, shift = handed[0][11:14]
    return Results(
        out, lse, write,
        grid_of(q, of_queries, call.dim, 16, 128, x.starts_q),
        grid_of(k, of_keys, call.dim, 64, 64, x.starts_k),
        shift,
    )  # fmt: skip


def grid_of(
    words: Tensor, scales: Tensor, dim: int, group: int, period: int, starts: Tensor | None
) -> Grid:
    """What a kernel wrote: two integers to a 16-bit element, scales of groups of sequences that begin at a period."""
    integers = words.contiguous().view(torch.int8)
    assert not integers[..., dim:].any(), "columns behind the head dimension are not zero"
    tokens = torch.arange(integers.shape[1], device=words.device)
    if starts is None:
        slots = tokens // group
    else:
        sequence = torch.searchsorted(starts[1:].long(), tokens, right=True)
        first = starts.long()[sequence]
        slots = (first // period + sequence) * (period // group) + (tokens - first) // group
    return Grid(integers[..., :dim].double(), scales[..., slots].transpose(1, 2).double())


def assert_rounded(grid: Grid, x: Tensor, group: int, starts: Tensor | None) -> None:
    """That a kernel's integers are those of x in fp64; next to a half either neighbour will do."""
    wanted = on_grid(x, group, starts)
    # Groups of nothing but zeros have any scale that is next to nothing.
    torch.testing.assert_close(grid.scales, wanted.scales, rtol=2e-6, atol=1e-17)
    wrong = grid.integers != wanted.integers
    sizes = x.double().abs() / wanted.scales.clamp(min=1e-30)[..., None]
    ties = (sizes % 1 - 0.5).abs() < 1e-3
    assert not (wrong & ~ties).any()
    assert largest(grid.integers - wanted.integers) <= 1 and grid.integers.abs().max() <= 127


def assert_right(
    call: Call, x: Inputs, got: Results, scale: float | None = None, band: float = BAND
) -> None:
    """Integers, shifts, then outputs, lse and masks, beside attention in fp64 of the same integers."""
    scale = call.dim**-0.5 if scale is None else scale
    if x.q.numel():
        assert_rounded(got.q, x.q, 16, x.starts_q)
    if x.k.numel():
        assert_rounded(got.k, centred(x), 64, x.starts_k)
    shift = shift_of(x, scale)
    torch.testing.assert_close(got.shift.double(), shift, rtol=1e-5, atol=1e-5)
    want, lse, write = attention(call, x, got.q.values, got.k.values, scale)
    lse = lse.view(got.lse.shape)
    assert relative_rmse(got.out, want) < MAX_OUTPUT_ERROR
    seen = torch.isfinite(lse)
    assert (got.lse[~seen] == -math.inf).all() and not got.out.transpose(1, 2)[~seen].any()
    assert largest((got.lse.double() - lse)[seen]) < MAX_LSE_ERROR
    if got.write is not None:
        assert_kept(call, x, got, scale, write, band)


def assert_kept(
    call: Call, x: Inputs, got: Results, scale: float, write: Tensor, band: float
) -> None:
    """That the list is right but for tiles in a band around the threshold, of which there are few."""
    more, fewer = (
        attention(call, x, got.q.values, got.k.values, scale, threshold=call.threshold + side)[2]
        for side in (-band, band)
    )
    assert not (fewer & ~got.write).any() and not (got.write & ~more).any()
    assert not (got.write & ~x.read).any()
    assert (more != fewer).sum() <= 0.1 * write.numel()
