"""KDA prefill of long sequences of few heads beside FLA with its own context parallelism inside the card.

FLA cuts sequences where FLA_INTRACARD_CP is set, in inference mode, and only if it is given `cu_seqlens`. It copies
lists of indices to the device in every call, so that a call cannot be captured in a graph: all are timed as eager
calls.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.harness.registry import Provider, Setting
from benchmarks.ops import copying
from benchmarks.ops.kda import kda_prefill
from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda import providers as kda_providers
from benchmarks.ops.kda.problem import Inputs, Result, setting
from benchmarks.ops.kda.providers import CEILING, CULA, FLA, FLA_LIMIT
from benchmarks.ops.sequences import Offsets
from benchmarks.ops.tuning import TUNING_MS, tune_anew

SWITCH = "FLA_INTRACARD_CP"
# Calls of FLA's cutting, which a check compares with the number before: a call that FLA did not cut is no such call.
_cuts = 0


@contextmanager
def cutting() -> Iterator[None]:
    """Switches FLA's cutting on."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


def packed(x: Inputs) -> Inputs:
    """The same inputs with offsets, which a dense problem of one sequence lacks."""
    if x.offsets is not None:
        return x
    ends = torch.tensor([0, x.q.shape[1]])
    on_device = ends.to(x.q.device)
    return dataclasses.replace(x, offsets=Offsets(on_device.int(), on_device, ends))


def _call(problem: Setting, x: Inputs) -> Callable[[], Result]:
    call = FLA.bind(problem, packed(x))

    def run() -> Result:
        with cutting():
            return call()

    return run


def _count_cuts() -> None:
    """Counts the calls of the kernel that only a cut sequence needs."""
    from fla.ops.common import intracard_cp

    merge = intracard_cp.intracard_merge
    if hasattr(merge, "counts"):
        return

    def counted(*args: Any, **options: Any) -> Any:
        global _cuts
        _cuts += 1
        return merge(*args, **options)

    counted.counts = True  # type: ignore[attr-defined]
    intracard_cp.intracard_merge = counted


def _prepare(problem: Setting) -> None:
    from fla.ops.cp import chunk_fwd, chunk_merge

    FLA.prepare(problem)
    for kernel in (chunk_fwd.chunk_cp_fwd_kernel_h, chunk_merge.chunk_cp_fwd_bwd_kernel_merge):
        tune_anew(kernel)
    _count_cuts()


FLA_CUT = Provider("fla_cp", "peer", _call, kda.moved, supports=FLA.supports, prepare=_prepare)


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Compares with the fp64 oracle, and says for FLA whether it cut anything."""
    if provider is not FLA_CUT:
        return kda_providers.check(provider, problem, device)
    before = _cuts
    with torch.inference_mode():
        errors = kda.check_kda(lambda p, x: _call(p, x)(), problem, device, FLA_LIMIT)
    return errors | {"cut": float(_cuts > before)}


def settings(quick: bool) -> list[Setting]:
    return [setting(16384, heads=8)] if quick else kda_prefill.few_heads()


OP = dataclasses.replace(
    kda_prefill.OP,
    name="kda_prefill_cut",
    title="KDA prefill of long sequences, K=V=128, with FLA's cutting",
    settings=settings,
    providers=(CULA, FLA, FLA_CUT, CEILING),
    check=check,
    notes=(
        *kda_prefill.NOTES[:3],
        "cula decides whether to cut sequences (use_intracard_cp='auto'). fla never cuts. fla_cp is FLA with "
        f"{SWITCH}=1, in inference mode and with cu_seqlens, which its cutting asks for; `cut` in its errors is 1 "
        "where it did cut.",
        "Eager calls, because FLA copies indices to the device in every call that it cuts, which no graph records.",
        f"FLA's kernels are tuned anew for every setting: all candidates, {TUNING_MS['rep']} ms each.",
        f"Relative RMSE of the worst checked head: cula within {kda.LIMIT:.0e}, fla within {FLA_LIMIT:.0e}.",
        copying.NOTE,
    ),
)
