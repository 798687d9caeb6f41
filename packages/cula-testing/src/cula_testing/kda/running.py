"""Launches a problem as the operator launches a call on a GPU, and compiles configs for the emulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cula_core.delta_rule import launch
from cula_core.delta_rule.call import Call
from cula_core.delta_rule.config import (
    BLOCK_BYTES,
    CHUNK,
    HEAD_DIM,
    Config,
    PrepareConfig,
    chunk_slots,
)
from cula_core.delta_rule.plan import Beside, Plan, plan
from cula_core.delta_rule.prefill import prepared
from cula_core.delta_rule.target import Target
from cula_core.dtypes import dtype_name
from cula_emulator.memory import loose_strides
from cula_emulator.pytest_plugin import BoundKernel, Emulated

from ..comparing import same
from ..compiled import emulated_kernel
from ..tensors import column, int32
from .problems import Outcome, Problem, views

INTRA = ("Aqk", "Akk", "w", "u", "qg", "kg")


def compiler(emulated: Emulated, target: Target, arch: str) -> Callable[[Config], BoundKernel]:
    """Returns what compiles a config for an architecture, once for all tests, and runs it under a test's schedule."""

    def compiled(config: Config) -> BoundKernel:
        # Those of the chunk-parallel kernel that spill are marked where its machine code is tested.
        chunks = isinstance(config, PrepareConfig)
        return emulated_kernel(emulated, launch.unit(target, config, arch), may_spill=chunks)

    return compiled


def prepare_config(
    problem: Problem, index_dtype: str = "int32", intra: bool = False
) -> PrepareConfig:
    """Returns the config of the chunk-parallel kernel for a problem."""
    x, options = problem.given, problem.options
    dtypes = (dtype_name(x[name].dtype) for name in ("q", "g", "beta"))
    return PrepareConfig(
        *dtypes,
        operand=problem.operand,
        gate=problem.gate,
        bounded=problem.bounded,
        l2norm=problem.l2norm,
        beta_sigmoid=options["beta_sigmoid"],
        neg_eigval=options["neg_eigval"],
        rate=x["A_log"] is not None,
        bias=x["dt_bias"] is not None,
        index_dtype=index_dtype if problem.packed else None,
        intra=intra,
    )


def forced(
    tiles: int | None, segment_chunks: int, beside: tuple[int, int] | None = None
) -> Callable[..., Plan]:
    """Returns `plan`, but with these tiles, and with segments of so many chunks, which may be shorter than pays, or
    with so many machines and CTAs that prepare beside them."""

    def make(
        target: Target, batch: int, tokens: int, heads_v: int, sequences: int | None, *rest
    ) -> Plan:
        made = plan(target, batch, tokens, heads_v, sequences, *rest)
        length = segment_chunks * CHUNK
        segments = batch if sequences is None else sequences
        if length:
            segments = (
                batch * -(-tokens // length) if sequences is None else tokens // length + sequences
            )
        way = None
        if beside is not None:
            steps = chunk_slots(batch, tokens, sequences) * heads_v
            machines, ctas = beside
            share = -(-steps // machines)
            machines = -(-steps // share)
            each = target.v_tiles // (tiles or made.tiles)
            way = Beside(machines, share, machines * each, ctas, 4)
        return replace(
            made, tiles=tiles or made.tiles, segment_tokens=length, segments=segments, beside=way
        )

    return make


class Run:
    """A problem in memory: guards around and NaN in all that its kernels may write.

    empty: makes such memory, as the fixture `emulated` does. as_views: inputs are views of larger tensors full of NaN,
    outputs and states have gaps. tiles, segment_chunks, beside: in place of the planner's choice, which intracard_cp
    asks for. intra: memory for what a backward pass takes. slots: chunks that the workspace holds, None for all.
    """

    def __init__(
        self,
        target: Target,
        problem: Problem,
        empty: Callable[..., Tensor],
        *,
        as_views: bool = False,
        tiles: int | None = None,
        segment_chunks: int = 0,
        beside: tuple[int, int] | None = None,
        intracard_cp: str | None = None,
        slots: int | None = None,
        multiprocessors: int = 132,
        index_dtype: str = "int32",
        intra: Sequence[Tensor] = (),
    ) -> None:
        self._target, self._problem, self._multiprocessors = target, problem, multiprocessors
        self._planner = plan if intracard_cp else forced(tiles, segment_chunks, beside)
        v = problem.given["v"]
        batch, tokens, heads_v = v.shape[:3]

        def states(count: int) -> Tensor:
            shape = (count, heads_v, HEAD_DIM, HEAD_DIM)
            stride = loose_strides(shape, 4 * as_views, dense=2)
            return empty(shape, torch.float32, stride=stride)

        initial = final = None
        if problem.initial is not None:
            initial = states(len(problem.initial))
            self._turned(initial)[self._used] = problem.initial[self._used]
        if problem.final:
            final = initial if problem.final == "in place" else states(len(problem.lengths))
        self._initial, self._final = initial, final
        self._before = None if initial is None else initial.clone()
        self._out = empty(v.shape, v.dtype, stride=loose_strides(v.shape, 8 * as_views))
        count = len(problem.lengths) if problem.packed else None
        held = chunk_slots(batch, tokens, count) if slots is None else slots
        workspace = empty((held * heads_v * BLOCK_BYTES,), torch.uint8)
        given = views(problem.given) if as_views else problem.given
        self._call = self._as_call(given, workspace, index_dtype, intra, intracard_cp or "off")

    @property
    def _used(self) -> list[int]:
        return [row for row in self._problem.rows if row >= 0]

    def _turned(self, tensor: Tensor) -> Tensor:
        return tensor.mT if self._problem.v_first else tensor

    def _as_call(
        self,
        given: dict[str, Tensor | None],
        workspace: Tensor,
        index_dtype: str,
        intra: Sequence[Tensor],
        intracard_cp: str,
    ) -> Call:
        problem, in_place = self._problem, self._problem.final == "in place"
        lengths = problem.cu_seqlens(torch.int64) if problem.packed else None
        call = Call(
            **given,
            initial_state=None if in_place else self._initial,
            state_pool=self._initial if in_place else None,
            state_indices=None if problem.slots is None else column(int32(*problem.slots)),
            final_state=None if in_place else self._final,
            cu_seqlens=None if lengths is None else lengths.to(getattr(torch, index_dtype)),
            cu_seqlens_cpu=lengths,
            out=self._out,
            workspace=workspace,
            **dict.fromkeys(INTRA) | dict(zip(INTRA, intra)),
            bounded=problem.bounded,
            state_v_first=problem.v_first,
            operand=problem.operand,
            intracard_cp=intracard_cp,
            **problem.options,
        )  # fmt: skip
        ready = prepared(call)
        read = ("q", "k", "v", "g", "beta", "A_log")
        copied = [name for name in read if getattr(ready, name) is not given[name]]
        assert not copied, f"{copied}: copied, so that the kernels would not see how they lie"
        return ready

    def launch(self, kernels: launch.Kernels, factors: Tensor | None = None) -> Tensor:
        """Launches the kernels; kernels turns a config into what is called. Returns blocks of chunks, with `factors`
        those for a backward pass."""
        return launch.run(
            self._target, self._call, multiprocessors=self._multiprocessors, kernels=kernels, planner=self._planner,
            factors=factors,
        )  # fmt: skip

    def outcome(self) -> Outcome:
        """Returns what the kernels wrote, and holds the states that they may not change to their bits."""
        problem, initial, final = self._problem, self._initial, self._final
        kept = torch.ones(0 if initial is None else len(initial), dtype=torch.bool)
        if problem.final == "in place":
            kept[self._used] = False
            final = torch.stack([initial[max(row, 0)] for row in problem.rows])
        elif final is not None and problem.padding:
            assert not final[list(problem.padding)].any(), "final state of a padding sequence"
        if initial is not None:
            assert same(initial[kept], self._before[kept]), (
                "a state that is not the call's to change"
            )
        return Outcome(self._out, None if final is None else self._turned(final))


def configs_of(target: Target, problem: Problem, **options) -> list[Config]:
    """Returns the configs of the kernels that a problem launches; options are those of `Run`."""
    configs: list[Config] = []

    def kernels(config: Config) -> Callable[..., None]:
        configs.append(config)
        return lambda *_: None

    def empty(shape: tuple[int, ...], dtype: torch.dtype, stride: tuple | None = None) -> Tensor:
        return (
            torch.zeros(shape, dtype=dtype)
            if stride is None
            else torch.empty_strided(shape, stride, dtype=dtype)
        )

    Run(target, problem, empty, **options).launch(kernels)
    return configs
