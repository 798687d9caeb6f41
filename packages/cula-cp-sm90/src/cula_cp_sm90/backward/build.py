"""What is compiled for a config of the backward pass. The only host module of this folder that imports the DSL, and
only a compile imports it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from cula_core.cute import fake
from cula_core.cute.types import DTYPES
from cula_core.delta_rule.config import CHUNK, HEAD_DIM
from cula_core.delta_rule.kernels.block import BLOCK, SQUARE, WIDE

from .config import V_TILE, WalkConfig
from .kernels.walk import KdaWalk


def kernel(config: WalkConfig, arch: str) -> tuple[object, ...]:
    """Returns what is compiled for a config: the kernel and its fake arguments, without the stream."""
    return KdaWalk(config), *walk_arguments(config)


def walk_arguments(config: WalkConfig) -> tuple:
    """Returns blocks [slots, HV, BLOCK], v or do [B, T, HV, 128], forward factors [slots, HV, 3, 64], back peaks
    [N, HV], states [N, HV, K, V] or V, K in front of the walk and behind it, kept states [slots, HV, 2, 64 * 128] and
    rows [slots, HV, 2, 64 * 64], segment table, tokens of a segment, number of CTAs."""
    batch, tokens, heads_v = (cute.sym_int() for _ in range(3))

    def states(wanted: bool):
        return fake.states(heads_v, HEAD_DIM, HEAD_DIM, config.state_dtype) if wanted else None

    def kept(size: int):
        shape = (cute.sym_int(), heads_v, HEAD_DIM // V_TILE, size)
        stride = (cute.sym_int64(divisibility=size), HEAD_DIM // V_TILE * size, size, 1)
        return make_fake_tensor(DTYPES[config.operand], shape, stride=stride, assumed_align=128)

    blocks = make_fake_tensor(
        DTYPES[config.operand], (cute.sym_int(), heads_v, BLOCK),
        stride=(cute.sym_int64(divisibility=BLOCK), BLOCK, 1), assumed_align=128,
    )  # fmt: skip
    return (
        blocks,
        fake.rows(config.dtype, (batch, tokens, heads_v, HEAD_DIM)),
        None if config.back else fake.states(heads_v, 3, CHUNK),
        fake.matrix(cutlass.Int32, heads_v) if config.back else None,
        states(config.start),
        states(config.end),
        kept(WIDE),
        kept(SQUARE),
        fake.segment_table() if config.packed else None,
        cutlass.Int32(1),
        cutlass.Int32(1),
    )
