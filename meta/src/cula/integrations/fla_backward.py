"""The backward of flash-linear-attention behind the forward of a kernel that has none: simple GLA and KDA."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cula import reference
from cula.integrations.fla import as_fla_reads, load, one_decay, supports, with_exact_states

_CHUNK = 64
_GLA_TENSORS = ("q", "k", "v", "g", "g_gamma", "initial_state", "cu_seqlens", "cu_seqlens_cpu")
_KDA_TENSORS = (
    "q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias", "cu_seqlens", "cu_seqlens_cpu",
)  # fmt: skip


def supports_backward(**problem: Any) -> str | None:
    """Why FLA's backward cannot follow a kernel's forward, or None."""
    forward_only = (
        "exact_state",
        "checkpoints",
        "num_splits",
        "use_intracard_cp",
        "segment_tokens",
    )
    return supports(**{name: fact for name, fact in problem.items() if name not in forward_only})


def with_backward(function: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A prefill function whose backward is FLA's.

    forward: a kernel's `chunk_kda`, or its `chunk_simple_gla` for every function of Lightning prefill.

    Raises:
        TypeError: the kernel's `chunk_kda` lacks `return_intra`, which makes it return what FLA's backward reads.
    """
    if function == "chunk_kda":
        if "return_intra" not in inspect.signature(forward).parameters:
            raise TypeError("chunk_kda has no return_intra, which the backward of fla needs")
        adapter = functools.partial(_kda, forward)
    else:
        adapter = functools.partial(_simple_gla, forward)
        if function != "chunk_simple_gla":
            adapter = functools.partial(load(function), gla=adapter)

    @torch.compiler.disable
    def run(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        return adapter(*args, **options)

    return run


@with_exact_states
def _simple_gla(
    forward: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None = None,
    g_gamma: Tensor | None = None, scale: float | None, initial_state: Tensor | None = None,
    output_final_state: bool, state_v_first: bool, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, use_qk_l2norm_in_kernel: bool, exact_state: bool,
    state_checkpoints: None, checkpoint_every_n_tokens: None, num_splits: int | None, out: None = None,
    segment_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    settings: dict[str, Any] = {
        "scale": k.shape[-1] ** -0.5 if scale is None else scale,
        "output_final_state": output_final_state,
        "state_v_first": state_v_first,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "exact_state": exact_state,
        "num_splits": num_splits,
        "segment_tokens": segment_tokens,
    }
    g, g_gamma = one_decay(g, g_gamma)
    tensors: tuple[Any, ...] = (q, k, v, g, g_gamma, initial_state, cu_seqlens, cu_seqlens_cpu)
    if v.numel() == 0:  # FLA's backward plans for no less than a token
        return reference.chunk_simple_gla(**dict(zip(_GLA_TENSORS, tensors)), **settings)
    return _SimpleGLA.apply(forward, settings, *tensors)


class _SimpleGLA(torch.autograd.Function):
    """A kernel's forward, which keeps its inputs alone, and FLA's backward, which computes the states again."""

    @staticmethod
    def forward(
        ctx: Any, kernel: Callable[..., Any], settings: dict[str, Any], *tensors: Tensor | None
    ) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.settings = settings
        return kernel(**dict(zip(_GLA_TENSORS, tensors)), **settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dht: Tensor | None) -> Any:
        from fla.ops.simple_gla.chunk import chunk_simple_gla_bwd
        from fla.ops.utils import chunk_local_cumsum
        from fla.ops.utils.constant import RCP_LN2

        q, k, v, g, g_gamma, initial_state, cu_seqlens, cu_seqlens_cpu = ctx.saved_tensors
        settings = ctx.settings
        packing = _packing(cu_seqlens, cu_seqlens_cpu)
        sums = None if g is None else _gate_sums(g.contiguous(), None, packing)
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k)]
            prepared = [
                as_fla_reads(x, v.shape[2], settings["use_qk_l2norm_in_kernel"]) for x in leaves
            ]
        dq, dk, dv, dsums, dh0 = chunk_simple_gla_bwd(
            *(x.detach() for x in prepared),
            v.contiguous(),
            sums,
            None if g_gamma is None else g_gamma * RCP_LN2,
            _contiguous(initial_state),
            do.contiguous(),
            _contiguous(dht),
            settings["scale"],
            settings["state_v_first"],
            **packing,
        )
        # Back through the normalisation and the repetition of heads.
        given = [d.to(x.dtype) for d, x in zip((dq, dk), prepared)]
        dq, dk = torch.autograd.grad(prepared, leaves, given)
        dg = None if g is None else chunk_local_cumsum(dsums, reverse=True, **packing).to(g.dtype)
        return None, None, dq, dk, dv.to(v.dtype), dg, None, dh0, None, None


@with_exact_states
def _kda(
    forward: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, out: None = None,
    **options: Any,
) -> Any:  # fmt: skip
    tensors = (q, k, v, g, beta, *(options.pop(name) for name in _KDA_TENSORS[5:]))
    if v.numel() == 0:  # FLA's backward plans for no less than a token
        return reference.chunk_kda(**dict(zip(_KDA_TENSORS, tensors)), **options)
    return _KDA.apply(forward, options, *tensors)


class _KDA(torch.autograd.Function):
    """A kernel's forward, which keeps its inputs, Aqk and (I + Akk)^-1, and FLA's backward.

    With `disable_recompute` it keeps w, u, qg and kg as well. Norms, gates and states are computed again.
    """

    @staticmethod
    def forward(
        ctx: Any, kernel: Callable[..., Any], options: dict[str, Any], *tensors: Tensor | None
    ) -> Any:
        given = dict(zip(_KDA_TENSORS, tensors))
        o, final, *intra = kernel(**given, **options, return_intra=True)
        ctx.save_for_backward(*tensors, *intra)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> Any:
        from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd
        from fla.ops.common.gate import fused_beta_sigmoid_bwd, fused_beta_sigmoid_fwd
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd

        count = len(_KDA_TENSORS)
        saved = (
            ctx.saved_tensors
        )  # once: where activations are recomputed a second reading is an error
        given, (Aqk, Akk, *factors) = saved[:count], saved[count:]
        q, k, v, g, raw_beta, initial_state, A_log, dt_bias, *offsets = map(_contiguous, given)
        dt_bias = None if dt_bias is None else dt_bias.flatten()
        options = ctx.options
        packing = _packing(*offsets)
        if options["use_qk_l2norm_in_kernel"]:
            (q, q_rstd), (k, k_rstd) = l2norm_fwd(q), l2norm_fwd(k)
        beta, strength = raw_beta, 2.0 if options["allow_neg_eigval"] else 1.0
        if options["use_beta_sigmoid_in_kernel"]:
            beta = fused_beta_sigmoid_fwd(raw_beta, scale=strength)
        gate = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": options["lower_bound"]}
        inside = options["use_gate_in_kernel"]
        kept: dict[str, Any] = dict(zip(("w", "u", "qg", "kg"), factors))
        sums = None  # of a gate inside; FLA then makes them with the rest
        if kept or not inside:
            sums = _gate_sums(g, gate if inside else None, packing)
        if kept:
            kept |= _states(kept, sums, initial_state, options["state_v_first"], packing)
        dq, dk, dv, dbeta, dg, dh0, dA_log, dbias = chunk_kda_bwd(
            q=q,
            k=k,
            v=v,
            beta=beta,
            Aqk=Aqk,
            Akk=Akk,
            scale=k.shape[-1] ** -0.5 if options["scale"] is None else options["scale"],
            initial_state=initial_state,
            do=torch.zeros_like(v) if do is None else do.contiguous(),
            dht=_contiguous(dht),
            g=sums,
            g_org=g if inside else None,
            state_v_first=options["state_v_first"],
            safe_gate=options["safe_gate"],
            use_gate_in_kernel=inside,
            disable_recompute=bool(kept),
            **gate,
            **kept,
            **packing,
        )
        if options["use_qk_l2norm_in_kernel"]:
            dq, dk = l2norm_bwd(q, q_rstd, dq), l2norm_bwd(k, k_rstd, dk)
        if options["use_beta_sigmoid_in_kernel"]:
            dbeta = fused_beta_sigmoid_bwd(raw_beta, dbeta, scale=strength)
        found = (dq, dk, dv, dg, dbeta, dh0, dA_log, dbias)
        cast = (None if d is None else d.to(x.dtype).view(x.shape) for d, x in zip(found, given))
        return None, None, *cast, None, None


def _gate_sums(g: Tensor, gate: dict[str, Any] | None, packing: dict[str, Any]) -> Tensor:
    """Sums of the decay within a chunk, in powers of two. gate: what makes decays of a raw g; None: g is the decay."""
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    if gate is None:
        return chunk_local_cumsum(g, scale=RCP_LN2, **packing)
    from fla.ops.kda.gate import kda_gate_chunk_cumsum

    return kda_gate_chunk_cumsum(g, scale=RCP_LN2, **gate, **packing)


def _states(
    kept: dict[str, Tensor], sums: Tensor | None, initial_state: Tensor | None, state_v_first: bool,
    packing: dict[str, Any],
) -> dict[str, Tensor]:  # fmt: skip
    """h, the state in front of every chunk, and v_new, what the tokens of a chunk write."""
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

    h, v_new, _ = chunk_gated_delta_rule_fwd_h(
        k=kept["kg"], w=kept["w"], u=kept["u"], gk=sums, initial_state=initial_state, state_v_first=state_v_first,
        **packing,
    )  # fmt: skip
    return {"h": h, "v_new": v_new}


def _contiguous(x: Tensor | None) -> Any:
    return None if x is None else x.contiguous()


def _packing(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> dict[str, Any]:
    """How tokens are cut into chunks, as FLA's functions take it."""
    from fla.ops.utils import prepare_chunk_indices

    indices = None
    if cu_seqlens is not None:
        indices = prepare_chunk_indices(cu_seqlens, _CHUNK, cu_seqlens_cpu=cu_seqlens_cpu)
    return {"chunk_size": _CHUNK, "cu_seqlens": cu_seqlens, "chunk_indices": indices}
