"""What is compiled for a config. The only host file that imports the DSL, and only a compile imports it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from cula_core.cute import fake
from cula_core.cute.types import INDICES

from .config import (
    BackwardConfig,
    Config,
    ConvertConfig,
    ForwardConfig,
    OrderConfig,
    QueriesConfig,
    SumsConfig,
)
from .kernels.backward import LiteBackward
from .kernels.ends import LiteConvert, LiteSums
from .kernels.forward import LiteForward
from .kernels.order import LiteOrder
from .kernels.queries import LiteQueries


def kernel(config: Config, arch: str) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    made, arguments = {
        ForwardConfig: (LiteForward, forward_arguments),
        OrderConfig: (LiteOrder, order_arguments),
        BackwardConfig: (LiteBackward, backward_arguments),
        QueriesConfig: (LiteQueries, queries_arguments),
        SumsConfig: (LiteSums, sums_arguments),
        ConvertConfig: (LiteConvert, convert_arguments),
    }[type(config)]
    return made(config), *arguments(config)


def mask_of(heads: object):
    """Returns a mask of lists [B, Hq, rows, words]."""
    strides = (*(cute.sym_int64() for _ in range(3)), 1)
    shape = (cute.sym_int(), heads, cute.sym_int(), cute.sym_int())
    return make_fake_tensor(cutlass.Int32, shape, stride=strides)


def per_row(batch: object, heads: object, rows: object):
    """Returns a number of every row, fp32 [B, Hq, Sq]."""
    strides = (cute.sym_int64(), cute.sym_int64(), 1)
    return make_fake_tensor(cutlass.Float32, (batch, heads, rows), stride=strides)


def per_padded_row(batch: object, heads: object):
    """Returns the same with T' rows, a multiple of 64."""
    strides = (*(cute.sym_int64(divisibility=64) for _ in range(2)), 1)
    shape = (batch, heads, cute.sym_int())
    return make_fake_tensor(cutlass.Float32, shape, stride=strides, assumed_align=16)


def starts(config: Config):
    """Returns cu_seqlens [N + 1] of packed sequences, None of a batch."""
    return None if config.packed is None else fake.vector(INDICES[config.packed])


def longest(config: Config):
    """Returns the most tokens of a packed sequence, None of a batch."""
    return None if config.packed is None else cutlass.Int32(1)


def order_arguments(config: OrderConfig) -> tuple:
    """Returns stand-ins for the arguments of `LiteOrder`.

    They are the mask, work, cu_seqlens_q and _k, numbers of query rows and keys, of the longest packed sequence, and of
    heads that share keys: 1 unless the order is that of keys.
    """
    return (
        mask_of(cute.sym_int()),
        fake.vector(cutlass.Int32),
        *(starts(config),) * 2,
        *(cutlass.Int32(1),) * 3,
    )


def forward_arguments(config: ForwardConfig) -> tuple:
    """Returns stand-ins for the arguments of `LiteForward`.

    They are q, k, v, out, lse, read mask, must_do, write mask, cu_seqlens_q and _k, direction_at, work, scale in log2
    units, margin, direction, query rows of the longest packed sequence, number of CTAs.
    """
    batch, rows, keys, heads, heads_k = (cute.sym_int() for _ in range(5))

    def activation(length: object, heads: object):
        return fake.rows(config.dtype, (batch, length, heads, config.head_dim))

    def mask(wanted: bool):
        return mask_of(heads) if wanted else None

    return (
        activation(rows, heads),
        activation(keys, heads_k),
        activation(keys, heads_k),
        activation(rows, heads),
        per_row(batch, heads, rows),
        mask(config.skip),
        mask(config.must_do),
        mask(config.skip),
        *(starts(config),) * 2,
        fake.vector(cutlass.Int32, 1) if config.on_device else None,
        fake.vector(cutlass.Int32),
        *(cutlass.Float32(1.0),) * 2,
        cutlass.Int32(1),
        longest(config),
        cutlass.Int32(1),
    )


def backward_arguments(config: BackwardConfig) -> tuple:
    """Returns stand-ins for the arguments of `LiteBackward`.

    They are q, k, v, dout, log-sum-exps in log2 units and Delta [B, Hq, T'], T' a multiple of 64, the transposed mask,
    cu_seqlens_q and _k, work, accumulated gradients of q [B, Sq, Hq, 64 or 128] in fp32 or None, dk, dv, scale, the
    same in log2 units, keys of the longest packed sequence. Of T' rows each packed sequence has whole units of 64.
    """
    batch, rows, keys, heads, heads_k = (cute.sym_int() for _ in range(5))

    def activation(
        length: object, heads: object, dtype: str = config.dtype, dim: int = config.head_dim
    ):
        return fake.rows(dtype, (batch, length, heads, dim))

    return (
        activation(rows, heads),
        activation(keys, heads_k),
        activation(keys, heads_k),
        activation(rows, heads),
        per_padded_row(batch, heads),
        per_padded_row(batch, heads),
        mask_of(heads) if config.skip else None,
        *(starts(config),) * 2,
        fake.vector(cutlass.Int32) if config.ordered else None,
        None if config.keys_only else activation(rows, heads, "float32", config.width),
        activation(keys, heads_k),
        activation(keys, heads_k),
        *(cutlass.Float32(1.0),) * 2,
        longest(config),
    )


def queries_arguments(config: QueriesConfig) -> tuple:
    """Returns stand-ins for the arguments of `LiteQueries`.

    They are q, k, v, dout, log-sum-exps in log2 units and Delta as `LiteBackward` takes them, the mask, cu_seqlens_q
    and _k, work, dq, scale, the same in log2 units, query rows of the longest packed sequence, number of CTAs.
    """
    batch, rows, keys, heads, heads_k = (cute.sym_int() for _ in range(5))

    def activation(length: object, heads: object):
        return fake.rows(config.dtype, (batch, length, heads, config.head_dim))

    return (
        activation(rows, heads),
        activation(keys, heads_k),
        activation(keys, heads_k),
        activation(rows, heads),
        per_padded_row(batch, heads),
        per_padded_row(batch, heads),
        mask_of(heads) if config.skip else None,
        *(starts(config),) * 2,
        fake.vector(cutlass.Int32),
        activation(rows, heads),
        *(cutlass.Float32(1.0),) * 2,
        longest(config),
        cutlass.Int32(1),
    )


def sums_arguments(config: SumsConfig) -> tuple:
    """Returns stand-ins for the arguments of `LiteSums`.

    They are out, dout, lse and its gradient [B, Hq, Sq], log-sum-exps in log2 units and Delta as `LiteBackward` takes
    them, its accumulators of gradients of q, if it has any, cu_seqlens_q, and query rows of the longest packed
    sequence.
    """
    batch, rows, heads = (cute.sym_int() for _ in range(3))
    shape = (batch, rows, heads)
    return (
        fake.rows(config.dtype, (*shape, config.head_dim)),
        fake.rows(config.dtype, (*shape, config.head_dim)),
        per_row(batch, heads, rows),
        per_row(batch, heads, rows) if config.with_dlse else None,
        per_padded_row(batch, heads),
        per_padded_row(batch, heads),
        fake.rows("float32", (*shape, config.width)) if config.with_acc else None,
        starts(config),
        longest(config),
    )


def convert_arguments(config: ConvertConfig) -> tuple:
    """Returns stand-ins for the arguments of `LiteConvert`.

    They are accumulators, dq, scale, cu_seqlens_q, and query rows of the longest packed sequence.
    """
    shape = tuple(cute.sym_int() for _ in range(3))
    return (
        fake.rows("float32", (*shape, config.width)),
        fake.rows(config.dtype, (*shape, config.head_dim)),
        cutlass.Float32(1.0),
        starts(config),
        longest(config),
    )
