"""KDA as cuLA of inclusionAI has it: `cula.kda` there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cula import delta, kda
from cula.compat._indices import int32
from cula_core import arguments

__all__ = [
    "chunk_kda",
    "fused_sigmoid_gating_delta_rule_update",
    "kda_decode",
    "kda_prefill_hopper",
]


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    cp_context: object | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    transpose_state_layout: bool = False,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """KDA over whole sequences: `cula.kda.chunk_kda` in cuLA's argument order. beta is a write strength, not a logit.

    Args:
        q, k, v, g, beta, scale, initial_state, output_final_state: see `cula.kda.chunk_kda`.
        use_qk_l2norm_in_kernel, use_gate_in_kernel, cu_seqlens, cu_seqlens_cpu, safe_gate: see there.
        disable_recompute, cp_context: see there.
        lower_bound, A_log, dt_bias: see there; ignored without `use_gate_in_kernel`.
        return_intermediate_states: also return the state before every chunk of 64 tokens, in bfloat16.
        chunk_indices: ignored.
        transpose_state_layout: states are `[N, HV, V, K]` instead of `[N, HV, K, V]`.

    Returns:
        `(o, final_state)`, or `(o, final_state, h)`.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as our function.

    Example:
        >>> import torch
        >>> from cula.compat.kda import chunk_kda
        >>> q, k, v = torch.randn(3, 1, 100, 2, 32)  # each [B, T, H, D]
        >>> g, beta = -torch.rand(1, 100, 2, 32), torch.rand(1, 100, 2)
        >>> o, state = chunk_kda(q, k, v, g, beta, 0.5, None, True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 32]), torch.Size([1, 2, 32, 32]))
    """
    found = kda.chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        safe_gate=safe_gate,
        # It is for a backward pass, which intermediate states exclude.
        disable_recompute=False if return_intermediate_states else disable_recompute,
        return_intermediate_states=return_intermediate_states,
        state_v_first=transpose_state_layout,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context,
        **_gate(use_gate_in_kernel, lower_bound, A_log, dt_bias),
    )
    return (*found[:2], found[2].to(torch.bfloat16)) if len(found) == 3 else found


def kda_prefill_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    transpose_state_layout: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """KDA over whole sequences with states `[N, HV, V, K]`: `cula.kda.chunk_kda` in cuLA's other argument order.

    It is not bound to Hopper, and `safe_gate` may be False.

    Args:
        q, k, v, g, beta, scale, initial_state, output_final_state: see `cula.kda.chunk_kda`.
        use_qk_l2norm_in_kernel, use_gate_in_kernel, safe_gate, cu_seqlens, cu_seqlens_cpu: see there.
        lower_bound, A_log, dt_bias: see there; ignored without `use_gate_in_kernel`.
        chunk_indices: ignored.
        transpose_state_layout: False: states are `[N, HV, K, V]`.

    Returns:
        `(o, final_state)`, None for the state unless `output_final_state`.

    Raises:
        TypeError, ValueError, RuntimeError: as our function.

    Example:
        >>> import torch
        >>> from cula.compat.kda import kda_prefill_hopper
        >>> q, k, v = torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 16)
        >>> g, beta = -torch.rand(1, 100, 2, 32), torch.rand(1, 100, 2)
        >>> o, state = kda_prefill_hopper(q, k, v, g, beta, output_final_state=True, safe_gate=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 16]), torch.Size([1, 2, 16, 32]))
    """
    o, final = kda.chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        safe_gate=safe_gate,
        state_v_first=transpose_state_layout,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        **_gate(use_gate_in_kernel, lower_bound, A_log, dt_bias),
    )[:2]
    return o, final


def kda_decode(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor | None,
    initial_state_indices: Tensor | None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    out: Tensor | None = None,
    state_layout: str | None = "vk",
) -> Tensor:
    """One token of KDA for each of N rows, on a pool of states that is updated in place.

    Args:
        A_log: `[HV]`.
        dt_bias: `[HV, K]`.
        q, k: `[N, 1, H, K]`, or `[1, N, H, K]`.
        v: `[N, 1, HV, V]`, or `[1, N, HV, V]`.
        a: the raw gate: N * HV * K numbers, as `[N, HV, K]`, `[N, HV * K]`, or with the dimension of 1 in any place.
        b: logits of the write strength: N * HV numbers, as `[N, HV]` or with the dimension of 1.
        initial_state_source: the pool, `[pool, HV, V, K]`. None: rows start from zero, and their states are forgotten.
        initial_state_indices: `[N]`, the row of the pool; negative: padding, whose output is zero. None: row n.
        cu_seqlens: `[N + 1]`, not read: every row has one token.
        scale, use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold: as of `cula.delta.delta_rule_decode`.
        out: of the shape of v, written and returned.
        state_layout: "vk", or "kv" for a pool `[pool, HV, K, V]`.

    Returns:
        The outputs, of the shape and dtype of v.

    Raises:
        TypeError, ValueError, RuntimeError: as `cula.delta.delta_rule_decode`, which names b beta.

    Example:
        >>> import torch
        >>> from cula.compat.kda import kda_decode
        >>> q, k = torch.randn(2, 3, 1, 2, 32)  # [N, 1, H, K]
        >>> v, a, b = torch.randn(3, 1, 4, 32), torch.randn(3, 4, 32), torch.randn(3, 4)
        >>> pool, rows = torch.zeros(8, 4, 32, 32), torch.tensor([6, 0, -1], dtype=torch.int32)
        >>> o = kda_decode(torch.zeros(4), torch.zeros(4, 32), q, k, v, a, b, pool, rows)
        >>> o.shape, pool.flatten(1).any(1).nonzero().flatten().tolist()
        (torch.Size([3, 1, 4, 32]), [0, 6])
    """
    return fused_sigmoid_gating_delta_rule_update(
        A_log,
        a,
        dt_bias,
        softplus_beta,
        softplus_threshold,
        q,
        k,
        v,
        b,
        initial_state_source,
        initial_state_indices,
        scale,
        use_qk_l2norm_in_kernel,
        cu_seqlens,
        True,
        out,
        state_layout,
    )


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor | None,
    initial_state_indices: Tensor | None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
    out: Tensor | None = None,
    state_layout: str | None = "vk",
) -> Tensor:
    """`kda_decode` in the argument order of engines, or the gated delta rule, which cuLA does not have.

    Args:
        A_log, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, scale, cu_seqlens, out, state_layout: see there.
        a: without `is_kda` N * HV numbers, one gate per head; dt_bias is `[HV]` then.
        initial_state_source, initial_state_indices: see there.
        use_qk_l2norm_in_kernel: divide q and k by `sqrt(sum(x^2) + 1e-6)`; off by default here.
        is_kda: whether there is a gate for every channel of K.

    Returns:
        The outputs, of the shape and dtype of v.

    Raises:
        TypeError, ValueError, RuntimeError: as `kda_decode`.

    Example:
        >>> import torch
        >>> from cula.compat.kda import fused_sigmoid_gating_delta_rule_update
        >>> q, k = torch.randn(2, 1, 3, 2, 32)  # [1, N, H, K]
        >>> v, a, b = torch.randn(1, 3, 4, 32), torch.randn(3, 4), torch.randn(3, 4)
        >>> A_log, dt_bias, pool = torch.zeros(4), torch.zeros(4), torch.zeros(3, 4, 32, 32)
        >>> o = fused_sigmoid_gating_delta_rule_update(A_log, a, dt_bias, 1.0, 20.0, q, k, v, b, pool, None)
        >>> o.shape, pool.flatten(1).any(1).all().item()
        (torch.Size([1, 3, 4, 32]), True)
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        arguments.four_dims(name, x, "[N, 1, heads, dim] or [1, N, heads, dim]")
    packed = q.shape[0] == 1
    rows, heads, dim_k = q.shape[1] if packed else q.shape[0], v.shape[2], q.shape[3]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[:2] != ((1, rows) if packed else (rows, 1)):
            arguments.value_error(
                name, "one token per row, [N, 1, heads, dim] or [1, N, heads, dim]", list(x.shape)
            )
    layouts = {"vk": True, "kv": False}
    layout = "vk" if state_layout is None else str(state_layout).strip().lower()
    if layout not in layouts:
        arguments.value_error("state_layout", "'vk' or 'kv'", state_layout)
    if cu_seqlens is not None:
        arguments.vector("cu_seqlens", cu_seqlens, "N + 1", rows + 1)
    state_v_first = layouts[layout]
    states = (heads, v.shape[3], dim_k) if state_v_first else (heads, dim_k, v.shape[3])
    if initial_state_source is None:
        initial_state_source = torch.zeros(rows, *states, device=q.device)
        initial_state_indices = None
    arguments.tensor("initial_state_source", initial_state_source)
    if initial_state_source.shape[1:] != states:
        letters = "V, K" if state_v_first else "K, V"
        arguments.value_error(
            "initial_state_source",
            f"[pool, HV, {letters}] = [pool, {', '.join(map(str, states))}]",
            list(initial_state_source.shape),
        )
    if initial_state_indices is not None:
        initial_state_indices = int32("initial_state_indices", initial_state_indices)
    if out is not None:
        arguments.four_dims("out", out, "the dimensions of v")
    # Both layouts are rows of one token.
    q, k, v = (x.transpose(0, 1) for x in (q, k, v)) if packed else (q, k, v)
    o = delta.delta_rule_decode(
        q,
        k,
        v,
        _per_row("a", a, (rows, 1, heads, dim_k) if is_kda else (rows, 1, heads)),
        _per_row("b", b, (rows, 1, heads)),
        initial_state_source,
        state_indices=initial_state_indices,
        scale=scale,
        A_log=A_log,
        dt_bias=dt_bias,
        softplus_beta=softplus_beta,
        softplus_threshold=softplus_threshold,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
        out=out.transpose(0, 1) if packed and out is not None else out,
    )
    if out is not None:
        return out
    return o.transpose(0, 1) if packed else o


def _gate(
    inside: bool, lower_bound: float | None, A_log: Tensor | None, dt_bias: Tensor | None
) -> dict[str, Any]:
    """What a gate inside is made of; nothing without one."""
    return {"lower_bound": lower_bound, "A_log": A_log, "dt_bias": dt_bias} if inside else {}


def _per_row(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Numbers in the order of `shape`, whatever dimensions they have."""
    arguments.tensor(name, x)
    if x.shape == shape:
        return x
    if x.numel() != torch.Size(shape).numel():
        arguments.value_error(name, f"the numbers of {list(shape)}", list(x.shape))
    return x.reshape(shape)
