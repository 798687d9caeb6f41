"""The implementations of skip-list attention, and of dense attention, that are compared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.harness.registry import Provider, Setting
from benchmarks.ops.installed import missing
from benchmarks.ops.lite import problem as lite
from benchmarks.ops.lite.internals import forced
from benchmarks.ops.lite.problem import KEEP_ALL, Inputs, Result

LiteResult = tuple[Tensor, Tensor, Tensor | None]
Bound = TypeVar("Bound", bound=Inputs)
Call = Callable[[], Any]

_lite_missing = missing("liteattention_sm89")
_hopper_missing = missing("liteattention_sm90")


def lite_supports(problem: Setting) -> str | None:
    """Why our kernels cannot serve a problem here, or None."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "liteattention-sm89 needs compute capability 8.0 or newer"
    return _lite_missing()


def sm89_supports(problem: Setting) -> str | None:
    """Why the kernels of liteattention-sm89 are not timed beside those that are chosen, or None."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        return lite_supports(problem) or "is lite itself"
    return lite_supports(problem) or ("is lite itself" if _hopper_missing() else None)


def with_sm89(bind: Callable[[Setting, Bound], Call]) -> Callable[[Setting, Bound], Call]:
    """`bind`, itself and in its calls, with the kernels of liteattention-sm89, as LITEATTENTION_KERNEL=sm89 asks."""

    def bound(problem: Setting, x: Bound) -> Call:
        with forced("sm89"):
            call = bind(problem, x)

        def run() -> Any:
            with forced("sm89"):
                return call()

        return run

    return bound


def _lite_call(
    problem: Setting,
    x: Inputs,
    out: Tensor | None = None,
    threshold: float | None = KEEP_ALL,
    direction: int = 1,
    int8: bool = False,
) -> Callable[[], LiteResult]:
    from liteattention_sm89 import lite_attention

    if lite.is_dense(problem):
        return _lite_dense_call(problem, x, out, int8)
    options: dict[str, Any] = {
        "threshold": threshold,
        "direction": direction,
        "causal": problem.params["causal"],
        "block_m": lite.BLOCK_M,
        "block_n": lite.BLOCK_N,
        "use_int8": int8,
        "out": out,
    }
    return lambda: lite_attention(x.q, x.k, x.v, x.mask, **options)


def _lite_dense_call(
    problem: Setting, x: Inputs, out: Tensor | None = None, int8: bool = False
) -> Callable[[], LiteResult]:
    from liteattention_sm89 import lite_attention

    options: dict[str, Any] = {"causal": problem.params["causal"], "use_int8": int8, "out": out}
    return lambda: lite_attention(x.q, x.k, x.v, threshold=None, **options)


def _lite_result(
    problem: Setting, x: Inputs, threshold: float | None, direction: int, int8: bool = False
) -> Result:
    out = torch.full_like(x.q, torch.nan)
    _, lse, write = _lite_call(problem, x, out, threshold, direction, int8)()
    return Result(out, lse, write)


def _lite_dense_result(problem: Setting, x: Inputs, int8: bool = False) -> Result:
    out = torch.full_like(x.q, torch.nan)
    _, lse, _ = _lite_dense_call(problem, x, out, int8)()
    return Result(out, lse)


def dense_supports(problem: Setting) -> str | None:
    """Why our dense kernel is not timed beside our kernel with lists, or None."""
    return "is lite itself" if lite.is_dense(problem) else lite_supports(problem)


def _torch_call(backend: str) -> Callable[[Setting, Inputs], Callable[[], Tensor]]:
    """Binds torch's attention with one backend; [B, H, S, D] views of the same memory."""

    def bind(problem: Setting, x: Inputs) -> Callable[[], Tensor]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen, causal = getattr(SDPBackend, backend), problem.params["causal"]
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))

        def call() -> Tensor:
            with sdpa_kernel(chosen):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return call

    return bind


def torch_supports(problem: Setting) -> str | None:
    """Why torch's attention cannot serve a problem here, or None."""
    if not lite.is_dense(problem):
        return "takes no lists of tiles"
    return None if torch.cuda.is_available() else "needs an NVIDIA GPU"


@functools.cache
def torch_refusal(backend: str, dim: int, training: bool) -> str | None:
    """Why a backend of torch's attention does not run here with a head dimension, or None; it is tried once.

    `training` asks for gradients too.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    try:
        with torch.inference_mode(False), torch.enable_grad():
            shape = (1, 1, lite.BLOCK_M, dim)
            q = torch.ones(shape, dtype=torch.bfloat16, device="cuda", requires_grad=training)
            with sdpa_kernel(getattr(SDPBackend, backend)):
                out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
            if training:
                torch.autograd.grad(out, q, torch.ones_like(out))
            torch.cuda.synchronize()
    except RuntimeError as error:
        return f"does not take this problem: {str(error).partition(chr(10))[0]}"
    return None


def torch_runs(backend: str, training: bool = False) -> Callable[[Setting], str | None]:
    """`torch_supports`, and whether the backend takes the head dimension, with gradients if `training`."""

    def supports(problem: Setting) -> str | None:
        return torch_supports(problem) or torch_refusal(backend, problem.params["D"], training)

    return supports


def _torch_moved(problem: Setting) -> int:
    return 4 * lite.activation_bytes(problem)


# What users get: on Hopper the kernels of liteattention-sm90.
LITE = Provider("lite", "ours", _lite_call, lite.moved, supports=lite_supports)
# The same function with the kernels of liteattention-sm89 there too.
LITE_SM89 = Provider(
    "lite_sm89", "variant", with_sm89(_lite_call), lite.moved, supports=sm89_supports
)
# Scores from 8-bit integers, by kernels of liteattention-sm89 everywhere. Every call rounds q and k: it reads k once
# more, and writes and reads the integers.
LITE_INT8 = Provider(
    "lite_int8",
    "variant",
    functools.partial(_lite_call, int8=True),
    lambda problem: lite.moved(problem) + 3 * lite.activation_bytes(problem),
    supports=lite_supports,
)
# Our own dense kernel on the inputs of a problem with lists, which shows what skipping costs and what it saves.
LITE_DENSE = Provider(
    "lite_dense",
    "peer",
    _lite_dense_call,
    lambda problem: lite.moved(problem) - 2 * lite.mask_bytes(problem),
    supports=dense_supports,
)
TORCH_FLASH = Provider(
    "torch_flash",
    "peer",
    _torch_call("FLASH_ATTENTION"),
    _torch_moved,
    supports=torch_supports,
)
TORCH_CUDNN = Provider(
    "torch_cudnn",
    "peer",
    _torch_call("CUDNN_ATTENTION"),
    _torch_moved,
    supports=torch_supports,
)
PROVIDERS = (LITE, LITE_SM89, LITE_INT8, LITE_DENSE, TORCH_FLASH, TORCH_CUDNN)


def check(provider: Provider, problem: Setting, device: Any) -> dict[str, float]:
    """Compares a provider with the fp64 oracle on fresh inputs."""
    if provider.name == LITE_SM89.name:
        with forced("sm89"):
            return check(LITE, problem, device)
    if provider.name == LITE_INT8.name:
        if lite.is_dense(problem):
            dense = functools.partial(_lite_dense_result, int8=True)
            return lite.check_dense(dense, problem, device, lite.INT8)
        listed = functools.partial(_lite_result, int8=True)
        return lite.check_listed(listed, problem, device, lite.INT8)
    if provider.name == LITE.name and not lite.is_dense(problem):
        return lite.check_listed(_lite_result, problem, device)
    if provider.name in (LITE.name, LITE_DENSE.name):
        return lite.check_dense(_lite_dense_result, problem, device)
    return lite.check_dense(
        lambda problem, x: Result(provider.bind(problem, x)().transpose(1, 2)), problem, device
    )
