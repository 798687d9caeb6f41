"""What is compiled for a Config. The only host module that imports the DSL, and only a compile imports it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from cula_core.cute.fake import strided_vector, vector
from cula_core.cute.types import DTYPES, F32, I32

from .arguments import Arguments, flush_arguments
from .config import CONVOLUTION_WIDTH, Config, Problem
from .kernels.decode import DeltaDecode
from .kernels.flush import Flush
from .plan import supports_overlap


def kernel(config: Config, arch: str) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    arguments = fake_arguments(config.problem)
    if config.problem.flushes:
        return Flush(config), *flush_arguments(arguments)
    return DeltaDecode(config, overlap=supports_overlap(arch)), *arguments


def fake_arguments(problem: Problem) -> Arguments:
    """Returns arguments of which dtypes, head dims and tokens are fixed, and nothing else."""
    gate, dim_k, dim_v = problem.gate, problem.head_dim_k, problem.head_dim_v
    dtype = DTYPES[problem.dtype]
    heads, heads_v, rows, pool = (cute.sym_int() for _ in range(4))
    batch = 1 if problem.packed else rows
    tokens = cute.sym_int() if problem.packed or problem.long else problem.tokens

    align = 16 if problem.direct and problem.aligned else None

    def activation(heads, dim, dtype=dtype, align=None):
        return _strided(dtype, batch, tokens, heads, dim, align=align)

    def per_head(dtype):
        return _strided(DTYPES[dtype], batch, tokens, heads_v, dense=0)

    def states(rows):
        matrix = (dim_v, dim_k) if problem.state_v_first else (dim_k, dim_v)
        return _strided(DTYPES[problem.state_dtype], rows, heads_v, *matrix, align=16, dense=2)

    g = None
    if gate.kind != "none":
        channels = activation(heads_v, dim_k, DTYPES[gate.dtype], align)
        g = channels if gate.channels else per_head(gate.dtype)
    slots = None
    if problem.slots:
        shape = (rows,) if problem.slots == 1 else (rows, cute.sym_int())
        slots = _strided(I32, *shape, dense=0)
    rings: tuple = (None,) * 4
    if problem.replay:
        length = cute.sym_int()
        factors = (heads_v, dim_k) if gate.channels else (heads_v,)
        rings = (
            _contiguous(dtype, pool, length, heads, dim_k),
            _contiguous(F32, pool, length, heads_v, dim_v),
            _contiguous(F32, pool, length, *factors),
            _contiguous(I32, pool, heads_v, dim_v // 8),
        )
    fused = problem.fused
    inputs = taps = tap_bias = None
    if fused.convolution:
        channels = cute.sym_int()
        inputs = _contiguous(dtype, pool, cute.sym_int(), channels)
        taps = _contiguous(DTYPES[fused.convolution], channels, CONVOLUTION_WIDTH)
        tap_bias = vector(DTYPES[fused.convolution], channels) if fused.bias else None
    return Arguments(
        q=None if problem.commits else activation(heads, dim_k, align=align),
        k=activation(heads, dim_k, align=align),
        v=activation(heads_v, dim_v),
        g=g,
        beta=None if gate.strength == "one" else per_head(gate.strength_dtype),
        A_log=vector(F32, heads_v) if gate.rate else None,
        dt_bias=make_fake_tensor(DTYPES[gate.bias], (cute.sym_int(),), stride=(1,))
        if gate.bias
        else None,
        out=None if problem.commits else activation(heads_v, dim_v),
        state=states(pool) if problem.begins else None,
        next_state=states(cute.sym_int()) if problem.ends else None,
        slots=slots,
        next_slots=_strided(I32, rows, dense=0) if problem.redirected else None,
        accepted=strided_vector(I32, rows) if problem.counted else None,
        token_states=states(cute.sym_int()) if problem.every_token else None,
        token_slots=_strided(I32, rows, cute.sym_int(), dense=0) if problem.every_token else None,
        offsets=vector(I32) if problem.packed else None,
        ring_k=rings[0],
        ring_u=rings[1],
        ring_decay=rings[2],
        cursor=rings[3],
        inputs=inputs,
        positions=strided_vector(I32, rows) if fused.convolution else None,
        taps=taps,
        tap_bias=tap_bias,
        gate=activation(heads_v, dim_v) if fused.norm else None,
        norm_weight=vector(DTYPES[fused.weight], dim_v) if fused.norm else None,
        scale=cutlass.Float32(1.0),
        bound=cutlass.Float32(1.0),
        threshold=cutlass.Float32(1.0),
        eps=cutlass.Float32(0.0),
        null_slot=cutlass.Int32(-1),
        rows=cutlass.Int32(1),
    )


def _strided(dtype: type, *shape: object, align: int | None = None, dense: int = 1):
    """A tensor with free strides but those of the last `dense` dimensions."""
    units = 1 if align is None else align * 8 // dtype.width
    strides: list = []
    for number in reversed(range(len(shape))):
        if number >= len(shape) - dense:
            strides.append(1 if not strides else strides[-1] * shape[number + 1])
        else:
            strides.append(cute.sym_int64(divisibility=units))
    extra = {} if align is None else {"assumed_align": align}
    return make_fake_tensor(dtype, shape, stride=tuple(reversed(strides)), **extra)


def _contiguous(dtype: type, *shape: object):
    """A contiguous tensor whose rows begin at multiples of 16 bytes, where they are that long."""
    strides: list = [1]
    for size in reversed(shape[1:]):
        strides.append(
            strides[-1] * size if isinstance(size, int) else cute.sym_int64(divisibility=1)
        )
    return make_fake_tensor(dtype, shape, stride=tuple(reversed(strides)), assumed_align=16)
