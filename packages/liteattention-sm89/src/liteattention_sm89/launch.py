"""Finds the kernels of a call, and launches them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cula_core.compiled.artifacts import Unit
from cula_core.compiled.libraries import kernel
from cula_core.constants import LOG2_E
from cula_core.dtypes import dtype_name
from cula_core.once import once

from . import masks
from .config import BackwardConfig, ForwardConfig, Problem, int8_width
from .plan import plan_backward, plan_forward, plan_quantize


def forward_unit(config: ForwardConfig, arch: str) -> Unit:
    """Returns the kernel of attention for an architecture ("sm_89", "sm_90a", ...), to be compiled."""
    return _unit(arch, "forward", config)


def means_unit(problem: Problem, arch: str) -> Unit:
    """Returns the kernel of the keys' means, by which 8-bit keys are centred."""
    return _unit(arch, "means", problem)


def quantize_unit(problem: Problem, of_keys: bool, arch: str) -> Unit:
    """Returns the kernel that rounds queries, or keys, to 8-bit integers."""

    return _unit(arch, "quantize", problem, of_keys)


def backward_unit(config: BackwardConfig, arch: str) -> Unit:
    """Returns the kernel of the gradients that the config's role names."""
    return _unit(arch, "backward", config)


def sums_unit(config: BackwardConfig, with_dlse: bool, arch: str) -> Unit:
    """Returns the kernel that comes before those of the gradients. with_dlse: lse has a gradient too."""

    return _unit(arch, "sums", config, with_dlse)


def gather_unit(config: BackwardConfig, arch: str) -> Unit:
    """Returns the kernel that brings the accumulated gradients of queries into their layout."""
    return _unit(arch, "gather", config)


def _unit(arch: str, *facts: object) -> Unit:
    """Returns what can be compiled; the facts tell kernels of one config apart."""
    return Unit(f"{__package__}.build", facts, arch)


@once
def compile_forward(config: ForwardConfig, arch: str) -> Callable[..., None]:
    """Returns a callable for one config on one architecture, reused for every size and stride."""
    return kernel(forward_unit(config, arch))


@once
def compile_means(problem: Problem, arch: str) -> Callable[..., None]:
    """Returns what launches the kernel of `means_unit`."""
    return kernel(means_unit(problem, arch))


@once
def compile_quantize(problem: Problem, of_keys: bool, arch: str) -> Callable[..., None]:
    """Returns what launches the kernel of `quantize_unit`."""
    return kernel(quantize_unit(problem, of_keys, arch))


@once
def compile_backward(config: BackwardConfig, arch: str) -> Callable[..., None]:
    """Returns what launches the kernel of `backward_unit`."""
    return kernel(backward_unit(config, arch))


@once
def compile_sums(config: BackwardConfig, with_dlse: bool, arch: str) -> Callable[..., None]:
    """Returns what launches the kernel of `sums_unit`."""
    return kernel(sums_unit(config, with_dlse, arch))


@once
def compile_gather(config: BackwardConfig, arch: str) -> Callable[..., None]:
    """Returns what launches the kernel of `gather_unit`."""
    return kernel(gather_unit(config, arch))


@once
def _arch(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise RuntimeError(
            f"liteattention-sm89 needs compute capability 8.0 or newer; {device} has {major}.{minor}"
        )
    return f"sm_{major}{minor}" + "a" * (major >= 9)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    read: Tensor | None,
    must_do: Tensor | None,
    write: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    *,
    threshold: float,
    direction: int | Tensor,
    scale: float,
    causal: bool,
    block_n: int,
    int8: bool = False,
    max_seqlen_k: int | None = None,
    kernel_for: Callable[[ForwardConfig, str], Callable[..., None]] = compile_forward,
    means_for: Callable[[Problem, str], Callable[..., None]] = compile_means,
    quantize_for: Callable[[Problem, bool, str], Callable[..., None]] = compile_quantize,
    arch: str | None = None,
) -> None:
    """Launches one call on torch's current stream; arguments are those of `ops.lite_attention`, checked, scale > 0.

    lse [B, Hq, Sq]. write may be read: a query tile's row is read before it is written, and by nobody else. int8 rounds
    q and k first, into a workspace of their number of elements in bytes, and needs max_seqlen_k. The kernels and arch
    are for tests without a GPU.
    """
    on_device = isinstance(direction, Tensor)
    index_dtype = "int32" if cu_seqlens_q is None else dtype_name(cu_seqlens_q.dtype)
    problem = Problem(
        dtype_name(q.dtype), q.shape[3], causal,
        skip=read is not None,
        block_n=block_n,
        must_do=must_do is not None,
        packed=cu_seqlens_q is not None,
        index_dtype=index_dtype,
        on_device=on_device,
        int8=int8,
    )  # fmt: skip
    scale_log2 = scale * LOG2_E
    arch = arch or _arch(q.device)
    plan = plan_forward(problem, arch, q.shape[0], _packed(cu_seqlens_q), max_seqlen_q)
    scales: Sequence[Tensor | None] = (None,) * 3
    margin = threshold / scale_log2  # in the units of products q k^T
    if int8:
        margin = threshold  # there are none, because every tile has its own scale
        assert max_seqlen_k is not None
        q, k, *scales = _quantized(
            q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, problem, arch, means_for, quantize_for
        )  # fmt: skip
    kernel_for(plan.config, arch)(
        q, k, v, out, lse, read, must_do, write, cu_seqlens_q, cu_seqlens_k, direction if on_device else None,
        *scales, scale_log2, margin, 1 if on_device else direction, plan.query_tiles, plan.sequences,
    )  # fmt: skip


def _packed(starts: Tensor | None) -> int | None:
    """The number of packed sequences, None for a dense batch."""
    return None if starts is None else starts.shape[0] - 1


def _quantized(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int,
    max_seqlen_k: int, scale: float, problem: Problem, arch: str, means_for: Callable[..., Callable[..., None]],
    quantize_for: Callable[..., Callable[..., None]],
) -> tuple[Tensor, ...]:  # fmt: skip
    """q and k as integers, two to a 16-bit element, their scales, and what lse misses."""
    sequences = k.shape[0] if cu_seqlens_k is None else cu_seqlens_k.shape[0] - 1
    shape = (sequences, *k.shape[2:])
    if k.numel() > 0:
        means = k.new_empty(shape, dtype=torch.float32)
        means_for(problem.plain, arch)(k, means, cu_seqlens_k, sequences)
    else:
        means = k.new_zeros(shape, dtype=torch.float32)
    shifts = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    found, scales = [], []
    for x, starts, longest, of_keys in (
        (q, cu_seqlens_q, max_seqlen_q, False),
        (k, cu_seqlens_k, max_seqlen_k, True),
    ):
        plan = plan_quantize(of_keys, x.shape[0], x.shape[1], _packed(starts), longest)
        found.append(x.new_empty(*x.shape[:3], int8_width(x.shape[3]) // 2))
        shape = x.shape[0], x.shape[2], plan.groups
        scales.append(torch.empty(shape, dtype=torch.float32, device=x.device))
        if plan.tiles > 0:
            quantize_for(problem.plain, of_keys, arch)(
                x, means, found[-1], scales[-1], None if of_keys else shifts, starts, scale,
                plan.tiles, plan.sequences,
            )  # fmt: skip
    return *found, *scales, shifts


class BackwardKernels:
    """The kernels of a backward pass; tests without a GPU pass others."""

    backward = staticmethod(compile_backward)
    sums = staticmethod(compile_sums)
    gather = staticmethod(compile_gather)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    scale: float,
    causal: bool,
    block_n: int,
    deterministic: bool,
    kernels: type[BackwardKernels] = BackwardKernels,
    arch: str | None = None,
) -> None:
    """Writes dq, dk and dv on torch's current stream; scale > 0, lse and dlse [B, Hq, Sq], mask [B, Hq, Mt, W].

    Workspace: 8 bytes per row and head, and unless deterministic 4 bytes per element of dq.
    """
    problem = Problem(
        dtype_name(q.dtype), q.shape[3], causal,
        skip=mask is not None,
        block_n=block_n,
        packed=cu_seqlens_q is not None,
        index_dtype="int32" if cu_seqlens_q is None else dtype_name(cu_seqlens_q.dtype),
    )  # fmt: skip
    arch = arch or _arch(q.device)
    plan = plan_backward(
        problem, arch, q.shape[0], q.shape[1], _packed(cu_seqlens_q), max_seqlen_q, max_seqlen_k, deterministic,
    )  # fmt: skip
    main, ends, sequences = plan.main, plan.ends, plan.sequences
    shape = (q.shape[0], q.shape[2], plan.slots)
    sums = torch.empty(*shape, 2 * main.rows, dtype=torch.float32, device=q.device)
    acc = None
    if not deterministic:
        acc = torch.empty(*shape, main.rows * main.width, dtype=torch.float32, device=q.device)
    kernels.sums(ends, dlse is not None, arch)(
        out, dout, lse, dlse, sums, acc, cu_seqlens_q, plan.row_tiles, sequences
    )
    starts = cu_seqlens_q, cu_seqlens_k
    scales = scale, scale * LOG2_E
    across = None if mask is None else masks.transpose(mask, *plan.mask_tiles)
    kernels.backward(main, arch)(
        q, k, v, dout, sums, across, acc, dk, dv, *starts, *scales, plan.key_tiles, sequences
    )  # fmt: skip
    if plan.queries is None:
        kernels.gather(ends, arch)(acc, dq, cu_seqlens_q, scale, plan.query_tiles, sequences)
        return
    kernels.backward(plan.queries, arch)(
        q, k, v, dout, sums, mask, dq, None, None, *starts, *scales, plan.query_tiles, sequences
    )
