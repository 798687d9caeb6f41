"""KDA prefill beside FlashKDA, the C++ kernels of Moonshot AI, on inputs that both take.

FlashKDA takes bf16 and logits of beta, so every implementation here does. It never cuts a sequence.

Its limit is one for the first head. There the roundings of its operands to bf16, up to 2^-9 each, and of its state
behind every 16 tokens add up to less than 1e-2. It takes the sigmoids of beta and of gates from tanh.approx, whose
relative error may be 2^-11, which is 2.4e-4 in a sigmoid. In the first head that adds another 2e-2 at most. In the last
one it is a tenth of beta, and more than many decays, so that a state may grow or fade instead of staying. Therefore the
errors of the other heads are written down and have no limit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness.registry import Provider, Setting
from benchmarks.ops import copying
from benchmarks.ops.installed import missing
from benchmarks.ops.kda import kda_prefill
from benchmarks.ops.kda import problem as kda
from benchmarks.ops.kda import providers as kda_providers
from benchmarks.ops.kda.problem import Inputs, Result, setting
from benchmarks.ops.kda.providers import CEILING, CULA
from benchmarks.ops.sequences import main_sizes, sequences_of

FLASH_KDA_LIMIT = 3e-2

_flash_kda_missing = missing("flash_kda")


def _supports(problem: Setting) -> str | None:
    return _flash_kda_missing()


def _call(problem: Setting, x: Inputs, fill: float | None = None) -> Callable[[], Result]:
    """A call that writes to new memory, first filled with `fill` if that is given; its states are [N,HV,V,K]."""
    import flash_kda

    options = {"A_log": x.A_log, "dt_bias": x.dt_bias.view(-1, kda.DIM)}
    options |= {"lower_bound": kda.LOWER_BOUND, "scale": kda.DIM**-0.5}
    if x.offsets is not None:
        options["cu_seqlens"] = x.offsets.int64
    shape = (sequences_of(problem), problem.params["H"], kda.DIM, kda.DIM)

    def run() -> Result:
        out = torch.empty_like(x.v)
        final = torch.empty(shape, dtype=torch.float32, device=x.v.device)
        if fill is not None:
            out.fill_(fill)
            final.fill_(fill)
        flash_kda.fwd(x.q, x.k, x.v, x.gate, x.beta, out=out, final_state=final, **options)
        return out, final

    return run


def _result(problem: Setting, x: Inputs) -> Result:
    out, final = _call(problem, x, fill=float("nan"))()
    return out, final.mT


FLASH_KDA = Provider("flash_kda", "peer", _call, kda.moved, supports=_supports)


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Compares with the fp64 oracle; FlashKDA has a limit in the first head only."""
    if provider.name == FLASH_KDA.name:
        return kda.check_kda(_result, problem, device, math.inf, True, FLASH_KDA_LIMIT)
    return kda_providers.check(provider, problem, device, True, kda.LIMIT)


def settings(quick: bool) -> list[Setting]:
    """The settings of `kda_prefill` without features, which FlashKDA lacks but for initial states."""
    if quick:
        return [setting(4096), setting(8192, sequences=10, lengths="random")]
    return [setting(**size) for size in main_sizes()] + kda_prefill.few_heads()


OP = dataclasses.replace(
    kda_prefill.OP,
    name="kda_prefill_flashkda",
    title="KDA prefill, K=V=128, beside FlashKDA",
    settings=settings,
    providers=(CULA, FLASH_KDA, CEILING),
    make_inputs=functools.partial(kda.make_inputs, raw_beta=True),
    check=check,
    notes=(
        "Gates, norms of q and k, and the sigmoid of beta are computed inside, with a safe gate of lower bound -5. "
        "Every provider returns final states in fp32.",
        *kda_prefill.NOTES[1:3],
        "cula decides whether to cut sequences (use_intracard_cp='auto'), has one workspace for all calls, and is "
        "given the lengths of packed sequences on the host too.",
        "flash_kda is FlashKDA's fwd, which transposes beta and allocates a workspace in every call. It never cuts.",
        f"Relative RMSE: cula within {kda.LIMIT:.0e} in the worst checked head. flash_kda, whose states are bf16 and "
        f"whose sigmoids are approximate, within {FLASH_KDA_LIMIT:.0e} in the first head; in the others, where betas "
        "and decays are small, its errors are written down and have no limit.",
        copying.NOTE,
        *kda_prefill.NOTES[-1:],
    ),
)
