"""Compiles configs for an architecture and launches calls. The only host file that imports the DSL."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from torch import Tensor

from .config import BLOCK_M, ForwardConfig, Problem, dtype_name, select
from .forward import DTYPES, LiteForward

_INDEX = {"int32": cutlass.Int32, "int64": cutlass.Int64}


def forward_arguments(config: ForwardConfig) -> tuple:
    """What `cute.compile` needs to know of the arguments: only dtypes, the head dimension and flags are fixed."""
    problem = config.problem
    heads, heads_k = cute.sym_int(), cute.sym_int()
    batch, rows, keys = cute.sym_int(), cute.sym_int(), cute.sym_int()

    def activation(length: object, heads: object):
        strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
        shape = (batch, length, heads, problem.head_dim)
        return make_fake_tensor(DTYPES[problem.dtype], shape, stride=strides, assumed_align=16)

    def mask():
        strides = (*(cute.sym_int64() for _ in range(3)), 1)
        shape = (cute.sym_int(), heads, cute.sym_int(), cute.sym_int())
        return make_fake_tensor(cutlass.Int32, shape, stride=strides)

    def starts():
        return make_fake_tensor(_INDEX[problem.index_dtype], (cute.sym_int(),), stride=(1,))

    lse_strides = (cute.sym_int64(), cute.sym_int64(), 1)
    return (
        activation(rows, heads),
        activation(keys, heads_k),
        activation(keys, heads_k),
        activation(rows, heads),
        make_fake_tensor(cutlass.Float32, (batch, heads, rows), stride=lse_strides),
        mask() if problem.skip else None,
        mask() if problem.must_do else None,
        mask() if problem.skip else None,
        starts() if problem.packed else None,
        starts() if problem.packed else None,
        make_fake_tensor(cutlass.Int32, (1,), stride=(1,)) if problem.on_device else None,
        cutlass.Float32(1.0),
        cutlass.Float32(1.0),
        cutlass.Int32(1),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


@functools.cache
def compile_forward(config: ForwardConfig, arch: str, *options) -> Callable[..., None]:
    """A callable for one config on one architecture ("sm_89", "sm_90a", ...), reused for every size and stride."""
    with warnings.catch_warnings():
        # Loops over accumulator registers are unrolled on purpose.
        warnings.filterwarnings("ignore", message="This static loop has")
        return cute.compile[(cute.GPUArch(arch), cute.EnableTVMFFI, *options)](
            LiteForward(config),
            *forward_arguments(config),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )


@functools.cache
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
    kernel_for: Callable[[ForwardConfig, str], Callable[..., None]] = compile_forward,
    arch: str | None = None,
) -> None:
    """Launches one call on torch's current stream; arguments are those of `ops.lite_attention`, checked, scale > 0.

    lse [B, Hq, Sq]. write may be read: a query tile's row is read before it is written, and by nobody else. kernel_for
    and arch are for tests without a GPU.
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
    )  # fmt: skip
    scale_log2 = scale * math.log2(math.e)
    sequences = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    arch = arch or _arch(q.device)
    kernel_for(select(problem, arch), arch)(
        q, k, v, out, lse, read, must_do, write, cu_seqlens_q, cu_seqlens_k,
        direction if on_device else None, scale_log2, threshold / scale_log2, 1 if on_device else direction,
        -(-max_seqlen_q // BLOCK_M), sequences,
    )  # fmt: skip
