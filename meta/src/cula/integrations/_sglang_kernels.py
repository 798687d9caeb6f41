"""Kernel classes that SGLang's dispatchers take, and what stands around its function for Lightning attention.

They are made when a model is loaded, from SGLang's own Triton classes: what cula does not serve goes to these, with the
reason in the log "cula" at level info, once per reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from cula.integrations import _sglang_calls as calls
from cula.integrations._engine_calls import serve

_KERNELS = "sglang.srt.layers.attention.linear.kernels"
_ENGINE = "SGLang"


def gdn_kernel(impl: str) -> type:
    """A class for the gated delta rule. impl: what `cula` is asked for."""
    base = import_module(f"{_KERNELS}.gdn_triton").TritonGDNKernel

    def extend(self: Any, *args: Any, **named: Any) -> Any:
        o, last, h = base.extend(self, *args, **named)
        _fill_snapshots(h, **named)
        return o, last, h

    return _kernel(
        "CulaGDNKernel", base, impl, calls.gdn_extend, extend, supports_track_state_snapshot=True
    )


def kda_kernel(impl: str) -> type:
    """A class for KDA. impl: what `cula` is asked for."""
    base = import_module(f"{_KERNELS}.kda_triton").TritonKDAKernel
    return _kernel(
        "CulaKDAKernel",
        base,
        impl,
        calls.kda_extend,
        base.extend,
        supports_packed_decode_safe_gate=True,
    )


def _kernel(
    name: str, base: type, impl: str, extend: Callable[..., Any], their_extend: Callable[..., Any], **flags: bool
) -> type:  # fmt: skip
    pairs = {
        method: (getattr(calls, method), getattr(base, method))
        for method in ("packed_decode", "decode", "target_verify")
    }
    pairs["extend"] = (extend, their_extend)
    methods = {method: _method(*pair, impl) for method, pair in pairs.items()}
    return type(name, (base,), {"__module__": __name__} | flags | methods)


def lightning(
    impl: str, phases: frozenset[str], theirs: Callable[..., Any], *args: Any, **named: Any
) -> Any:
    """`seg_la_fwd` by cula in the phases that run on it; theirs: SGLang's own."""
    asked = dict(zip(("q", "k", "v", "s", "decay_scales", "meta"), args), **named)
    phase = "prefill" if calls.prefills(asked["q"], asked["meta"]) else "decode"
    if phase not in phases:
        return theirs(*args, **named)
    return serve(_ENGINE, "seg_la_fwd", calls.seg_la_fwd, theirs, args, named, impl)


def _method(ours: Callable[..., Any], theirs: Callable[..., Any], impl: str) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **named: Any) -> Any:
        return serve(
            _ENGINE, ours.__name__, ours, functools.partial(theirs, self), args, named, impl
        )

    return method


def _fill_snapshots(
    h: Tensor | None, *, query_start_loc: Tensor, track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None, **_: Any,
) -> None:  # fmt: skip
    """Takes the states for the prefix cache from h, those before each chunk, which is all that Triton's kernel keeps.

    SGLang reads them from track_state, because our class promises that.
    """
    if track_state is None or track_chunk_idx is None or h is None:
        return
    chunks = (query_start_loc.diff() + 63) // 64
    rows = chunks.cumsum(0) - chunks + track_chunk_idx.clamp(min=0)
    track_state.copy_(h[0, rows.clamp(max=h.shape[1] - 1)])
