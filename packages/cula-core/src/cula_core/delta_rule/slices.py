"""A call over slices of sequences: the state in front of a slice may become known while the call is under way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import tensors
from .call import Call, Slice
from .config import CHUNK, HEAD_DIM, MAX_GRID_Z, chunk_slots
from .launch import Kernels, Launch, kernels_of, new_blocks
from .plan import Plan, plan
from .target import Target


class Begun:
    """A call of which everything is done that needs no state in front of the slices that continue a sequence.

    maps: of the slices that go on, in their order, A `[HV, K, V]` and M `[HV, K, K]`: a slice turns the state S into
    M S + A. Of a slice that begins a sequence M is None, and A the state behind it.
    """

    def __init__(self, launch: Launch, slices: Sequence[Slice], segments: Tensor) -> None:
        self._launch, self._slices, self._segments = launch, slices, segments
        self._scanned: Tensor | None = None
        if launch.spread.split or any(part.goes_on for part in slices):
            self._scanned = launch.scan(0, segments)
        self.maps = self._maps()

    def finish(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs `[1, T, HV, V]` and the states behind all slices, from those in front of them `[N, HV, K, V]`."""
        final = torch.empty_like(starts)
        launch = replace(self._launch, initial=starts, final=final, fresh=None)
        merged = None
        if launch.spread.split:
            assert self._scanned is not None
            for n, part in enumerate(self._slices):
                first, count = self._segments_of(n)
                if part.comes_on and count > 1:
                    # The merge takes A of a first segment as the state behind it.
                    own = self._scanned[first]
                    own[:, :HEAD_DIM] = _applied(own, starts[n].mT)
            merged = launch.merge(self._scanned)
        launch.recurrence(0, len(launch.blocks), merged, self._segments)
        return launch.call.out, final

    def _maps(self) -> list[tuple[Tensor, Tensor | None]]:
        found: list[tuple[Tensor, Tensor | None]] = []
        known = None
        for n, part in enumerate(self._slices):
            if not part.goes_on:
                continue
            assert self._scanned is not None
            first, count = self._segments_of(n)
            if part.comes_on:
                whole = self._scanned[first]  # A^T above M^T
                for segment in range(first + 1, first + count):
                    own = self._scanned[segment]
                    whole = whole @ own[:, HEAD_DIM:]
                    whole[:, :HEAD_DIM] += own[:, :HEAD_DIM]
                found.append((whole[:, :HEAD_DIM].mT, whole[:, HEAD_DIM:].mT))
            elif count == 1:
                found.append((self._scanned[first, :, :HEAD_DIM].mT, None))
            else:
                known = self._launch.merge(self._scanned) if known is None else known
                last = first + count - 1
                found.append((_applied(self._scanned[last], known[last]).mT, None))
        return found

    def _segments_of(self, n: int) -> tuple[int, int]:
        """The number of a slice's first segment, and how many it has."""
        part, length = self._slices[n], self._launch.segment_tokens
        return part.start // length + n, max(1, -(-(part.stop - part.start) // length))


def begin(
    target: Target,
    call: Call,
    slices: Sequence[Slice],
    *,
    multiprocessors: int | None = None,
    kernels: Kernels | None = None,
    planner: Callable[..., Plan] = plan,
) -> Begun:
    """Launches what needs no state in front of the slices that continue a sequence, on torch's current stream.

    The call has tensors as the kernels read them, cu_seqlens as slices say, initial states (those of slices that
    continue a sequence are not read) and neither a pool nor a workspace. The other arguments are as those of
    `launch.run`.
    """
    batch, tokens, heads_v = call.v.shape[:3]
    slots = chunk_slots(batch, tokens, len(slices))
    if slots > MAX_GRID_Z:
        raise ValueError(
            f"cp_context: expected at most {MAX_GRID_Z} chunks of {CHUNK} tokens on a rank, got {slots}"
        )
    device = call.q.device
    count = multiprocessors or tensors.multiprocessors(device)
    blocks = new_blocks(call, slots)
    longest = max(part.stop - part.start for part in slices)
    spread = planner(
        target, batch, tokens, heads_v, len(slices), count, blocks.nbytes, call.intracard_cp, longest,
        call.segment_tokens,
        (sum(2 * part.goes_on + part.comes_on for part in slices),
         sum(1 + part.comes_on for part in slices if part.goes_on)),
    )  # fmt: skip
    launch = Launch(
        target,
        call,
        spread,
        kernels or kernels_of(target, device),
        count,
        initial=call.initial,
        final=None,
        indices=None,
        targets=None,
        fresh=_bits(tuple(part.bits for part in slices), device),
        null_slot=-1,
        in_place=False,
        # More than all tokens have, so that the number of an empty slice behind them is that of its sequence.
        segment_tokens=spread.segment_tokens or (tokens // CHUNK + 1) * CHUNK,
        blocks=blocks,
    )
    segments = launch.segment_table()
    launch.prepare(0, slots, segments)
    return Begun(launch, slices, segments)


@functools.lru_cache(maxsize=64)
def _bits(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8, device=device)


def _applied(scanned: Tensor, state: Tensor) -> Tensor:
    """The transposed state behind a segment."""
    return torch.baddbmm(scanned[:, :HEAD_DIM], state, scanned[:, HEAD_DIM:])
