"""The argument contract of what decays and write strengths are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import arguments
from .slots import STATES, Sizes, check_contiguous, check_dtype


def check_gates(
    sizes: Sizes,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    softplus_beta: float,
    softplus_threshold: float,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    use_qk_l2norm_in_kernel: bool,
) -> None:
    """Checks the gates and the flags of a decode on a pool."""
    arguments.booleans(
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    batch, tokens = sizes.lead.shape[:2]
    heads_v, dim_k = sizes.heads_v, sizes.dim_k
    if g is not None:
        per_head = (batch, tokens, heads_v)
        every = (per_head, (*per_head, dim_k), (batch, tokens, heads_v * dim_k))
        check_gate("g", g, "[B, T, HV], [B, T, HV, K] or [B, T, HV * K]", every, sizes)
        if has_channels(g, sizes):
            arguments.last_dim("g", g)
        # NaN may be the gate of padding.
        if not use_gate_in_kernel and arguments.is_readable(g) and bool((g > 0).any()):
            expected = "values <= 0 with use_gate_in_kernel=False"
            arguments.value_error("g", expected, g.max().item())
    check_strength(sizes, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    check_lower_bound(lower_bound, use_gate_in_kernel)
    check_softplus(softplus_beta, softplus_threshold)
    used = g is not None and use_gate_in_kernel
    check_parameters(sizes, has_channels(g, sizes), used, A_log, dt_bias)


def check_gate(
    name: str,
    x: Tensor,
    letters: str,
    shapes: Sequence[tuple[int, ...]],
    sizes: Sizes,
    dtypes: Sequence[torch.dtype] | None = None,
) -> None:
    """Checks a gate or beta. dtypes: those that are taken; None: of states."""
    arguments.tensor(name, x)
    if all(x.shape != shape for shape in shapes):
        expected = f"{letters} = {' or '.join(str(list(shape)) for shape in shapes)}"
        arguments.value_error(name, expected, list(x.shape))
    check_dtype(name, x, dtypes or STATES[sizes.kind])
    arguments.device(name, x, sizes.lead, sizes.lead_name)


def check_strength(
    sizes: Sizes,
    beta: Tensor | None,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    dtypes: Sequence[torch.dtype] | None = None,
) -> None:
    """Checks beta and whether it may be doubled. dtypes: of beta, as in `check_gate`."""
    if beta is not None:
        per_head = (*sizes.lead.shape[:2], sizes.heads_v)
        check_gate("beta", beta, f"[B, T, {sizes.heads_name}]", (per_head,), sizes, dtypes)
    if allow_neg_eigval and not (use_beta_sigmoid and beta is not None):
        got = "no beta" if beta is None else "use_beta_sigmoid_in_kernel=False"
        expected = "False unless there are beta and use_beta_sigmoid_in_kernel"
        arguments.value_error("allow_neg_eigval", expected, f"True with {got}")


def check_lower_bound(lower_bound: float | None, use_gate_in_kernel: bool) -> None:
    """Checks the bound of the safe gate."""
    arguments.number("lower_bound", lower_bound)
    if lower_bound is None:
        return
    if not lower_bound < 0:
        arguments.value_error("lower_bound", "a number below 0", lower_bound)
    if not use_gate_in_kernel:
        expected = "None unless use_gate_in_kernel is True"
        arguments.value_error("lower_bound", expected, lower_bound)


def check_softplus(softplus_beta: float, softplus_threshold: float) -> None:
    """Checks what the softplus of the gate is made with."""
    for name, number in (
        ("softplus_beta", softplus_beta),
        ("softplus_threshold", softplus_threshold),
    ):
        if number is None:
            arguments.type_error(name, "a float", "NoneType")
        arguments.number(name, number)
    if not softplus_beta > 0:
        arguments.value_error("softplus_beta", "a number above 0", softplus_beta)


def check_parameters(
    sizes: Sizes, channels: bool, used: bool, A_log: Tensor | None, dt_bias: Tensor | None
) -> None:
    """Checks A_log and dt_bias. used: there is a gate that they are part of."""
    heads_v, dim_k = sizes.heads_v, sizes.dim_k
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is None:
            continue
        arguments.floating(name, x)
        if not used:
            arguments.value_error(
                name, "None unless there are g and use_gate_in_kernel", "a tensor"
            )
        arguments.device(name, x, sizes.lead, sizes.lead_name)
    if A_log is not None:
        arguments.vector("A_log", A_log, sizes.heads_name, heads_v)
    if dt_bias is not None and not channels:
        arguments.vector("dt_bias", dt_bias, sizes.heads_name, heads_v)
    elif dt_bias is not None:
        if dt_bias.shape != (heads_v * dim_k,) and dt_bias.shape != (heads_v, dim_k):
            expected = f"[HV * K] = [{heads_v * dim_k}] or [HV, K] = [{heads_v}, {dim_k}]"
            arguments.value_error("dt_bias", expected, list(dt_bias.shape))
        check_contiguous("dt_bias", dt_bias)


def has_channels(g: Tensor | None, sizes: Sizes) -> bool:
    """Whether g, of any of its shapes, has a gate for every channel of K."""
    return g is not None and (g.dim() == 4 or g.shape[2] != sizes.heads_v)
