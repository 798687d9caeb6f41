"""The torch operator of the backward, and calls of `chunk_gated_delta_rule` that autograd follows. Kernels are imported
when a CUDA tensor comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from cula_core.dtypes import dtype_name
from cula_core.operators import no_second_derivative, register_fake
from cula_core.reference.common import work_dtype
from cula_core.reference.gates import log_decay
from cula_core.reference.kda_backward import chunk_kda_backward
from cula_core.tensors import aligned, dense_states, is_plain_cuda_call

from .call import SCHEMA, BackwardCall, Gradients

# What a call keeps until its backward: all that is not computed again.
_KEPT = (
    "q",
    "k",
    "v",
    "g",
    "beta",
    "initial_state",
    "A_log",
    "dt_bias",
    "cu_seqlens",
    "cu_seqlens_cpu",
)


def trained(
    chunk_gated_delta_rule: Callable[..., tuple], given: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Calls `chunk_gated_delta_rule` with arguments by name that are fit for training, so that autograd finds the way
    back."""
    options = {name: x for name, x in given.items() if name not in _KEPT}
    result: tuple[Tensor, Tensor | None] = _Trained.apply(
        chunk_gated_delta_rule, options, *(given[name] for name in _KEPT)
    )
    return result


class _Trained(torch.autograd.Function):
    """The forward keeps nothing but its inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        chunk_gated_delta_rule: Callable[..., tuple],
        options: dict[str, Any],
        *kept: Tensor | None,
    ) -> Any:
        o, final = chunk_gated_delta_rule(**dict(zip(_KEPT, kept)), **options)
        ctx.save_for_backward(*kept)
        q, scale = cast(Tensor, kept[0]), options["scale"]
        ctx.rules = {
            "scale": q.shape[3] ** -0.5 if scale is None else float(scale),
            "l2norm": options["use_qk_l2norm_in_kernel"],
            "beta_sigmoid": options["use_beta_sigmoid_in_kernel"],
            "neg_eigval": options["allow_neg_eigval"],
            "state_v_first": options["state_v_first"],
            "operand": dtype_name(options["operand_dtype"] or torch.float16),
        }
        ctx.softplus = None
        if options["use_gate_in_kernel"]:
            ctx.softplus = (options["softplus_beta"], options["softplus_threshold"])
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> Any:
        # Read once: under a checkpoint of activations a second time fails.
        q, k, v, g, beta, initial, A_log, dt_bias, cu_seqlens, _ = ctx.saved_tensors
        heads = max(q.shape[2], v.shape[2])
        # Heads of q and k that differ, or that are more than those of v, are repeated.
        same = heads if q.shape[2] != k.shape[2] else q.shape[2]
        shape = (*v.shape[:2], heads)
        work = work_dtype(q)
        decay, strength = g, beta
        if g is None:
            decay = q.new_zeros(shape, dtype=work)
        elif ctx.softplus is not None:
            decay = log_decay(g.to(work)[..., None], A_log, dt_bias, softplus=ctx.softplus).squeeze(
                -1
            )
        if beta is None:
            strength = q.new_ones(shape, dtype=work)
        values = _repeated(v, heads)
        call = BackwardCall(
            _repeated(q, same), _repeated(k, same), values, decay, strength, initial, cu_seqlens,
            torch.zeros_like(values) if do is None else do, dht, **ctx.rules,
        )  # fmt: skip
        # Where gradients of gradients may follow, the operator is there to refuse them.
        direct = is_plain_cuda_call(q) and not torch.is_grad_enabled()
        run = _run_on_gpu if direct else torch.ops.cula_lightning_sm90.gated_backward.default
        dq, dk, dv, d_decay, dbeta, dh0 = run(*call)
        dq, dk, dv = (_of_group(d, x) for d, x in ((dq, q), (dk, k), (dv, v)))
        dg, of_rate, of_bias = d_decay, None, None
        if ctx.softplus is not None:
            dg, of_rate, of_bias = _gate_backward(d_decay, g, decay, A_log, dt_bias, *ctx.softplus)
        found = (
            dq, dk, dv, None if g is None else dg, None if beta is None else dbeta,
            None if initial is None else dh0.to(initial.dtype), of_rate, of_bias,
        )  # fmt: skip
        return None, None, *found, None, None


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


def _run_on_cpu(*values: Any) -> tuple[Tensor, ...]:
    call = BackwardCall(*values)
    wide = call.g[..., None].expand(*call.g.shape, call.q.shape[3])
    with torch.autocast("cpu", enabled=False):
        found = chunk_kda_backward(
            call.q, call.k, call.v, wide, call.beta, None, None, call.initial_state, call.cu_seqlens, call.do, call.dht,
            scale=call.scale, gate="log", lower_bound=0.0, l2norm=call.l2norm, beta_sigmoid=call.beta_sigmoid,
            neg_eigval=call.neg_eigval, state_v_first=call.state_v_first,
        )  # fmt: skip
    return _results(
        call, Gradients(found.dq, found.dk, found.dv, found.dg.sum(-1), found.dbeta, found.dh0)
    )


def _run_on_gpu(*values: Any) -> tuple[Tensor, ...]:
    call = BackwardCall(*values)
    if call.v.numel() == 0:  # states pass through
        *rest, dh0 = (x.zero_() for x in _new_results(call))
        return *rest, dh0 if call.dht is None or not dh0.numel() else dh0.copy_(call.dht)
    ready = prepared(call)
    results = (
        None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in ready[:6]
    )
    found = Gradients(*cast(Any, results))
    from .launch import run

    run(ready, found)
    return _results(call, found)


def prepared(call: BackwardCall) -> BackwardCall:
    """Returns the call with tensors as the kernels read them: those of tokens at multiples of 16 bytes, decays and
    strengths of at most 32 bits, states and their gradients in fp32 and dense."""
    do = call.do if call.do.stride(3) == 1 else call.do.contiguous()
    g, beta = (x.float() if x.dtype == torch.float64 else x for x in (call.g, call.beta))
    return call._replace(
        q=aligned(call.q),
        k=aligned(call.k),
        v=aligned(call.v),
        g=g,
        beta=beta,
        initial_state=dense_states(call.initial_state),
        do=aligned(do),
        dht=dense_states(call.dht),
    )


def _new_results(call: BackwardCall) -> list[Tensor]:
    """Returns memory for the results: gradients of tokens in the dtype of their inputs, that of states in fp32, or fp64
    with fp64 activations; of states that are None no element."""
    states = (0,) if call.initial_state is None else call.initial_state.shape
    of_tokens = [call.q.new_empty(x.shape, dtype=x.dtype) for x in call[:5]]
    return [*of_tokens, call.q.new_empty(states, dtype=work_dtype(call.q))]


def _results(call: BackwardCall, found: Gradients) -> tuple[Tensor, ...]:
    """Returns gradients as `_new_results` describes them."""
    exact = work_dtype(call.q)
    of_tokens = (d.to(x.dtype).contiguous() for x, d in zip(call[:5], found[:5]))
    dh0 = call.q.new_empty(0, dtype=exact) if found.dh0 is None else found.dh0.to(exact)
    return *of_tokens, dh0.contiguous()


_NAME = "cula_lightning_sm90::gated_backward"
torch.library.define(_NAME, SCHEMA)
torch.library.impl(_NAME, "CPU", _run_on_cpu)
torch.library.impl(_NAME, "CUDA", _run_on_gpu)
register_fake(_NAME, lambda *values: tuple(_new_results(BackwardCall(*values))))
torch.library.register_autograd(_NAME, no_second_derivative)
