"""flash-linear-attention as the implementation "fla": its functions under the signatures of cula.

Needs `fla-core` 0.6 and CUDA tensors. FLA plans packed input on the host: without `cu_seqlens_cpu` it reads
`cu_seqlens` back. `fla_backward` puts FLA's backward behind the forward of a kernel that has none.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from cula._installed import importable
from cula.reference._common import expand_heads, live_states, only_live
from cula_core.reference.common import normalized
from cula_core.reference.lightning_decode import pool_slots, store_live

_MINIMUM = (0, 6)


@dataclass(frozen=True)
class Guard:
    """What FLA's backward refuses when it runs, after the forward: so it has to be refused before.

    kernel: the function of FLA that raises. functions: those of cula whose backward calls it.
    gated: it raises only where a decay per token is given. archs, triton: only there, and from the first release up to
    the second; None is any. odd: it raises where K or V is odd.
    tilelang: FLA calls TileLang's kernel instead, where it can be used.
    """

    kernel: str
    functions: tuple[str, ...]
    gated: bool = False
    archs: tuple[str, ...] | None = None
    triton: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    odd: bool = False
    tilelang: bool = False


# Of FLA 0.6.0. Triton compiles the gated chunk_bwd_dqkwg wrongly. Its states are in fp32 in simple GLA, which
# TileLang's kernel does not take. It is right without a gate per token, and KDA has kernels of its own.
_WRONG_ON_HOPPER: dict[str, Any] = {"archs": ("sm90",), "triton": ((3, 4, 0), (3, 7, 1))}
GUARDS = (
    Guard("chunk_bwd_dqkwg", ("chunk_simple_gla",), gated=True, **_WRONG_ON_HOPPER),
    Guard("chunk_bwd_dqkwg", ("chunk_gated_delta_rule",), tilelang=True, **_WRONG_ON_HOPPER),
    Guard(
        "chunk_bwd_dv",
        ("chunk_simple_gla", "lightning_attn_fwd", "lightning_attn_fwd_varlen"),
        odd=True,
    ),
)
# Functions whose backward FLA always has, and those that have none at all.
UNGUARDED = ("chunk_kda",)
INFERENCE_ONLY = (
    "fused_recurrent_kda",
    "fused_recurrent_gated_delta_rule",
    "linear_attention_decode",
    "linear_attention_commit",
)


def supports(
    *,
    arch: str = "",
    function: str | None = None,
    dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    head_dim_k: int | None = None,
    head_dim_v: int | None = None,
    requires_grad: bool = False,
    gate_dtype: torch.dtype | None = None,
    decay_requires_grad: bool = False,
    exact_state: bool = False,
    checkpoints: bool = False,
    num_splits: int | None = None,
    stochastic_rounding: bool = False,
    return_intermediate_states: bool = False,
    use_intracard_cp: bool | str = "auto",
    segment_tokens: int | None = None,
    grouped_queries: bool = False,
    softplus: bool = False,
    state_pool: bool = False,
    has_initial_state: bool = False,
    operand_dtype: torch.dtype | None = None,
    **_: Any,
) -> str | None:
    """Why a problem is refused, or None."""
    if not arch.startswith("sm"):
        return f"needs a CUDA device, the device here is {arch}"
    if function not in _FUNCTIONS:
        return f"has no {function}"
    if dtype is not None and dtype not in (torch.bfloat16, torch.float16):
        return f"activations must be bfloat16 or float16, not {dtype}"
    if state_dtype == torch.float64:
        return "computes states in float32, not float64"
    if head_dim_k is not None and head_dim_k > 256:
        return f"K must be at most 256, not {head_dim_k}"
    if stochastic_rounding:
        return "has no stochastic rounding"
    if return_intermediate_states:
        return "returns intermediate states in its own layout and precision"
    if use_intracard_cp is True:
        return "splits sequences by settings of its own, not by use_intracard_cp=True"
    if segment_tokens is not None:
        return "cuts no sequences after a number of tokens of the caller (segment_tokens)"
    if exact_state:
        return "has no exact_state"
    if checkpoints:
        return "writes no state_checkpoints"
    if function in ("chunk_kda", "chunk_gated_delta_rule"):
        reason = _lacks(grouped_queries, softplus, state_pool, has_initial_state, operand_dtype)
        if reason is not None:
            return reason
    if num_splits not in (None, 1):
        return f"does not split sequences (num_splits={num_splits})"
    if requires_grad and function in INFERENCE_ONLY:
        return "has no backward of it"
    if decay_requires_grad and gate_dtype is None:
        return "has no gradient for the constant decay of a head"
    # Last, so that an installation is only advised where it would help.
    if not importable("fla"):
        return "flash-linear-attention is not installed: pip install fla-core"
    old = why_too_old()
    if old is not None:
        return old
    if not requires_grad:
        return None
    refusals = (
        _guarded(guard, arch, gate_dtype is not None, (head_dim_k, head_dim_v))
        for guard in GUARDS
        if function in guard.functions
    )
    return next((reason for reason in refusals if reason is not None), None)


def _lacks(
    grouped_queries: bool,
    softplus: bool,
    state_pool: bool,
    has_initial_state: bool,
    operand_dtype: torch.dtype | None,
) -> str | None:
    """What its prefill of the delta rules lacks of what is asked for, or None."""
    if grouped_queries:
        return "needs as many heads of k as of q, and no fewer of v"
    if softplus:
        return "has no softplus_beta and softplus_threshold"
    if state_pool:
        return "updates no state_pool"
    if has_initial_state:
        return "has no has_initial_state"
    if operand_dtype is not None:
        return "has no operand_dtype"
    return None


def _guarded(
    guard: Guard, arch: str, gated: bool, head_dims: tuple[int | None, int | None]
) -> str | None:
    """Why the backward of a problem would be refused by one of FLA's guards, or None."""
    if (guard.gated and not gated) or (guard.archs is not None and arch not in guard.archs):
        return None
    if guard.triton is not None:
        first, fixed = guard.triton
        found = _triton()
        if found is None or not first <= found < fixed or (guard.tilelang and _tilelang()):
            return None
        other = " or TileLang" if guard.tilelang else ""
        of_what = "backward with g" if guard.gated else "backward"
        return (
            f"its {of_what} needs Triton {_dotted(fixed)} or newer{other} on {arch}, "
            f"{_dotted(found)} is installed"
        )
    if guard.odd:
        for name, dim in zip("KV", head_dims):
            if dim is not None and dim % 2:
                return f"its backward needs an even {name}, not {dim}"
    return None


def load(function: str) -> Callable[..., Any]:
    """The adapter for a public function of cula."""
    adapter = _FUNCTIONS[function]

    @functools.wraps(adapter)
    def run(*args: Any, **options: Any) -> Any:
        from cula.integrations import fla_plugin

        if not fla_plugin.registered():
            return adapter(*args, **options)
        with fla_plugin.bypassed():
            return adapter(*args, **options)

    return run


def why_too_old(oldest: tuple[int, int] = _MINIMUM) -> str | None:
    """Why the FLA that is installed cannot be used, or None."""
    found = _version()
    if found is None or found >= oldest:
        return None
    return f"needs fla-core {_dotted(oldest)} or newer, {_dotted(found)} is installed"


def _version() -> tuple[int, ...] | None:
    """Major and minor version of fla-core; None for a source tree, which has no metadata."""
    try:
        return tuple(int(part) for part in version("fla-core").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return None


def _triton() -> tuple[int, ...] | None:
    """Version of Triton; None where there is no metadata."""
    for distribution in ("triton", "pytorch-triton"):
        try:
            return tuple(int(part) for part in re.findall(r"\d+", version(distribution))[:3])
        except PackageNotFoundError:
            pass
    return None


def _tilelang() -> bool:
    """Whether FLA calls TileLang's kernels. FLA itself is asked: it looks for a compiler and at its own settings."""
    if not importable("tilelang") or import_module("fla.backends")._DISPATCH_DISABLED:
        return False
    backend = import_module("fla.ops.common.backends.tilelang").CommonTileLangBackend
    return bool(backend.can_use())


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def with_exact_states(adapter: Callable[..., Any]) -> Callable[..., Any]:
    """An adapter that takes states of 16 bits, where FLA, or what comes behind it, begins and ends with fp32."""

    @functools.wraps(adapter)
    def run(*args: Any, initial_state: Tensor | None = None, **options: Any) -> Any:
        exact = None if initial_state is None else initial_state.float()
        o, final, *rest = adapter(*args, initial_state=exact, **options)
        return o, _in_dtype_of(initial_state, final), *rest

    return run


# Arguments of the delta rules that FLA has not; `supports` has refused what they would change.
_UNKNOWN_TO_FLA = (
    "softplus_beta", "softplus_threshold", "state_pool", "state_indices", "initial_state_indices",
    "output_state_indices", "update_state_pool", "null_slot", "has_initial_state", "state_checkpoints",
    "checkpoint_every_n_tokens", "checkpoint_rows", "checkpoint_offsets", "use_intracard_cp", "operand_dtype",
    "segment_tokens",
)  # fmt: skip


@with_exact_states
def _chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
    dt_bias: Tensor | None, return_intermediate_states: bool, out: Tensor | None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    from fla.ops.kda import chunk_kda

    for name in _UNKNOWN_TO_FLA:
        options.pop(name, None)
    # FLA gives the gradient of dt_bias the shape [HV * K], whichever shape it came in.
    dt_bias = None if dt_bias is None else dt_bias.flatten()
    return _into(out, *chunk_kda(q, k, v, g, beta, dt_bias=dt_bias, **options))


def _fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
    initial_state: Tensor | None, out: Tensor | None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    from fla.ops.kda import fused_recurrent_kda

    o, final = fused_recurrent_kda(q, k, v, g, beta, initial_state=initial_state, **options)
    return _into(out, o, _in_dtype_of(initial_state, final))


def _fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *,
    beta: Tensor | None, initial_state: Tensor | None, out: Tensor | None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    # Without beta FLA makes one for every head of q, which are fewer than those of v where heads are grouped.
    beta = v.new_ones(v.shape[:3]) if beta is None else beta
    o, final = fused_recurrent_gated_delta_rule(
        q, k, v, beta=beta, initial_state=initial_state, **options
    )
    return _into(out, o, _in_dtype_of(initial_state, final))


@with_exact_states
def _chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, *, out: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    # FLA takes both.
    g = v.new_zeros(v.shape[:3], dtype=torch.float32) if g is None else g
    beta = v.new_ones(v.shape[:3]) if beta is None else beta
    for name in _UNKNOWN_TO_FLA:
        options.pop(name, None)
    return _into(out, *chunk_gated_delta_rule(q, k, v, g, beta, **options))


@with_exact_states
def _chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None = None, g_gamma: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool, exact_state: bool, state_checkpoints: None, checkpoint_every_n_tokens: None,
    num_splits: int | None, out: Tensor | None = None, segment_tokens: None = None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    from fla.ops.simple_gla import chunk_simple_gla

    q, k = (as_fla_reads(x, v.shape[2], use_qk_l2norm_in_kernel) for x in (q, k))
    g, g_gamma = one_decay(g, g_gamma)
    return _into(out, *chunk_simple_gla(q, k, v, g=g, g_gamma=g_gamma, **options))


def as_fla_reads(x: Tensor, heads: int, normalise: bool) -> Tensor:
    """q or k with the heads of v and, if asked for, normalised: neither is an option of FLA's simple GLA."""
    return expand_heads(normalized(x.float()).to(x.dtype) if normalise else x, heads).contiguous()


def one_decay(g: Tensor | None, g_gamma: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """FLA takes one of the two."""
    return (g, g_gamma) if g is None or g_gamma is None else (g + g_gamma, None)


def _lightning_attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, *, gla: Callable[..., Any] = _chunk_simple_gla, **options: Any
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    return gla(q, k, v, g_gamma=-decay, **options)


def _lightning_attn_fwd_varlen(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, cu_seqlens: Tensor, *,
    state_pool: Tensor | None, initial_state_indices: Tensor | None, output_final_state: bool,
    update_state_pool: bool, null_slot: int | None, has_initial_state: Tensor | None, checkpoint_rows: None,
    checkpoint_offsets: None, out: Tensor | None, gla: Callable[..., Any] = _chunk_simple_gla, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    options |= {"g_gamma": -decay, "cu_seqlens": cu_seqlens}
    if state_pool is None:
        return gla(q, k, v, output_final_state=output_final_state, out=out, **options)
    slots, live = pool_slots(initial_state_indices, cu_seqlens.shape[0] - 1, state_pool, null_slot)
    read = live if has_initial_state is None else live & has_initial_state
    initial = live_states(state_pool, slots, read)
    wanted = update_state_pool or output_final_state
    o, final = gla(q, k, v, initial_state=initial, output_final_state=wanted, **options)
    o = only_live(o, live, cu_seqlens)
    if update_state_pool:
        if final is not None:
            store_live(state_pool, final, slots, live)
        return _into(out, o, state_pool)
    if final is not None:
        final = torch.where(live[:, None, None, None], final, 0)
    return _into(out, o, final)


def _linear_attention_decode(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor, *,
    state_indices: Tensor | None, scale: float | None, state_v_first: bool,
    out: Tensor | None, commit: bool, rounding_seed: None, null_slot: int | None,
) -> Tensor:  # fmt: skip
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    slots, live = pool_slots(state_indices, q.shape[0], state, null_slot)
    o, final = fused_recurrent_simple_gla(
        expand_heads(q, v.shape[2]),
        expand_heads(k, v.shape[2]),
        v,
        g_gamma=-decay,
        scale=scale,
        initial_state=state[slots].float(),
        output_final_state=commit,
        state_v_first=state_v_first,
    )
    if commit:
        store_live(state, final, slots, live)
    return _into(out, torch.where(live[:, None, None, None], o, 0), None)[0]


def _linear_attention_commit(
    k: Tensor, v: Tensor, state: Tensor, decay: Tensor, num_accepted: Tensor, *,
    state_indices: Tensor | None, state_v_first: bool, rounding_seed: None, null_slot: int | None,
) -> None:  # fmt: skip
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    slots, live = pool_slots(state_indices, k.shape[0], state, null_slot)
    # A token that was not accepted neither writes nor decays.
    accepted = torch.arange(k.shape[1], device=k.device) < num_accepted[:, None]
    k = torch.where(accepted[..., None, None], expand_heads(k, v.shape[2]), 0)
    g = torch.where(accepted[..., None], -decay, 0)
    _, final = fused_recurrent_simple_gla(
        k,
        k,
        v,
        g=g,
        initial_state=state[slots].float(),
        output_final_state=True,
        state_v_first=state_v_first,
    )
    store_live(state, final, slots, live)


def _in_dtype_of(initial: Tensor | None, final: Tensor | None) -> Tensor | None:
    """Final states, which FLA returns in fp32, in the dtype of the initial ones."""
    return final if initial is None or final is None else final.to(initial.dtype)


def _into(out: Tensor | None, o: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return (o if out is None else out.copy_(o)), state


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "chunk_kda": _chunk_kda,
    "fused_recurrent_kda": _fused_recurrent_kda,
    "fused_recurrent_gated_delta_rule": _fused_recurrent_gated_delta_rule,
    "chunk_gated_delta_rule": _chunk_gated_delta_rule,
    "chunk_simple_gla": _chunk_simple_gla,
    "lightning_attn_fwd": _lightning_attn_fwd,
    "lightning_attn_fwd_varlen": _lightning_attn_fwd_varlen,
    "linear_attention_decode": _linear_attention_decode,
    "linear_attention_commit": _linear_attention_commit,
}
