"""The torch operator of the backward, and calls of `chunk_gated_delta_rule` that autograd follows. Kernels are imported
when a CUDA tensor comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cula_core.delta_rule.backward import ops
from cula_core.dtypes import dtype_name
from cula_core.reference.common import work_dtype
from cula_core.reference.gates import log_decay
from cula_core.reference.kda_backward import chunk_kda_backward

from .call import SCHEMA, BackwardCall, Gradients

# Fields of a call; and beta and threshold of the softplus, if decays are computed from g.
_Rules = tuple[dict[str, Any], tuple[float, float] | None]


def trained(
    chunk_gated_delta_rule: Callable[..., tuple], given: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Calls `chunk_gated_delta_rule` with arguments by name that are fit for training, so that autograd finds the way
    back."""
    return ops.trained(chunk_gated_delta_rule, given, _rules, _gradients)


def _rules(q: Tensor, options: dict[str, Any]) -> _Rules:
    scale, softplus = options["scale"], None
    if options["use_gate_in_kernel"]:
        softplus = (options["softplus_beta"], options["softplus_threshold"])
    return {
        "scale": q.shape[3] ** -0.5 if scale is None else float(scale),
        "l2norm": options["use_qk_l2norm_in_kernel"],
        "beta_sigmoid": options["use_beta_sigmoid_in_kernel"],
        "neg_eigval": options["allow_neg_eigval"],
        "state_v_first": options["state_v_first"],
        "operand": dtype_name(options["operand_dtype"] or torch.float16),
        **ops.cutting(options),
    }, softplus


def _gradients(
    kept: dict[str, Any], rules: _Rules, do: Tensor | None, dht: Tensor | None
) -> tuple[Tensor | None, ...]:
    call, of_inputs = _call(*kept.values(), rules=rules, do=do, dht=dht)
    return of_inputs(_backward(call))


def begin_chunk_gated_delta_rule_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor,
    do: Tensor,
    *,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    use_intracard_cp: bool | str = "auto",
    operand_dtype: torch.dtype | None = None,
    segment_tokens: int | None = None,
) -> ops.Begun:
    """Begins the backward of a call of `chunk_gated_delta_rule` over packed slices of sequences on several GPUs.

    The arguments are those of the call, with all states in front of slices, float32 `[N, HS, K, V]`, and do, the
    gradient of the outputs. Gradients of the states behind slices are laid out like those in front.

    Returns:
        a `Begun`, whose `finish` returns the gradients of q, k, v, g, beta, A_log, dt_bias and the states in front.
    """
    options = {
        "scale": scale, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, "allow_neg_eigval": allow_neg_eigval,
        "softplus_beta": softplus_beta, "softplus_threshold": softplus_threshold, "state_v_first": False,
        "use_intracard_cp": use_intracard_cp, "operand_dtype": operand_dtype, "segment_tokens": segment_tokens,
    }  # fmt: skip
    rules = _rules(q, options)
    given = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, None)
    return _backward.begin(*_call(*given, rules=rules, do=do, dht=None))


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    copy: Tensor | None,
    *,
    rules: _Rules,
    do: Tensor | None,
    dht: Tensor | None,
) -> tuple[BackwardCall, Callable[[tuple[Tensor, ...]], tuple[Tensor | None, ...]]]:
    """Returns the operator's call, and a function that makes gradients of the inputs of what it returns."""
    fields, softplus = rules
    heads = max(q.shape[2], v.shape[2])
    # Heads of q and k that differ, or that are more than those of v, are repeated.
    same = heads if q.shape[2] != k.shape[2] else q.shape[2]
    shape = (*v.shape[:2], heads)
    work = work_dtype(q)
    decay, strength = g, beta
    if g is None:
        decay = q.new_zeros(shape, dtype=work)
    elif softplus is not None:
        decay = log_decay(g.to(work)[..., None], A_log, dt_bias, softplus=softplus).squeeze(-1)
    if beta is None:
        strength = q.new_ones(shape, dtype=work)
    values = _repeated(v, heads)
    call = BackwardCall(
        _repeated(q, same), _repeated(k, same), values, decay, strength, initial, cu_seqlens,
        torch.zeros_like(values) if do is None else do, dht, cu_seqlens_cpu=copy, **fields,
    )  # fmt: skip

    def of_inputs(found: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        dq, dk, dv, dg, dbeta, dh0 = found
        dq, dk, dv = (_of_group(d, x) for d, x in ((dq, q), (dk, k), (dv, v)))
        of_rate = of_bias = None
        if softplus is not None:
            dg, of_rate, of_bias = _gate_backward(dg, g, decay, A_log, dt_bias, *softplus)
        return (
            dq, dk, dv, None if g is None else dg, None if beta is None else dbeta, of_rate, of_bias,
            None if initial is None else dh0.to(initial.dtype),
        )  # fmt: skip

    return call, of_inputs


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def _of_group(d: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of x [B, T, H, D] from those of the heads that it was repeated to."""
    if d.shape == x.shape:
        return d
    return d.unflatten(2, (x.shape[2], -1)).sum(3, dtype=work_dtype(x)).to(x.dtype)


def _gate_backward(
    d: Tensor, g: Tensor, decay: Tensor, A_log: Tensor, dt_bias: Tensor | None, beta: float, threshold: float
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Returns the gradients of g, A_log and dt_bias from that of decay = -exp(A_log) softplus(g + dt_bias)."""
    x = g.to(decay.dtype)
    if dt_bias is not None:
        x = x + dt_bias.to(x.dtype)
    slope = torch.where(beta * x > threshold, 1.0, (beta * x).sigmoid())
    dg = -A_log.to(x.dtype).exp() * slope * d
    of_bias = None if dt_bias is None else dg.sum((0, 1)).to(dt_bias.dtype)
    return dg.to(g.dtype), (decay * d).sum((0, 1)).to(A_log.dtype), of_bias


def _run_on_cpu(call: BackwardCall) -> Gradients:
    wide = call.g[..., None].expand(*call.g.shape, call.q.shape[3])
    found = chunk_kda_backward(
        call.q, call.k, call.v, wide, call.beta, None, None, call.initial_state, call.cu_seqlens, call.do, call.dht,
        scale=call.scale, gate="log", lower_bound=0.0, l2norm=call.l2norm, beta_sigmoid=call.beta_sigmoid,
        neg_eigval=call.neg_eigval, state_v_first=call.state_v_first,
    )  # fmt: skip
    return Gradients(found.dq, found.dk, found.dv, found.dg.sum(-1), found.dbeta, found.dh0)


def prepared(call: BackwardCall) -> BackwardCall:
    """Returns the call with tensors as the kernels read them: what `as_read` makes of them, decays and strengths of at
    most 32 bits."""
    g, beta = (x.float() if x.dtype == torch.float64 else x for x in (call.g, call.beta))
    return ops.as_read(call, g=g, beta=beta)


def _launch(call: BackwardCall, found: Gradients) -> None:
    from .launch import run

    run(call, found)


def _launch_front(call: BackwardCall, dh0: Tensor | None) -> tuple[Tensor, Tensor] | None:
    from .launch import run_front

    return run_front(call, dh0)


_backward = ops.Backward(
    "cula_lightning_sm90::gated_backward", SCHEMA, BackwardCall, Gradients,
    on_cpu=_run_on_cpu, prepared=prepared, launch=_launch, launch_front=_launch_front,
)  # fmt: skip
