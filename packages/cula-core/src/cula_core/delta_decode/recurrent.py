"""The argument contract of the delta rule token by token over sequences of any length, under FLA's names."""

from __future__ import annotations

from torch import Tensor

from .. import arguments
from .gates import check_gate, check_lower_bound, check_parameters, check_strength
from .slots import NO_BACKWARD, Limits, Sizes, check_grid, check_states


def check_fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    out: Tensor | None,
    limits: Limits | None = None,
    requires_grad: bool = False,
) -> int:
    """Raises unless the arguments of `fused_recurrent_kda` fit together; returns the number of sequences.

    limits: those of kernels, which have no backward. requires_grad: whether an input does, where there are no limits.
    """
    _flags(
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, output_final_state,
        use_qk_l2norm_in_kernel, state_v_first,
    )  # fmt: skip
    sizes = _sizes(q, k, v, cu_seqlens, out, limits)
    arguments.number("scale", scale)
    _log_decay("g", g, "K", sizes.dim_k, sizes, checked=not use_gate_in_kernel)
    arguments.tensor("beta", beta)
    check_strength(sizes, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    check_lower_bound(lower_bound, use_gate_in_kernel)
    check_parameters(sizes, True, use_gate_in_kernel, A_log, dt_bias)
    if A_log is None and use_gate_in_kernel and lower_bound is None:
        expected = "a tensor with use_gate_in_kernel and no lower_bound"
        arguments.value_error("A_log", expected, None)
    _initial_state(initial_state, v, sizes, state_v_first)
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    _gradients(requires_grad, out, limits, **inputs, initial_state=initial_state)
    return sizes.rows


def check_fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None,
    gk: Tensor | None,
    gv: Tensor | None,
    beta: Tensor | None,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    out: Tensor | None,
    limits: Limits | None = None,
    requires_grad: bool = False,
) -> int:
    """The same of `fused_recurrent_gated_delta_rule`; kernels have no gates over V, and no g beside gk."""
    _flags(
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, output_final_state,
        use_qk_l2norm_in_kernel, state_v_first,
    )  # fmt: skip
    sizes = _sizes(q, k, v, cu_seqlens, out, limits)
    arguments.number("scale", scale)
    if g is not None:
        check_gate("g", g, "[B, T, HV]", (tuple(v.shape[:3]),), sizes)
        if not use_gate_in_kernel:
            arguments.sign("g", g, -1)
    elif use_gate_in_kernel:
        arguments.value_error("use_gate_in_kernel", "False without g", True)
    for name, x, letter, dim in (("gk", gk, "K", sizes.dim_k), ("gv", gv, "V", sizes.dim_v)):
        if x is not None:
            _log_decay(name, x, letter, dim, sizes)
    if limits is not None and gv is not None:
        arguments.value_error("gv", "None (the kernel takes no gates over V)", "a tensor")
    if limits is not None and g is not None and gk is not None:
        arguments.value_error("gk", "None beside g (the kernel takes one of them)", "a tensor")
    if use_beta_sigmoid_in_kernel and beta is None:
        arguments.value_error("use_beta_sigmoid_in_kernel", "False without beta", True)
    check_strength(sizes, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    check_parameters(sizes, False, use_gate_in_kernel, A_log, dt_bias)
    if A_log is None and use_gate_in_kernel:
        arguments.value_error("A_log", "a tensor with use_gate_in_kernel", None)
    _initial_state(initial_state, v, sizes, state_v_first)
    inputs = {"q": q, "k": k, "v": v, "g": g, "gk": gk, "gv": gv, "beta": beta, "A_log": A_log}
    _gradients(requires_grad, out, limits, **inputs, dt_bias=dt_bias, initial_state=initial_state)
    return sizes.rows


def _flags(
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    state_v_first: bool,
) -> None:
    arguments.booleans(
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
    )


def _sizes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    out: Tensor | None,
    limits: Limits | None,
) -> Sizes:
    """Checks activations and packing. Where kernels do not bind it, plain torch serves every device alike."""
    arguments.attention(q, k, v, out, None if limits is None else limits.head_dims)
    batch, tokens, heads, dim_k = q.shape
    sequences = batch if cu_seqlens is None else arguments.offsets("cu_seqlens", cu_seqlens, q)
    check_grid("q", sequences, heads, "sequences", limits)
    kind = "cpu" if limits is None else q.device.type
    heads_v, dim_v = v.shape[2:]
    return Sizes(kind, sequences, tokens, heads, heads_v, dim_k, dim_v, None, q, "q", limits)


def _log_decay(
    name: str, x: Tensor, letter: str, dim: int, sizes: Sizes, checked: bool = True
) -> None:
    """Checks a gate per channel. checked: it is a log decay, whose values are looked at."""
    shape = (*sizes.lead.shape[:2], sizes.heads_v, dim)
    check_gate(name, x, f"[B, T, HV, {letter}]", (shape,), sizes)
    arguments.last_dim(name, x)
    if checked:
        arguments.sign(name, x, -1)


def _initial_state(x: Tensor | None, v: Tensor, sizes: Sizes, state_v_first: bool) -> None:
    if x is None:
        return
    check_states("initial_state", x, v, sizes, state_v_first)
    if x.shape[0] != sizes.rows:
        expected = f"one state for each of {sizes.rows} sequences"
        arguments.value_error("initial_state", expected, x.shape[0])


def _gradients(
    requires_grad: bool, out: Tensor | None, limits: Limits | None, **inputs: Tensor | None
) -> None:
    """Refuses gradients: all of them for kernels, and those through memory of the caller's for plain torch."""
    if limits is None:
        arguments.not_with_gradients("out", out, requires_grad)
    else:
        arguments.no_gradients(NO_BACKWARD, **inputs, out=out)
