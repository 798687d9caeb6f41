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


_backward = ops.Backward(
    "cula_cp_sm90::backward", SCHEMA, BackwardCall, Gradients, on_cpu=_run_on_cpu, prepared=prepared, launch=_launch
)  # fmt: skip
