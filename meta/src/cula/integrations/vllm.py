"""cula in vLLM 0.33: after `register()` its layers of linear attention call kernels of cula.

vLLM calls `plugin` in each of its processes, before it imports a model, and that does nothing unless CULA_VLLM=1. Then
the functions of `_vllm_calls` take the places of vLLM's own of the same names and parameters, as soon as vLLM imports
the modules that they are in; one that has other parameters stays. What no kernel serves goes on to vLLM's own function,
with the reason in the log "cula" at level info.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from cula._env import configure_logging

__all__ = ["plugin", "register", "registered", "unregister"]

_logger = logging.getLogger("cula")
_GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_OPERATOR = (
    "ChunkGatedDeltaRule"  # a class of _GDN that others may derive from, instead of a function
)
_OPERATORS = "vllm.model_executor.custom_op"
# By module of vLLM, the functions that are looked up there.
_FUNCTIONS = {
    _GDN: (
        "fi_chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule_packed_decode",
        "fused_sigmoid_gating_delta_rule_update",
    ),
    "vllm._custom_ops": ("fused_gdn_decode_post_conv_mtp",),
    "vllm.models.kimi_k3.nvidia.ops.third_party.kda": (
        "chunk_kda_with_fused_gate",
        "fused_recurrent_kda",
        "fused_recurrent_kda_packed_decode",
    ),
    "vllm.models.kimi_k3.nvidia.kda": ("_flashkda_prefill",),
    "vllm.model_executor.layers.mamba.linear.bailing_linear_attn": (
        "linear_attention_prefill_and_mix",
        "linear_attention_decode",
    ),
}
_replaced: dict[tuple[str, str], Any] = {}
_impl = ""


def plugin() -> None:
    """What vLLM calls in each of its processes: `register()` if CULA_VLLM=1."""
    if os.environ.get("CULA_VLLM", "").strip() == "1":
        register()


def register(impl: str | None = None) -> None:
    """Puts kernels of cula behind vLLM's functions, in this process. A second call changes `impl` alone.

    Modules of vLLM that are not imported yet are served when they are. The environment variable CULA_VLLM=1 does this
    in all processes of a server.

    Args:
        impl: an implementation as `cula.explain` names it; None: any kernel, and vLLM itself where none serves.

    Raises:
        TypeError: impl is no name.

    Example:
        >>> from cula.integrations import vllm
        >>> vllm.register()  # doctest: +SKIP
    """
    global _impl
    from cula._registry import KERNELS_ONLY

    if impl is not None and not (isinstance(impl, str) and impl):
        raise TypeError(f"impl: expected the name of an implementation or None, got {impl!r}")
    configure_logging()
    first, _impl = not _impl, KERNELS_ONLY if impl is None else impl
    if not first:
        return
    for name in _FUNCTIONS:
        if name in sys.modules:
            _patch(sys.modules[name])
    sys.meta_path.insert(0, _finder)


def unregister() -> None:
    """Takes back what `register` did; does nothing where it was not called."""
    global _impl
    _impl = ""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for (module, name), original in _replaced.items():
        if name == _OPERATOR:
            sys.modules[_OPERATORS].op_registry_oot.pop(name, None)
        else:
            setattr(sys.modules[module], name, original)
    _replaced.clear()


def registered() -> bool:
    """Whether vLLM asks cula in this process."""
    return bool(_impl)


# ---- how vLLM reaches us ---------------------------------------------------------------------------------------------


class _Finder(MetaPathFinder):
    """Lets a module of vLLM be found as it is, and patches it when it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _FUNCTIONS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def _patch(module: ModuleType) -> None:
    """Puts ours in the places of a module, where they have the parameters that are known."""
    from cula.integrations import _vllm_calls

    for name in _FUNCTIONS[module.__name__]:
        theirs: Any = getattr(module, name, None)
        ours = getattr(_vllm_calls, name)
        if _fits(module, name, theirs, ours):
            _replaced[module.__name__, name] = theirs
            setattr(module, name, _served(name, ours, theirs))
    if module.__name__ == _GDN:
        _derive(module, _vllm_calls.chunk_gated_delta_rule)


def _derive(module: ModuleType, ours: Callable[..., Any]) -> None:
    """Registers a class in the place of vLLM's operator of prefill."""
    theirs: Any = getattr(module, _OPERATOR, None)
    for method in ("forward_cuda", "forward_native"):
        if not _fits(module, f"{_OPERATOR}.{method}", getattr(theirs, method, None), ours, 1):
            return
    if _OPERATOR in sys.modules[_OPERATORS].op_registry_oot:
        _logger.warning("another plug-in of vLLM has taken the place of %s, which stays", _OPERATOR)
        return

    class CulaChunkGatedDeltaRule(theirs):
        def forward(self, *args: Any, **named: Any) -> Any:
            return _call(_OPERATOR, ours, super().forward, args, named)

    theirs.register_oot(CulaChunkGatedDeltaRule)
    _replaced[module.__name__, _OPERATOR] = theirs


def _fits(
    module: ModuleType, name: str, theirs: Any, ours: Callable[..., Any], bound: int = 0
) -> bool:
    """Whether a function of vLLM has the parameters of ours, behind `bound` others; the log says what follows."""
    place = f"{module.__name__}.{name}"
    if theirs is None:
        _logger.warning("%s does not exist in this vLLM, and cula does not serve it", place)
    elif _parameters(theirs)[bound:] != _parameters(ours):
        _logger.warning("%s has other parameters than in vLLM 0.33.0, and stays vLLM's", place)
    else:
        _logger.info("%s calls cula", place)
        return True
    return False


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults of parameters; `impl` is ours alone."""
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in found if p.name != "impl"]


def _served(name: str, ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def function(*args: Any, **named: Any) -> Any:
        return _call(name, ours, theirs, args, named)

    return function


def _call(
    name: str, ours: Callable[..., Any], theirs: Callable[..., Any], args: tuple, named: dict
) -> Any:
    from cula.integrations._engine_calls import serve

    if not _impl:
        return theirs(*args, **named)
    return serve("vLLM", name, ours, theirs, args, named, _impl)
