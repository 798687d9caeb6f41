"""What is compiled for a config. The only host file that imports the DSL, and only a compile imports it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from cula_core.cute import fake

from .config import BackwardConfig, ForwardConfig, OrderConfig
from .kernels.backward import LiteBackward
from .kernels.forward import LiteForward
from .kernels.order import LiteOrder


def kernel(config: ForwardConfig | BackwardConfig | OrderConfig, arch: str) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    if isinstance(config, BackwardConfig):
        return LiteBackward(config), *backward_arguments(config)
    if isinstance(config, OrderConfig):
        return LiteOrder(config), *order_arguments()
    return LiteForward(config), *forward_arguments(config)


def mask_of(heads: object):
    """Returns a mask of lists [B, Hq, rows, words]."""
    strides = (*(cute.sym_int64() for _ in range(3)), 1)
    shape = (cute.sym_int(), heads, cute.sym_int(), cute.sym_int())
    return make_fake_tensor(cutlass.Int32, shape, stride=strides)


def order_arguments() -> tuple:
    """Returns stand-ins for the arguments of `LiteOrder`: the mask, work, and numbers of query rows and keys."""
    return mask_of(cute.sym_int()), fake.vector(cutlass.Int32), *(cutlass.Int32(1),) * 2


def forward_arguments(config: ForwardConfig) -> tuple:
    """Returns stand-ins for the arguments of `LiteForward`.

    They are q, k, v, out, lse, read mask, must_do, write mask, direction_at, work, scale in log2 units, margin,
    direction, number of CTAs.
    """
    batch, rows, keys, heads, heads_k = (cute.sym_int() for _ in range(5))

    def activation(length: object, heads: object):
        return fake.rows(config.dtype, (batch, length, heads, config.head_dim))

    def mask(wanted: bool):
        return mask_of(heads) if wanted else None

    strides = (cute.sym_int64(), cute.sym_int64(), 1)
    return (
        activation(rows, heads),
        activation(keys, heads_k),
        activation(keys, heads_k),
        activation(rows, heads),
        make_fake_tensor(cutlass.Float32, (batch, heads, rows), stride=strides),
        mask(config.skip),
        mask(config.must_do),
        mask(config.skip),
        fake.vector(cutlass.Int32, 1) if config.on_device else None,
        fake.vector(cutlass.Int32),
        *(cutlass.Float32(1.0),) * 2,
        *(cutlass.Int32(1),) * 2,
    )


def backward_arguments(config: BackwardConfig) -> tuple:
    """Returns stand-ins for the arguments of `LiteBackward`.

    They are q, k, v, dout, log-sum-exps in log2 units and Delta [B, Hq, T'], T' a multiple of 64, the transposed mask,
    accumulated gradients of q [B, Sq, Hq, 128] in fp32, dk, dv, scale, the same in log2 units.
    """
    batch, rows, keys, heads, heads_k = (cute.sym_int() for _ in range(5))

    def activation(
        length: object, heads: object, dtype: str = config.dtype, dim: int = config.head_dim
    ):
        return fake.rows(dtype, (batch, length, heads, dim))

    def sums():
        strides = (*(cute.sym_int64(divisibility=64) for _ in range(2)), 1)
        return make_fake_tensor(
            cutlass.Float32, (batch, heads, cute.sym_int()), stride=strides, assumed_align=16
        )

    mask = mask_of(heads) if config.skip else None
    return (
        activation(rows, heads),
        activation(keys, heads_k),
        activation(keys, heads_k),
        activation(rows, heads),
        sums(),
        sums(),
        mask,
        activation(rows, heads, "float32", config.width),
        activation(keys, heads_k),
        activation(keys, heads_k),
        *(cutlass.Float32(1.0),) * 2,
    )
