"""What is compiled for a Config. The only host module that imports the DSL, and only a compile imports it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from cula_core.cute.fake import strided_vector, vector
from cula_core.cute.types import DTYPES

from .config import Config, Problem
from .kernels.decode import LightningDecode
from .plan import supports_overlap


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
        strided_vector(cutlass.Int32, batch) if problem.indexed else None,
        strided_vector(cutlass.Int32, batch) if problem.mode == "commit" else None,
        vector(cutlass.Int64, 1) if problem.stochastic else None,
        activation(heads_v, problem.head_dim_v) if outputs else None,
        cutlass.Float32(1.0),
        cutlass.Int32(1) if problem.padded else None,
    )


def kernel(config: Config, arch: str) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    overlap = supports_overlap(arch)
    return LightningDecode(config, overlap=overlap), *fake_arguments(config.problem)
