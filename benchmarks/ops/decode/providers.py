"""The implementations of Lightning decode that are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import Provider, Setting
from benchmarks.ops import in_place
from benchmarks.ops.checks import SEED
from benchmarks.ops.decode import problem as decode
from benchmarks.ops.decode.problem import Inputs
from benchmarks.ops.installed import missing
from benchmarks.ops.tuning import forget

_cula_missing = missing("cula_lightning_decode")
_fla_missing = missing("fla.ops.simple_gla")


def _cula_call(problem: Setting, x: Inputs, out: Tensor | None = None) -> Callable[[], Tensor]:
    from cula_lightning_decode import linear_attention_decode

    first, commit = decode.v_first(problem), problem.params["commit"]
    return lambda: linear_attention_decode(
        x.q,
        x.k,
        x.v,
        x.state,
        x.decay,
        state_indices=x.indices,
        state_v_first=first,
        out=out,
        commit=commit,
    )


def _cula_result(problem: Setting, x: Inputs) -> tuple[Tensor, Tensor]:
    out = torch.full_like(x.v, float("nan"))
    _cula_call(problem, x, out)()
    return out, x.state


def _fla_call(problem: Setting, x: Inputs) -> Callable[[], tuple[Tensor, Tensor | None]]:
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    first, commit, g_gamma = decode.v_first(problem), problem.params["commit"], -x.decay
    return lambda: fused_recurrent_simple_gla(
        x.q,
        x.k,
        x.v,
        g_gamma=g_gamma,
        initial_state=x.state,
        output_final_state=commit,
        state_v_first=first,
    )


def _fla_supports(problem: Setting) -> str | None:
    if problem.params["indexed"]:
        return "takes no pool indices"
    return _fla_missing()


def _fla_prepare(problem: Setting) -> None:
    """Tunes the peer anew for every setting, because its autotuner's key leaves the batch out."""
    from fla.ops.common.fused_recurrent import fused_recurrent_fwd_kernel

    forget(fused_recurrent_fwd_kernel)


def _ceiling_supports(problem: Setting) -> str | None:
    return None if problem.params["commit"] else "verification writes no state"


CULA = Provider("cula", "ours", _cula_call, decode.moved, supports=lambda problem: _cula_missing())
# FLA reads a bf16 state but always writes the new one in fp32.
FLA = Provider(
    "fla",
    "peer",
    _fla_call,
    lambda problem: decode.moved(problem, written_state="fp32"),
    supports=_fla_supports,
    prepare=_fla_prepare,
)
CEILING = in_place.ceiling(lambda x: x.state, decode.state_bytes, _ceiling_supports)
PROVIDERS = (CULA, FLA, CEILING)

_RESULTS = {"cula": _cula_result, "fla": lambda problem, x: _fla_call(problem, x)()}


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Compares a provider with the fp64 recurrence on fresh inputs; the ceiling is compared with its own definition."""
    if provider.role == "ceiling":
        x = decode.make_inputs(problem, device, seed=SEED)
        return in_place.check(provider, lambda y: y.state, problem, x)
    return decode.check_decode(_RESULTS[provider.name], problem, device)
