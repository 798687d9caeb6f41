"""Launches both walks of a backward pass, or what a front asks of them. Where sequences are cut, scans of segments and
merges of their maps go before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compiled.artifacts import Unit
from ...dtypes import dtype_name
from ...streams import side_by_side
from ..config import HEAD_DIM, MergeConfig
from .config import MAP_ROWS, V_TILES, PeaksConfig, WalkConfig
from .groups import in_groups
from .plan import Spread
from .walks import Kept, Walked, peaks_of, segments_of, sequences_of, spread_of

Kernels = Callable[[WalkConfig | MergeConfig], Callable[..., None]]


def begin(
    call: Any,
    found: Any,
    kept: Kept,
    multiprocessors: int,
    kernels: Callable[..., Callable[..., None]],
    prepare: Callable[[Spread, Tensor | None, Tensor, int], None],
) -> Walks:
    """Launches what goes before the walks of heads that are done together, and returns these.

    prepare: launches a package's kernel that writes blocks, factors and peaks of so many slots, and the table of
    segments where there is memory for it. Where blocks were kept, nothing is left to do for them but that table.
    """
    spread = spread_of(call, multiprocessors)
    peaks, segments = peaks_of(call), segments_of(call, spread)
    again = call.blocks is None
    if again or segments is not None:
        prepare(spread, segments, peaks, kept.slots if again else 0)
    if not again:
        index = None if call.cu_seqlens is None else dtype_name(call.cu_seqlens.dtype)
        config = PeaksConfig(dtype_name(call.q.dtype), index)
        kernels(config)(call.do, call.cu_seqlens, peaks, kept.slots)
    return Walks(kernels, multiprocessors, call, spread, kept, peaks, segments, found.dh0)


def run_front(
    call: Walked,
    found: Any,
    start: Callable[[Any, Any, Kept], Walks],
    scratch: int | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Launches the part of a backward pass that ends with the gradients of initial states, and keeps blocks and factors
    of the call if it can.

    found: memory of these gradients, and of no others; where it has none either, nothing is done but what can be kept.
    start: launches what goes before the walks of heads that are done together, and returns these. scratch: as of
    `in_groups`. Returns the blocks and the factors; None where there is too little memory for those of all heads.
    """
    parts = list(in_groups(call, found, scratch, walks_keep=False))
    if len(parts) > 1 and found.dh0 is None:
        return None
    for own, memory, kept in parts:
        both = start(own, memory, kept)
        if memory.dh0 is not None:
            both.run_back()
    return parts[0][2][:2] if len(parts) == 1 else None


def walk_unit(config: WalkConfig | MergeConfig | PeaksConfig, arch: str) -> Unit:
    """Returns a kernel as something that can be compiled ahead of its first call."""
    package = "cula_core.delta_rule" if isinstance(config, MergeConfig) else __package__
    return Unit(f"{package}.build", config, arch, ())


class Way(NamedTuple):
    """What one of both walks reads and writes: v or do, states in front of it and behind it or None, kept states and
    rows or None; and where sequences are cut memory for what segments start from, [segments, HV, V, K] fp32."""

    back: bool
    v: Tensor
    start: Tensor | None
    end: Tensor | None
    states: Tensor | None
    rows: Tensor | None
    starts: Tensor | None


@dataclass(frozen=True)
class Walks:
    """Both walks of a call.

    kernels: returns what to call for a config. kept: memory between the kernels of the call. peaks [N, HV]: bits of
    the largest gradients. segments: the table of packed segments, made before, or None. dh0: memory for the gradients
    of initial states, or None.
    """

    kernels: Kernels
    multiprocessors: int
    call: Walked
    spread: Spread
    kept: Kept
    peaks: Tensor
    segments: Tensor | None
    dh0: Tensor | None

    def run(self) -> None:
        """Launches them."""
        forward, back, maps = self._scanned()
        self._both(partial(self._walk, maps), forward, back)

    def run_back(self) -> None:
        """Launches the walk back alone, for what it leaves in front of sequences, and keeps nothing."""
        _, back, maps = self._scanned()
        self._walk(maps, back._replace(states=None, rows=None))

    def _scanned(self) -> tuple[Way, Way, Tensor | None]:
        """Returns both directions, and where sequences are cut the maps of segments, which it has scanned: the walk
        back needs of the forward scan what segments apply to states."""
        call, kept, cut = self.call, self.kept, self.spread.cut
        starts = [self._matrices(HEAD_DIM) if cut else None for _ in range(2)]
        forward = Way(False, call.v, call.initial_state, None, kept.states, kept.z, starts[0])
        back = Way(True, call.do, call.dht, self.dh0, kept.d_states, kept.minus_y, starts[1])
        if not cut:
            return forward, back, None
        maps = self._matrices(MAP_ROWS)
        self._both(partial(self._scan, maps), forward, back)
        return forward, back, maps

    def _both(self, launch: Callable[[Way], None], forward: Way, back: Way) -> None:
        """Launches both directions, neither of which reads what the other writes: side by side, where chains of a few
        heads leave most of the card to others, or segments are as many as it takes for both."""
        device = self.call.v.device
        beside = self.spread.cut or 2 * self._ctas(self.spread.tiles) <= self.multiprocessors
        if device.type != "cuda" or not beside:
            launch(forward)
            launch(back)
            return
        side_by_side(device, partial(launch, forward), partial(launch, back))

    def _scan(self, maps: Tensor, way: Way) -> None:
        """Writes what a direction finds out about segments."""
        ctas = self._ctas(V_TILES, halves=1 if way.back else 2)
        self._launch(way._replace(end=None, starts=None), maps, V_TILES, ctas)

    def _walk(self, maps: Tensor | None, way: Way) -> None:
        """Writes the states and rows of a direction, once it is known what segments start from."""
        if maps is not None:
            self._merge(maps, way)
        self._launch(way, None, self.spread.tiles, self._ctas(self.spread.tiles))

    def _merge(self, maps: Tensor, way: Way) -> None:
        """Writes what segments start from, but for those that begin a walk."""
        call = self.call
        index = None if call.cu_seqlens is None else dtype_name(call.cu_seqlens.dtype)
        self.kernels(MergeConfig(index_dtype=index, back=way.back))(
            maps if way.back else maps[:, :, : 2 * HEAD_DIM], None, way.starts, None, None, None, call.cu_seqlens, -1,
            sequences_of(call), call.v.shape[1], self.spread.segment_tokens,
        )  # fmt: skip

    def _launch(self, way: Way, maps: Tensor | None, tiles: int, ctas: int) -> None:
        """Launches a scan, which writes maps, or a walk."""
        call, scan = self.call, maps is not None
        config = WalkConfig(
            dtype_name(way.v.dtype), way.back, call.operand, tiles, self.segments is not None, way.start is not None,
            way.end is not None, call.state_v_first, split=way.starts is not None, scan=scan,
            kept=scan or way.states is not None,
        )  # fmt: skip
        self.kernels(config)(
            self.kept.blocks, way.v, None if way.back else self.kept.factors, self.peaks if way.back else None,
            way.start, way.end, *((None, None) if scan else (way.states, way.rows)), maps, way.starts, self.segments,
            self.spread.segment_tokens, ctas,
        )  # fmt: skip

    def _ctas(self, tiles: int, halves: int = 1) -> int:
        """Returns the CTAs of a launch over all segments. halves: matrices [V, K] that a segment has."""
        items = self.spread.segments * self.call.v.shape[2] * halves * (V_TILES // tiles)
        return min(self.multiprocessors, items)

    def _matrices(self, height: int) -> Tensor:
        shape = (self.spread.segments, self.call.v.shape[2], height, HEAD_DIM)
        return self.call.v.new_empty(shape, dtype=torch.float32)
