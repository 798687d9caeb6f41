"""Finds the kernels of a call of the delta rule, and launches them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import shortcuts, tensors
from ..compiled.artifacts import Unit
from ..compiled.libraries import kernel
from ..constants import COLUMNS
from ..dtypes import dtype_name
from ..once import once
from .call import Call
from .config import (
    BLOCK_BYTES,
    CHUNK,
    HEAD_DIM,
    Config,
    FactorsConfig,
    MergeConfig,
    PrepareConfig,
    RecurrenceConfig,
    chunk_slots,
    flag_words,
    workspace_bytes,
)
from .plan import Beside, Plan, plan
from .target import Target

Kernels = Callable[[Config], Callable[..., None]]


def unit(target: Target, config: Config, arch: str) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    parts: tuple[str, ...] = ()
    if isinstance(config, RecurrenceConfig):
        parts = (target.recurrence + ("Beside" if config.beside else ""),)
    return Unit(f"{__package__}.build", config, arch, parts)


@once
def compile(target: Target, config: Config, arch: str) -> Callable[..., None]:
    """Returns a callable for one config and architecture, reused for every size and stride."""
    return kernel(unit(target, config, arch))


@once
def kernels_of(target: Target, device: torch.device) -> Kernels:
    arch = target.compiles_for[torch.cuda.get_device_capability(device)]
    return lambda config: compile(target, config, arch)


# ---- calls -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """What the kernels of one call share: the call, how it is spread out, and memory between the kernels.

    initial, final, indices, targets, fresh: states as the recurrence reads and writes them, their rows, and bytes that
    are 0 where a sequence begins from zero. They are the call's own or, in a call of several pieces, those that one
    piece hands to the next. segment_tokens: a length that no segment exceeds. factors: memory for factors of tokens
    where blocks are those for a backward pass, else None.
    """

    target: Target
    call: Call
    spread: Plan
    kernels: Kernels
    multiprocessors: int
    initial: Tensor | None
    final: Tensor | None
    indices: Tensor | None
    targets: Tensor | None
    fresh: Tensor | None
    null_slot: int
    in_place: bool
    segment_tokens: int
    blocks: Tensor
    factors: Tensor | None = None

    def run(self) -> None:
        """Launches every kernel of the call, piece by piece."""
        slots = chunk_slots(self.call.v.shape[0], self.call.v.shape[1], self.call.packed_sequences)
        if self.spread.beside is not None:
            self.beside(self.spread.beside)
            return
        for piece in range(self.spread.pieces):
            first = piece * self.spread.piece_slots
            held = min(self.spread.piece_slots, slots - first)
            segments = self.segment_table() if self.call.packed else None
            self.prepare(first, held, segments)
            if len(self.call.intra) > 2:
                self._factors(first, held)
            starts = self.merge(self.scan(first, segments)) if self.spread.split else None
            self.recurrence(first, held, starts, segments)

    def beside(self, way: Beside) -> None:
        """Launches both kernels, which run at the same time."""
        call = self.call
        # Of all flags the first that is read is one of a chunk: so none is left from another call.
        flags = call.q.new_empty((flag_words(way.machines, way.share),), dtype=torch.int32).zero_()
        carried = call.q.new_empty((way.machines, 1, HEAD_DIM, HEAD_DIM), dtype=torch.float32)
        self.kernels(replace(self._prepare_config, beside=True))(
            call.q, call.k, call.g, call.beta, call.A_log, call.dt_bias, call.cu_seqlens, self.blocks, flags,
            call.scale, call.lower_bound, way.machines, way.share, way.lead, way.prepare_ctas,
        )  # fmt: skip
        config = replace(
            self._config(scan=False, tiles=self.spread.tiles),
            beside=True,
            index_dtype=self._index_dtype,
        )
        self.kernels(config)(
            self.blocks, call.v, call.out, self.initial, self.indices, self.targets, self.fresh, self.final,
            *self._checkpoints, None, None, None, None, self.null_slot, max(call.checkpoint_every, CHUNK),
            self.segment_tokens, 0, call.cu_seqlens, flags, carried, way.share, way.ctas,
        )  # fmt: skip

    def segment_table(self) -> Tensor:
        """Returns memory for the table of segments, which the first kernel makes for the others."""
        return self.call.q.new_empty((1 + self.spread.segments, COLUMNS), dtype=torch.int32)

    def prepare(self, first: int, held: int, segments: Tensor | None) -> None:
        """Writes blocks of chunks, and the table of segments."""
        call = self.call
        self.kernels(self._prepare_config)(
            call.q, call.k, call.g, call.beta, call.A_log, call.dt_bias, call.cu_seqlens, segments, self.blocks,
            call.Aqk, call.Akk, None, self.factors, None, call.scale, call.lower_bound, self.segment_tokens,
            min(call.q.shape[1], self.segment_tokens), first, held,
        )  # fmt: skip

    def _factors(self, first: int, held: int) -> None:
        call = self.call
        config = FactorsConfig(dtype_name(call.v.dtype), call.operand, self._index_dtype)
        self.kernels(config)(
            self.blocks, call.v, call.w, call.u, call.qg, call.kg, call.cu_seqlens, call.scale, first, held
        )  # fmt: skip

    def scan(self, first: int, segments: Tensor | None) -> Tensor:
        """Returns the maps of the segments: A^T, and behind it M^T."""
        maps = self._matrices(2 * HEAD_DIM)
        ctas = min(self.multiprocessors, 2 * self.spread.segments * self.call.v.shape[2])
        self.kernels(self._config(scan=True, tiles=self.target.v_tiles))(
            self.blocks, self.call.v, self.call.out, self.initial, self.indices, None, self.fresh, None, None, None,
            None, maps, None, self.factors, segments, self.null_slot, CHUNK, self.segment_tokens, first, ctas,
        )  # fmt: skip
        return maps

    def merge(self, maps: Tensor) -> Tensor:
        """Returns the transposed state in front of each segment."""
        call, starts = self.call, self._matrices(HEAD_DIM)
        config = MergeConfig(
            call.state_v_first,
            self.initial is not None,
            self.indices is not None,
            self._index_dtype,
            fresh=self.fresh is not None,
            state_dtype=tensors.states_dtype(self.initial),
        )
        self.kernels(config)(
            maps, None, starts, self.initial, self.indices, self.fresh, call.cu_seqlens, self.null_slot, call.sequences,
            call.q.shape[1], self.segment_tokens,
        )  # fmt: skip
        return starts

    def recurrence(
        self,
        first: int,
        held: int,
        starts: Tensor | None,
        segments: Tensor | None,
    ) -> None:
        """Writes outputs and final states; starts: the transposed state in front of each segment."""
        call, spread = self.call, self.spread
        tiles = self.target.v_tiles // spread.tiles
        ctas = min(self.multiprocessors, spread.segments * call.v.shape[2] * tiles)
        blocks = self.blocks if held == len(self.blocks) else self.blocks[:held]
        self.kernels(self._config(scan=False, tiles=spread.tiles))(
            blocks, call.v, call.out, None if spread.split else self.initial, self.indices, self.targets,
            self.fresh, self.final, *self._checkpoints, None, starts,
            self.factors, segments, self.null_slot, max(call.checkpoint_every, CHUNK),
            self.segment_tokens, first, ctas,
        )  # fmt: skip

    @property
    def _prepare_config(self) -> PrepareConfig:
        call = self.call
        return PrepareConfig(
            dtype_name(call.q.dtype),
            dtype_name(call.g.dtype),
            dtype_name(call.beta.dtype),
            call.operand,
            call.gate,
            call.bounded,
            call.l2norm,
            call.beta_sigmoid,
            call.neg_eigval,
            rate=call.A_log is not None,
            bias=call.dt_bias is not None,
            index_dtype=self._index_dtype,
            intra=call.Aqk is not None,
            rooted=self.factors is not None,
        )

    def _config(self, scan: bool, tiles: int) -> RecurrenceConfig:
        return self.target.recurrence_config(
            dtype_name(self.call.v.dtype),
            operand=self.call.operand,
            tiles=tiles,
            split=self.spread.split or scan,
            scan=scan,
            packed=self.call.packed,
            state_v_first=self.call.state_v_first,
            initial_state=self.initial is not None,
            final_state=self.final is not None and not scan,
            indexed=self.indices is not None,
            in_place=self.in_place and not scan,
            redirected=self.targets is not None and not scan,
            fresh=self.fresh is not None,
            checkpoints=self._kept if not scan else None,
            placed=self._kept is not None and self.call.checkpoint_rows is not None and not scan,
            rooted=self.factors is not None,
            state_dtype=tensors.states_dtype(self.initial, None if scan else self.final),
            kept_dtype=tensors.states_dtype(None if scan else self.call.checkpoints),
        )

    @property
    def _kept(self) -> str | None:
        """When states on the way are kept."""
        if self.call.checkpoints is None:
            return None
        return "every" if self.call.checkpoint_offsets is None else "once"

    @property
    def _checkpoints(self) -> tuple[Tensor | None, ...]:
        """Where states on the way are kept, in which rows, and after how many tokens."""
        call = self.call
        if call.checkpoints is None:
            return None, None, None
        return call.checkpoints, call.checkpoint_rows, call.checkpoint_offsets

    @property
    def _index_dtype(self) -> str | None:
        offsets = self.call.cu_seqlens
        return None if offsets is None else dtype_name(offsets.dtype)

    def _matrices(self, height: int) -> Tensor:
        shape = (self.spread.segments, self.call.v.shape[2], height, HEAD_DIM)
        return self.call.q.new_empty(shape, dtype=torch.float32)


def _may_run_beside(call: Call, factors: Tensor | None) -> bool:
    """Returns whether there are kernels of a call that run beside each other."""
    half = call.g.dtype != torch.float32
    return call.bounded and half and call.Aqk is None and factors is None


# What decides how a call is spread out.
_planner: Callable[..., Plan] = plan


@contextmanager
def scheduled(beside: str) -> Iterator[list[Plan]]:
    """Inside this context the kernels of a call run beside each other ("on"), one after the other ("off"), or as the
    plan says ("auto"); for tests and benchmarks, not for several threads. Yields the plans that calls are given inside.

    Where a call has no kernels that run beside each other, they run one after the other. Lists of earlier calls, which
    would be run again without a plan, are forgotten, and so are those that are written inside.
    """
    global _planner
    before, plans = _planner, list[Plan]()
    decide: Callable[..., Plan] = plan

    def planner(*facts: Any) -> Plan:
        plans.append(decide(*facts[:-1], "off" if facts[-1] == "off" else beside))
        return plans[-1]

    _planner = planner
    shortcuts.forget()
    try:
        yield plans
    finally:
        _planner = before
        shortcuts.forget()


def run(
    target: Target,
    call: Call,
    *,
    multiprocessors: int | None = None,
    kernels: Kernels | None = None,
    planner: Callable[..., Plan] | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """Launches one call on torch's current stream, and returns the blocks of its chunks, of a call in one piece of all.
    Kernels that run beside each other leave nothing in them.

    The call has tensors as the kernels read them. factors [slots, HV, 4, 64] fp32, for a call in one piece: blocks are
    those for a backward pass, and factors of tokens are written there. Tests without a GPU pass the number of
    multiprocessors, `kernels`, which returns what to call for a config, and a planner.
    """
    batch, tokens, heads_v = call.v.shape[:3]
    workspace, device = call.workspace, call.q.device
    whole = workspace_bytes(batch, tokens, heads_v, call.packed_sequences)
    count = multiprocessors or tensors.multiprocessors(device)
    longest: int | None = tokens
    if call.packed:
        copy = call.cu_seqlens_cpu
        longest = None if copy is None else tensors.longest_sequence(copy)
    spread = (planner or _planner)(
        target, batch, tokens, heads_v, call.packed_sequences, count,
        whole if workspace is None else workspace.numel(), call.intracard_cp, longest,
        call.segment_tokens, (0, 0), "auto" if _may_run_beside(call, factors) else "off",
    )  # fmt: skip
    initial, final, indices, in_place = call.initial, call.final, call.state_indices, call.in_place
    targets, fresh = call.output_state_indices, call.has_initial_state
    null_slot = -1 if call.null_slot is None else call.null_slot
    # Pieces find the states of those before them where these belong in the end, unless sequences begin somewhere else,
    # or they would be rounded there.
    exact = initial is None or initial.dtype == torch.float32
    carried = spread.pieces > 1 and not (in_place and targets is None and fresh is None and exact)
    if carried:
        initial = final = _carried(call)
        in_place, targets, fresh, null_slot = True, None, None, -1
        # Padding slots keep their indices, so that their tokens are skipped; the others have a row of their own.
        if indices is not None:
            own = torch.arange(call.sequences, dtype=torch.int32, device=device)
            indices = torch.where(tensors.live_rows(indices, call.null_slot), own, -1)
    blocks = new_blocks(call, spread.piece_slots)
    Launch(
        target,
        call,
        spread,
        kernels or kernels_of(target, device),
        count,
        initial,
        final,
        indices,
        targets,
        None if fresh is None else fresh.view(torch.uint8),
        null_slot,
        in_place,
        spread.segment_tokens or max(tokens, CHUNK),
        blocks,
        factors,
    ).run()
    if not carried or final is None:
        return blocks
    if call.state_pool is not None:
        tensors.scatter_states(
            call.state_pool, final, call.state_indices, call.output_state_indices, call.null_slot
        )
    elif call.final_state is not None and call.final_state is not final:
        call.final_state.copy_(final)
    return blocks


def new_blocks(call: Call, slots: int) -> Tensor:
    """Returns memory for the blocks of so many chunks, in the workspace if there is one."""
    shape = (slots, call.v.shape[2], BLOCK_BYTES // 2)
    operand = getattr(torch, call.operand)
    if call.workspace is None:
        return call.q.new_empty(shape, dtype=operand)
    return call.workspace[: math.prod(shape) * 2].view(operand).view(shape)


def _carried(call: Call) -> Tensor:
    """Returns the states of all sequences where the pieces of a call find them again: at last the final ones, in the
    final states' memory if there is any of float32."""
    states = call.final_state
    if states is None or states.dtype != torch.float32:
        shape = (call.sequences, call.v.shape[2], HEAD_DIM, HEAD_DIM)
        states = call.q.new_empty(shape, dtype=torch.float32)
    return tensors.gather_states(
        call.initial, call.state_indices, states, call.null_slot, call.has_initial_state
    )
