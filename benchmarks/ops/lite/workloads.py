"""Queries, keys and values of successive denoising steps, for attention that remembers which tiles mattered.

Every workload is a generator of `steps` triples q, k, v [B, S, H, D] in `dtype`, made on `device` from one seed: the
same arguments give the same numbers again, on every device. Tokens are those of a grid of frames, rows and columns,
columns fastest. N is standard normal, drawn anew wherever it stands; logits are q.k / sqrt(D).

    simulation  k of a token is its own q and noise: one key tile per query tile matters, the same in every step
    structured  logits fall with the distance in the grid, by head over frames, places or both, under fading noise
    random      every tile matters as little as any other
    drift       structured, but from one step on every query looks for keys half of the tokens further on
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Step = tuple[Tensor, Tensor, Tensor]
Device = str | torch.device


@dataclass(frozen=True)
class Shape:
    """B, the grid (frames, rows, columns), H and D."""

    batch: int
    grid: tuple[int, int, int]
    heads: int
    dim: int

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def full(self) -> tuple[int, int, int, int]:
        return (self.batch, self.tokens, self.heads, self.dim)


@dataclass(frozen=True)
class HeadType:
    """Reach over frames, rows and columns in tokens, and the logit of a query with a key at its own place."""

    reach: tuple[float, float, float]
    peak: float


HEAD_TYPES = {
    "spatial": HeadType((0.7, 3.0, 3.0), 12.0),
    "temporal": HeadType((6.0, 1.2, 1.2), 12.0),
    "local": HeadType((1.5, 2.5, 2.5), 10.0),
    "diffuse": HeadType((6.0, 12.0, 16.0), 3.0),
}

# Grids for the usual numbers of tokens.
GRIDS = {
    4096: (8, 16, 32),
    8192: (8, 32, 32),
    16384: (16, 32, 32),
    32768: (16, 32, 64),
}

SIMULATION_KEY_NOISE = 0.3
SIMULATION_STEP_NOISE = 0.02
# Noise level of the first and of the last step.
LEVELS = (0.8, 0.1)
DRIFT_LEVEL = 0.3
# Deviation of the noise of q and k, and of v, at level 1.
NOISE = 0.35
VALUE_NOISE = 0.1
# Share of fresh noise in every step, see `_evolved`.
FRESH = 0.25


def simulation(
    shape: Shape, steps: int, device: Device, seed: int, dtype: torch.dtype = torch.bfloat16
) -> Iterator[Step]:
    """The diagonal pattern that skipping kernels have been shown on; for regressions only.

        q = N    k = q + 0.3 N    v = N                   in step 0
        q + 0.02 N    k + 0.02 N    v + 0.02 N            in every later one; the noise does not add up

    A query's logit with its own key is close to sqrt(D), all others are standard normal: every threshold from -5 to 0
    leaves the diagonal, and every step drops the same evenly spread rest. It says nothing about real data.
    """
    draw = _Normal(device, seed)
    q = draw(shape.full)
    base = (q, q + SIMULATION_KEY_NOISE * draw(shape.full), draw(shape.full))
    for step in range(steps):
        noise = SIMULATION_STEP_NOISE if step else 0.0
        yield _cast((x + noise * draw(shape.full) for x in base), dtype)


def random(
    shape: Shape, steps: int, device: Device, seed: int, dtype: torch.dtype = torch.bfloat16
) -> Iterator[Step]:
    """q = k = v = N, fresh in every step. Logits are standard normal: at -10 no tile can be skipped."""
    draw = _Normal(device, seed)
    for _ in range(steps):
        yield _cast((draw(shape.full) for _ in range(3)), dtype)


def structured(
    shape: Shape,
    steps: int,
    device: Device,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    types: Sequence[str] = tuple(HEAD_TYPES),
) -> Iterator[Step]:
    """Video-like attention on the way from noise to picture; head h is of type types[h % len(types)].

    A token at p = (frame, row, column) has the random Fourier features of its place,

        f(p) = sqrt(2 / D) [cos(w_j . p), sin(w_j . p)],  j < D / 2,    w_j ~ N(0, diag(1 / reach^2)) per head,

    so that f(p) . f(p') is, up to 1 / sqrt(D), the kernel exp(-|(p - p') / reach|^2 / 2). In step t of T

        q = a_t g f(p) + 0.35 s_t n        g^2 = peak sqrt(D)        s_t = 0.8 .. 0.1, linear in t
        k = a_t g f(p) + 0.35 s_t n'       a_t^2 = max(1 - s_t^2 / 2, 0.1)
        v = (u(p) + u(p - columns) + u(p - rows) + u(p - frames)) / 2 + 0.1 s_t N

    where u is N, fixed per trajectory, its neighbours one token away and cyclic, and where n and n' move on from step
    to step as n <- sqrt(1 - r^2) n + r N with r = 0.25. Logits without noise are peak times the kernel.
    """
    span = max(steps - 1, 1)
    levels = [LEVELS[0] + (LEVELS[1] - LEVELS[0]) * t / span for t in range(steps)]
    return _video(shape, levels, device, seed, dtype, types, lambda step, places: places)


def drift(
    shape: Shape,
    steps: int,
    device: Device,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    types: Sequence[str] = ("local",),
    at: int | None = None,
) -> Iterator[Step]:
    """From step `at` (half of the steps) on other tiles matter, which lists that only shrink cannot follow.

    As `structured`, at the constant level 0.3; but the query of token i has the features of token i until step `at`,
    and from then on those of token i + S / 2, cyclic. With an even number of frames that is the same place half of the
    video later. Tiles dropped before are missing then until the state is reset.
    """
    at = steps // 2 if at is None else at

    def places(step: int, features: Tensor) -> Tensor:
        return features if step < at else features.roll(-(shape.tokens // 2), 0)

    return _video(shape, [DRIFT_LEVEL] * steps, device, seed, dtype, types, places)


WORKLOADS: dict[str, Callable[[Shape, int, Device, int], Iterator[Step]]] = {
    "simulation": simulation,
    "structured": structured,
    "random": random,
    "drift": drift,
}


def _video(
    shape: Shape,
    levels: Sequence[float],
    device: Device,
    seed: int,
    dtype: torch.dtype,
    types: Sequence[str],
    places: Callable[[int, Tensor], Tensor],
) -> Iterator[Step]:
    """One step per noise level. places(step, features of all tokens) gives the features the queries have."""
    draw = _Normal(device, seed)
    features = _features(shape, types, draw)
    values = _smooth(draw(shape.full), shape)
    noise_q, noise_k = draw(shape.full), draw(shape.full)
    for step, level in enumerate(levels):
        signal = math.sqrt(max(1 - level**2 / 2, 0.1))
        q = signal * places(step, features) + NOISE * level * noise_q
        k = signal * features + NOISE * level * noise_k
        v = values + VALUE_NOISE * level * draw(shape.full)
        yield _cast((q, k, v), dtype)
        noise_q, noise_k = _evolved(noise_q, draw), _evolved(noise_k, draw)


def _features(shape: Shape, types: Sequence[str], draw: _Normal) -> Tensor:
    """g f(p) of all tokens and heads, [S, H, D] fp32."""
    if shape.dim % 2:
        raise ValueError(f"dim: expected an even number, got {shape.dim}")
    if not types or set(types) - set(HEAD_TYPES):
        raise ValueError(f"types: expected some of {', '.join(HEAD_TYPES)}, got {tuple(types)}")
    heads = [HEAD_TYPES[types[h % len(types)]] for h in range(shape.heads)]
    reach = torch.tensor([h.reach for h in heads], device=draw.device)
    peak = torch.tensor([h.peak for h in heads], device=draw.device)
    axes = [torch.arange(n, device=draw.device, dtype=torch.float32) for n in shape.grid]
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    frequencies = draw((shape.heads, shape.dim // 2, 3)) / reach[:, None]
    # A matrix product may run in TF32, which is too coarse for phases of hundreds.
    phases = sum(places[:, None, None, a] * frequencies[..., a] for a in range(3))
    size = (peak * math.sqrt(shape.dim)).sqrt() * math.sqrt(2 / shape.dim)
    return torch.cat([phases.cos(), phases.sin()], -1) * size[:, None]


def _smooth(u: Tensor, shape: Shape) -> Tensor:
    """Half the sum of every token and its three predecessors in the grid, which has unit variance again."""
    grid = u.unflatten(1, shape.grid)
    return ((grid + grid.roll(1, 3) + grid.roll(1, 2) + grid.roll(1, 1)) / 2).flatten(1, 3)


def _evolved(noise: Tensor, draw: _Normal) -> Tensor:
    """The next value of noise that keeps its variance and has correlation sqrt(1 - r^2) with the last."""
    return math.sqrt(1 - FRESH**2) * noise + FRESH * draw(tuple(noise.shape))


class _Normal:
    """Standard normal fp32 numbers from one seed: the same on every device, up to the last bits of log and cos.

    Number n of SplitMix64 makes a pair by the method of Box and Muller; torch's own generators differ by device.
    """

    def __init__(self, device: Device, seed: int) -> None:
        self.device = device
        self.used = 0
        self.start = _signed(_finalized(seed % 2**64))

    def __call__(self, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        pairs = -(-count // 2)
        numbers = torch.arange(self.used + 1, self.used + 1 + pairs, device=self.device)
        self.used += pairs
        bits = _finalized(numbers.mul_(_signed(_STRIDE)).add_(self.start))
        # fp32 holds 24 bits. The first number is above 0 for its logarithm, the second is a part of a turn.
        radius = (-2 * (((bits >> 40 & 0xFFFFFF) + 1) * 2.0**-24).log_()).sqrt_()
        angle = (bits & 0xFFFFFF) * (2.0**-24 * 2 * math.pi)
        return torch.cat((radius * angle.cos(), radius * angle.sin()))[:count].view(shape)


# SplitMix64: the distance of two numbers, and the shifts and factors that mix one.
_STRIDE = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def _finalized(bits: Any) -> Any:
    """Mixes the bits of an int, or those of an int64 tensor in place; products wrap."""
    for shift, factor in _MIX:
        if isinstance(bits, int):
            bits = (bits ^ bits >> shift) * factor % 2**64
        else:
            # The shift of a signed number repeats its sign.
            bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (64 - shift) - 1))
            bits.mul_(_signed(factor))
    return bits


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def _cast(tensors: Iterable[Tensor], dtype: torch.dtype) -> Step:
    q, k, v = (t.to(dtype) for t in tensors)
    return q, k, v
