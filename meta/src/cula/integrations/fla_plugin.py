"""cula behind flash-linear-attention: after `register()` FLA's own functions, layers and models run on kernels of cula.

FLA 0.6 asks backends before it launches its Triton kernels, and cula becomes the first of them. Two functions that FLA
asks nobody about are replaced where FLA looks them up, so that names which were imported earlier are served too. What
no kernel serves goes on to FLA's other backends and to FLA itself, with the reason in the log "cula" at level info.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cula._installed import importable
from cula.integrations._engine_calls import refuse

__all__ = ["bypassed", "register", "registered", "unregister"]

_logger = logging.getLogger("cula")
_PRIORITY = 1  # FLA takes the lowest first: FlashKDA has 3
_TYPE = "cula"
# By operation of FLA's registry, the functions that are asked there; and functions that have a registry of their own.
_OPERATIONS = {
    "gated_delta_rule": ("fla.ops.gated_delta_rule.chunk", "chunk_gated_delta_rule"),
    "kda": ("fla.ops.kda.fused_recurrent", "fused_recurrent_kda_fwd"),
}
_FUNCTIONS = (
    ("fla.ops.kda.chunk", "chunk_kda"),
    ("fla.ops.simple_gla.fused_chunk", "fused_chunk_simple_gla"),
)
_DECODE = ("fla.ops.gated_delta_rule.fused_recurrent", "fused_recurrent_gated_delta_rule_fwd")
_GLA = ("fla.ops.simple_gla.chunk", "ChunkSimpleGLAFunction")


class _Here(threading.local):
    """Whether this thread is inside FLA on our behalf, so that FLA must not come back to us."""

    off = False


_here = _Here()
_replaced: dict[tuple[str, str], Any] = {}
_impl = ""


def register(impl: str | None = None) -> None:
    """Puts kernels of cula behind the functions of FLA 0.6, in this process. A second call changes `impl` alone.

    Served are `chunk_kda` and `fused_recurrent_kda`, `chunk_gated_delta_rule` and `fused_recurrent_gated_delta_rule`,
    `chunk_simple_gla`, `fused_chunk_simple_gla` and `chunk_lightning_attn`, and what calls them: FLA's layers and
    models, and those of transformers that use FLA. Where gradients are wanted, `chunk_kda` and `chunk_simple_gla` have
    a kernel as forward and FLA's own backward. `CULA_FLA=0` in the environment switches the backend off.

    Args:
        impl: an implementation as `cula.explain` names it; None: any kernel, and FLA itself where none serves.

    Raises:
        ImportError: FLA is not installed.
        RuntimeError: it is older than 0.6, or FLA_DISABLE_BACKEND_DISPATCH=1 has switched its backends off.

    Example:
        >>> from cula.integrations import fla_plugin
        >>> fla_plugin.register()  # doctest: +SKIP
    """
    global _impl
    from cula._registry import KERNELS_ONLY
    from cula.integrations.fla import why_too_old

    if not importable("fla"):
        raise ImportError("flash-linear-attention is not installed: pip install fla-core")
    if (why := why_too_old()) is not None:
        raise RuntimeError(why)
    backends = import_module("fla.backends")
    if backends._DISPATCH_DISABLED:
        raise RuntimeError("FLA_DISABLE_BACKEND_DISPATCH=1 has switched FLA's backends off")
    _impl = KERNELS_ONLY if impl is None else impl
    backend = _backend(backends.BaseBackend)
    for operation in _OPERATIONS:
        backends.register(operation)(backend)
    for place in _FUNCTIONS:
        backends.register(_found(place))(backend)
    # As what FLA dispatches, outside graphs. Not where the function is defined: that would import the whole compiler.
    _replace(_DECODE, torch.compiler.disable(_decode_of_gdn), _PARAMETERS_OF_DECODE)
    _replace(_GLA, _SimpleGLA, None)


def unregister() -> None:
    """Takes back what `register` did; does nothing where it was not called."""
    global _impl
    _impl = ""
    for (module, name), original in _replaced.items():
        setattr(import_module(module), name, original)
    _replaced.clear()
    if not importable("fla"):
        return
    backends = import_module("fla.backends")
    registries = [
        *(backends._operation_registries.get(operation) for operation in _OPERATIONS),
        *(backends._function_registries.get(inspect.unwrap(_found(place))) for place in _FUNCTIONS),
    ]
    for registry in registries:
        if registry is not None:
            registry._backends.pop(_TYPE, None)


def registered() -> bool:
    """Whether FLA asks cula in this process."""
    return bool(_impl)


@contextlib.contextmanager
def bypassed() -> Iterator[None]:
    """In this context, in this thread, FLA does not ask cula: comparisons with FLA measure FLA."""
    before, _here.off = _here.off, True
    try:
        yield
    finally:
        _here.off = before


# ---- how FLA reaches us ----------------------------------------------------------------------------------------------


def _backend(base: type) -> type:
    """Returns the class that FLA's registries take: a method and a verifier for each function."""

    def willing(self: object, *args: Any, **named: Any) -> tuple[bool, str | None]:
        return (False, "cula has refused this call") if _here.off else (True, None)

    methods: dict[str, Any] = {}
    for place in (*_OPERATIONS.values(), *_FUNCTIONS):
        methods[f"{place[1]}_verifier"] = willing
        methods[place[1]] = _method(place)
    facts = {
        "backend_type": _TYPE,
        "package_name": "cula",
        "env_var": "CULA_FLA",
        "priority": _PRIORITY,
    }
    return type("CulaBackend", (base,), facts | methods)


def _method(place: tuple[str, str]) -> Callable[..., Any]:
    ours = _SERVED[place[1]]

    def method(self: object, *args: Any, **named: Any) -> Any:
        return _serve(ours, _found(place), args, named)

    return method


def _serve(ours: Callable[..., Any], theirs: Callable[..., Any], args: tuple, named: dict) -> Any:
    """What cula computes, or FLA where cula does not serve the call."""
    from cula._ranks import context_of
    from cula._registry import Refused, log_once

    if not _here.off:
        try:
            return ours(*args, **named)
        except (Refused, TypeError, ValueError, NotImplementedError) as error:
            if context_of(None) is not None:  # FLA would take this rank's slice for whole sequences
                raise
            # FLA says itself what is wrong with a call that is wrong.
            log_once(logging.INFO, f"{ours.__name__.lstrip('_')} is left to FLA: {error}")
    with bypassed():
        return theirs(*args, **named)


def _found(place: tuple[str, str]) -> Any:
    return getattr(import_module(place[0]), place[1])


def _replace(place: tuple[str, str], ours: Any, parameters: tuple[str, ...] | None) -> None:
    """Replaces an attribute of a module of FLA, unless its parameters are not those that are known."""
    if place in _replaced:
        return
    theirs = _found(place)
    if parameters is not None and tuple(inspect.signature(theirs).parameters) != parameters:
        _logger.warning("%s.%s has other parameters than in FLA 0.6.0, and stays", *place)
        return
    _replaced[place] = theirs
    setattr(import_module(place[0]), place[1], ours)


# ---- functions of FLA by cula ----------------------------------------------------------------------------------------


def _dense(x: Tensor) -> Tensor:
    """An activation whose last dimension has no gaps; FLA's functions take any strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _state(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _flat(x: Tensor | None) -> Tensor | None:
    """Numbers per head or channel, which some callers keep as [1, 1, H, 1]."""
    return None if x is None else x.reshape(-1)


def _exact(found: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """FLA's final states are float32."""
    o, final = found
    return o, None if final is None else final.float()


def _layout(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """The layout of states, which earlier releases called otherwise."""
    if transpose_state_layout is None:
        return state_v_first
    refuse(state_v_first_twice=state_v_first)
    return transpose_state_layout


def _chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: object | None = None, use_graph: bool = False,
    max_num_seqs: int | None = None, *, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    chunk_size: int = 64, transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    from cula.kda import chunk_kda

    # h would have another dtype than FLA's. The size of a chunk changes nothing but rounding.
    refuse(
        cp_context=cp_context,
        use_graph=use_graph,
        max_num_seqs=max_num_seqs,
        return_intermediate_states=return_intermediate_states,
        chunk_size=chunk_size not in (32, 64),
    )
    gate = use_gate_in_kernel
    found = chunk_kda(
        _dense(q), _dense(k), _dense(v), _dense(g), beta, scale, _state(initial_state), output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate,
        lower_bound if gate else None, disable_recompute,
        state_v_first=_layout(state_v_first, transpose_state_layout), cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu, A_log=_flat(A_log) if gate else None, dt_bias=_flat(dt_bias) if gate else None,
        impl=_impl,
    )  # fmt: skip
    return _exact(found)


def _fused_recurrent_kda_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_state: Tensor | None = None, scale: float | None = None,
    output_final_state: bool = False, inplace_final_state: bool = True, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    lower_bound: float | None = None, out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    from cula.kda import fused_recurrent_kda

    refuse(
        inplace_final_state=inplace_final_state,
        ssm_state_indices=ssm_state_indices,
        num_accepted_tokens=num_accepted_tokens,
    )
    gate = use_gate_in_kernel
    found = fused_recurrent_kda(
        _dense(q), _dense(k), _dense(v), _dense(g), beta, _flat(A_log) if gate else None,
        _flat(dt_bias) if gate else None, scale, _state(initial_state), output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound if gate else None,
        state_v_first, cu_seqlens, out=out, impl=_impl,
    )  # fmt: skip
    return _exact(found)


def _chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, chunk_indices: Tensor | None = None,
    cp_context: object | None = None, *, use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, chunk_size: int = 64, transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    from cula.lightning import chunk_gated_delta_rule

    # chunk_indices follow from cu_seqlens, which kernels read themselves.
    refuse(cp_context=cp_context, chunk_size=chunk_size not in (16, 32, 64))
    gate = use_gate_in_kernel
    found = chunk_gated_delta_rule(
        _dense(q), _dense(k), _dense(v), g, beta, scale, _state(initial_state), output_final_state,
        use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        _layout(state_v_first, transpose_state_layout), cu_seqlens, cu_seqlens_cpu, use_gate_in_kernel=gate,
        A_log=_flat(A_log) if gate else None, dt_bias=_flat(dt_bias) if gate else None, impl=_impl,
    )  # fmt: skip
    return _exact(found)


def _fused_recurrent_gated_delta_rule_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None, gv: Tensor | None = None,
    beta: Tensor | None = None, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    from cula.lightning import fused_recurrent_gated_delta_rule

    refuse(gk=gk, gv=gv)
    found = fused_recurrent_gated_delta_rule(
        _dense(q), _dense(k), _dense(v), g, beta=beta, scale=scale, initial_state=_state(initial_state),
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=A_log is not None, A_log=_flat(A_log), dt_bias=_flat(dt_bias),
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, impl=_impl,
    )  # fmt: skip
    return _exact(found)


def _chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    from cula.lightning import chunk_simple_gla

    found = chunk_simple_gla(
        _dense(q), _dense(k), _dense(v), g, g_gamma, scale, _state(initial_state), output_final_state,
        state_v_first, cu_seqlens, cu_seqlens_cpu, impl=_impl,
    )  # fmt: skip
    return _exact(found)


def _fused_chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    return _chunk_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens
    )


def _decode_of_gdn(*args: Any, **named: Any) -> Any:
    """What stands where FLA has the forward of `fused_recurrent_gated_delta_rule`."""
    return _serve(_fused_recurrent_gated_delta_rule_fwd, _replaced[_DECODE], args, named)


class _SimpleGLA:
    """What stands where FLA has the autograd function of `chunk_simple_gla`."""

    @staticmethod
    def apply(*args: Any) -> Any:
        return _serve(_chunk_simple_gla, _replaced[_GLA].apply, args, {})


_PARAMETERS_OF_DECODE = tuple(inspect.signature(_fused_recurrent_gated_delta_rule_fwd).parameters)
_SERVED: dict[str, Callable[..., Any]] = {
    "chunk_kda": _chunk_kda,
    "fused_recurrent_kda_fwd": _fused_recurrent_kda_fwd,
    "chunk_gated_delta_rule": _chunk_gated_delta_rule,
    "fused_chunk_simple_gla": _fused_chunk_simple_gla,
}
