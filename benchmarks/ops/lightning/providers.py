"""The implementations of Lightning prefill that are compared."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import Provider, Setting
from benchmarks.ops import copying
from benchmarks.ops.installed import missing
from benchmarks.ops.lightning import problem as lightning
from benchmarks.ops.lightning.problem import Inputs, Result
from benchmarks.ops.sequences import has, spans
from benchmarks.ops.tuning import tune_anew

_cula_missing = missing("cula_lightning_sm90")
_fla_missing = missing("fla.ops.simple_gla")


def _cula_supports(problem: Setting) -> str | None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        return "cula-lightning-sm90 needs compute capability 9.0"
    return _cula_missing()


def _cula_call(problem: Setting, x: Inputs, out: Tensor | None = None) -> Callable[[], Result]:
    import cula_lightning_sm90 as cula

    options: dict[str, Any] = {
        "use_qk_l2norm_in_kernel": has(problem, "l2norm"),
        "exact_state": has(problem, "exact"),
        "out": out,
    }
    if x.checkpoints is not None:
        options["state_checkpoints"] = x.checkpoints
        options["checkpoint_every_n_tokens"] = lightning.EVERY
    offsets = None if x.offsets is None else x.offsets.int32
    if x.gate is not None:
        return lambda: cula.chunk_simple_gla(
            x.q,
            x.k,
            x.v,
            g=x.gate,
            initial_state=x.state,
            output_final_state=True,
            cu_seqlens=offsets,
            **options,
        )
    if offsets is not None:
        return lambda: cula.lightning_attn_fwd_varlen(
            x.q,
            x.k,
            x.v,
            x.decay,
            offsets,
            state_pool=x.state,
            initial_state_indices=x.indices,
            **options,
        )
    return lambda: cula.lightning_attn_fwd(
        x.q, x.k, x.v, x.decay, initial_state=x.state, output_final_state=True, **options
    )


def result(problem: Setting, x: Inputs) -> Result:
    """What our call returns, with NaN in its output first; final states have the order of the sequences."""
    out = torch.full_like(x.v, float("nan"))
    _, state = _cula_call(problem, x, out)()
    return out, state if x.indices is None else state[x.indices.long()]


_FLA_LACKS = {
    "gva": "takes no grouped value heads",
    "pool": "takes no pool indices",
    "l2norm": "does not normalize inside",
    "exact": "has one precision of the state update",
    "checkpoints": "returns no states on the way",
}


def _fla_supports(problem: Setting) -> str | None:
    return _FLA_LACKS.get(problem.params["feature"]) or _fla_missing()


def _fla_call(problem: Setting, x: Inputs) -> Callable[[], Result]:
    from fla.ops.simple_gla import chunk_simple_gla

    g_gamma = None if x.decay is None else -x.decay
    offsets, on_host = (None, None) if x.offsets is None else (x.offsets.int64, x.offsets.host)
    return lambda: chunk_simple_gla(
        x.q,
        x.k,
        x.v,
        g=x.gate,
        g_gamma=g_gamma,
        initial_state=x.state,
        output_final_state=True,
        cu_seqlens=offsets,
        cu_seqlens_cpu=on_host,
    )


def _fla_prepare(problem: Setting) -> None:
    from fla.ops.common import chunk_h, chunk_o
    from fla.ops.utils import cumsum

    kernels = (
        chunk_h.chunk_fwd_kernel_h,
        chunk_o.chunk_fwd_kernel_o,
        cumsum.chunk_local_cumsum_scalar_kernel,
    )
    for kernel in kernels:
        tune_anew(kernel)
    if not isinstance(chunk_h.prepare_chunk_offsets, _KnownEnds):
        chunk_h.prepare_chunk_offsets = _KnownEnds(chunk_h.prepare_chunk_offsets)


class _KnownEnds:
    """Makes the peer's chunk offsets with their last element on the host, because the peer reads it in every call."""

    def __init__(self, prepare: Callable[..., Tensor]) -> None:
        self.prepare = functools.lru_cache(maxsize=4)(lambda *args: _with_known_end(prepare(*args)))

    def __call__(self, cu_seqlens: Tensor, chunk_size: int) -> Tensor:
        return self.prepare(cu_seqlens, chunk_size)


class _KnownEnd(Tensor):
    """A vector whose element [-1] is a host tensor."""

    end: Tensor

    def __getitem__(self, index: Any) -> Tensor:
        return self.end if isinstance(index, int) and index == -1 else super().__getitem__(index)


def _with_known_end(offsets: Tensor) -> Tensor:
    known = offsets.as_subclass(_KnownEnd)
    known.end = offsets[-1].cpu()
    return known


CULA = Provider("cula", "ours", _cula_call, lightning.moved, supports=_cula_supports)
FLA = Provider(
    "fla", "peer", _fla_call, lightning.moved, supports=_fla_supports, prepare=_fla_prepare
)
CEILING = copying.ceiling(lightning.moved)
PROVIDERS = (CULA, FLA, CEILING)

_RESULTS = {"cula": result, "fla": lambda problem, x: _fla_call(problem, x)()}


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Compares a provider with the fp64 oracle on fresh inputs; the ceiling is compared with its own definition."""
    if provider.role == "ceiling":
        return copying.check(provider, problem, device)
    heads = _fla_state_heads(problem) if provider is FLA else None
    return lightning.check_prefill(_RESULTS[provider.name], problem, device, heads)


def _fla_state_heads(problem: Setting) -> int | None:
    """How many of the first heads have finite final states with the peer; None means all.

    Behind a sequence that ends inside a chunk of 64 tokens the peer multiplies zeros by exp(decay * tokens missing),
    which is infinite in fp32 for strong decays.
    """
    if problem.params["mode"] == "gate" or all((b - a) % 64 == 0 for _, a, b in spans(problem)):
        return None
    decays = lightning.decays(problem.params["H"], "cpu")
    return int((decays * 63 < math.log(torch.finfo(torch.float32).max)).sum())
