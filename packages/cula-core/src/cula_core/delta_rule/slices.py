"""A call over slices of sequences: the state in front of a slice may become known while the call is under way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from .. import tensors
from .call import Call, Slice
from .config import CHUNK, HEAD_DIM, MAX_GRID_Z, chunk_slots
from .fold import FoldKernels, behind, joined
from .launch import Kernels, Launch, kernels_of, new_blocks
from .plan import Plan, plan
from .target import Target


class Steps(Protocol):
    """What is left to launch of a call over slices, whose chunks are prepared.

    kernels: what returns the kernel of a config. segment_tokens: of a segment of a slice. cut: whether slices are cut
    into segments, else each is one, however long.
    Maps of segments are `[segments, HV, 256, 128]`, A^T above M^T.
    """

    @property
    def kernels(self) -> FoldKernels: ...

    @property
    def segment_tokens(self) -> int: ...

    @property
    def cut(self) -> bool: ...

    def scan(self) -> Tensor:
        """Returns the maps of segments, but of the last ones of slices that do not go on."""

    def finish(self, starts: Tensor, final: Tensor, maps: Tensor | None) -> Tensor:
        """Writes the states behind slices from those in front of them, and returns the outputs. maps: of cut slices; A
        of the first segment of each is the state behind it."""


class Begun:
    """A call of which everything is done that needs no state in front of the slices that continue a sequence.

    maps: of the slices that go on, in their order, A `[HV, K, V]` and M `[HV, K, K]`: a slice turns the state S into
    M S + A. Of a slice that begins a sequence M is None, and A the state behind it.
    """

    def __init__(self, steps: Steps, slices: Sequence[Slice]) -> None:
        self._steps, self._slices = steps, slices
        self._scanned: Tensor | None = None
        if steps.cut or any(part.goes_on for part in slices):
            self._scanned = steps.scan()
        self.maps = self._maps()

    def finish(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs `[1, T, HV, V]` and the states behind all slices, from those in front of them `[N, HV, K, V]`."""
        final = torch.empty_like(starts)
        if self._steps.cut:
            assert self._scanned is not None
            for n, part in enumerate(self._slices):
                first, count = self._segments_of(n)
                if part.comes_on and count > 1:
                    # The merge takes A of a first segment as the state behind it.
                    own = self._scanned[first : first + 1]
                    own[0, :, :HEAD_DIM] = behind(self._steps.kernels, own, starts[n])
        return self._steps.finish(starts, final, self._scanned), final

    def _maps(self) -> list[tuple[Tensor, Tensor | None]]:
        found: list[tuple[Tensor, Tensor | None]] = []
        for n, part in enumerate(self._slices):
            if not part.goes_on:
                continue
            assert self._scanned is not None
            first, count = self._segments_of(n)
            own = self._scanned[first : first + count]
            if part.comes_on:
                whole = joined(self._steps.kernels, own)
                found.append((whole[:, :HEAD_DIM].mT, whole[:, HEAD_DIM:].mT))
            else:
                found.append((behind(self._steps.kernels, own).mT, None))
        return found

    def _segments_of(self, n: int) -> tuple[int, int]:
        """The number of a slice's first segment, and how many it has."""
        part, length = self._slices[n], self._steps.segment_tokens
        return part.start // length + n, max(1, -(-(part.stop - part.start) // length))


@dataclass(frozen=True)
class _OfKda:
    """The kernels of KDA. segments: their table."""

    launch: Launch
    segments: Tensor

    @property
    def kernels(self) -> FoldKernels:
        return self.launch.kernels

    @property
    def segment_tokens(self) -> int:
        return self.launch.segment_tokens

    @property
    def cut(self) -> bool:
        return self.launch.spread.split

    def scan(self) -> Tensor:
        return self.launch.scan(0, self.segments)

    def finish(self, starts: Tensor, final: Tensor, maps: Tensor | None) -> Tensor:
        launch = replace(self.launch, initial=starts, final=final, fresh=None)
        merged = launch.merge(maps) if self.cut and maps is not None else None
        launch.recurrence(0, len(launch.blocks), merged, self.segments)
        return launch.call.out


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
        fresh=bits(slices, device),
        null_slot=-1,
        in_place=False,
        # More than all tokens have, so that the number of an empty slice behind them is that of its sequence.
        segment_tokens=spread.segment_tokens or (tokens // CHUNK + 1) * CHUNK,
        blocks=blocks,
    )
    segments = launch.segment_table()
    launch.prepare(0, slots, segments)
    return Begun(_OfKda(launch, segments), slices)


def bits(slices: Sequence[Slice], device: torch.device) -> Tensor:
    """Returns what kernels know of slices, a byte each."""
    return _tensor(tuple(part.bits for part in slices), device)


@functools.lru_cache(maxsize=64)
def _tensor(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8, device=device)
