"""Finds the kernel of a call, and launches it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from cula_core import tensors
from cula_core.compiled.artifacts import Unit
from cula_core.compiled.libraries import kernel
from cula_core.dtypes import dtype_name
from cula_core.once import once
from cula_core.reference.gates import gate_kind, strength_kind

from .arguments import Arguments, flush_arguments
from .config import DTYPES as NAMES
from .config import MAX_TOKENS, Config, Fused, Gate, Problem
from .plan import MANY_STATES, crowding, select

_NOTHING_FUSED = Fused()
_READ = tuple(getattr(torch, name) for name in NAMES)


def unit(config: Config, arch: str) -> Unit:
    """Returns a config's kernel for an architecture ("sm_80", "sm_90a", ...) as something that can be compiled."""
    return Unit(f"{__package__}.build", config, arch)


@once
def compile(config: Config, arch: str) -> Callable[..., None]:
    """Returns a callable for one config and architecture, reused for every size and stride."""
    return kernel(unit(config, arch))


@once
def kernel_for(
    problem: Problem, device: torch.device, few: int = MANY_STATES
) -> Callable[..., None]:
    """Returns the compiled kernel of a problem; compiles on first use (about a second). few: as `crowding` says.

    Raises ValueError for a problem that no kernel serves, RuntimeError for a GPU that is too old.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise RuntimeError(
            f"cula-delta-decode needs compute capability 8.0 or newer; {device} has {major}.{minor}"
        )
    if problem.illegal():
        raise ValueError(problem.illegal())
    arch = f"sm_{major}{minor}" + "a" * (major >= 9)
    return compile(select(problem, arch, tensors.multiprocessors(device), few), arch)


# ---- calls -----------------------------------------------------------------------------------------------------------


def decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, A_log: Tensor | None,
    dt_bias: Tensor | None, state: Tensor, state_indices: Tensor | None, output_state_indices: Tensor | None,
    num_accepted: Tensor | None, token_states: Tensor | None, token_state_indices: Tensor | None,
    cu_seqlens: Tensor | None, ring_k: Tensor | None, ring_u: Tensor | None, ring_decay: Tensor | None,
    cursor: Tensor | None, inputs: Tensor | None, positions: Tensor | None, taps: Tensor | None,
    tap_bias: Tensor | None, norm_gate: Tensor | None, norm_weight: Tensor | None, norm_eps: float,
    norm_activation: str | None, scale: float, lower_bound: float | None, softplus_beta: float,
    softplus_threshold: float, use_gate: bool, beta_sigmoid: bool, neg_eigval: bool, l2norm: bool,
    state_v_first: bool, commit: bool, max_tokens: int, null_slot: int | None, out: Tensor,
) -> None:  # fmt: skip
    """Launches one call of `delta_rule_decode` on torch's current stream."""
    stores = commit and ring_k is None
    if token_state_indices is not None and token_states is None:
        token_states = state
    g, A_log, dt_bias = gates_as_read(g, A_log, dt_bias, v)
    gate = gate_of(g, beta, A_log, dt_bias, lower_bound, use_gate, beta_sigmoid, neg_eigval)
    problem = _problem(
        k.dtype, state.dtype, k.shape[3], v.shape[3], max_tokens, state_v_first, gate, l2norm,
        0 if state_indices is None else state_indices.dim(), stores, output_state_indices is not None,
        token_states is not None, cu_seqlens is not None, ring_k is not None, num_accepted is not None,
        fused_of(taps, tap_bias, norm_weight, norm_activation),
    )  # fmt: skip
    _launch(
        problem,
        Arguments(
            q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, out=out, state=state,
            next_state=state if stores else None, slots=state_indices, next_slots=output_state_indices,
            accepted=num_accepted, token_states=token_states, token_slots=token_state_indices, offsets=cu_seqlens,
            ring_k=ring_k, ring_u=ring_u, ring_decay=ring_decay, cursor=cursor, inputs=inputs, positions=positions,
            taps=taps, tap_bias=tap_bias, gate=norm_gate, norm_weight=norm_weight, scale=scale,
            bound=softplus_beta if lower_bound is None else lower_bound, threshold=softplus_threshold, eps=norm_eps,
            null_slot=-1 if null_slot is None else null_slot, rows=_rows(k, cu_seqlens),
        ),
    )  # fmt: skip


def commit(
    k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None,
    state: Tensor, num_accepted: Tensor, state_indices: Tensor | None, cu_seqlens: Tensor | None,
    lower_bound: float | None, softplus_beta: float, softplus_threshold: float, use_gate: bool, beta_sigmoid: bool,
    neg_eigval: bool, l2norm: bool, state_v_first: bool, max_tokens: int, null_slot: int | None,
) -> None:  # fmt: skip
    """Launches one call of `delta_rule_commit` on torch's current stream."""
    g, A_log, dt_bias = gates_as_read(g, A_log, dt_bias, v)
    gate = gate_of(g, beta, A_log, dt_bias, lower_bound, use_gate, beta_sigmoid, neg_eigval)
    problem = Problem(
        dtype_name(k.dtype), dtype_name(state.dtype), k.shape[3], v.shape[3], max_tokens, state_v_first, gate,
        l2norm=l2norm, slots=int(state_indices is not None), packed=cu_seqlens is not None, counted=True, commits=True,
    )  # fmt: skip
    _launch(
        problem,
        Arguments(
            k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, state=state, next_state=state,
            slots=state_indices, accepted=num_accepted, offsets=cu_seqlens, scale=1.0,
            bound=softplus_beta if lower_bound is None else lower_bound, threshold=softplus_threshold,
            null_slot=-1 if null_slot is None else null_slot, rows=_rows(k, cu_seqlens),
        ),
    )  # fmt: skip


def flush(
    state: Tensor, ring_k: Tensor, ring_u: Tensor, ring_decay: Tensor, cursor: Tensor, num_accepted: Tensor | None,
    state_indices: Tensor | None, state_v_first: bool, null_slot: int | None,
) -> None:  # fmt: skip
    """Launches one call of `delta_rule_flush` on torch's current stream."""
    problem = Problem(
        dtype_name(ring_k.dtype), dtype_name(state.dtype), ring_k.shape[3], ring_u.shape[3], 1, state_v_first,
        Gate("log", channels=ring_decay.dim() == 4), slots=int(state_indices is not None), replay=True,
        counted=num_accepted is not None, flushes=True,
    )  # fmt: skip
    _launch(
        problem,
        Arguments(
            k=ring_k, state=state, slots=state_indices, accepted=num_accepted, ring_k=ring_k, ring_u=ring_u,
            ring_decay=ring_decay, cursor=cursor, null_slot=-1 if null_slot is None else null_slot,
            rows=len(state) if state_indices is None else len(state_indices),
        ),
    )  # fmt: skip


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, A_log: Tensor | None,
    dt_bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    lower_bound: float | None, softplus_beta: float, softplus_threshold: float, use_gate: bool, beta_sigmoid: bool,
    neg_eigval: bool, l2norm: bool, state_v_first: bool, out: Tensor, final_state: Tensor | None,
) -> None:  # fmt: skip
    """Launches one call of the recurrence over rows of any length on torch's current stream."""
    g, A_log, dt_bias = gates_as_read(g, A_log, dt_bias, v)
    gate = gate_of(g, beta, A_log, dt_bias, lower_bound, use_gate, beta_sigmoid, neg_eigval)
    tokens = q.shape[1]
    long = cu_seqlens is not None or not 1 <= tokens <= MAX_TOKENS
    states = final_state if initial_state is None else initial_state
    problem = Problem(
        dtype_name(q.dtype), "float32" if states is None else dtype_name(states.dtype), q.shape[3], v.shape[3],
        MAX_TOKENS if long else tokens, state_v_first, gate, l2norm, begins=initial_state is not None, slots=0,
        ends=final_state is not None, packed=cu_seqlens is not None, long=long,
    )  # fmt: skip
    _launch(
        problem,
        Arguments(
            q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, out=out, state=initial_state,
            next_state=final_state, offsets=None if cu_seqlens is None else cu_seqlens.int(), scale=scale,
            bound=softplus_beta if lower_bound is None else lower_bound, threshold=softplus_threshold, null_slot=-1,
            rows=_rows(q, cu_seqlens),
        ),
    )  # fmt: skip


def gates_as_read(
    g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, v: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns g [B, T, HV] or [B, T, HV, K], A_log [HV] fp32 and dt_bias [HV] or [HV * K] of a dtype that is read."""
    heads = v.shape[2]
    if g is not None and g.dim() == 3 and g.shape[2] != heads:
        g = g.unflatten(2, (heads, -1))
    if A_log is not None and A_log.dtype != torch.float32:
        A_log = A_log.float()
    if dt_bias is not None:
        if dt_bias.dtype not in _READ:
            dt_bias = dt_bias.float()
        if dt_bias.data_ptr() % 16:  # as a slice may be; the kernel reads 16 bytes at a time
            dt_bias = dt_bias.clone()
        if dt_bias.dim() == 2:
            dt_bias = dt_bias.view(-1)
    return g, A_log, dt_bias


def gate_of(
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    use_gate: bool,
    beta_sigmoid: bool,
    neg_eigval: bool,
) -> Gate:
    """Returns the static facts of a call's gates."""
    return _gate(
        None if g is None else g.dtype,
        g is not None and g.dim() == 4,
        use_gate,
        lower_bound is not None,
        A_log is not None,
        None if dt_bias is None else dt_bias.dtype,
        None if beta is None else beta.dtype,
        beta_sigmoid,
        neg_eigval,
    )


def fused_of(
    taps: Tensor | None, tap_bias: Tensor | None, weight: Tensor | None, activation: str | None
) -> Fused:
    """Returns the static facts of what a call does before and behind."""
    if taps is None and weight is None:
        return _NOTHING_FUSED
    return Fused(
        None if taps is None else dtype_name(taps.dtype),
        tap_bias is not None,
        activation,
        "float32" if weight is None else dtype_name(weight.dtype),
    )


@functools.cache
def _gate(
    dtype: torch.dtype | None, channels: bool, use_gate: bool, bounded: bool, rate: bool, bias: torch.dtype | None,
    strength: torch.dtype | None, beta_sigmoid: bool, doubled: bool,
) -> Gate:  # fmt: skip
    what = strength_kind(strength is not None, beta_sigmoid)
    return Gate(
        gate_kind(dtype is not None, use_gate, bounded),
        channels,
        "float32" if dtype is None else dtype_name(dtype),
        rate,
        None if bias is None else dtype_name(bias),
        what,
        "float32" if strength is None else dtype_name(strength),
        doubled and what == "logits",
    )


@functools.cache
def _problem(
    dtype: torch.dtype, state_dtype: torch.dtype, dim_k: int, dim_v: int, tokens: int, state_v_first: bool, gate: Gate,
    l2norm: bool, slots: int, ends: bool, redirected: bool, every_token: bool, packed: bool, replay: bool,
    counted: bool, fused: Fused,
) -> Problem:  # fmt: skip
    return Problem(
        dtype_name(dtype), dtype_name(state_dtype), dim_k, dim_v, tokens, state_v_first, gate, l2norm, slots=slots,
        ends=ends, redirected=redirected, every_token=every_token, packed=packed, replay=replay, counted=counted,
        fused=fused,
    )  # fmt: skip


def _rows(k: Tensor, cu_seqlens: Tensor | None) -> int:
    return k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _launch(problem: Problem, x: Arguments) -> None:
    if x.rows == 0:
        return
    device = x.k.device
    few = MANY_STATES if x.v is None else crowding(problem, x.rows * x.v.shape[2])
    run = kernel_for(problem, device, few)
    arguments = flush_arguments(x) if problem.flushes else x
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(problem, x)
        return
    try:
        run(*arguments)
    except ValueError:
        # Asked only now, because the compiled code has looked at every address anyway.
        if not problem.direct or not problem.aligned or aligned(x.q, x.k, x.g):
            raise
        _launch(replace(problem, aligned=False), x)


def aligned(*activations: Tensor | None) -> bool:
    """Whether every token and head of all of them begins at a multiple of 16 bytes; tensors of numbers do not
    count."""
    return not any(
        (
            x.data_ptr()
            | x.stride(0) * x.itemsize
            | x.stride(1) * x.itemsize
            | x.stride(2) * x.itemsize
        )
        % 16
        for x in activations
        if x is not None and x.dim() == 4
    )
