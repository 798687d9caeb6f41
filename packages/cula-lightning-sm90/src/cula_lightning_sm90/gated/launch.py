"""Compiles configs. The only host module that imports the DSL."""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from cula_core.cute import fake
from cula_core.cute.artifacts import Unit
from cula_core.cute.compile import compile as compile_kernel
from cula_core.cute.schedule import SegmentTable
from cula_core.cute.types import DTYPES, INDICES
from cula_core.once import once

from .config import CHUNK, HEAD_DIM, Config, TableConfig
from .kernels.prefill import GatedDeltaPrefill

ARCH = "sm_90a"


def kernel(config: Config | TableConfig) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    if isinstance(config, TableConfig):
        return SegmentTable(CHUNK), *fake.segment_table_arguments(INDICES[config.index_dtype])
    return GatedDeltaPrefill(config), *fake_arguments(config)


def fake_arguments(config: Config) -> tuple:
    """Returns the arguments of `GatedDeltaPrefill` without the stream: only dtypes and flags are fixed."""
    batch, tokens, heads = (cute.sym_int() for _ in range(3))

    def activation(heads: object):
        return fake.rows(config.dtype, (batch, tokens, heads, HEAD_DIM))

    def by_token(name: str):
        dtype = DTYPES[name]
        strides = tuple(cute.sym_int64() for _ in range(3))
        shape = (batch, tokens, heads)
        return make_fake_tensor(dtype, shape, stride=strides, assumed_align=dtype.width // 8)

    def state():
        return fake.states(heads, HEAD_DIM, HEAD_DIM)

    softplus = config.gate == "softplus"
    return (
        activation(cute.sym_int()),
        activation(cute.sym_int()),
        activation(cute.sym_int()),
        activation(heads),
        by_token(config.gate_dtype) if config.gate else None,
        by_token(config.strength_dtype) if config.strength else None,
        fake.vector(cutlass.Float32, heads) if softplus else None,
        fake.vector(cutlass.Float32, heads) if softplus and config.bias else None,
        state() if config.initial_state else None,
        fake.vector(cutlass.Int32) if config.indexed else None,
        fake.vector(cutlass.Int32) if config.redirected else None,
        fake.vector(cutlass.Uint8) if config.fresh else None,
        state() if config.final_state else None,
        state() if config.checkpoints else None,
        fake.segment_table() if config.packed else None,
        fake.vector(cutlass.Int32) if config.packed else None,
        cutlass.Float32(1.0),
        cutlass.Float32(1.0),
        cutlass.Float32(20.0),
        cutlass.Int32(-1),
        cutlass.Int32(1),
        cutlass.Int32(1),
    )


def unit(config: Config | TableConfig) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    return Unit(lambda: kernel(config), config, ARCH, (__name__,))


@once
def compile(config: Config | TableConfig, *options: object) -> Callable[..., None]:
    """Returns a callable for one config, reused for every size and stride. options: further ones of `cute.compile`."""
    return compile_kernel(*kernel(config), arch=ARCH, options=options)
