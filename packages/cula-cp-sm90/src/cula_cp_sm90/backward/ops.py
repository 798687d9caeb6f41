"""The torch operator of the backward, and calls of `chunk_kda` that autograd follows. Kernels are imported when a CUDA
tensor comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cula_core.delta_rule.prefill import as_kernels_read, rules
from cula_core.operators import no_second_derivative, register_fake
from cula_core.reference.common import work_dtype
from cula_core.reference.kda_backward import Gradients, chunk_kda_backward
from cula_core.tensors import aligned, dense_states, is_plain_cuda_call

from .call import SCHEMA, BackwardCall

# What a call keeps until its backward: all that is not computed again.
_KEPT = (
    "q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu",
)  # fmt: skip
# Options of `chunk_kda` that say how its numbers are meant, as `rules` takes them.
_RULES = (
    "scale", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
    "safe_gate", "lower_bound", "operand_dtype",
)  # fmt: skip


def trained(chunk_kda: Callable[..., tuple], given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Calls `chunk_kda` with arguments by name that are fit for training, so that autograd finds the way back."""
    options = {name: x for name, x in given.items() if name not in _KEPT}
    result: tuple[Tensor, Tensor | None] = _Trained.apply(
        chunk_kda, options, *(given[name] for name in _KEPT)
    )
    return result


class _Trained(torch.autograd.Function):
    """The forward keeps nothing but its inputs."""

    @staticmethod
    def forward(
        ctx: Any, chunk_kda: Callable[..., tuple], options: dict[str, Any], *kept: Tensor | None
    ) -> Any:
        o, final = chunk_kda(**dict(zip(_KEPT, kept)), **options)
        ctx.save_for_backward(*kept)
        ctx.rules = [options[name] for name in _RULES]
        ctx.state_v_first = options["state_v_first"]
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> Any:
        # Read once: under a checkpoint of activations a second time fails.
        kept = dict(zip(_KEPT, ctx.saved_tensors))
        q, v = kept["q"], kept["v"]
        values: dict[str, Any] = kept | {
            "do": torch.zeros_like(v) if do is None else do,
            "dht": dht,
            "state_v_first": ctx.state_v_first,
        }
        call = BackwardCall(**values, **rules(q, *ctx.rules))
        # Where gradients of gradients may follow, the operator is there to refuse them.
        direct = is_plain_cuda_call(q) and not torch.is_grad_enabled()
        run = _run_on_gpu if direct else torch.ops.cula_cp_sm90.backward.default
        found = run(*call)
        grads = (None if x is None else d for x, d in zip(kept.values(), found))
        return None, None, *grads, None, None


def _run_on_cpu(*values: Any) -> tuple[Tensor, ...]:
    call = BackwardCall(*values)
    with torch.autocast("cpu", enabled=False):
        found = chunk_kda_backward(
            *call[:9], call.do, call.dht, scale=call.scale, gate=call.gate, lower_bound=call.lower_bound,
            l2norm=call.l2norm, beta_sigmoid=call.beta_sigmoid, neg_eigval=call.neg_eigval,
            state_v_first=call.state_v_first,
        )  # fmt: skip
    return _results(call, found)


def _run_on_gpu(*values: Any) -> tuple[Tensor, ...]:
    call = BackwardCall(*values)
    if call.v.numel() == 0:  # states pass through
        *rest, dh0 = (x.zero_() for x in _new_results(call))
        return *rest, dh0 if call.dht is None or not dh0.numel() else dh0.copy_(call.dht)
    ready = prepared(call)
    found = Gradients(
        *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in ready[:5]),
        *(None if x is None else torch.empty_like(x) for x in ready[5:8]),
    )
    from .launch import run

    run(ready, found)
    return _results(call, found)


def prepared(call: BackwardCall) -> BackwardCall:
    """Returns the call with tensors as the kernels read them: those of tokens at multiples of 16 bytes, gates and
    strengths of at most 32 bits, parameters, states and their gradients in fp32 and dense."""
    g, beta, rate, bias = as_kernels_read(call.g, call.beta, call.A_log, call.dt_bias)
    do = call.do if call.do.stride(3) == 1 else call.do.contiguous()
    return call._replace(
        q=aligned(call.q),
        k=aligned(call.k),
        v=aligned(call.v),
        g=g,
        beta=beta,
        A_log=None if rate is None else rate.contiguous(),
        dt_bias=bias,
        initial_state=dense_states(call.initial_state),
        do=aligned(do),
        dht=dense_states(call.dht),
    )


def _new_results(call: BackwardCall) -> list[Tensor]:
    """Returns memory for the results: gradients of tokens in the dtype of their inputs, and those of parameters and
    states in fp32, or fp64 with fp64 activations; of an input that is None no element."""
    exact = work_dtype(call.q)
    tokens = [(x.shape, x.dtype) for x in call[:5]]
    rest = [((0,) if x is None else x.shape, exact) for x in call[5:8]]
    return [call.q.new_empty(shape, dtype=dtype) for shape, dtype in (*tokens, *rest)]


def _results(call: BackwardCall, found: Gradients) -> tuple[Tensor, ...]:
    """Returns gradients as `_new_results` describes them."""
    exact = work_dtype(call.q)
    tokens = (d.to(x.dtype).contiguous() for x, d in zip(call[:5], found[:5]))
    rest = (
        call.q.new_empty(0, dtype=exact)
        if x is None or d is None
        else d.to(exact).view(x.shape).contiguous()
        for x, d in zip(call[5:8], found[5:])
    )
    return *tokens, *rest


torch.library.define("cula_cp_sm90::backward", SCHEMA)
torch.library.impl("cula_cp_sm90::backward", "CPU", _run_on_cpu)
torch.library.impl("cula_cp_sm90::backward", "CUDA", _run_on_gpu)
register_fake("cula_cp_sm90::backward", lambda *values: tuple(_new_results(BackwardCall(*values))))
torch.library.register_autograd("cula_cp_sm90::backward", no_second_derivative)
