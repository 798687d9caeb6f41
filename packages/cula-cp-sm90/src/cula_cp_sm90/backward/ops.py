"""The torch operator of the backward, and calls of `chunk_kda` that autograd follows. Kernels are imported when a CUDA
tensor comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cula_core.delta_rule.backward import ops
from cula_core.delta_rule.prefill import RULES, as_kernels_read, rules
from cula_core.reference.kda_backward import Gradients, chunk_kda_backward

from .call import SCHEMA, BackwardCall


def trained(chunk_kda: Callable[..., tuple], given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Calls `chunk_kda` with arguments by name that are fit for training, so that autograd finds the way back."""
    return ops.trained(chunk_kda, given, _rules, _gradients)


def _rules(q: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    given = rules(q, *(options[name] for name in RULES))
    return given | {"state_v_first": options["state_v_first"], **ops.cutting(options)}


def _gradients(
    kept: dict[str, Any], given: dict[str, Any], do: Tensor | None, dht: Tensor | None
) -> list[Tensor | None]:
    if do is None:
        do = torch.zeros_like(kept["v"])
    found = _backward(BackwardCall(**kept, do=do, dht=dht, **given))
    return [None if x is None else d for x, d in zip(kept.values(), found)]


def _run_on_cpu(call: BackwardCall) -> Gradients:
    return chunk_kda_backward(
        *call[:9], call.do, call.dht, scale=call.scale, gate=call.gate, lower_bound=call.lower_bound,
        l2norm=call.l2norm, beta_sigmoid=call.beta_sigmoid, neg_eigval=call.neg_eigval,
        state_v_first=call.state_v_first,
    )  # fmt: skip


def prepared(call: BackwardCall) -> BackwardCall:
    """Returns the call with tensors as the kernels read them: what `as_read` makes of them, gates and strengths of at
    most 32 bits, parameters in fp32 and dense."""
    g, beta, rate, bias = as_kernels_read(call.g, call.beta, call.A_log, call.dt_bias)
    rate = None if rate is None else rate.contiguous()
    return ops.as_read(call, g=g, beta=beta, A_log=rate, dt_bias=bias)


def _launch(call: BackwardCall, found: Gradients) -> None:
    from .launch import run

    run(call, found)


def _launch_front(call: BackwardCall, dh0: Tensor | None) -> tuple[Tensor, Tensor] | None:
    from .launch import run_front

    return run_front(call, dh0)


_backward = ops.Backward(
    "cula_cp_sm90::backward", SCHEMA, BackwardCall, Gradients, on_cpu=_run_on_cpu, prepared=prepared, launch=_launch,
    launch_front=_launch_front,
)  # fmt: skip


def begin_chunk_kda_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor,
    do: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_intracard_cp: bool | str = "auto",
    segment_tokens: int | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    operand_dtype: torch.dtype | None = None,
) -> ops.Begun:
    """Begins the backward of a call of `chunk_kda` over packed slices of sequences, as `begin_chunk_kda` does the call.

    The arguments are those of `begin_chunk_kda`, with all states in front of slices, float32 `[N, HV, K, V]`, and do,
    the gradient of the outputs. Gradients of the states behind slices are laid out like those in front.

    Returns:
        a `Begun`, whose `finish` returns the gradients of q, k, v, g, beta, A_log, dt_bias and the states in front.
    """
    given = rules(
        q, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate,
        lower_bound, operand_dtype,
    )  # fmt: skip
    cuts = ops.cutting({"use_intracard_cp": use_intracard_cp, "segment_tokens": segment_tokens})
    return _backward.begin(
        BackwardCall(
            q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu=None, do=do, dht=None, **given,
            state_v_first=False, **cuts,
        )
    )  # fmt: skip
