"""What an implementation is, and those that need no kernel package: flash-linear-attention and the reference."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

FLA_PRIORITY = 1000
REFERENCE_PRIORITY = 2000
# Functions whose kernels, if they have no backward, are completed by FLA's, with the function that is the forward then.
_BACKWARD_OF_FLA = {
    "lightning_attn_fwd": "chunk_simple_gla",
    "lightning_attn_fwd_varlen": "chunk_simple_gla",
    "chunk_simple_gla": "chunk_simple_gla",
    "chunk_kda": "chunk_kda",
}


@dataclass(frozen=True)
class Implementation:
    """One way to run the functions of an op.

    archs is None when any device will do. `supports(**problem)` returns why a problem is refused, or None.
    `load(function)` returns a callable with the public signature without `impl`.
    """

    name: str
    ops: tuple[str, ...]
    archs: tuple[str, ...] | None
    priority: int
    supports: Callable[..., str | None]
    load: Callable[[str], Callable[..., Any]]
    kernel: bool = True


def fla(ops: Iterable[str]) -> Implementation:
    """flash-linear-attention, through the adapter in `cula.integrations`, which is imported when it is asked."""

    def supports(**problem: Any) -> str | None:
        return _adapter().supports(**problem)

    def load(function: str) -> Callable[..., Any]:
        return _adapter().load(function)

    served = tuple(op for op in ops if op != "lite.attention")
    return Implementation("fla", served, None, FLA_PRIORITY, supports, load, kernel=False)


def reference(ops: Iterable[str]) -> Implementation:
    """Plain torch, which serves everything but what promises to split a sequence."""

    def supports(*, use_intracard_cp: bool | str = "auto", **_: Any) -> str | None:
        if use_intracard_cp is True:
            return "does not split sequences (use_intracard_cp=True)"
        return None

    def load(function: str) -> Callable[..., Any]:
        target: Callable[..., Any] = importlib.import_module("cula._opaque").load(function)
        return target

    return Implementation(
        "reference", tuple(ops), None, REFERENCE_PRIORITY, supports, load, kernel=False
    )


def takes_the_backward_of_fla(found: Implementation, function: str) -> bool:
    """Whether FLA's backward may follow the forward of an implementation that has none."""
    return found.kernel and function in _BACKWARD_OF_FLA


def why_no_backward(found: Implementation, reason: str, problem: dict[str, Any]) -> str | None:
    """Why a kernel that refused a problem with gradients cannot serve with FLA's backward either, or None.

    reason: the kernel's refusal. problem: what `supports` was asked, `function` among it.
    """
    without = found.supports(**{**problem, "requires_grad": False})
    if without is not None:
        return without
    backward: str | None = _backward().supports_backward(**problem)
    if backward is not None:
        return f"{reason}; fla: {backward}"
    load_with_backward(found, problem["function"])
    return None


@functools.cache
def load(found: Implementation, function: str) -> Callable[..., Any]:
    """What serves a public function."""
    return found.load(function)


@functools.cache
def load_with_backward(found: Implementation, function: str) -> Callable[..., Any]:
    """What serves a public function with FLA's backward behind the forward of `found`."""
    forward = load(found, _BACKWARD_OF_FLA[function])
    target: Callable[..., Any] = _backward().with_backward(function, forward)
    return target


def forget() -> None:
    """Loads everything again at the next call."""
    load.cache_clear()
    load_with_backward.cache_clear()


def _adapter() -> ModuleType:
    return importlib.import_module("cula.integrations.fla")


def _backward() -> ModuleType:
    return importlib.import_module("cula.integrations.fla_backward")
