"""Problems, inputs, oracle, check and byte counts of a decode step with what models have around it.

Before the step is the short convolution of q, k and v, behind it the gated RMSNorm of the output: with silu for GDN,
with the sigmoid for KDA. A setting has both, or the norm alone. Slot 0 of a pool belongs to no row, because other
implementations take it for padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness.registry import CheckFailed, Setting
from benchmarks.ops import checks
from benchmarks.ops.delta import problem as delta
from benchmarks.ops.delta.internals import Gates, fused

EPS = 1e-5
ACTIVATIONS = {"gdn": "silu", "kda": "sigmoid"}
# Inputs that the convolution looks back at.
KEPT = 3
OUTPUT_LIMIT = delta.OUTPUT_LIMIT
# Of ours. What the convolution returns is rounded to bf16, and a sum of fp32 may fall on another side of the middle
# between two numbers than one of fp64, which changes a key by 2^-8 in one of its channels.
STATE_LIMIT = {**delta.STATE_LIMIT, torch.float32: 3e-4}
# Far from the seeds of the inputs of the step.
_SEED = 1_000_000
_POSITIONS = 64


@dataclasses.dataclass
class Inputs:
    """One buffer set.

    step: what the step itself gets; its q, k and v are views of mixed [B,T,C] bf16, C = 2 HQ K + HV V. weight [C,4]
    bf16, ring [slots,L,C] bf16 and positions int32 [B] are of the convolution, gate [B,T,HV,V] bf16 and norm_weight
    fp32 [V] of the norm; all weights are numbers of bf16.
    """

    step: delta.Inputs
    mixed: Tensor
    weight: Tensor
    ring: Tensor
    positions: Tensor
    gate: Tensor
    norm_weight: Tensor


class Result(NamedTuple):
    """Outputs [B,T,HV,V], states by row in the layout of the problem, and the last inputs of the convolution [B,3,C] in
    their order, where there is one."""

    out: Tensor
    states: Tensor
    kept: Tensor | None


def setting(gate: str, batch: int, *sizes: Any, conv: bool = True, **options: Any) -> Setting:
    """A problem of `delta.setting` with norm, and with `conv` also the convolution: gdn-B8-T1-fp32-vk-conv-norm."""
    made = delta.setting(gate, batch, *sizes, **options)
    name = f"{made.name}-conv-norm" if conv else f"{made.name}-norm"
    return Setting(name, {**made.params, "conv": conv})


def has_conv(problem: Setting) -> bool:
    """Whether the convolution belongs to the problem."""
    return bool(problem.params["conv"])


def sizes(problem: Setting) -> list[int]:
    """The channels of q, of k and of v."""
    p = problem.params
    return [p["H"] * delta.DIM, p["H"] * delta.DIM, p["HV"] * delta.DIM]


def heads(problem: Setting, flat: tuple[Tensor, ...]) -> list[Tensor]:
    """q, k and v [B,T,heads,DIM] of their channels."""
    return [part.unflatten(-1, (-1, delta.DIM)) for part in flat]


def make_inputs(problem: Setting, device: Any, seed: int, spare: int = 0) -> Inputs:
    """Fresh random data of one buffer set; besides slot 0, `spare` slots of every pool belong to no row."""
    p = problem.params
    step = delta.make_inputs(problem, device, seed, spare + 1)
    step.slots = step.slots + 1
    generator = torch.Generator(device).manual_seed(_SEED + seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    mixed = torch.cat([part.flatten(2) for part in (step.q, step.k, step.v)], 2)
    step.q, step.k, step.v = heads(problem, mixed.split(sizes(problem), 2))
    positions = torch.rand(p["B"], generator=generator, device=device) * _POSITIONS
    length = fused.least_length(p["T"])
    return Inputs(
        step=step,
        mixed=mixed,
        weight=(0.5 * randn(mixed.shape[2], 4)).bfloat16(),
        ring=randn(len(step.state), length, mixed.shape[2]).bfloat16(),
        positions=positions.to(torch.int32),
        gate=randn(*step.v.shape).bfloat16(),
        norm_weight=(1 + 0.1 * randn(delta.DIM)).bfloat16().float(),
    )


def windows(x: Inputs, later: int = 0) -> Tensor:
    """The last inputs [B,3,C] before the token `later` tokens behind the first one, zero before the sequence begins."""
    at = x.positions.long()[:, None] + later + torch.arange(-KEPT, 0, device=x.mixed.device)
    found = x.ring[x.step.slots.long()[:, None], at % x.ring.shape[1]]
    return torch.where((at >= 0)[..., None], found, 0)


def norm(problem: Setting, x: Inputs) -> fused.GatedNorm:
    """The norm of a problem."""
    return fused.GatedNorm(x.gate, x.norm_weight, EPS, ACTIVATIONS[problem.params["gate"]])


# ---- bytes -----------------------------------------------------------------------------------------------------------


def moved(problem: Setting, conv: bool | None = None, written_state: str | None = None) -> int:
    """Bytes of one launch: every input read once, every output written once; `conv` if the convolution is in it."""
    p = problem.params
    found = delta.moved("write", problem, written_state)
    found += 2 * p["B"] * p["T"] * p["HV"] * delta.DIM + 4 * delta.DIM
    if has_conv(problem) if conv is None else conv:
        channels = sum(sizes(problem))
        found += 2 * channels * 4 + 2 * p["B"] * channels * (KEPT + p["T"]) + 4 * p["B"]
    return found


def between_bytes(problem: Setting) -> int:
    """Bytes that a kernel for each part writes for the next one, which reads them: the convolved tokens and outputs."""
    p = problem.params
    channels = sum(sizes(problem)) if has_conv(problem) else 0
    return 4 * p["B"] * p["T"] * (channels + p["HV"] * delta.DIM)


# ---- oracle and check ------------------------------------------------------------------------------------------------


def oracle(
    problem: Setting, x: Inputs, rows: list[int], conv: bool, rounded: bool
) -> tuple[Tensor, Tensor]:
    """The fp64 outputs and states of some rows; with `rounded` what the convolution returns is rounded to bf16."""
    step, at = x.step, torch.tensor(rows, device=x.mixed.device)
    slots = step.slots[at].long()
    q, k, v, g, beta = (t[at].double() for t in (step.q, step.k, step.v, step.g, step.beta))
    if conv:
        given = fused.ShortConvolution(x.ring[slots].double(), x.positions[at], x.weight.double())
        q, k, v = fused.convolve(q, k, v, given)
        if rounded:
            q, k, v = (t.bfloat16().double() for t in (q, k, v))
    state = step.state[slots].double()
    gated = norm(problem, x)
    gated = gated._replace(gate=x.gate[at].double(), weight=x.norm_weight.double())
    out = fused.fused_decode(
        q, k, v, g, beta, state, norm=gated, gates=Gates(), A_log=step.A_log.double(),
        dt_bias=step.dt_bias.double(), state_v_first=delta.v_first(problem),
    )  # fmt: skip
    return out, state


def check_task(
    run: Callable[[Setting, Inputs], Result],
    problem: Setting,
    device: Any,
    limits: tuple[float, Mapping[torch.dtype, float]] = (OUTPUT_LIMIT, STATE_LIMIT),
    conv: bool | None = None,
    rounded: bool = True,
) -> dict[str, float]:
    """Compares `run(setting, inputs)` with the reference in fp64, on fresh data and for some rows.

    conv: whether it has the convolution, None: if the problem has it; rounded: whether it rounds what that returns. The
    last inputs of the convolution have to be exact.
    """
    x = make_inputs(problem, device, checks.SEED, delta.SPARE)
    rows = checks.checked_rows(problem.params["B"])
    conv = has_conv(problem) if conv is None else conv
    want_output, want_states = oracle(problem, x, rows, conv, rounded)
    want_kept = torch.cat((windows(x), x.mixed), 1)[:, -KEPT:]
    spares = [checks.SpareRows(pool, x.step.slots) for pool in (x.step.state, x.ring)]
    result = run(problem, x)
    checks.require_finite(problem, output=result.out)
    for spare in spares:
        spare.require_unchanged(problem)
    if conv and (result.kept is None or not torch.equal(result.kept, want_kept)):
        raise CheckFailed(f"{problem.name}: the last inputs of the convolution are not kept")
    found = {
        "output": checks.worst_head(result.out[rows], want_output, 2),
        "state": checks.worst_head(result.states[rows], want_states, 1),
    }
    within = {"output": limits[0], "state": limits[1][delta.DTYPES[problem.params["state"]]]}
    checks.require_within(problem, found, within)
    return found
