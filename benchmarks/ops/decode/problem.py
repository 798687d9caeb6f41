"""Problems, inputs, oracle, check and byte counts of Lightning decode.

    S <- exp(-decay) S + k v^T          o = scale * q^T S

Timing calls the in-place update thousands of times on the same state. The inputs are chosen so that this changes
neither magnitude nor timing: every decay is in (0, 1), so the state tends to k v^T / (1 - exp(-decay)), at most 256
times one outer product, and never fades into denormals because each call adds k v^T again. The ceiling, which has
nothing to add, multiplies by -1: exact, the same kernel as any other factor, and as stable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import CheckFailed, Setting
from benchmarks.ops.checks import (
    SEED,
    checked_rows,
    relative_rmse,
    require_finite,
    require_within,
)

HEADS = 64
DIM = 128
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OUTPUT_LIMIT = 5e-3
STATE_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 3e-3}


@dataclass
class Inputs:
    """One buffer set.

    q, k [B,T,H,K] and v [B,T,H,V] are bf16, state is [B,H,K,V] or [B,H,V,K], decay fp32 [H], indices int32 [B] or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    state: Tensor
    decay: Tensor
    indices: Tensor | None


def setting(
    batch: int,
    tokens: int = 1,
    state: str = "fp32",
    layout: str = "kv",
    l2: str = "cold",
    commit: bool = True,
    indexed: bool = False,
) -> Setting:
    """A problem, named like B64-T1-fp32-kv-cold; layout "kv" is [B,H,K,V], and "vk" is [B,H,V,K] (state_v_first)."""
    name = f"B{batch}-T{tokens}-{state}-{layout}-{l2}"
    name += ("" if commit else "-verify") + ("-indexed" if indexed else "")
    params = {
        "B": batch,
        "T": tokens,
        "state": state,
        "layout": layout,
        "commit": commit,
        "indexed": indexed,
    }
    return Setting(name, params, l2)


def make_inputs(problem: Setting, device: Any, seed: int) -> Inputs:
    """Fresh random data of one buffer set."""
    p = problem.params
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    activations = (p["B"], p["T"], HEADS, DIM)
    indices = None
    if p["indexed"]:
        indices = torch.randperm(p["B"], generator=generator, device=device).to(torch.int32)
    return Inputs(
        q=randn(*activations),
        k=randn(*activations) * DIM**-0.5,
        v=randn(*activations),
        state=randn(p["B"], HEADS, DIM, DIM, dtype=DTYPES[p["state"]]),
        decay=decays(device),
        indices=indices,
    )


def decays(device: Any) -> Tensor:
    """Geometric slopes 2^(-8 (h + 1) / H): the per-head factor runs from 0.40 to 0.996."""
    heads = torch.arange(1, HEADS + 1, device=device, dtype=torch.float32)
    return torch.exp2(-8.0 * heads / HEADS)


def v_first(problem: Setting) -> bool:
    """Whether states are stored as [B,H,V,K]."""
    return problem.params["layout"] == "vk"


def state_bytes(problem: Setting, dtype: str | None = None) -> int:
    """Bytes of all states in a storage type of DTYPES, or in the problem's own."""
    size = DTYPES[dtype or problem.params["state"]].itemsize
    return problem.params["B"] * HEADS * DIM * DIM * size


def moved(problem: Setting, written_state: str | None = None) -> int:
    """Bytes of one call, which reads q, k, v, decay, indices and the state, and writes o and perhaps the state.

    A call that verifies writes no state. `written_state` names the storage type of the new state where it is another
    than that of the state that was read.
    """
    p = problem.params
    activations = 4 * p["B"] * p["T"] * HEADS * DIM * 2
    small = HEADS * 4 + (p["B"] * 4 if p["indexed"] else 0)
    written = 0
    if p["commit"]:
        written = state_bytes(problem, written_state)
    return activations + small + state_bytes(problem) + written


def recurrence(x: Inputs, rows: Tensor, state: Tensor, first: bool) -> tuple[Tensor, Tensor]:
    """fp64 outputs [R,T,H,V] and final states of batch rows `rows`, whose states before the call are `state`."""
    s = state.double().transpose(-1, -2) if first else state.double()
    factor = torch.exp(-x.decay.double())[None, :, None, None]
    q, k, v = (t[rows].double() for t in (x.q, x.k, x.v))
    outputs = []
    for t in range(q.shape[1]):
        s = factor * s + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(torch.einsum("rhk,rhkv->rhv", q[:, t], s) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), s.transpose(-1, -2) if first else s


def check_decode(
    run: Callable[[Setting, Inputs], tuple[Tensor, Tensor | None]], problem: Setting, device: Any
) -> dict[str, float]:
    """Compares `run(setting, inputs) -> (o, state after the call or None)` with the recurrence, on fresh data.

    `run` fills outputs that it allocates itself with NaN first.
    """
    x = make_inputs(problem, device, seed=SEED)
    rows = torch.tensor(checked_rows(problem.params["B"]), device=device)
    slots = rows if x.indices is None else x.indices[rows].long()
    before = x.state[slots].clone()
    want_o, want_state = recurrence(x, rows, before, v_first(problem))
    o, state = run(problem, x)
    require_finite(problem, output=o)
    errors = {"output": relative_rmse(o[rows], want_o)}
    limits = {"output": OUTPUT_LIMIT}
    if problem.params["commit"]:
        errors["state"] = relative_rmse(state[slots], want_state)
        limits["state"] = STATE_LIMIT[DTYPES[problem.params["state"]]]
    elif not torch.equal(x.state[slots], before):
        raise CheckFailed(f"{problem.name}: commit=False changed the state")
    require_within(problem, errors, limits)
    return errors
