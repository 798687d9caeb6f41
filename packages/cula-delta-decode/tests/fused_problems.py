"""Problems of decode with a short convolution before it and a gated norm behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from delta_problems import POOL, SLOTS, Case, Inputs, exact, make_inputs, new_replay
from torch import Tensor

from cula_core.reference import delta_decode as reference
from cula_core.reference.decode_fused import GatedNorm, ShortConvolution, convolve
from cula_core.reference.delta_decode import Replay
from cula_testing.tensors import column, int32

LENGTH = 16
POSITIONS = (5, 9, 1, 700)
LIVE = [n for n, slot in enumerate(SLOTS) if slot >= 0]
WRITTEN = [slot for slot in SLOTS if slot >= 0]
# A value that lies halfway between two numbers of its dtype may round either way behind the convolution, and what
# follows with it. Without the rounding, or with one tap wrong, the error is ten times this one and more.
EITHER_WAY = 3e-4


def make_norm(
    case: Case, x: Inputs, activation: str = "silu", weight: str = "float32"
) -> GatedNorm:
    generator = torch.Generator().manual_seed(1)
    gate = torch.randn(x.v.shape, generator=generator).to(x.v.dtype)
    scale = torch.randn(case.dims[1], generator=generator).to(getattr(torch, weight))
    return GatedNorm(gate, scale, 1e-5, activation)


def make_convolution(
    case: Case, x: Inputs, *, bias: bool = False, weight: str = "bfloat16", positions=POSITIONS
) -> ShortConvolution:
    """Rings that hold NaN wherever the next call must not look."""
    (heads, heads_v), (dim_k, dim_v) = case.heads, case.dims
    channels = 2 * heads * dim_k + heads_v * dim_v
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    ring = torch.full((POOL, LENGTH, channels), math.nan, dtype=x.q.dtype)
    for slot, position in zip(SLOTS, positions):
        for p in range(max(position - 3, 0), position):
            ring[slot, p % LENGTH] = normal(channels)
    dtype = getattr(torch, weight)
    return ShortConvolution(
        ring, column(int32(*positions)), (normal(channels, 4) / 2).to(dtype),
        normal(channels).to(dtype) if bias else None,
    )  # fmt: skip


def convolved(case: Case, x: Inputs, convolution: ShortConvolution) -> tuple[Inputs, Tensor]:
    """The inputs behind the convolution, rounded to their dtype, and the rings afterwards."""
    ring = convolution.inputs.clone()
    parts = [part.double() for part in (x.q, x.k, x.v)]
    q, k, v = convolve(
        *parts, convolution._replace(inputs=ring.double()), state_indices=x.slots,
        cu_seqlens=x.cu_seqlens, max_tokens=case.tokens if case.packed else None,
    )  # fmt: skip
    convolve(
        x.q, x.k, x.v, convolution._replace(inputs=ring), state_indices=x.slots,
        cu_seqlens=x.cu_seqlens, max_tokens=case.tokens if case.packed else None,
    )  # fmt: skip
    dtype = x.q.dtype
    return replace(x, q=q.to(dtype), k=k.to(dtype), v=v.to(dtype)), ring


def to_device(option: ShortConvolution | GatedNorm | Replay, device: torch.device | str):
    """The same option with its tensors on a device."""
    moved = (x.to(device) if isinstance(x, Tensor) else x for x in option)
    return type(option)(*moved)


def assert_close(actual: Tensor, expected: Tensor, relative_rmse, slack: float) -> None:
    floor = relative_rmse(expected.to(actual.dtype), expected)
    error = relative_rmse(actual, expected)
    assert error <= 1.05 * floor + slack, (error, floor)


def beside_serial(
    case: Case,
    decode: Callable[..., Tensor],
    flush: Callable[[Inputs, Replay, Tensor], None],
    steps: int,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Calls with a replay behind a convolution, of which some tokens are rejected, beside serial decoding in fp64.

    Yields what is compared, the result and what it should be: outputs, and the states behind a flush. Rejected tokens
    leave the rings of the convolution by being written over: positions go on where they were.
    decode(inputs, replay=, accepted=, convolution=) and flush(inputs, replay, accepted) run on `device`.
    """
    generator = torch.Generator().manual_seed(case.tokens)
    first = make_inputs(case)
    replay = to_device(new_replay(case, LENGTH), device)
    taps = make_convolution(case, first, positions=(0, 0, 2, 9))
    # Serial decoding sees accepted tokens only.
    history = {n: taps.inputs[slot].clone() for n, slot in enumerate(SLOTS) if slot >= 0}
    pool, wide = first.state.to(device), first.state.double()
    there = to_device(taps, device)
    previous = None
    for step in range(steps):
        x = replace(make_inputs(case, seed=step), A_log=first.A_log, dt_bias=first.dt_bias)
        accepted = torch.randint(0, case.tokens + 1, (4,), generator=generator, dtype=torch.int32)
        if previous is not None:
            raw, seen = previous
            commit(case, seen, wide, accepted)
            for n, ring in history.items():
                for t in range(int(accepted[n])):
                    parts = [part[n, t].flatten() for part in (raw.q, raw.k, raw.v)]
                    ring[(int(taps.positions[n]) + t) % LENGTH] = torch.cat(parts)
            taps = taps._replace(positions=taps.positions + accepted)
        exact_ring = torch.full_like(taps.inputs, math.nan)
        for n, ring in history.items():
            exact_ring[SLOTS[n]] = ring
        seen, _ = convolved(case, x, taps._replace(inputs=exact_ring))
        expected, _ = exact(case, replace(seen, state=wide), next_state=None)
        there = there._replace(positions=taps.positions.to(device))
        given = replace(x.to(device), state=pool)
        out = decode(given, replay=replay, accepted=accepted.to(device), convolution=there)
        yield f"output {step}", out[LIVE].cpu(), expected[LIVE]
        previous = x, seen
    accepted = torch.full((4,), case.tokens, dtype=torch.int32)
    assert previous is not None
    commit(case, previous[1], wide, accepted)
    flush(given, replay, accepted.to(device))
    yield "state", pool[WRITTEN].cpu(), wide[WRITTEN]


def commit(case: Case, x: Inputs, wide: Tensor, accepted: Tensor) -> None:
    """Advances states in fp64 by the accepted tokens."""
    given = x.wide("k", "v", "g", "beta", "A_log", "dt_bias")
    k, v, g, beta = (given.pop(n) for n in ("k", "v", "g", "beta"))
    reference.delta_rule_commit(
        k, v, g, beta, wide, accepted, state_indices=x.slots, **given, **case.options()
    )
