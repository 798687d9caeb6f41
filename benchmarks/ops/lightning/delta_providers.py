"""The implementations of Lightning prefill and of the gated delta rule that are compared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness.registry import Provider, Setting
from benchmarks.ops.installed import missing
from benchmarks.ops.lightning import delta
from benchmarks.ops.lightning import problem as lightning
from benchmarks.ops.lightning import providers as lightning_providers
from benchmarks.ops.lightning.delta import Inputs
from benchmarks.ops.lightning.problem import Result
from benchmarks.ops.sequences import sequences_of
from benchmarks.ops.tuning import tune_anew

_flashinfer_missing = missing("flashinfer.gdn_prefill")
_fla_missing = missing("fla.ops.gated_delta_rule")
# The largest relative RMSE of outputs and of states. These kernels round the state, the inverse and what is added to
# the state to 16 bits one after the other, and one error enters the next; a test says what that loses. Most is lost
# where a head has no decay and beta is 1: then nothing fades but through the keys that overwrite it.
LIMIT, UNFADING_LIMIT = 5e-3, 7.5e-3
# Calls in which FlashInfer cut sequences, which a check compares with the number before.
_cuts = 0


def _ours(gate: bool, problem: Setting, x: Inputs) -> Callable[[], Result]:
    return lightning_providers.CULA.bind(problem, x.gated if gate else x.decayed)


def _flashinfer_supports(problem: Setting) -> str | None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        return "FlashInfer's Hopper kernel needs compute capability 9.0"
    return _flashinfer_missing()


def _flashinfer_call(
    gate: bool, beta: bool, problem: Setting, x: Inputs, fill: float | None = None
) -> Callable[[], Result]:
    """The call writes o [B,T,H,V] and states [N,H,V,K] that are made here, with `fill` in every element."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    v = x.gated.v
    out, dim = torch.empty_like(v), v.shape[-1]
    states = torch.empty(sequences_of(problem), v.shape[2], dim, dim, device=v.device)
    if fill is not None:
        out.fill_(fill)
        states.fill_(fill)
    packed = [t.flatten(0, 1) for t in (x.gated.q, x.gated.k, v)]
    options = {
        "g": (x.kept_gate if gate else x.kept_decay).flatten(0, 1),
        "beta": x.beta.flatten(0, 1) if beta else None,
        "output_final_state": True,
        "cu_seqlens": x.ends,
        "output": out.flatten(0, 1),
        "output_state": states,
        "use_cp": "auto",
    }

    def run() -> Result:
        chunk_gated_delta_rule(*packed, **options)
        return out, states

    return run


def _count_cuts(problem: Setting) -> None:
    """Counts the calls that FlashInfer hands on to its kernels for sequences that are cut."""
    from flashinfer import gdn_prefill

    cut = gdn_prefill.cp_delta_rule_dsl_sm90
    if cut is None or hasattr(cut, "counts"):
        return

    def counted(*args: Any, **options: Any) -> Any:
        global _cuts
        _cuts += 1
        return cut(*args, **options)

    counted.counts = True  # type: ignore[attr-defined]
    gdn_prefill.cp_delta_rule_dsl_sm90 = counted


def _fla_call(problem: Setting, x: Inputs) -> Callable[[], Result]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    y, options = x.gated, {}
    if y.offsets is not None:
        options = {"cu_seqlens": y.offsets.int64, "cu_seqlens_cpu": y.offsets.host}
    return lambda: chunk_gated_delta_rule(
        y.q, y.k, y.v, g=y.gate, beta=x.beta, output_final_state=True, **options
    )


def _fla_prepare(problem: Setting) -> None:
    from fla.ops.common import chunk_delta_h, chunk_o
    from fla.ops.gated_delta_rule import chunk_fwd, wy_fast
    from fla.ops.utils import cumsum

    for kernel in (
        cumsum.chunk_local_cumsum_scalar_kernel,
        chunk_fwd.chunk_gated_delta_rule_fwd_kkt_solve_kernel,
        wy_fast.recompute_w_u_fwd_kernel,
        chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64,
        chunk_o.chunk_fwd_kernel_o,
    ):
        tune_anew(kernel)


def _moved(numbers: int) -> Callable[[Setting], int]:
    return lambda problem: delta.moved(problem, numbers)


def _flashinfer(name: str, gate: bool, beta: bool) -> Provider:
    return Provider(
        name,
        "peer",
        functools.partial(_flashinfer_call, gate, beta),
        _moved(2 if beta else 1),
        supports=_flashinfer_supports,
        prepare=_count_cuts,
    )


CULA, DECAY = (
    Provider(
        name,
        role,
        functools.partial(_ours, gate),
        _moved(int(gate)),
        supports=lightning_providers.CULA.supports,
    )
    for name, role, gate in (("cula", "ours", True), ("cula_decay", "variant", False))
)
FLASHINFER_DECAY = _flashinfer("flashinfer_decay", gate=False, beta=False)
FLASHINFER_GATE = _flashinfer("flashinfer_gate", gate=True, beta=False)
FLASHINFER_DELTA = _flashinfer("flashinfer_delta", gate=True, beta=True)
FLA_DELTA = Provider(
    "fla_delta",
    "peer",
    _fla_call,
    _moved(2),
    supports=lambda problem: _fla_missing(),
    prepare=_fla_prepare,
)
PROVIDERS = (CULA, DECAY, FLASHINFER_DECAY, FLASHINFER_GATE, FLASHINFER_DELTA, FLA_DELTA)


def _simple_gla(gate: bool, problem: Setting, x: Inputs, heads: list[int]) -> Result:
    want = lightning.oracle(problem, x.gated if gate else x.decayed, heads)
    return want.output, want.state


def _delta_rule(gate: bool, beta: bool, problem: Setting, x: Inputs, heads: list[int]) -> Result:
    y = x.gated if gate else x.decayed
    return delta.delta_oracle(problem, y, x.beta if beta else None, heads)


def _of_flashinfer(gate: bool, beta: bool, problem: Setting, x: Inputs) -> Result:
    out, states = _flashinfer_call(gate, beta, problem, x, fill=float("nan"))()
    return out, states.mT


# What a provider computes, and how a check runs it.
_ORACLES = {
    "cula": functools.partial(_simple_gla, True),
    "cula_decay": functools.partial(_simple_gla, False),
    "flashinfer_decay": functools.partial(_delta_rule, False, False),
    "flashinfer_gate": functools.partial(_delta_rule, True, False),
    "flashinfer_delta": functools.partial(_delta_rule, True, True),
    "fla_delta": functools.partial(_delta_rule, True, True),
}
_RESULTS: dict[str, Callable[[Setting, Inputs], Result]] = {
    "cula": lambda problem, x: lightning_providers.result(problem, x.gated),
    "cula_decay": lambda problem, x: lightning_providers.result(problem, x.decayed),
    "flashinfer_decay": functools.partial(_of_flashinfer, False, False),
    "flashinfer_gate": functools.partial(_of_flashinfer, True, False),
    "flashinfer_delta": functools.partial(_of_flashinfer, True, True),
    "fla_delta": lambda problem, x: _fla_call(problem, x)(),
}


def limits(provider: Provider) -> dict[str, float]:
    """The largest relative RMSE of the output and of the state that a check accepts."""
    if provider.role != "peer":
        return {"output": lightning.OUTPUT_LIMIT, "state": lightning.STATE_LIMIT}
    limit = UNFADING_LIMIT if provider is FLASHINFER_DECAY else LIMIT
    return {"output": limit, "state": limit}


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Compares with the fp64 oracle of what a provider computes, and says for FlashInfer whether it cut anything."""
    before, name = _cuts, provider.name
    errors = delta.check_against(_ORACLES[name], _RESULTS[name], problem, device, limits(provider))
    if provider.prepare is _count_cuts:
        errors["cut"] = float(_cuts > before)
    return errors
