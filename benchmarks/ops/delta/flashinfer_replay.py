"""FlashInfer's replay of GDN drafts on bf16 states, which folds a window of records into a state when it is full.

A call gets the records of earlier tokens as they are, and writes those of its own behind them. How many records there
are, and where they begin, is the caller's to move on after each call, which no call here does: so a row has the same
window in every call. The windows of the rows are those of all phases of a serving loop, so every call folds as many of
them as the mean over time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import Setting
from benchmarks.ops import checks
from benchmarks.ops.delta import problem as delta
from benchmarks.ops.delta.internals import Gates, reference
from benchmarks.ops.delta.problem import Inputs
from benchmarks.ops.installed import missing

SLOTS, WINDOW = 32, 16
TOKENS = (4, 8)

_missing = missing("flashinfer.gdn_decode")


@dataclass
class Windows:
    """The records of a pool: k [slots,H,SLOTS,K] of norm 1 and u [slots,HV,SLOTS,V] bf16, g [slots,HV,SLOTS] fp32 the
    sum of log decays since the state; and by row, int32 [B], how many there are and where they begin."""

    k: Tensor
    u: Tensor
    g: Tensor
    lengths: Tensor
    begins: Tensor


def supports(problem: Setting) -> str | None:
    """Why FlashInfer's replay cannot take a step, or None."""
    p = problem.params
    if p["mode"] != "step":
        return "the setting is no step"
    if delta.has_channels(problem) or p["state"] != "bf16" or not delta.v_first(problem):
        return "replays drafts of GDN on bf16 states [V, K]"
    if p["T"] not in TOKENS:
        return f"takes {' or '.join(map(str, TOKENS))} tokens"
    return _missing()


def full_from(tokens: int) -> int:
    """The records from which on a window is folded into the state, because another call might not fit."""
    return WINDOW - tokens + 1


def periods(tokens: int) -> list[int]:
    """The calls from one fold to the next, by the number of accepted tokens, from 1 on."""
    return [-(-full_from(tokens) // accepted) for accepted in range(1, tokens + 1)]


def windows(problem: Setting, x: Inputs, seed: int = 0) -> Windows:
    """Windows in use, each in a phase of its own; those of a row grow by its number of accepted tokens."""
    assert x.accepted is not None
    p, device = problem.params, x.q.device
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    slots = len(x.state)
    k = torch.nn.functional.normalize(randn(slots, p["H"], SLOTS, delta.DIM), dim=-1)
    u = randn(slots, p["HV"], SLOTS, delta.DIM)
    period = torch.tensor(periods(p["T"]), device=device)[x.accepted.long() - 1]
    phase = 1 + (torch.rand(p["B"], generator=generator, device=device) * period).long()
    lengths = phase.clamp(max=period) * x.accepted
    begins = torch.randint(SLOTS, (p["B"],), generator=generator, device=device)
    made = Windows(
        k.bfloat16(), u.bfloat16(), torch.zeros(slots, p["HV"], SLOTS, device=device),
        lengths.to(torch.int32), begins.to(torch.int32),
    )  # fmt: skip
    # The sums begin with the first record of a window, wherever that is in its ring.
    sums = -randn(p["B"], p["HV"], SLOTS).abs().mul(0.1).cumsum(-1)
    places = (begins[:, None] + torch.arange(SLOTS, device=device)) % SLOTS
    by_row = torch.zeros_like(sums).scatter(2, places[:, None].expand_as(sums), sums)
    made.g[x.slots.long()] = by_row
    return made


def call(
    problem: Setting, x: Inputs, out: Tensor | None = None, at: Windows | None = None
) -> Callable[[], Any]:
    """What is timed."""
    from flashinfer.gdn_kernels import gated_delta_rule_mtp_ucache_flush as replay

    if replay is None:
        raise ImportError("flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache_flush is missing")
    w = windows(problem, x) if at is None else at
    given = {
        "q": x.q, "k": x.k, "v": x.v, "b": x.beta, "initial_state_source": x.state,
        "initial_state_indices": x.slots, "k_cache": w.k, "u_cache": w.u, "g_cache": w.g,
        "hist_len": w.lengths, "cache_base": w.begins, "flush_min": full_from(problem.params["T"]),
        "restart_hist_on_flush": False,
    }  # fmt: skip

    def run() -> Tensor:
        o = torch.empty_like(x.v) if out is None else out
        return replay(x.A_log, x.g, x.dt_bias, output=o, **given)

    return run


def moved(problem: Setting) -> int:
    """Bytes of a call; states are stored and records are read as often as in the mean over time."""
    p, tokens, state = problem.params, problem.params["T"], delta.state_bytes(problem)
    stored = sum(1 / n for n in periods(tokens)) / tokens
    replayed = sum(a * (n + 1) / 2 for a, n in enumerate(periods(tokens), 1)) / tokens
    record = p["B"] * (2 * delta.DIM * (p["H"] + p["HV"]) + 4 * p["HV"])
    once = delta.token_bytes(problem) + delta.query_bytes(problem) + state
    return once + round(stored * state + (replayed + tokens) * record)


def check(problem: Setting, device: Any) -> dict[str, float]:
    """Compares outputs and states with the recurrence in fp64 on the states that the records give.

    It takes A_log and dt_bias in bf16, and so does the recurrence.
    """
    x = delta.make_inputs(problem, device, checks.SEED)
    w = windows(problem, x, checks.SEED)
    full = w.lengths >= full_from(problem.params["T"])
    rows = sorted({*checks.checked_rows(problem.params["B"]), *full.nonzero()[:2, 0].tolist()})
    at = torch.tensor(rows, device=x.q.device)
    states, before = _folded(x, w, at), x.state[x.slots[at].long()].double()
    stored = torch.where(full[at, None, None, None], states, before)
    tokens = (t[at].double() for t in (x.q, x.k, x.v, x.g, x.beta))
    want = reference.delta_rule_decode(
        *tokens, states, gates=Gates(), A_log=x.A_log.bfloat16().double(),
        dt_bias=x.dt_bias.bfloat16().double(), state_v_first=True,
    )  # fmt: skip
    out = torch.full_like(x.v, float("nan"))
    call(problem, x, out, w)()
    checks.require_finite(problem, output=out)
    found = {
        "output": checks.worst_head(out[rows], want, 2),
        "state": checks.worst_head(x.state[x.slots[at].long()], stored, 1),
    }
    within = {"output": delta.PEER_OUTPUT_LIMIT, "state": delta.PEER_STATE_LIMIT[x.state.dtype]}
    checks.require_within(problem, found, within)
    return found


def _folded(x: Inputs, w: Windows, at: Tensor) -> Tensor:
    """The fp64 states [R,HV,V,K] of some rows with all their records."""
    found = []
    for n in at.tolist():
        slot, length = int(x.slots[n]), int(w.lengths[n])
        places = (int(w.begins[n]) + torch.arange(length, device=at.device)) % w.k.shape[2]
        group = x.v.shape[2] // x.k.shape[2]
        k = w.k[slot][:, places].double().repeat_interleave(group, 0)
        u, g = w.u[slot][:, places].double(), w.g[slot][:, places].double()
        last = g[:, -1:]
        kept = torch.exp(last)[..., None] * x.state[slot].double()
        found.append(kept + (u * torch.exp(last - g)[..., None]).transpose(1, 2) @ k)
    return torch.stack(found)
