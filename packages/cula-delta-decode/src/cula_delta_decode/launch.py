"""Compiles a Config for an architecture and launches it. The only host module that imports the DSL."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from cula_core.cute.artifacts import Unit
from cula_core.cute.compile import compile as compile_kernel
from cula_core.cute.fake import vector
from cula_core.cute.types import DTYPES, F32, I32
from cula_core.once import once

from .config import Config, Problem
from .kernels.decode import DeltaDecode
from .plan import supports_overlap


def _strided(dtype: type, *shape: object, align: int | None = None, dense: int = 1):
    """A tensor with free strides but those of the last `dense` dimensions."""
    units = 1 if align is None else align * 8 // dtype.width
    strides: list = []
    for number, size in reversed(list(enumerate(shape))):
        if number >= len(shape) - dense:
            strides.append(1 if not strides else strides[-1] * shape[number + 1])
        else:
            strides.append(cute.sym_int64(divisibility=units))
    extra = {} if align is None else {"assumed_align": align}
    return make_fake_tensor(dtype, shape, stride=tuple(reversed(strides)), **extra)


def fake_arguments(problem: Problem) -> tuple:
    """Returns the arguments of `DeltaDecode` without the stream; fixed are dtypes, head dims and tokens only."""
    gate, dim_k, dim_v = problem.gate, problem.head_dim_k, problem.head_dim_v
    dtype, state_dtype = DTYPES[problem.dtype], DTYPES[problem.state_dtype]
    heads, heads_v, rows = cute.sym_int(), cute.sym_int(), cute.sym_int()
    batch, tokens = (1, cute.sym_int()) if problem.packed else (rows, problem.tokens)

    def activation(heads, dim):
        return _strided(dtype, batch, tokens, heads, dim)

    def per_head(dtype, dense=0):
        return _strided(DTYPES[dtype], batch, tokens, heads_v, dense=dense)

    def states():
        matrix = (dim_v, dim_k) if problem.state_v_first else (dim_k, dim_v)
        return _strided(state_dtype, cute.sym_int(), heads_v, *matrix, align=16, dense=2)

    g = bias = None
    if gate.kind != "none":
        if gate.channels:
            g = _strided(DTYPES[gate.dtype], batch, tokens, heads_v, dim_k)
        else:
            g = per_head(gate.dtype)
    if gate.bias:
        width = dim_k if gate.channels else 1
        bias = make_fake_tensor(DTYPES[gate.bias], (heads_v, width), stride=(width, 1))
    slots = None
    if problem.slots:
        shape = (rows,) if problem.slots == 1 else (rows, cute.sym_int())
        slots = _strided(I32, *shape, dense=0)
    rings: tuple = (None,) * 4
    if problem.replay:
        pool, length = cute.sym_int(), cute.sym_int()
        factors = (heads_v, dim_k) if gate.channels else (heads_v,)
        rings = (
            _contiguous(dtype, pool, length, heads, dim_k),
            _contiguous(F32, pool, length, heads_v, dim_v),
            _contiguous(F32, pool, length, *factors),
            _contiguous(I32, pool, heads_v, dim_v // 8),
        )
    counted = problem.slots == 2 or problem.replay
    return (
        activation(heads, dim_k),
        activation(heads, dim_k),
        activation(heads_v, dim_v),
        g,
        per_head(gate.strength_dtype) if gate.strength != "one" else None,
        vector(F32, heads_v) if gate.rate else None,
        bias,
        activation(heads_v, dim_v),
        states() if problem.begins else None,
        states() if problem.ends else None,
        slots,
        _strided(I32, rows, dense=0) if problem.redirected else None,
        vector(I32, rows) if counted else None,
        states() if problem.every_token else None,
        _strided(I32, rows, cute.sym_int(), dense=0) if problem.every_token else None,
        vector(I32) if problem.packed else None,
        *rings,
        *(cutlass.Float32(1.0) for _ in range(3)),
        cutlass.Int32(-1),
        cutlass.Int32(1),
    )


def _contiguous(dtype: type, *shape: object):
    """A contiguous tensor whose rows begin at multiples of 16 bytes, where they are that long."""
    strides: list = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size if isinstance(size, int) else cute.sym_int64(divisibility=1))
    return make_fake_tensor(dtype, shape, stride=tuple(reversed(strides)), assumed_align=16)


def kernel(config: Config, arch: str) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    return DeltaDecode(config, overlap=supports_overlap(arch)), *fake_arguments(config.problem)


def unit(config: Config, arch: str) -> Unit:
    """Returns a config's kernel as something that can be compiled ahead of its first call."""
    return Unit(lambda: kernel(config, arch), config, arch, (__name__,))


@once
def compile(config: Config, arch: str, *options: object):
    """Returns a callable for one config and architecture ("sm_80", "sm_90a", ...), reused for every size and stride.

    options: further ones of `cute.compile`.
    """
    return compile_kernel(*kernel(config, arch), arch=arch, options=options)
