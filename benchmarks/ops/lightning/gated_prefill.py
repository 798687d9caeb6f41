"""Prefill of the gated delta rule beside FlashInfer and flash-linear-attention; K=V=128."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness.registry import Op, Provider, Setting
from benchmarks.ops.installed import missing
from benchmarks.ops.lightning import delta, delta_providers
from benchmarks.ops.lightning.delta import Inputs, setting
from benchmarks.ops.lightning.problem import Result
from benchmarks.ops.tuning import TUNING_MS

LIMIT = 3e-3


def _call(problem: Setting, x: Inputs, out: torch.Tensor | None = None) -> Callable[[], Result]:
    from cula_lightning_sm90 import chunk_gated_delta_rule

    y = x.gated
    offsets = None if y.offsets is None else y.offsets.int32
    host = None if y.offsets is None else y.offsets.host
    options = {
        "output_final_state": True, "cu_seqlens": offsets, "cu_seqlens_cpu": host, "out": out
    }  # fmt: skip
    return lambda: chunk_gated_delta_rule(y.q, y.k, y.v, y.gate, x.beta, **options)


def _result(problem: Setting, x: Inputs) -> Result:
    return _call(problem, x, torch.full_like(x.gated.v, float("nan")))()


CULA = Provider(
    "cula",
    "ours",
    _call,
    lambda problem: delta.moved(problem, 2),
    supports=lambda problem: missing("cula_lightning_sm90")(),
)


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Compares with the fp64 oracle."""
    if provider is not CULA:
        return delta_providers.check(provider, problem, device)

    def want(problem: Setting, x: Inputs, heads: list[int]) -> Result:
        return delta.delta_oracle(problem, x.gated, x.beta, heads)

    limits = {"output": LIMIT, "state": LIMIT}
    return delta.check_against(want, _result, problem, device, limits)


def settings(quick: bool) -> list[Setting]:
    """Many heads and few, of one length and packed; q and k have fewer heads where models have it so."""
    main = [setting(16384), setting(8192, heads=32, heads_q=16), setting(8192, heads=16)]
    if quick:
        return main
    dense = [setting(t) for t in (1024, 4096)] + [setting(16384, batch=2)]
    few = [setting(65536, heads=8), setting(65536, heads=8, slow=True)]
    grouped = [setting(t, heads=32, heads_q=16) for t in (2048, 16384, 32768)]
    packed = [
        setting(32768, sequences=4, heads_q=16),
        setting(8192, sequences=8, heads_q=16),
        setting(16384, sequences=20, heads=32, lengths="random"),
    ]
    return main + dense + few + grouped + packed


OP = Op(
    name="gated_prefill",
    title="Prefill of the gated delta rule, K=V=128",
    settings=settings,
    providers=(CULA, delta_providers.FLASHINFER_DELTA, delta_providers.FLA_DELTA),
    make_inputs=delta.make_inputs,
    set_bytes=delta.read,
    check=check,
    notes=(
        "Keys are normalised before the call, for every provider; gates are log decays per token and head for cula and "
        "fla, and their exponentials, computed before the call, for flashinfer. Every provider returns final states, "
        "flashinfer's as [V, K].",
        "flashinfer: dense problems are given to it as B packed sequences. Outputs and states are written to memory "
        "made before the call. use_cp='auto', its default; `cut` in its errors is 1 where it cut sequences.",
        "Log decays are -0.05 on average. cula cuts the sequences of few heads, and has less to do where 40 octaves of "
        "decay lie in a segment: after 560 tokens here, never with the decays of -slow, a hundredth of these.",
        f"fla is tuned anew for every setting: all its candidates, {TUNING_MS['rep']} ms each.",
        f"Checked before it is timed: relative RMSE of the worst checked head against an fp64 oracle, cula within "
        f"{LIMIT:.0e} for the output and the state, the others within {delta_providers.LIMIT:.0e}.",
        "cold: buffer sets rotate over more than 3x the L2; a set larger than that is one.",
    ),
)
