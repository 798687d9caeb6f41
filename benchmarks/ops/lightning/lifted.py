"""FLA's backward pass where FLA refuses it: on Hopper with Triton 3.4 up to 3.7.0, which may compile it wrongly.

Its time is what one would have to beat. Its errors are written down and not judged.
"""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable

from torch import Tensor

from benchmarks.harness.registry import Provider, Setting

LIFTED = "fla_lifted"
Step = Callable[[], tuple[Tensor, ...]]


def lifted(run: Step) -> Step:
    """The same call with FLA's refusal lifted while it runs."""
    from fla.ops.common import chunk_o

    def call() -> tuple[Tensor, ...]:
        with unittest.mock.patch.object(chunk_o, "TRITON_ABOVE_3_7_1", True):
            return run()

    return call


def supports(forward: Provider, trained: Provider, problem: Setting) -> str | None:
    """None only where FLA refuses its backward for the sake of Triton, and nothing else is missing.

    forward, trained: FLA as the provider of the forward pass, and of both.
    """
    refused = trained.supports(problem)
    if refused is None:
        return "FLA runs its backward here"
    return forward.supports(problem) or (None if "Triton" in refused else refused)
