"""Launches one call of a kernel in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from delta_problems import Case, Inputs, problem_of
from torch import Tensor

from cula_core.reference.decode_fused import GatedNorm, ShortConvolution
from cula_core.reference.delta_decode import Replay
from cula_delta_decode import launch
from cula_delta_decode.config import Config, Fused, Problem
from cula_delta_decode.plan import MANY_STATES, select
from cula_emulator.pytest_plugin import BoundKernel, Emulated
from cula_testing.compiled import emulated_kernel


@pytest.fixture
def run(emulated) -> Callable[..., Tensor]:
    """run(case, inputs, arch, ...) launches one emulated call and returns its output, filled with NaN before."""

    def run(
        case: Case,
        x: Inputs,
        arch: str = "sm_90a",
        *,
        scale: float | None = None,
        next_state: Tensor | None = None,
        next_slots: Tensor | None = None,
        accepted: Tensor | None = None,
        token_states: Tensor | None = None,
        token_slots: Tensor | None = None,
        replay: Replay | None = None,
        convolution: ShortConvolution | None = None,
        norm: GatedNorm | None = None,
        commits: bool = False,
        long: bool = False,
        few: int = MANY_STATES,
        **changes,
    ) -> Tensor | None:
        problem = problem_of(
            case,
            slots=0 if x.slots is None else x.slots.dim(),
            ends=next_state is not None,
            redirected=next_slots is not None,
            every_token=token_states is not None,
            replay=replay is not None,
            counted=accepted is not None,
            commits=commits,
            long=long,
            fused=fused_of(convolution, norm),
            aligned=launch.aligned(x.q, x.k, x.g),
        )
        rings = replay or (None,) * 4
        out = None if commits else emulated.empty_like(x.v)
        arguments = launch.Arguments(
            q=None if commits else x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, A_log=x.A_log, out=out,
            dt_bias=None if x.dt_bias is None else x.dt_bias.flatten(),
            state=x.state if case.begins else None, next_state=next_state, slots=x.slots, next_slots=next_slots,
            accepted=accepted, token_states=token_states, token_slots=token_slots, offsets=x.cu_seqlens,
            ring_k=rings[0], ring_u=rings[1], ring_decay=rings[2], cursor=rings[3],
            **fused_arguments(convolution, norm),
            scale=case.dims[0] ** -0.5 if scale is None else scale, bound=-5.0 if case.gate[0] == "safe" else 1.0,
            threshold=20.0, null_slot=case.null_slot, rows=len(x.lengths),
        )  # fmt: skip
        compiled(problem, arch, few)(*arguments, **changes)
        return out

    def flush(case: Case, x: Inputs, replay: Replay, accepted: Tensor | None, arch: str = "sm_90a"):
        problem = problem_of(
            replace(case, tokens=1),
            slots=int(x.slots is not None),
            replay=True,
            counted=accepted is not None,
            flushes=True,
        )
        rows = len(x.state) if x.slots is None else len(x.slots)
        compiled(problem, arch)(x.state, *replay, x.slots, accepted, case.null_slot, rows)

    run.flush = flush

    def compiled(problem: Problem, arch: str, few: int = MANY_STATES):
        assert problem.illegal() is None
        return emulated_kernel_of(emulated, select(problem, arch, few=few), arch)

    run.compiled = compiled
    return run


def emulated_kernel_of(emulated: Emulated, config: Config, arch: str) -> BoundKernel:
    """Returns the kernel of a config as the emulator runs it.

    It may spill a few bytes with offsets of 64 bits, and where three CTAs of 256 threads share the registers.
    """
    may_spill = config.problem.long or config.resident == 3
    return emulated_kernel(emulated, launch.unit(config, arch), may_spill=may_spill)


def fused_of(convolution: ShortConvolution | None, norm: GatedNorm | None) -> Fused:
    """The static facts of what a call does before and behind."""
    taps, bias = (None, None) if convolution is None else convolution[2:]
    weight, activation = (None, None) if norm is None else (norm.weight, norm.activation)
    return launch.fused_of(taps, bias, weight, activation)


def fused_arguments(convolution: ShortConvolution | None, norm: GatedNorm | None) -> dict:
    """Those arguments of the kernel that belong to it."""
    found: dict = {}
    if convolution is not None:
        found |= zip(("inputs", "positions", "taps", "tap_bias"), convolution)
    if norm is not None:
        found |= {"gate": norm.gate, "norm_weight": norm.weight, "eps": norm.eps}
    return found
