"""Skip-list attention over a sequence whose pattern moves: the mask is carried from step to step.

The tokens are the cells of a small video. Queries and keys are random Fourier features of the cell's place, so a cell
attends to cells near it; from step to step the queries drift along the rows while their noise falls. A tile once
dropped is never looked at again, so the mask is started afresh half way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

import cula.lite
from cula.demo.data import Corpus, Projections
from cula.demo.results import Check, Outcome, Row, SkipTrace, relative_rmse
from cula.demo.runtime import Advance, Machine, oracle, served_by
from cula.reference import lite_attention as reference_attention

HEADS, DIM = 2, 64
STEPS, RESTART = 8, 4
TICKS = STEPS
ROWS, COLUMNS = 16, 16
THRESHOLD = -7.0
# Cells within about these distances (frames, rows, columns) look alike; PEAK is the logit of a cell with itself.
REACH, PEAK = (0.7, 3.0, 3.0), 12.0
DRIFT = 4.0
NOISE = (0.6, 0.1)
# Dropping tiles whose every probability is below 2**THRESHOLD of its row's largest may cost this much.
SKIP_BOUND = 0.1
DENSITY_BOUND = 0.7
# Tiles within rounding of the threshold may be decided differently than in fp64.
MASK_BOUND = 0.01
TILE = 128


def run(
    machine: Machine, corpus: Corpus, projections: Projections, tokens: int, advance: Advance
) -> Outcome:
    """Attend step after step in alternating direction; compare with the same mask and with dense attention in fp64."""
    frames = 8 if tokens >= 2048 else 4
    size = frames * ROWS * COLUMNS
    text = corpus.stream(size)
    text = text.repeat(-(-size // len(text)))[:size]
    v = machine.put(projections.embed(text, "skip-v", HEADS, DIM))[None]
    impl = served_by(
        "lite.attention",
        machine,
        function="lite_attention",
        dtype=v.dtype,
        head_dim_k=DIM,
        head_dim_v=DIM,
        tokens=size,
    )
    rows = []
    trace, blind = SkipTrace("mask restarted", [], []), SkipTrace("mask never restarted", [], [])
    tiles = size // TILE
    every = torch.ones(1, HEADS, tiles, tiles, dtype=torch.bool, device=machine.device)
    mask = stale = every
    for step, (q, k) in enumerate(_video(machine, projections, frames)):
        direction = 1 if step % 2 == 0 else -1
        mask = every if step % RESTART == 0 else mask
        q64, k64, v64 = oracle(q), oracle(k), oracle(v)
        dense = _exact_attention(q64, k64, v64, every.cpu())
        (out, written), rate = machine.timed(partial(_attend, q, k, v, mask, direction), size)
        density, loss = mask.double().mean().item(), relative_rmse(out, dense)
        trace.density.append(density)
        trace.error.append(loss)

        _, _, want_mask = reference_attention(
            q64, k64, v64, mask.cpu(), threshold=THRESHOLD, direction=direction, block_n=TILE
        )
        assert want_mask is not None  # only dense attention writes no mask
        # A tile that was not visited cannot come back; one that did makes the whole mask worthless.
        regained = bool((written & ~mask).any())
        disagree = 1.0 if regained else (written.cpu() != want_mask).double().mean().item()
        checks = [Check("vs dense", loss, SKIP_BOUND), Check("mask", disagree, MASK_BOUND)]
        if step % RESTART == RESTART - 1:
            checks.append(Check("density", density, DENSITY_BOUND))
        error = relative_rmse(out, _exact_attention(q64, k64, v64, mask.cpu()))
        rows.append(
            Row(
                "lite.attention",
                f"step {step + 1}, {'forward' if direction > 0 else 'backward'}, {size} tokens",
                impl,
                rate,
                Check("error", error, machine.bound),
                tuple(checks),
                f"density {density:.0%}",
            )
        )
        mask = written

        other, after = (out, written) if step < RESTART else _attend(q, k, v, stale, direction)
        blind.density.append(stale.double().mean().item())
        blind.error.append(relative_rmse(other, dense))
        stale = after
        advance(1)
    return Outcome(rows, skips=[trace, blind])


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, read: torch.Tensor, direction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    out, _, written = cula.lite.lite_attention(
        q, k, v, read, threshold=THRESHOLD, direction=direction, block_n=TILE
    )
    assert written is not None  # only dense attention writes no mask
    return out, written


def _exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Softmax attention `[B, S, H, D]` over the tiles of `mask`."""
    mask = mask.repeat_interleave(TILE, 2).repeat_interleave(TILE, 3)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def _video(
    machine: Machine, projections: Projections, frames: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Queries and keys `[1, S, HEADS, DIM]` of each step."""
    axes = [torch.arange(n, dtype=torch.float32) for n in (frames, ROWS, COLUMNS)]
    place = torch.cartesian_prod(*axes)
    waves = projections.table("skip-waves", HEADS, DIM // 2, 3) / torch.tensor(REACH)
    amplitude = math.sqrt(PEAK * math.sqrt(DIM) / (DIM // 2))

    def features(at: torch.Tensor) -> torch.Tensor:
        phase = torch.einsum("sc,hfc->shf", at, waves)
        return amplitude * torch.cat([phase.cos(), phase.sin()], dim=-1)

    for step in range(STEPS):
        share = step / (STEPS - 1)
        noise = NOISE[0] + (NOISE[1] - NOISE[0]) * share
        noises = projections.table(f"skip-noise{step}", 2, len(place), HEADS, DIM) * noise
        moved = place + torch.tensor([0.0, DRIFT * share, 0.0])
        yield (
            machine.put(features(moved) + noises[0])[None],
            machine.put(features(place) + noises[1])[None],
        )
