"""cula behind flash-linear-attention: after `register()` FLA's own functions, layers and models run on kernels of cula.

FLA asks backends before it launches its Triton kernels, and cula becomes the first of them. Functions that FLA asks
nobody about are replaced where FLA looks them up, so that names which were imported earlier are served too. What no
kernel serves goes on to FLA's other backends and to FLA itself, with the reason in the log "cula" at level info.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch

from cula._installed import importable
from cula.integrations import _fla_calls as calls

__all__ = ["bypassed", "register", "registered", "unregister"]

_logger = logging.getLogger("cula")
_PRIORITY = 1  # FLA takes the lowest first: FlashKDA has 3
_TYPE = "cula"
_OLDEST = (0, 5)
_FORMER = "transpose_state_layout"  # the name of state_v_first in FLA 0.5


class _Place(NamedTuple):
    """Where FLA looks a function up, or the autograd function of one, and what of ours serves it.

    registry: the operation under which FLA asks backends; "" where the function is asked about by itself. None: FLA
    asks nobody, and the attribute is replaced.
    """

    module: str
    name: str
    ours: Callable[..., Any]
    registry: str | None = None

    def found(self) -> Any:
        return getattr(import_module(self.module), self.name, None)


_KDA = ("fla.ops.kda.chunk", "chunk_kda", calls.chunk_kda)
_KDA_DECODE = (
    "fla.ops.kda.fused_recurrent", "fused_recurrent_kda_fwd", calls.fused_recurrent_kda_fwd,
)  # fmt: skip
_COMMON = (
    _Place("fla.ops.gated_delta_rule.fused_recurrent", "fused_recurrent_gated_delta_rule_fwd",
           calls.fused_recurrent_gated_delta_rule_fwd),
    _Place("fla.ops.simple_gla.chunk", "ChunkSimpleGLAFunction", calls.chunk_simple_gla),
)  # fmt: skip
# By the module of FLA that has the registries: of 0.6, and of 0.5.
_PLACES = {
    "fla.backends": (
        _Place(*_KDA, registry=""),
        _Place(*_KDA_DECODE, registry="kda"),
        _Place("fla.ops.gated_delta_rule.chunk", "chunk_gated_delta_rule", calls.chunk_gated_delta_rule,
               "gated_delta_rule"),
        _Place("fla.ops.simple_gla.fused_chunk", "fused_chunk_simple_gla", calls.chunk_simple_gla, ""),
        _Place("fla.ops.simple_gla.fused_recurrent", "fused_recurrent_simple_gla", calls.fused_recurrent_simple_gla,
               ""),
        *_COMMON,
    ),
    "fla.ops.backends": (
        _Place(*_KDA, registry="kda"),
        _Place(*_KDA_DECODE),
        _Place("fla.ops.gated_delta_rule.chunk", "ChunkGatedDeltaRuleFunction", calls.chunk_gated_delta_rule),
        _Place("fla.ops.simple_gla.fused_chunk", "fused_chunk", calls.chunk_simple_gla),
        _Place("fla.ops.simple_gla.fused_recurrent", "fused_recurrent", calls.fused_recurrent_simple_gla),
        *_COMMON,
    ),
}  # fmt: skip


class _Here(threading.local):
    """Whether this thread is inside FLA on our behalf, so that FLA must not come back to us."""

    off = False


_here = _Here()
_undo: list[Callable[[], object]] = []
_impl = ""


def register(impl: str | None = None) -> None:
    """Puts kernels of cula behind the functions of FLA 0.5 and 0.6, in this process. A second call changes only `impl`.

    Served are `chunk_kda` and `fused_recurrent_kda`, `chunk_gated_delta_rule` and `fused_recurrent_gated_delta_rule`,
    `chunk_simple_gla`, `fused_chunk_simple_gla` and `fused_recurrent_simple_gla`, `chunk_lightning_attn` and
    `fused_recurrent_lightning_attn`, and what calls them: FLA's layers and models, and those of transformers that use
    FLA. Where gradients are wanted, both passes of `chunk_kda`, `chunk_gated_delta_rule` and `chunk_simple_gla` are
    kernels if there is one for the backward. Otherwise a kernel is the forward, and FLA 0.6 has its own backward.
    `CULA_FLA=0` in the environment switches off what FLA asks backends about.

    Args:
        impl: an implementation as `cula.explain` names it; None: any kernel, and FLA itself where none serves.

    Raises:
        ImportError: FLA is not installed.
        RuntimeError: it is older than 0.5, or FLA_DISABLE_BACKEND_DISPATCH=1 has switched its backends off.

    Example:
        >>> from cula.integrations import fla_plugin
        >>> fla_plugin.register()  # doctest: +SKIP
    """
    global _impl
    from cula._registry import KERNELS_ONLY

    name, backends = _backends()
    if backends._DISPATCH_DISABLED:
        raise RuntimeError("FLA_DISABLE_BACKEND_DISPATCH=1 has switched FLA's backends off")
    found = [(place, place.found()) for place in _PLACES[name]]
    _impl = KERNELS_ONLY if impl is None else impl
    if _undo:
        return
    asked: dict[str | Callable[..., Any], dict[str, Any]] = {}
    for place, theirs in found:
        run = _serving(place, theirs)
        if run is None:
            continue
        if place.registry is None or name != "fla.backends":
            # FLA 0.6 calls backends outside of graphs. A decorator would import the whole compiler with this module.
            run = torch.compiler.disable(run)
        if place.registry is None:
            _replace(place, theirs, run)
        else:
            asked.setdefault(place.registry or inspect.unwrap(theirs), {})[place.name] = run
    for entry, methods in asked.items():
        registry = _registry_of(backends, entry)
        registry.register(_backend(backends.BaseBackend, methods))
        _undo.append(functools.partial(registry._backends.pop, _TYPE, None))


def unregister() -> None:
    """Takes back what `register` did; does nothing where it was not called."""
    global _impl
    _impl = ""
    while _undo:
        _undo.pop()()


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


def _backends() -> tuple[str, Any]:
    """The module of FLA that has the registries, and its name."""
    from cula.integrations.fla import why_too_old

    if not importable("fla"):
        raise ImportError("flash-linear-attention is not installed: pip install fla-core")
    if (why := why_too_old(_OLDEST)) is not None:
        raise RuntimeError(why)
    for name in _PLACES:
        try:
            return name, import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise RuntimeError(f"FLA has no registry of backends: neither {' nor '.join(_PLACES)}")


def _registry_of(backends: Any, entry: str | Callable[..., Any]) -> Any:
    """The registry of an operation or, in FLA 0.6, of a function, with FLA's own backends in it."""
    if not hasattr(backends, "_operation_registries"):
        backends.BackendRegistry.ensure_initialized(entry)
        return backends.BackendRegistry._registries[entry]
    of_operations = isinstance(entry, str)
    return (backends._operation_registries if of_operations else backends._function_registries)[
        entry
    ]


def _backend(base: type, methods: dict[str, Any]) -> Any:
    """What FLA's registries take: a backend with these methods."""

    def is_enabled(cls: type) -> bool:
        return not _here.off and os.environ.get("CULA_FLA", "1") != "0"

    facts = {
        "backend_type": _TYPE,
        "priority": _PRIORITY,
        "is_enabled": classmethod(is_enabled),
    }
    return type(
        "CulaBackend", (base,), facts | {n: staticmethod(run) for n, run in methods.items()}
    )()


def _serving(place: _Place, theirs: Any) -> Callable[..., Any] | None:
    """What stands in FLA's place; None, with a warning, where nothing is or a parameter is none of ours."""
    from cula._ranks import context_of
    from cula._registry import Refused, log_once

    where = f"{place.module}.{place.name}"
    if theirs is None:
        _logger.warning("FLA has no %s, as other releases have it", where)
        return None
    call = getattr(theirs, "apply", theirs)
    parameters = inspect.signature(getattr(theirs, "forward", theirs)).parameters.values()
    order = [x.name for x in parameters if x.kind is not x.VAR_KEYWORD and x.name != "ctx"]
    order = ["state_v_first" if name == _FORMER else name for name in order]
    if not inspect.signature(place.ours).parameters.keys() >= set(order):
        _logger.warning("%s has other parameters than in FLA 0.5 and 0.6, and stays", where)
        return None

    def run(*args: Any, **named: Any) -> Any:
        """What cula computes, or FLA where cula does not serve the call."""
        if not _here.off:
            try:
                # Too many arguments are FLA's to refuse.
                given = dict(zip(order, args, strict=len(args) > len(order)))
                return place.ours(**given, **_renamed(named), impl=_impl)
            except (Refused, TypeError, ValueError, NotImplementedError) as error:
                if context_of(None) is not None:
                    raise  # FLA would take this rank's slice for whole sequences
                # FLA says itself what is wrong with a call that is wrong.
                log_once(logging.INFO, f"{place.name} is left to FLA: {error}")
        with bypassed():
            return call(*args, **named)

    return run


def _renamed(named: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names of today."""
    if _FORMER not in named:
        return named
    if named.get("state_v_first"):
        raise ValueError(f"{_FORMER}: expected False beside state_v_first")
    return {n: x for n, x in named.items() if n != _FORMER} | {"state_v_first": named[_FORMER]}


def _replace(place: _Place, theirs: Any, run: Callable[..., Any]) -> None:
    """Replaces an attribute of a module of FLA: a function, or an autograd function, of which `apply` is called."""
    stand_in = (
        type(place.name, (), {"apply": staticmethod(run)}) if hasattr(theirs, "apply") else run
    )
    module = import_module(place.module)
    setattr(module, place.name, stand_in)
    _undo.append(functools.partial(setattr, module, place.name, theirs))
