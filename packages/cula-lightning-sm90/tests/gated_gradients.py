"""Cases of gradients of the gated delta rule: those of KDA whose channels decay alike, and how near they must come."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cula_lightning_sm90 import chunk_gated_delta_rule
from cula_testing.comparing import relative_rmse
from cula_testing.kda.gradient_cases import ALIKE_BARS, BARS, FEW, SUM_BARS, GradientCase
from cula_testing.kda.gradient_cases import gradient_case as case_of_kda

# What has a gradient, and its name.
NAMES = {"q": "dq", "k": "dk", "v": "dv", "g": "dg", "beta": "dbeta", "initial_state": "dh0"}


def gradient_case(kind: str, size: tuple[int, ...], device: torch.device, **more) -> GradientCase:
    """Returns a case of KDA whose channels decay alike."""
    case = case_of_kda(kind, size, gate="log", device=device, **more)
    g = case.given["g"]
    assert g is not None
    return replace(case, given=case.given | {"g": g[..., :1].expand_as(g)})


def differentiate(case: GradientCase, **options) -> dict[str, Tensor]:
    """Options are those of the function beside the flags of the case."""
    given = {name: x for name, x in case.given.items() if name not in ("A_log", "dt_bias")}
    given["g"] = given["g"][..., 0]  # type: ignore[index]
    leaves = {
        name: x.detach().clone().requires_grad_()
        for name in NAMES
        if (x := given[name]) is not None
    }
    flags = {name: x for name, x in case.flags.items() if name not in ("safe_gate", "lower_bound")}
    o, final = chunk_gated_delta_rule(
        **given | leaves, **flags, **options, output_final_state=case.dht is not None
    )
    pairs = [(o, case.do), *([] if case.dht is None else [(final, case.dht)])]
    results, grads = zip(*((y, d.to(y.dtype)) for y, d in pairs))
    return dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), grads)))


def check(found: dict[str, Tensor], case: GradientCase) -> None:
    """Holds the relative RMSE of the worst head of every gradient to its bar, or to what rounding alone loses."""
    __tracebackhide__ = True
    bars = BARS[case.operand]
    if case.kind in ("correlated_keys", "equal_keys"):
        bars = dict.fromkeys(bars, ALIKE_BARS[case.operand])
    bars, beyond = bars | SUM_BARS[case.operand], []
    for name, actual in found.items():
        exact = getattr(case.expected, NAMES[name])
        exact = exact.sum(-1) if name == "g" else exact
        assert actual.shape == exact.shape, name
        heads = 1 if name == "initial_state" else 2
        for one, other in zip(actual.unbind(heads), exact.unbind(heads)):
            limit = bars[NAMES[name]] * (1 + FEW / one.numel())
            limit = max(limit, 1.2 * relative_rmse(other.to(one.dtype), other))
            error = relative_rmse(one, other)
            if not error <= limit:
                beyond.append(f"{name} {error:.2e}, limit {limit:.2e}")
    assert not beyond, f"{case.kind}: relative RMSE of a head: {'; '.join(beyond)}"
