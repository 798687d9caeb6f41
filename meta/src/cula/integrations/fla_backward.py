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
from cula._opaque import autograd_anywhere
from cula.integrations.fla import as_fla_reads, load, one_decay, supports, with_exact_states

_CHUNK = 64
_GLA_TENSORS = ("q", "k", "v", "g", "g_gamma", "initial_state", "cu_seqlens", "cu_seqlens_cpu")
_KDA_TENSORS = (
    "q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias", "cu_seqlens", "cu_seqlens_cpu",
)  # fmt: skip
# Options that the backward reads, in the order of the parameters of `_kda_gradients`.
_KDA_OPTIONS = (
    "scale", "lower_bound", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval", "safe_gate", "state_v_first",
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
        return functools.partial(_kda, forward)
    adapter = functools.partial(_simple_gla, forward)
    if function == "chunk_simple_gla":
        return adapter
    return functools.partial(load(function), gla=adapter)


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
        given, settings = list(ctx.saved_tensors), ctx.settings
        run = _GLA_OPERATOR if torch.compiler.is_compiling() else _simple_gla_gradients
        found = run(
            do, dht, given, settings["scale"], settings["use_qk_l2norm_in_kernel"], settings["state_v_first"]
        )  # fmt: skip
        return None, None, *_per_input(_gla_wanted(given), found)


def _gla_wanted(given: list[Tensor | None]) -> list[Tensor | None]:
    """What has gradients: all but the constant decay and the packing."""
    q, k, v, g, _, initial_state, *_ = given
    return [q, k, v, g, None, initial_state, None, None]


def _simple_gla_gradients(
    do: Tensor,
    dht: Tensor | None,
    given: list[Any],
    scale: float,
    normalise: bool,
    state_v_first: bool,
) -> list[Tensor]:
    """Gradients of every tensor among `_gla_wanted`; given: in the order of `_GLA_TENSORS`."""
    from fla.ops.simple_gla.chunk import chunk_simple_gla_bwd
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    q, k, v, g, g_gamma, initial_state, cu_seqlens, cu_seqlens_cpu = given
    packing = _packing(cu_seqlens, cu_seqlens_cpu)
    sums = None if g is None else _gate_sums(g.contiguous(), None, packing)
    with autograd_anywhere():
        leaves = [x.detach().requires_grad_() for x in (q, k)]
        prepared = [as_fla_reads(x, v.shape[2], normalise) for x in leaves]
    dq, dk, dv, dsums, dh0 = chunk_simple_gla_bwd(
        *(x.detach() for x in prepared),
        v.contiguous(),
        sums,
        None if g_gamma is None else g_gamma * RCP_LN2,
        _contiguous(initial_state),
        do.contiguous(),
        _contiguous(dht),
        scale,
        state_v_first,
        **packing,
    )
    # Back through the normalisation and the repetition of heads.
    dq, dk = torch.autograd.grad(
        prepared, leaves, [d.to(x.dtype) for d, x in zip((dq, dk), prepared)]
    )
    dg = None if g is None else chunk_local_cumsum(dsums, reverse=True, **packing)
    return _like([q, k, v, g, initial_state], [dq, dk, dv, dg, dh0])


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
        count = len(_KDA_TENSORS)
        saved = (
            ctx.saved_tensors
        )  # read once: under a checkpoint of activations a second time fails
        given, intra = list(saved[:count]), list(saved[count:])
        run = _KDA_OPERATOR if torch.compiler.is_compiling() else _kda_gradients
        found = run(do, dht, given, intra, *(ctx.options[name] for name in _KDA_OPTIONS))
        return None, None, *_per_input(given[:8], found), None, None


def _kda_gradients(
    do: Tensor | None,
    dht: Tensor | None,
    given: list[Tensor | None],
    intra: list[Tensor],
    scale: float | None,
    lower_bound: float | None,
    normalise: bool,
    gate_inside: bool,
    beta_inside: bool,
    neg_eigval: bool,
    safe_gate: bool,
    state_v_first: bool,
) -> list[Tensor]:
    """Gradients of every tensor but those of the packing; given: in the order of `_KDA_TENSORS`."""
    from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd
    from fla.ops.common.gate import fused_beta_sigmoid_bwd, fused_beta_sigmoid_fwd
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd

    Aqk, Akk, *factors = intra
    q, k, v, g, raw_beta, initial_state, A_log, dt_bias, *offsets = map(_contiguous, given)
    dt_bias = None if dt_bias is None else dt_bias.flatten()
    packing = _packing(*offsets)
    if normalise:
        (q, q_rstd), (k, k_rstd) = l2norm_fwd(q), l2norm_fwd(k)
    beta, strength = raw_beta, 2.0 if neg_eigval else 1.0
    if beta_inside:
        beta = fused_beta_sigmoid_fwd(raw_beta, scale=strength)
    gate = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
    kept: dict[str, Any] = dict(zip(("w", "u", "qg", "kg"), factors))
    sums = None  # of a gate inside; FLA then makes them with the rest
    if kept or not gate_inside:
        sums = _gate_sums(g, gate if gate_inside else None, packing)
    if kept:
        kept |= _states(kept, sums, initial_state, state_v_first, packing)
    dq, dk, dv, dbeta, dg, dh0, dA_log, dbias = chunk_kda_bwd(
        q=q,
        k=k,
        v=v,
        beta=beta,
        Aqk=Aqk,
        Akk=Akk,
        scale=k.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=initial_state,
        do=torch.zeros_like(v) if do is None else do.contiguous(),
        dht=_contiguous(dht),
        g=sums,
        g_org=g if gate_inside else None,
        state_v_first=state_v_first,
        safe_gate=safe_gate,
        use_gate_in_kernel=gate_inside,
        disable_recompute=bool(kept),
        **gate,
        **kept,
        **packing,
    )
    if normalise:
        dq, dk = l2norm_bwd(q, q_rstd, dq), l2norm_bwd(k, k_rstd, dk)
    if beta_inside:
        dbeta = fused_beta_sigmoid_bwd(raw_beta, dbeta, scale=strength)
    return _like(given[:8], [dq, dk, dv, dg, dbeta, dh0, dA_log, dbias])


def _like(given: list[Tensor | None], found: list[Tensor | None]) -> list[Tensor]:
    """The gradients of those tensors that are given, in their dtypes and shapes."""
    pairs = ((x, d) for x, d in zip(given, found) if x is not None and d is not None)
    return [d.to(x.dtype).view(x.shape) for x, d in pairs]


def _per_input(wanted: list[Tensor | None], found: list[Tensor]) -> list[Tensor | None]:
    """Gradients at the places of the inputs that they belong to."""
    rest = iter(found)
    return [None if x is None else next(rest) for x in wanted]


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


def _operator(
    name: str, arguments: str, run: Callable[..., Any], wanted: Callable[[list[Tensor | None]], list[Tensor | None]]
) -> Any:  # fmt: skip
    """A backward as the operator `cula::<name>`, into which `torch.compile` does not look.

    run: takes gradients of both results and the inputs. wanted: the inputs that get a gradient.
    """
    name = f"cula::{name}"
    torch.library.define(
        name, f"(Tensor? do, Tensor? dht, Tensor?[] given, {arguments}) -> Tensor[]"
    )

    def fake(do: Any, dht: Any, given: list[Tensor | None], *_: Any) -> list[Tensor]:
        dense = torch.contiguous_format
        return [torch.empty_like(x, memory_format=dense) for x in wanted(given) if x is not None]

    torch.library.impl(name, "default", torch.no_grad()(run))
    torch.library.register_fake(name, fake)
    return getattr(torch.ops.cula, name.removeprefix("cula::")).default


_GLA_OPERATOR = _operator(
    "simple_gla_gradients",
    "float scale, bool normalise, bool state_v_first",
    _simple_gla_gradients,
    _gla_wanted,
)
_KDA_OPERATOR = _operator(
    "kda_gradients",
    "Tensor[] intra, float? scale, float? lower_bound, bool normalise, bool gate_inside, bool beta_inside, "
    "bool neg_eigval, bool safe_gate, bool state_v_first",
    _kda_gradients,
    lambda given: given[:8],
)
