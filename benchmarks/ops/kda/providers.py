"""The implementations of KDA prefill that are compared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.registry import Provider, Setting
from benchmarks.ops import copying
from benchmarks.ops.installed import missing
from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda.internals import PACKAGES, package
from benchmarks.ops.kda.problem import Inputs, Result
from benchmarks.ops.sequences import batch_of, has, is_packed
from benchmarks.ops.tuning import tune_anew

MANY_HEADS = 64
# Tokens of the shortest sequence that can be cut in two.
CUTTABLE = 2048
FLA_LIMIT = 1e-2

_MISSING = {name: missing(name) for name in PACKAGES.values()}
_fla_missing = missing("fla.ops.kda")


def gate_arguments(problem: Setting, x: Inputs) -> dict[str, Any]:
    """The gates, beta and their flags, under the names that every implementation uses."""
    bounded = kda.is_bounded(problem)
    raw = {"use_beta_sigmoid_in_kernel": True} if x.raw_beta else {}
    return {
        **raw,
        "g": x.gate,
        "beta": x.beta,
        "A_log": x.A_log,
        "dt_bias": x.dt_bias,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "safe_gate": bounded,
        "lower_bound": kda.LOWER_BOUND if bounded else None,
    }


def _cula_supports(problem: Setting) -> str | None:
    name = package()
    if name is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in PACKAGES)
        return f"our kernels need a compute capability of {known}"
    return _MISSING[name]()


def _choice_supports(problem: Setting) -> str | None:
    """Timing with and without cutting is limited to problems where cutting can pay."""
    if kda.longest(problem) < CUTTABLE:
        return "no sequence is long enough to be cut"
    if problem.params["feature"] or (problem.params["H"] >= MANY_HEADS and not is_packed(problem)):
        return "only packed sequences and few heads are timed with either choice"
    return _cula_supports(problem)


def workspace(problem: Setting, device: Any) -> Tensor:
    """The workspace of a call; all calls share one, as those of a model do."""
    p = problem.params
    size = import_module(package()).kda_workspace_bytes(
        batch_of(problem), p["T"], p["H"], p.get("N")
    )
    return _aligned(size, str(device))


@functools.lru_cache(maxsize=1)
def _aligned(size: int, device: str) -> Tensor:
    memory = torch.empty(size + 128, dtype=torch.uint8, device=device)
    return memory[-memory.data_ptr() % 128 :][:size]


def _cula_call(
    problem: Setting, x: Inputs, out: Tensor | None = None, cp: bool | str = "auto"
) -> Callable[[], Result]:
    chunk_kda = import_module(package()).chunk_kda
    options = {**gate_arguments(problem, x), "use_intracard_cp": cp, "out": out}
    options["workspace"] = workspace(problem, x.q.device)
    if x.offsets is not None:
        options |= {"cu_seqlens": x.offsets.int32, "cu_seqlens_cpu": x.offsets.host}
    if x.indices is not None:
        options |= {"state_pool": x.state, "initial_state_indices": x.indices}
    else:
        options |= {"initial_state": x.state, "output_final_state": True}
    return lambda: chunk_kda(x.q, x.k, x.v, **options)


def _cula_result(problem: Setting, x: Inputs, cp: bool | str = "auto") -> Result:
    out = torch.full_like(x.v, float("nan"))
    # Ones in every bit are NaN in every format.
    workspace(problem, x.q.device).fill_(255)
    _, state = _cula_call(problem, x, out, cp)()
    return out, state if x.indices is None else x.state[x.indices.long()]


def _fla_supports(problem: Setting) -> str | None:
    return "takes no pool indices" if has(problem, "pool") else _fla_missing()


def _fla_call(problem: Setting, x: Inputs) -> Callable[[], Result]:
    from fla.ops.kda import chunk_kda

    options = gate_arguments(problem, x)
    if x.offsets is not None:
        options |= {"cu_seqlens": x.offsets.int64, "cu_seqlens_cpu": x.offsets.host}
    return lambda: chunk_kda(
        x.q, x.k, x.v, initial_state=x.state, output_final_state=True, **options
    )


def _fla_prepare(problem: Setting) -> None:
    from fla.modules.norm import l2norm
    from fla.ops.common import chunk_delta_h
    from fla.ops.gla import chunk as gla
    from fla.ops.kda import chunk_intra, chunk_intra_token_parallel, gate, wy_fast

    kernels = (
        l2norm.l2norm_fwd_kernel,
        gate.kda_gate_chunk_cumsum_vector_kernel,
        chunk_intra.chunk_kda_fwd_kernel_intra_sub_chunk,
        chunk_intra.chunk_kda_fwd_kernel_inter_solve_fused,
        chunk_intra_token_parallel.chunk_kda_fwd_kernel_intra_token_parallel,
        wy_fast.recompute_w_u_fwd_kda_kernel,
        chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64,
        gla.chunk_gla_fwd_kernel_o,
    )
    for kernel in kernels:
        tune_anew(kernel)


CULA = Provider("cula", "ours", _cula_call, kda.moved, supports=_cula_supports)
SERIAL, CUT = (
    Provider(
        name,
        "variant",
        functools.partial(_cula_call, cp=cp),
        kda.moved,
        supports=_choice_supports,
    )
    for name, cp in (("cula_serial", False), ("cula_cp", True))
)
FLA = Provider("fla", "peer", _fla_call, kda.moved, supports=_fla_supports, prepare=_fla_prepare)
CEILING = copying.ceiling(kda.moved)
PROVIDERS = (CULA, SERIAL, CUT, FLA, CEILING)


def bind_inside(
    context: Callable[[], AbstractContextManager[Any]], problem: Setting, x: Inputs
) -> Callable[[], Result]:
    """Binds our call, and enters a new context around every one of its runs."""
    call = CULA.bind(problem, x)

    def run() -> Result:
        with context():
            return call()

    return run


_RESULTS = {
    "cula": _cula_result,
    "cula_serial": functools.partial(_cula_result, cp=False),
    "cula_cp": functools.partial(_cula_result, cp=True),
    "fla": lambda problem, x: _fla_call(problem, x)(),
}


def check(
    provider: Provider,
    problem: Setting,
    device: Any,
    raw_beta: bool = False,
    first_limit: float | None = None,
) -> dict[str, float]:
    """Compares a provider with the fp64 oracle on fresh inputs; the ceiling is compared with its own definition."""
    if provider.role == "ceiling":
        return copying.check(provider, problem, device)
    limit = FLA_LIMIT if provider.role == "peer" else kda.LIMIT
    return kda.check_kda(_RESULTS[provider.name], problem, device, limit, raw_beta, first_limit)
