"""What a dispatcher reads about this package; importing it imports neither kernels nor the DSL."""

from __future__ import annotations

from typing import Any

from cula_core.delta_rule import spec
from cula_core.spec import loader

from .arch import TARGET

NAME, ARCHS = TARGET.distribution, TARGET.archs
OP, PRIORITY = spec.OP, spec.PRIORITY
load = loader(TARGET.package)


def supports(**problem: Any) -> str | None:
    """Returns why a problem is refused, or None. Facts that are not given do not count against it."""
    reason = spec.supports(TARGET, **problem)
    if reason is None and problem.get("requires_grad") and problem.get("safe_gate") is False:
        return "no backward without safe_gate"
    return reason
