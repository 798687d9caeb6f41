"""Finds the kernels of a call, and launches them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula_core import arguments, tensors
from cula_core.compiled.artifacts import Unit
from cula_core.compiled.libraries import kernel
from cula_core.delta_rule.config import MergeConfig, chunk_slots
from cula_core.dtypes import dtype_name
from cula_core.once import once

from .call import Call
from .config import (
    BLOCK,
    CHUNK,
    ENDS,
    HEAD_DIM,
    LINE,
    Config,
    PrepareConfig,
    RecurrenceConfig,
)
from .plan import Plan, Walk, plan, workspace_words

ARCH = "sm_90a"
Kernels = Callable[[Config], Callable[..., None]]
# 32-bit words that the kernels of a call can share.
MOST_WORDS = (1 << 31) - 1


class Maps(NamedTuple):
    """What segments do to states: A^T and behind it M^T, `[segments, heads, 256, 128]`; and marks `[segments, heads]`,
    not zero where a segment forgets what was before it and M, which is zero, is not there."""

    found: Tensor
    marks: Tensor


def unit(config: Config) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    return Unit(f"{__package__}.build", config, ARCH)


@once
def compile(config: Config) -> Callable[..., None]:
    """Returns a callable for one config, reused for every size and stride."""
    return kernel(unit(config))


@dataclass(frozen=True)
class Launch:
    """What the kernels of one call share: the call, how it is spread out, and memory between the kernels.

    initial, final, fresh: states as the recurrence reads and writes them, and bytes that say what they are to sequences
    (`RecurrenceConfig`): the call's own, or those of slices. slots: of chunks of a head.
    """

    call: Call
    spread: Plan
    kernels: Kernels
    slots: int
    workspace: Tensor
    initial: Tensor | None
    final: Tensor | None
    fresh: Tensor | None

    def run(self) -> None:
        """Launches every kernel of the call."""
        self.prepare()
        if self.spread.second is None:
            self._walk(self.spread.first, 0, self._flags)
            return
        maps = self.scan()
        self.recurrence(maps, self.merge(maps))

    def prepare(self) -> None:
        """Writes blocks of chunks; beside it the recurrence may run."""
        call, first = self.call, self.spread.first
        strength = None
        if call.beta is not None:
            strength = "given"
            if call.beta_logits:
                strength = "doubled logits" if call.doubled else "logits"
        config = PrepareConfig(
            **self._operands,
            gate=None if call.g is None else "softplus" if call.raw_gate else "log",
            gate_dtype="float32" if call.g is None else dtype_name(call.g.dtype),
            bias=call.dt_bias is not None,
            strength=strength,
            strength_dtype="float32" if call.beta is None else dtype_name(call.beta.dtype),
            cut=self.spread.second is not None,
        )
        self.kernels(config)(
            call.q, call.k, call.g, call.beta, call.A_log, call.dt_bias, call.cu_seqlens, self.workspace, call.scale,
            call.softplus_beta, call.softplus_threshold, self._flags, self.slots, self._heads, first.seats,
            first.together, first.share, self.spread.segment, self.spread.ahead, self.spread.prepare_ctas,
        )  # fmt: skip

    def scan(self) -> Maps:
        """Returns what segments do to states."""
        maps = self.new_maps(self._segments)
        self._walk(self.spread.first, 0, self.spread.flags[0], maps)
        return maps

    def new_maps(self, segments: int) -> Maps:
        """Returns memory for what segments do to states."""
        shape = (segments, self._heads)
        return Maps(self._new(*shape, 2 * HEAD_DIM, HEAD_DIM), self._new(*shape, dtype=torch.int32))

    def merge(self, maps: Maps) -> Tensor:
        """Returns the transposed state in front of each segment, but of those behind marked ones."""
        call = self.call
        starts = self._new(self._segments, self._heads, HEAD_DIM, HEAD_DIM)
        config = MergeConfig(index_dtype=self._operands["index_dtype"], fades=True)
        self.kernels(config)(
            maps.found, maps.marks, starts, None, None, None, call.cu_seqlens, -1, call.sequences, call.q.shape[1],
            self.segment_tokens,
        )  # fmt: skip
        return starts

    def recurrence(self, maps: Maps, starts: Tensor) -> None:
        """Writes outputs and final states from the states in front of segments."""
        assert self.spread.second is not None
        self._walk(self.spread.second, *self.spread.flags, maps, starts)

    @property
    def segment_tokens(self) -> int:
        """Tokens of a segment."""
        return self.spread.segment * CHUNK

    def _walk(
        self,
        way: Walk,
        first_flag: int,
        own_flags: int,
        maps: Maps | None = None,
        starts: Tensor | None = None,
    ) -> None:
        call, initial, fresh, saved = self.call, self.initial, self.fresh, self.call.kept_in
        scan, pool, kept = maps is not None and starts is None, call.state_pool, None
        if saved is not None:
            saved = saved.flatten(0, 1) if saved.dim() == 5 else saved
            kept = "every" if call.checkpoint_offsets is None else "once"
        config = RecurrenceConfig(
            **self._operands,
            tiles=way.tiles,
            state_v_first=call.state_v_first,
            initial_state=initial is not None,
            final_state=not scan and self.final is not None,
            indexed=call.state_indices is not None,
            redirected=not scan and call.output_state_indices is not None,
            fresh=fresh is not None,
            in_place=not scan and pool is not None,
            checkpoints=kept if not scan else None,
            placed=not scan and kept is not None and call.checkpoint_rows is not None,
            scan=scan,
            cut=starts is not None,
            state_dtype=tensors.states_dtype(initial, None if scan else self.final),
        )
        self.kernels(config)(
            call.q, call.k, call.v, call.out, initial, call.state_indices,
            call.output_state_indices if config.redirected else None, fresh,
            self.final if config.final_state else None, saved if config.checkpoints else None,
            call.checkpoint_rows if config.placed else None,
            call.checkpoint_offsets if config.checkpoints == "once" else None, call.cu_seqlens, self.workspace,
            None if maps is None else maps.found, None if maps is None else maps.marks, starts,
            -1 if call.null_slot is None else call.null_slot, max(call.checkpoint_every, CHUNK), self._flags,
            first_flag, own_flags, self.slots, way.seats, way.together, way.share, self.spread.segment, way.ctas,
        )  # fmt: skip

    @cached_property
    def _operands(self) -> dict[str, Any]:
        call, offsets = self.call, self.call.cu_seqlens
        return {
            "dtype": dtype_name(call.q.dtype),
            "operand": dtype_name(call.operand_dtype or torch.float16),
            "l2norm": call.l2norm,
            "index_dtype": None if offsets is None else dtype_name(offsets.dtype),
        }

    @property
    def _flags(self) -> int:
        return sum(self.spread.flags)

    @property
    def _heads(self) -> int:
        return self.call.out.shape[2]

    @property
    def _segments(self) -> int:
        batch, tokens = self.call.q.shape[:2]
        if self.call.cu_seqlens is None:
            return batch * -(-tokens // self.segment_tokens)
        return tokens // self.segment_tokens + self.call.sequences

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.call.q.device)


def new_launch(
    call: Call,
    *,
    multiprocessors: int | None = None,
    kernels: Kernels = compile,
    planner: Callable[..., Plan] = plan,
) -> Launch:
    """Returns what launches the kernels of a call; the arguments are those of `run`.

    Raises:
        ValueError: more chunks than the kernels' memory can hold.
    """
    heads, slots, pool = call.out.shape[2], _slots(call), call.state_pool
    steps = slots if call.cu_seqlens is None else slots + ENDS * call.sequences
    longest = usual = -(-steps // call.sequences)
    most = call.q.shape[1]
    if call.cu_seqlens_cpu is not None:
        most = tensors.longest_sequence(call.cu_seqlens_cpu)
        longest = -(-most // CHUNK) + 1 + ENDS
    spread = planner(
        longest,
        usual,
        steps * heads,
        heads,
        heads // call.k.shape[2],
        multiprocessors or tensors.multiprocessors(call.q.device),
        "off" if call.segment_tokens else call.intracard_cp,
        call.segment_tokens // CHUNK if most > call.segment_tokens else 0,
    )
    words = workspace_words(sum(spread.flags), slots * heads, spread.first)
    if words > MOST_WORDS:
        arguments.value_error(
            "q, v",
            f"less than {MOST_WORDS // (BLOCK // 2):,} chunks of {CHUNK} tokens times heads of states in a call",
            f"{slots * heads:,}; fewer heads at a time give the same results",
        )
    fresh = call.has_initial_state
    return Launch(
        call,
        spread,
        kernels,
        slots,
        torch.empty(words, dtype=torch.int32, device=call.q.device),
        call.initial,
        call.final_state if pool is None else pool,
        None if fresh is None else fresh.view(torch.uint8),
    )


def run(call: Call, **options: Any) -> None:
    """Launches one call on torch's current stream, in groups of heads where its chunks take more than `MOST_WORDS`.

    The call's tensors are as the kernels read them, and there is at least one token. options: multiprocessors, their
    number, kernels, which turns a config into what is called, and the planner stand in for a GPU in tests.
    """
    heads, shared = call.out.shape[2], [x.shape[2] for x in (call.q, call.k, call.v)]
    # As few groups as can hold the blocks, and what is beside them; each has whole heads of q, k and v, or one.
    needed = -(-_slots(call) * heads * (BLOCK // 2 + 2 * LINE) // MOST_WORDS)
    even = (
        n
        for n in range(needed, heads + 1)
        if heads % n == 0 and all(n % h == 0 or h % n == 0 for h in shared)
    )
    count = next(even, 1)
    for n in range(count):
        new_launch(call if count == 1 else _of_heads(call, n, count), **options).run()


def _slots(call: Call) -> int:
    """Returns how many slots of chunks a head has."""
    batch, tokens = call.q.shape[:2]
    return chunk_slots(batch, tokens, None if call.cu_seqlens is None else call.sequences)


def _of_heads(call: Call, number: int, count: int) -> Call:
    """Returns the call of one of so many groups of heads."""

    def own(x: Tensor | None, dim: int) -> Any:
        if x is None:
            return None
        heads = x.shape[dim]
        return x.narrow(dim, number * heads // count, max(heads // count, 1))

    dims = (
        dict.fromkeys(("q", "k", "v", "g", "beta", "out"), 2)
        | dict.fromkeys(("A_log", "dt_bias"), 0)
        | dict.fromkeys(("initial_state", "state_pool", "final_state", "checkpoints"), -3)
    )
    return call._replace(**{name: own(getattr(call, name), dim) for name, dim in dims.items()})
