"""cula in SGLang 0.5.23: `--linear-attn-backend cula`, or one of the flags for decode, prefill and verification.

SGLang finds `register` by its entry point, in each of its processes; nothing is imported there before a model with
linear attention is loaded with one of these flags.
"""

from __future__ import annotations

import functools
import inspect
import logging
import pkgutil
from importlib import import_module
from typing import Any

__all__ = ["register"]

_logger = logging.getLogger("cula")
_NAME = "cula"
_LINEAR = "sglang.srt.layers.attention.linear"
_RESOLVE = f"{_LINEAR}.utils.resolve_linear_attn_backends"
_LIGHTNING = f"{_LINEAR}.lightning_backend.seg_la_fwd"
# By phase, the attribute of a dispatcher that holds its kernel.
_HOLDERS = {"decode": "decode_kernel", "prefill": "extend_kernel", "verify": "verify_kernel"}
_DISPATCHERS = {
    "gdn": f"{_LINEAR}.gdn_backend.GDNKernelDispatcher",
    "kda": f"{_LINEAR}.kda_backend.KDAKernelDispatcher",
}

_DECODE = ("self", *"q k v a b A_log dt_bias ssm_states cache_indices query_start_loc".split())
_EXTEND = ("self", *"q k v g beta ssm_states cache_indices query_start_loc".split())
_PACKED = (
    "self",
    *"mixed_qkv a b A_log dt_bias scale ssm_states cache_indices num_v_heads head_v_dim".split(),
)
_VERIFY = (
    "self", *"A_log dt_bias q k v a b ssm_states cache_indices query_start_loc intermediate_states_buffer".split(),
    *"intermediate_state_indices cache_steps retrieve_parent_token".split(),
)  # fmt: skip
# The parameters of SGLang 0.5.23, by kind: where others are found, that kind is left alone.
PARAMETERS: dict[str, dict[str, tuple[str, ...]]] = {
    "gdn": {
        f"{_DISPATCHERS['gdn']}.__init__": ("self", "decode_backend", "prefill_backend", "verify_backend"),
        f"{_LINEAR}.kernels.gdn_triton.TritonGDNKernel.packed_decode": (*_PACKED, "kwargs"),
        f"{_LINEAR}.kernels.gdn_triton.TritonGDNKernel.decode": (*_DECODE, "kwargs"),
        f"{_LINEAR}.kernels.gdn_triton.TritonGDNKernel.extend": (*_EXTEND, "inplace_update", "kwargs"),
        f"{_LINEAR}.kernels.gdn_triton.TritonGDNKernel.target_verify": (*_VERIFY, "kwargs"),
    },
    "kda": {
        f"{_DISPATCHERS['kda']}.__init__": ("self", "decode_backend", "prefill_backend", "verify_backend"),
        f"{_LINEAR}.kernels.kda_triton.TritonKDAKernel.packed_decode": (*_PACKED, "lower_bound", "kwargs"),
        f"{_LINEAR}.kernels.kda_triton.TritonKDAKernel.decode": (*_DECODE, "lower_bound", "kwargs"),
        f"{_LINEAR}.kernels.kda_triton.TritonKDAKernel.extend": (
            *_EXTEND, "A_log", "dt_bias", "lower_bound", "beta_is_raw", "return_intermediate_states", "kwargs",
        ),
        f"{_LINEAR}.kernels.kda_triton.TritonKDAKernel.target_verify": (
            *_VERIFY, "lower_bound", "cache_ring", "replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta",
            "kwargs",
        ),
    },
    "lightning": {
        _LIGHTNING: (
            *"q k v s decay_scales meta caches cache_indices track_lens track_state_indices softmax_scale".split(),
        ),
    },
}  # fmt: skip


def register(impl: str | None = None) -> None:
    """Makes "cula" a value of SGLang's `--linear-attn-*backend` flags, in this process. Again: does nothing.

    SGLang calls it by the entry point of the group `sglang.srt.plugins`. In a phase (decode, prefill, verification of
    drafts) whose flag is "cula", kernels of cula serve the gated delta rule, KDA and Lightning attention, and SGLang's
    Triton kernels what they do not.

    Args:
        impl: an implementation as `cula.explain` names it; None: any kernel.

    Raises:
        ValueError: there is no implementation of that name.
        ImportError: SGLang is not installed.

    Example:
        >>> from cula.integrations import sglang
        >>> sglang.register()  # doctest: +SKIP
    """
    if impl is not None:
        from cula._registry import _every_name

        if impl not in (known := _every_name()):
            raise ValueError(f"impl: expected None or one of {', '.join(known)}, got {impl!r}")
    choices = import_module("sglang.srt.arg_groups.choices")
    if _NAME not in choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
        choices.add_linear_attn_kernel_backend_choices([_NAME])
    _hook_resolution(import_module("sglang.srt.plugins.hook_registry"), impl)


@functools.cache
def _hook_resolution(hooks: Any, impl: str | None) -> None:
    """Has `_resolved` called whenever SGLang decides on backends; once for each registry of hooks."""
    hooks.HookRegistry.register(
        _RESOLVE, functools.partial(_resolved, hooks, impl), hooks.HookType.AFTER
    )


def _resolved(hooks: Any, impl: str | None, backends: Any, *args: Any, **named: Any) -> None:
    """Hooks into what a model that is being loaded will use, if its flags say so."""
    flags = import_module("sglang.srt.runtime_context").get_exec().mamba
    base = flags.linear_attn_backend
    named_by = {
        "decode": flags.linear_attn_decode_backend or base,
        "prefill": flags.linear_attn_prefill_backend or base,
        "verify": flags.linear_attn_verify_backend,  # SGLang does not take the base here
    }
    phases = frozenset(phase for phase, name in named_by.items() if name == _NAME)
    if phases:
        _hook_kernels(hooks, impl, phases)


@functools.cache
def _hook_kernels(hooks: Any, impl: str | None, phases: frozenset[str]) -> None:
    from cula._registry import KERNELS_ONLY
    from cula.integrations import _sglang_kernels

    impl = KERNELS_ONLY if impl is None else impl
    around = {
        "gdn": functools.partial(_dispatcher, "GDN", _sglang_kernels.gdn_kernel, impl, phases),
        "kda": functools.partial(_dispatcher, "KDA", _sglang_kernels.kda_kernel, impl, phases),
        "lightning": functools.partial(_sglang_kernels.lightning, impl, phases),
    }
    for kind, hook in around.items():
        if (changed := _changed(kind)) is not None:
            _logger.warning(
                "%s has other parameters than in SGLang 0.5.23: its kernels stay SGLang's", changed
            )
            continue
        target = _LIGHTNING if kind == "lightning" else f"{_DISPATCHERS[kind]}.__init__"
        hooks.HookRegistry.register(target, hook, hooks.HookType.AROUND)
    hooks.HookRegistry.apply_hooks()


def _changed(kind: str) -> str | None:
    """The first function of a kind whose parameters are not those that are known, or None."""
    for name, known in PARAMETERS[kind].items():
        try:
            found = tuple(inspect.signature(pkgutil.resolve_name(name)).parameters)
        except (ImportError, AttributeError):
            return name
        if found != known:
            return name
    return None


def _dispatcher(
    title: str, kernel_of: Any, impl: str, phases: frozenset[str],
    theirs: Any, self: Any, decode_backend: Any, prefill_backend: Any, verify_backend: Any = None,
) -> None:  # fmt: skip
    """Stands around the constructor of a dispatcher, which knows no backend but SGLang's own."""
    backends = {"decode": decode_backend, "prefill": prefill_backend, "verify": verify_backend}
    ours = [phase for phase in _HOLDERS if phase in phases]
    theirs(
        self, **{f"{p}_backend": type(x).TRITON if p in ours else x for p, x in backends.items()}
    )
    kernel = kernel_of(impl)()
    for phase in ours:
        setattr(self, _HOLDERS[phase], kernel)
    for flag in ("supports_packed_decode", "supports_packed_decode_safe_gate"):
        if hasattr(self, flag):
            setattr(self, flag, getattr(self.decode_kernel, flag, False))
    _logger.info("%s runs on cula in %s", title, ", ".join(ours))
