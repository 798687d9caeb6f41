"""Functions of flash-linear-attention by cula: they take FLA's arguments by name, and `impl`.

Each computes what FLA's function of that name does, or raises before it has changed anything. Parameters are those of
FLA 0.6; an earlier release has some of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cula import _check
from cula.integrations._engine_calls import decode_packed, refuse, slots_of_tokens

_Served = tuple[Tensor, Tensor | None]


def _dense(x: Tensor) -> Tensor:
    """An activation whose last dimension has no gaps; FLA's functions take any strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _state(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _exact(found: _Served) -> _Served:
    """FLA's final states are float32."""
    o, final = found
    return o, None if final is None else final.float()


def _packing(
    cp_context: object | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    **states: object,
) -> dict[str, Any]:
    """FLA takes no states beside a context, which has the offsets itself."""
    if cp_context is None:
        return {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
    refuse(**{f"{name} beside cp_context": x for name, x in states.items()})
    return {"cp_context": cp_context}


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: object | None = None, use_graph: bool = False,
    max_num_seqs: int | None = None, *, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    chunk_size: int = 64, impl: str,
) -> _Served | tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    from cula.kda import chunk_kda as ours

    refuse(chunk_size=chunk_size not in (32, 64))
    gate, states = use_gate_in_kernel, return_intermediate_states
    A_log, dt_bias = (A_log, dt_bias) if gate else (None, None)
    packing = _packing(
        cp_context, cu_seqlens, cu_seqlens_cpu, initial_state=initial_state, output_final_state=output_final_state
    )  # fmt: skip
    if use_graph:
        # What a graph replays reads nothing on the host: neither FLA's backward, nor offsets, nor those of a context.
        refuse(**{
            "use_graph with gradients": _check.requires_grad(q, k, v, g, beta, initial_state, A_log, dt_bias),
            "use_graph with intermediate states": states,
            "use_graph with cp_context": cp_context,
        })  # fmt: skip
        packing["cu_seqlens_cpu"] = None
    if states and cu_seqlens is not None and cu_seqlens_cpu is None:
        packing["cu_seqlens_cpu"] = (
            cu_seqlens.cpu()
        )  # FLA's tensor has a row for every chunk and no more
    o, final, *before = ours(
        _dense(q), _dense(k), _dense(v), _dense(g), beta, scale, _state(initial_state), output_final_state,
        use_qk_l2norm_in_kernel, gate, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate,
        lower_bound if gate else None, disable_recompute and not states, states, state_v_first, **packing,
        use_graph=use_graph, max_num_seqs=max_num_seqs, A_log=A_log, dt_bias=dt_bias, chunk_size=chunk_size, impl=impl,
    )  # fmt: skip
    o, final = _exact((o, final))
    return (o, final, before[0].to(k.dtype)) if before else (o, final)


def fused_recurrent_kda_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_state: Tensor | None = None, scale: float | None = None,
    output_final_state: bool = False, inplace_final_state: bool = True, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    lower_bound: float | None = None, out: Tensor | None = None, *, impl: str,
) -> _Served:  # fmt: skip
    from cula.delta import delta_rule_decode
    from cula.kda import fused_recurrent_kda

    gate = use_gate_in_kernel
    options: dict[str, Any] = {
        "A_log": A_log if gate else None, "dt_bias": dt_bias if gate else None,
        "lower_bound": lower_bound if gate else None, "scale": scale, "use_gate_in_kernel": gate,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "allow_neg_eigval": allow_neg_eigval,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, "state_v_first": state_v_first, "impl": impl,
    }  # fmt: skip
    q, k, v, g = _dense(q), _dense(k), _dense(v), _dense(g)
    if not inplace_final_state:
        # With slots FLA then gives a state for every token.
        refuse(ssm_state_indices=ssm_state_indices, num_accepted_tokens=num_accepted_tokens)
        options |= {
            "initial_state": _state(initial_state),
            "output_final_state": output_final_state,
        }
        return _exact(
            fused_recurrent_kda(q, k, v, g, beta, cu_seqlens=cu_seqlens, out=out, **options)
        )
    if initial_state is None:
        raise ValueError("initial_state: expected a tensor with inplace_final_state, got None")
    slots = ssm_state_indices
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(torch.int32)
        # Tokens of no row have the output zero.
        out = torch.zeros_like(v) if out is None else out
        if slots is not None:
            options |= {"num_accepted": num_accepted_tokens, "out": out}
            return decode_packed(
                q, k, v, g, beta, initial_state, slots, cu_seqlens, **options
            ), initial_state
        options |= {"cu_seqlens": cu_seqlens, "max_tokens": q.shape[1]}
    if slots is None:
        refuse(num_accepted_tokens=num_accepted_tokens)
    else:
        refuse(
            **{"more tokens than slots": q.shape[1] > (1 if slots.dim() == 1 else slots.shape[1])}
        )
        options |= slots_of_tokens(slots, num_accepted_tokens, q.shape[1])
    return delta_rule_decode(q, k, v, g, beta, initial_state, out=out, **options), initial_state


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, chunk_indices: Tensor | None = None,
    cp_context: object | None = None, *, use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, chunk_size: int = 64, impl: str,
) -> _Served:  # fmt: skip
    from cula.lightning import chunk_gated_delta_rule as ours

    gate = use_gate_in_kernel
    packing = _packing(
        cp_context, cu_seqlens, cu_seqlens_cpu, initial_state=initial_state, output_final_state=output_final_state
    )  # fmt: skip
    # chunk_indices follow from cu_seqlens, which kernels read themselves.
    return _exact(ours(
        _dense(q), _dense(k), _dense(v), g, beta, scale, _state(initial_state), output_final_state,
        use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, **packing,
        use_gate_in_kernel=gate, A_log=A_log if gate else None, dt_bias=dt_bias if gate else None,
        chunk_size=chunk_size, impl=impl,
    ))  # fmt: skip


def fused_recurrent_gated_delta_rule_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None, gv: Tensor | None = None,
    beta: Tensor | None = None, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, *, use_exp2: bool = False, impl: str,
) -> _Served:  # fmt: skip
    from cula.lightning import fused_recurrent_gated_delta_rule as ours

    refuse(gk=gk, gv=gv, use_exp2=use_exp2)
    return _exact(ours(
        _dense(q), _dense(k), _dense(v), g, beta=beta, scale=scale, initial_state=_state(initial_state),
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=A_log is not None, A_log=A_log, dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, impl=impl,
    ))  # fmt: skip


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int | None = None, *, exact_state: bool = False, impl: str,
) -> _Served:  # fmt: skip
    from cula.lightning import chunk_simple_gla as ours

    return _exact(ours(
        _dense(q), _dense(k), _dense(v), g, g_gamma, scale, _state(initial_state), output_final_state,
        state_v_first, cu_seqlens, cu_seqlens_cpu, exact_state=exact_state, impl=impl,
    ))  # fmt: skip


def fused_recurrent_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    reverse: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None, *,
    gk: Tensor | None = None, gv: Tensor | None = None, impl: str,
) -> _Served:  # fmt: skip
    # FLA's layers call it for up to 64 tokens. Whoever wants it for more, or its gradients, wants float32 throughout.
    refuse(reverse=reverse, gk=gk, gv=gv, **{
        "more than 64 tokens": q.shape[1] > 64,
        "gradients": _check.requires_grad(q, k, v, g, g_gamma, initial_state),
    })  # fmt: skip
    return chunk_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens, exact_state=True,
        impl=impl,
    )  # fmt: skip
