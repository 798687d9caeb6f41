"""Compiles a Config for an architecture and launches it. The only host module that imports the DSL."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_tensor
from torch import Tensor

from cula_core import tensors
from cula_core.cute.artifacts import Unit
from cula_core.cute.compile import compile as compile_kernel
from cula_core.cute.fake import vector
from cula_core.cute.types import DTYPES
from cula_core.dtypes import dtype_name
from cula_core.once import once

from .config import Config, Problem
from .kernels.decode import LightningDecode
from .plan import select, supports_overlap


def fake_arguments(problem: Problem) -> tuple:
    """Returns the arguments of `LightningDecode` without the stream; fixed are dtypes, head dims and tokens only."""
    dtype, state_dtype = (DTYPES[d] for d in (problem.dtype, problem.state_dtype))
    batch, heads, heads_v = cute.sym_int(), cute.sym_int(), cute.sym_int()

    def activation(heads, dim):
        strides = (cute.sym_int64(), cute.sym_int64(), cute.sym_int64(), 1)
        return make_fake_tensor(dtype, (batch, problem.tokens, heads, dim), stride=strides)

    dims = (problem.head_dim_k, problem.head_dim_v)
    rows, columns = dims[::-1] if problem.state_v_first else dims
    outer = tuple(cute.sym_int64(divisibility=problem.vector) for _ in range(2))
    state = make_fake_tensor(
        state_dtype,
        (cute.sym_int(), heads_v, rows, columns),
        stride=(*outer, columns, 1),
        assumed_align=16,
    )
    outputs = problem.mode != "commit"
    return (
        activation(heads, problem.head_dim_k) if outputs else None,
        activation(heads, problem.head_dim_k),
        activation(heads_v, problem.head_dim_v),
        state,
        vector(cutlass.Float32, heads_v),
        vector(cutlass.Int32, batch) if problem.indexed else None,
        vector(cutlass.Int32, batch) if problem.mode == "commit" else None,
        vector(cutlass.Int64, 1) if problem.stochastic else None,
        activation(heads_v, problem.head_dim_v) if outputs else None,
        cutlass.Float32(1.0),
    )


def kernel(config: Config, arch: str) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    overlap = supports_overlap(arch)
    return LightningDecode(config, overlap=overlap), *fake_arguments(config.problem)


def unit(config: Config, arch: str) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    return Unit(lambda: kernel(config, arch), config, arch, (__name__,))


@once
def compile(config: Config, arch: str, *options: object):
    """Returns a callable for one config and architecture ("sm_80", "sm_90a", ...), reused for every size and stride.

    options: further ones of `cute.compile`.
    """
    return compile_kernel(*kernel(config, arch), arch=arch, options=options)


@once
def kernel_for(
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    head_dim_k: int,
    head_dim_v: int,
    tokens: int,
    state_v_first: bool,
    indexed: bool,
    mode: str,
    stochastic: bool,
    device: torch.device,
):
    """Returns the compiled kernel for the static facts of a call; compiles on first use (about a second).

    Raises ValueError for facts that no kernel serves, RuntimeError for a GPU that is too old.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise RuntimeError(
            f"cula-lightning-decode needs compute capability 8.0 or newer; {device} has {major}.{minor}"
        )
    names = [dtype_name(d) for d in (dtype, state_dtype)]
    problem = Problem(
        *names, head_dim_k, head_dim_v, tokens, state_v_first, indexed, mode, stochastic
    )
    if problem.illegal():
        raise ValueError(problem.illegal())
    arch = f"sm_{major}{minor}" + "a" * (major >= 9)
    return compile(select(problem, arch, tensors.multiprocessors(device)), arch)


def run(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    num_accepted: Tensor | None,
    rounding_seed: Tensor | None,
    out: Tensor | None,
    scale: float,
    state_v_first: bool,
    mode: str,
) -> None:
    """Launches one call on torch's current stream.

    The compiled host code verifies every dtype, shape, stride, alignment and device in C++ before it launches, which
    is several times faster than Python could; what it cannot see is verified here. The caller explains the error.
    """
    batch, tokens, heads, head_dim_k = k.shape
    _, _, heads_v, head_dim_v = v.shape
    if heads_v % heads or (state_indices is None and state.shape[0] < batch):
        raise ValueError("heads or pool size do not fit")
    device = k.device
    kernel = kernel_for(
        k.dtype, state.dtype, head_dim_k, head_dim_v, tokens, state_v_first,
        state_indices is not None, mode, rounding_seed is not None, device,
    )  # fmt: skip
    if batch == 0:
        return
    arguments = (q, k, v, state, decay, state_indices, num_accepted, rounding_seed, out, scale)
    if device.index == torch.cuda.current_device():
        kernel(*arguments)
    else:
        with torch.cuda.device(device):
            kernel(*arguments)
