"""Tiny problems of every kernel for compute-sanitizer, on a GPU of compute capability 8.0 or newer.

`sanitizer.py` runs them. Inputs and expectations are made on the CPU, so that hardly anything but the kernels runs
under the tool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from delta_problems import SLOTS, Case, Inputs, exact, make_inputs, public
from fused_problems import beside_serial, convolved, make_convolution, make_norm, to_device
from torch import Tensor

from cula_core.reference import delta_decode as reference
from cula_core.reference.decode_fused import normalize
from cula_core.reference.delta_decode import Replay
from cula_delta_decode import (
    delta_rule_commit,
    delta_rule_decode,
    delta_rule_flush,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    new_replay,
)
from cula_testing.sanitizing import run_checks

KDA, FP16 = ("safe", True), "float16"
LIVE = [n for n, slot in enumerate(SLOTS) if slot >= 0]
ACCEPTED = (2, 0, 1, 3)
LENGTHS = (9, 0, 1, 20)
LIMIT = 3e-3  # of values rounded to bfloat16

Run = Callable[[Case, torch.device], dict[str, float]]


class Problem(NamedTuple):
    """What is called, and on what."""

    name: str
    run: Run
    case: Case


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative RMSE of a tensor of any device against one of the CPU."""
    actual = actual.cpu().double()
    return float((actual - expected).norm() / expected.norm())


def call(case: Case, x: Inputs, device: torch.device, **options: object) -> tuple[Tensor, Inputs]:
    """A call of `delta_rule_decode` on a device; its output, which was NaN before, and the inputs there."""
    there = x.to(device)
    out = torch.full_like(there.v, float("nan"))
    given = public(case, there) | options
    given = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in given.items()}
    given["state"] = there.state if options.get("state") is None else given["state"]
    delta_rule_decode(there.q, there.k, there.v, **given, out=out)
    return out, there


def decode(case: Case, device: torch.device) -> dict[str, float]:
    """One call that updates the states."""
    x = make_inputs(case)
    expected, state = exact(case, x)
    out, there = call(case, x, device)
    if case.packed:  # a kernel does not write the output of tokens that no row has
        used = sum(x.lengths)
        out, expected = out[:, :used], expected[:, :used]
    slots = [slot for slot in SLOTS if slot >= 0]
    return {"output": error(out, expected), "state": error(there.state[slots], state[slots])}


def verify(case: Case, device: torch.device) -> dict[str, float]:
    """Drafts that leave the states alone, and a commit of some of them."""
    x = make_inputs(case)
    expected, _ = exact(case, x, next_state=None)
    out, there = call(case, x, device, commit=False)
    accepted = torch.tensor(ACCEPTED, dtype=torch.int32)
    wide = x.wide("k", "v", "g", "beta", "A_log", "dt_bias", "state")
    tokens = [wide.pop(n) for n in ("k", "v", "g", "beta", "state")]
    options = {"state_indices": x.slots, **case.options()}
    reference.delta_rule_commit(*tokens, accepted, **options, **wide)
    given = public(case, there)
    given = {n: v for n, v in given.items() if n not in ("g", "beta", "state")}
    delta_rule_commit(
        there.k, there.v, there.g, there.beta, there.state, accepted.to(device), **given
    )
    return {"output": error(out, expected), "state": error(there.state, tokens[-1])}


def slots_of_tokens(case: Case, device: torch.device) -> dict[str, float]:
    """The state after every token in a slot of its own."""
    x = make_inputs(case, rows=2)
    table = torch.tensor([[4, 1, 2], [3, 6, -1]], dtype=torch.int32)
    accepted = torch.tensor([3, 1], dtype=torch.int32)
    wide = x.state.double()
    expected, _ = exact(
        case, x, state_indices=table, num_accepted=accepted, next_state=None, token_states=wide,
        token_state_indices=table,
    )  # fmt: skip
    out, there = call(
        case, x, device, state_indices=table, num_accepted=accepted, token_state_indices=table, commit=False
    )  # fmt: skip
    return {"output": error(out, expected), "state": error(there.state, wide)}


def another_slot(case: Case, device: torch.device) -> dict[str, float]:
    """States that go to other slots than they come from."""
    x = make_inputs(case)
    targets = torch.tensor([1, 2, -1, 6], dtype=torch.int32)
    wide = x.state.double()
    expected, _ = exact(case, x, next_state=wide, output_state_indices=targets)
    out, there = call(case, x, device, output_state_indices=targets)
    return {"output": error(out, expected), "state": error(there.state, wide)}


def replay(case: Case, device: torch.device) -> dict[str, float]:
    """Calls that leave the pool behind, of which some tokens are accepted, and a flush."""
    first = make_inputs(case)
    pool, wide = first.state.to(device), first.state.double()
    channels = case.gate[1]
    rings = new_replay(
        pool, case.heads[0], max_tokens=case.tokens, channels=channels,
        dtype=getattr(torch, case.dtype), state_v_first=case.state_v_first,
    )  # fmt: skip
    accepted = torch.tensor([min(a, case.tokens) for a in ACCEPTED], dtype=torch.int32)
    found, before = {}, None
    for step in range(4):
        x = replace(make_inputs(case, seed=step), A_log=first.A_log, dt_bias=first.dt_bias)
        tokens = x.wide("q", "k", "v", "g", "beta", "A_log", "dt_bias")
        q, k, v, g, beta = (tokens.pop(n) for n in ("q", "k", "v", "g", "beta"))
        options = {"state_indices": x.slots, **case.options(), **tokens}
        expected = reference.delta_rule_decode(q, k, v, g, beta, wide, **options)
        reference.delta_rule_commit(k, v, g, beta, wide, accepted, **options)
        out, _ = call(case, x, device, state=pool, replay=rings, num_accepted=before)
        found[f"output {step}"] = error(out[LIVE], expected[LIVE])
        before = accepted.to(device)
    delta_rule_flush(
        pool, rings, before, state_indices=first.slots.to(device), state_v_first=case.state_v_first
    )
    slots = [slot for slot in SLOTS if slot >= 0]
    return {**found, "state": error(pool[slots], wide[slots])}


def fused(case: Case, device: torch.device, convolves: bool = True) -> dict[str, float]:
    """A short convolution before a call, and a gated norm behind it."""
    x = make_inputs(case)
    norm, options, seen = make_norm(case, x), {}, x
    if convolves:
        convolution = make_convolution(case, x, bias=case.state_v_first)
        seen, ring = convolved(case, x, convolution)
        options["convolution"] = to_device(convolution, device)
    expected, state = exact(case, seen)
    expected = normalize(expected, norm)
    out, there = call(case, x, device, norm=to_device(norm, device), **options)
    found, rows = {}, LIVE
    if case.packed:
        out, expected, rows = out[0], expected[0], used(x)
    slots = [slot for slot in SLOTS if slot >= 0]
    if convolves:
        inputs = options["convolution"].inputs.cpu()
        found["ring"] = error(inputs.nan_to_num(), ring.double().nan_to_num())
    return {
        **found,
        "output": error(out[rows], expected[rows]),
        "state": error(there.state[slots], state[slots]),
    }


def used(x: Inputs) -> list[int]:
    """The packed tokens of rows that are no padding."""
    starts = x.cu_seqlens.tolist()
    return [t for n in LIVE for t in range(starts[n], starts[n + 1])]


def fused_replay(case: Case, device: torch.device) -> dict[str, float]:
    """Calls behind a convolution that leave the pool behind, of which some tokens are accepted, and a flush."""

    def decode_once(x: Inputs, *, accepted: Tensor, **options: object) -> Tensor:
        return call(case, x, device, num_accepted=accepted, **options)[0]

    def flush(x: Inputs, replay: Replay, accepted: Tensor) -> None:
        options = {"state_indices": x.slots, "state_v_first": case.state_v_first}
        delta_rule_flush(x.state, replay, accepted, **options)

    pairs = beside_serial(case, decode_once, flush, steps=3, device=device)
    return {what: error(found, expected) for what, found, expected in pairs}


def recurrent(case: Case, device: torch.device) -> dict[str, float]:
    """Rows of any length under flash-linear-attention's names."""
    lengths = LENGTHS if case.packed else (11,) * 4
    dense = replace(case, packed=False, indexed=False, tokens=sum(lengths) if case.packed else 11)
    x = make_inputs(dense, rows=1 if case.packed else 4)
    x.state = x.state[:4]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    x.cu_seqlens = offsets if case.packed else None
    wide = x.wide("q", "k", "v", "g", "beta", "A_log", "dt_bias", "state")
    q, k, v, g, beta, state = (wide.pop(n) for n in ("q", "k", "v", "g", "beta", "state"))
    expected = reference.delta_rule_decode(
        q, k, v, g, beta, state, next_state=state, cu_seqlens=x.cu_seqlens, max_tokens=max(lengths),
        **case.options(), **wide,
    )  # fmt: skip
    there = x.to(device)
    given = {
        "beta": there.beta,
        "A_log": there.A_log,
        "dt_bias": there.dt_bias.flatten(),
        "initial_state": there.state,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": case.l2norm,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "state_v_first": case.state_v_first,
        "cu_seqlens": there.cu_seqlens,
        "out": torch.full_like(there.v, float("nan")),
    }
    if case.gate[1]:
        out, final = fused_recurrent_kda(
            there.q, there.k, there.v, there.g, lower_bound=-5.0, **given
        )
    else:
        out, final = fused_recurrent_gated_delta_rule(there.q, there.k, there.v, there.g, **given)
    return {"output": error(out, expected), "state": error(final, state)}


PROBLEMS = (
    Problem("one token, [V, K]", decode, Case(dims=(128, 128))),
    Problem("one token, [V, K], KDA", decode, Case(gate=KDA, heads=(2, 4), dims=(128, 64))),
    Problem("one token, [V, K], fp16", decode, Case(state_dtype=FP16, dtype=FP16, heads=(2, 2))),
    Problem("one token, [K, V]", decode, Case(state_v_first=False, dims=(128, 128))),
    Problem("one token, [K, V], KDA", decode, Case(gate=KDA, state_v_first=False, dims=(128, 128))),
    Problem("one token, [K, V], bf16", decode, Case(state_v_first=False, state_dtype="bfloat16")),
    Problem("no gates", decode, Case(gate=("none", False), strength="one", l2norm=False)),
    Problem("log decays", decode, Case(gate=("log", True), strength="given", tokens=2)),
    Problem("4 tokens, [V, K]", decode, Case(tokens=4, dims=(128, 128))),
    Problem("8 tokens, [V, K], KDA", decode, Case(gate=KDA, tokens=8, dims=(64, 128))),
    Problem("4 tokens, [K, V], KDA", decode, Case(gate=KDA, tokens=4, state_v_first=False)),
    Problem("8 tokens, [K, V]", decode, Case(tokens=8, state_v_first=False, dims=(128, 64))),
    Problem("packed, [V, K]", decode, Case(tokens=4, packed=True)),
    Problem(
        "packed, [K, V], KDA", decode, Case(gate=KDA, tokens=3, packed=True, state_v_first=False)
    ),
    Problem("verify and commit, [V, K]", verify, Case(tokens=4)),
    Problem(
        "verify and commit, [K, V], KDA", verify, Case(gate=KDA, tokens=4, state_v_first=False)
    ),
    Problem("slots of tokens, [V, K], KDA", slots_of_tokens, Case(gate=KDA, tokens=3)),
    Problem("slots of tokens, [K, V]", slots_of_tokens, Case(tokens=3, state_v_first=False)),
    Problem("another slot", another_slot, Case(tokens=2)),
    Problem("replay, one token, [V, K]", replay, Case()),
    Problem("replay, [V, K], KDA", replay, Case(gate=KDA, tokens=3, heads=(2, 4))),
    Problem("replay, one token, [K, V], KDA", replay, Case(gate=KDA, state_v_first=False)),
    Problem("replay, [K, V]", replay, Case(tokens=4, state_v_first=False)),
    Problem("fused, one token, [V, K]", fused, Case(dims=(128, 128))),
    Problem(
        "fused, one token, [K, V], bf16", fused, Case(state_v_first=False, state_dtype="bfloat16")
    ),
    Problem(
        "fused, 8 tokens, [V, K], KDA",
        fused,
        Case(gate=KDA, tokens=8, heads=(2, 4), dims=(128, 64)),
    ),
    Problem("fused, 4 tokens, [K, V], KDA", fused, Case(gate=KDA, tokens=4, state_v_first=False)),
    Problem("fused, packed, [V, K]", fused, Case(tokens=4, packed=True)),
    Problem(
        "norm alone, [K, V]", partial(fused, convolves=False), Case(tokens=2, state_v_first=False)
    ),
    Problem("fused, replay, [V, K], KDA", fused_replay, Case(gate=KDA, tokens=3, heads=(2, 4))),
    Problem("fused, replay, one token, [K, V]", fused_replay, Case(state_v_first=False)),
    Problem("any length, [V, K]", recurrent, Case()),
    Problem("any length, [K, V], KDA", recurrent, Case(gate=KDA, state_v_first=False)),
    Problem("any length, packed, [V, K], KDA", recurrent, Case(gate=KDA, packed=True)),
    Problem("any length, packed, [K, V]", recurrent, Case(packed=True, state_v_first=False)),
)


def run_here(first: int = 0, step: int = 1, device: str = "cuda") -> int:
    """Every problem, or every `step`-th from the `first` on, in this process; returns how many are wrong."""

    def errors_of(problem: Problem) -> str:
        errors = problem.run(problem.case, torch.device(device))
        for what, found in errors.items():
            assert found < LIMIT, f"{what} {found:.1e}"
        return "  ".join(f"{what} {found:.1e}" for what, found in errors.items())

    problems = PROBLEMS[first::step]
    return run_checks((f"{p.name:32}", partial(errors_of, p)) for p in problems)
