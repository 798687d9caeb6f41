"""The recurrence over rows of any length under flash-linear-attention's names: states come back, none is updated."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cula_core.delta_decode.recurrent import (
    check_fused_recurrent_gated_delta_rule,
    check_fused_recurrent_kda,
)
from cula_core.operators import register_fake
from cula_core.reference import delta_decode as reference
from cula_core.shortcuts import shortcut
from cula_core.tensors import as_stored, is_plain_cuda_call, longest_sequence, new_states

from .ops import GATES, LIMITS

torch.library.define(
    "cula_delta_decode::recurrent",
    "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    f"Tensor? cu_seqlens, float scale, {GATES}, Tensor(a!) out, Tensor(b!)? final_state) -> ()",
)


def _recurrent_cpu(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, A_log: Tensor | None,
    dt_bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float, *rest: Any,
) -> None:  # fmt: skip
    *flags, out, final_state = rest
    longest = None if cu_seqlens is None else longest_sequence(cu_seqlens)
    reference.delta_rule_decode(
        q, k, v, g, beta, initial_state, next_state=final_state, scale=scale, A_log=A_log, dt_bias=dt_bias,
        cu_seqlens=cu_seqlens, max_tokens=longest, out=out, **reference.options(*flags),
    )  # fmt: skip


def _recurrent_cuda(*arguments: object) -> None:
    _launch().recurrent(*arguments)


torch.library.impl("cula_delta_decode::recurrent", "CPU", _recurrent_cpu)
torch.library.impl("cula_delta_decode::recurrent", "CUDA", _recurrent_cuda)
register_fake("cula_delta_decode::recurrent")


@shortcut
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """KDA one token after another, with the argument order of flash-linear-attention 0.6.

    For decoding without a pool; `delta_rule_decode` updates states in place, which takes fewer bytes and one launch.
    Any number of tokens is served, eight of them at a time: long sequences are the work of a prefill kernel. The
    formula and the arguments are those of `delta_rule_decode`, but for these:

    Args:
        g: `[B, T, HV, K]`, the log decay, or with `use_gate_in_kernel` the raw gate.
        beta: `[B, T, HV]`.
        A_log: `[HV]`; None only with `lower_bound`, or without `use_gate_in_kernel`.
        initial_state: `[N, HV, K, V]`, or V, K with `state_v_first`; float32, bfloat16 or float16; left as it is; N is
            B or the number of packed sequences. None: zero.
        cu_seqlens: `[N + 1]` int32 or int64: B is 1, and T holds N sequences, some possibly empty. Where each has one
            token, a batch of views, `x.transpose(0, 1)`, takes the kernel for one token instead of that for any number.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]`, and final_state like initial_state (float32 without one), or None.

    Example:
        >>> import torch
        >>> from cula_delta_decode import fused_recurrent_kda
        >>> q, k = torch.randn(2, 1, 5, 2, 32)  # [B, T, H, K]
        >>> v, g, beta = torch.randn(1, 5, 4, 32), -torch.rand(1, 5, 4, 32), torch.rand(1, 5, 4)
        >>> o, state = fused_recurrent_kda(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
        >>> o.shape, state.shape
        (torch.Size([1, 5, 4, 32]), torch.Size([1, 4, 32, 32]))
    """
    sequences = check_fused_recurrent_kda(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, lower_bound=lower_bound, state_v_first=state_v_first,
        cu_seqlens=cu_seqlens, out=out, limits=LIMITS,
    )  # fmt: skip
    return _recurrent(
        sequences, q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, lower_bound,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, use_qk_l2norm_in_kernel, state_v_first,
        cu_seqlens, out,
    )  # fmt: skip


@shortcut
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule one token after another, with the argument order of flash-linear-attention 0.6.

    As `fused_recurrent_kda`, but for the gates: g `[B, T, HV]`, one per head, or gk `[B, T, HV, K]`, log decays per
    channel of K, not both; None: no decay. gv, gates over V, is not served. `use_gate_in_kernel` is about g, and needs
    A_log. beta `[B, T, HV]`; None: 1.

    Example:
        >>> import torch
        >>> from cula_delta_decode import fused_recurrent_gated_delta_rule
        >>> q, k = torch.randn(2, 2, 1, 2, 32)  # [B, T, H, K]
        >>> v, g, beta = torch.randn(2, 1, 4, 32), -torch.rand(2, 1, 4), torch.rand(2, 1, 4)
        >>> state = torch.randn(2, 4, 32, 32)
        >>> o, final = fused_recurrent_gated_delta_rule(
        ...     q, k, v, g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        ... )
        >>> o.shape, torch.equal(final, state)
        (torch.Size([2, 1, 4, 32]), False)
    """
    sequences = check_fused_recurrent_gated_delta_rule(
        q, k, v, g=g, gk=gk, gv=gv, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, out=out, limits=LIMITS,
    )  # fmt: skip
    return _recurrent(
        sequences, q, k, v, gk if g is None else g, beta, A_log, dt_bias, scale, initial_state, output_final_state,
        None, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, use_qk_l2norm_in_kernel,
        state_v_first, cu_seqlens, out,
    )  # fmt: skip


def _recurrent(
    sequences: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    lower_bound: float | None,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    use_qk_l2norm_in_kernel: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    final_state = None
    if output_final_state:
        final_state = new_states(sequences, q, v, state_v_first, initial_state)
    # The kernel writes states in the order in which it reads them.
    initial, swapped = as_stored(initial_state)
    written = final_state
    if swapped and final_state is not None:
        final_state = new_states(sequences, q, v, not state_v_first, initial_state)
        written, final_state = final_state, final_state.transpose(2, 3)
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    run = (
        _recurrent_cuda if is_plain_cuda_call(q) else torch.ops.cula_delta_decode.recurrent.default
    )
    run(
        q, k, v, g, beta, A_log, dt_bias, initial, cu_seqlens, q.shape[3] ** -0.5 if scale is None else float(scale),
        lower_bound, 1.0, 20.0, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        use_qk_l2norm_in_kernel, state_v_first != swapped, out, written,
    )  # fmt: skip
    return out, final_state


@functools.cache
def _launch() -> ModuleType:
    from . import launch

    return launch
