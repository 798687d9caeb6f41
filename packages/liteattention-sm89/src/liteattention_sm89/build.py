"""What is compiled for a config. The only host file that imports the DSL, and only a compile imports it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from cula_core.cute import fake
from cula_core.cute.types import INDICES

from .config import BackwardConfig, ForwardConfig, Problem, int8_width
from .kernels.backward import LiteBackward
from .kernels.forward import LiteForward
from .kernels.gather_dq import GatherDq
from .kernels.means import KeyMeans
from .kernels.quantize import Quantize
from .kernels.row_sums import RowSums


def kernel(facts: tuple, arch: str) -> tuple[object, ...]:
    """Returns what is compiled for the facts of a unit: the kernel and its fake arguments, without the stream."""
    name, *facts = facts
    made, arguments = {
        "forward": (LiteForward, forward_arguments),
        "means": (KeyMeans, means_arguments),
        "quantize": (Quantize, quantize_arguments),
        "backward": (LiteBackward, backward_arguments),
        "sums": (RowSums, sums_arguments),
        "gather": (GatherDq, gather_arguments),
    }[name]
    # What else the facts tell are arguments: of row sums, whether lse has a gradient.
    own = facts[:1] if name == "sums" else facts
    return made(*own), *arguments(*facts)


class _Fakes:
    """Stand-ins for arguments, of which only dtypes, the head dimension and flags are fixed."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.batch, self.rows, self.keys = (cute.sym_int() for _ in range(3))
        self.heads, self.heads_k = cute.sym_int(), cute.sym_int()

    def activation(self, of_keys: bool, columns: int | None = None):
        length, heads = (self.keys, self.heads_k) if of_keys else (self.rows, self.heads)
        shape = (self.batch, length, heads, columns or self.problem.head_dim)
        return fake.rows(self.problem.dtype, shape)

    def mask(self):
        strides = (*(cute.sym_int64() for _ in range(3)), 1)
        shape = (cute.sym_int(), self.heads, cute.sym_int(), cute.sym_int())
        return make_fake_tensor(cutlass.Int32, shape, stride=strides)

    def per_row(self):
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        return make_fake_tensor(
            cutlass.Float32, (self.batch, self.heads, self.rows), stride=strides
        )

    def per_tile(self, size: int):
        strides = (*(cute.sym_int64(divisibility=4) for _ in range(3)), 1)
        shape = (self.batch, self.heads, cute.sym_int(), size)
        return make_fake_tensor(cutlass.Float32, shape, stride=strides, assumed_align=16)

    def scales(self, of_keys: bool):
        shape = (self.batch, self.heads_k if of_keys else self.heads, cute.sym_int())
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        return make_fake_tensor(cutlass.Float32, shape, stride=strides)

    def means(self):
        strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
        shape = (cute.sym_int(), self.heads_k, self.problem.head_dim)
        return make_fake_tensor(cutlass.Float32, shape, stride=strides, assumed_align=16)

    def starts(self):
        if not self.problem.packed:
            return None
        return fake.vector(INDICES[self.problem.index_dtype])


def forward_arguments(config: ForwardConfig) -> tuple:
    """Returns stand-ins for the arguments of `LiteForward`.

    They are q, k, v, out, lse, read mask, must_do, write mask, cu_seqlens_q and _k, direction_at, scales of 8-bit q and
    k, what lse misses with them, scale in log2 units, margin, direction, number of query tiles and of sequences.
    """
    problem = config.problem
    x = _Fakes(problem)
    columns = config.score_columns if problem.int8 else problem.head_dim
    return (
        x.activation(False, columns),
        x.activation(True, columns),
        x.activation(True),
        x.activation(False),
        x.per_row(),
        x.mask() if problem.skip else None,
        x.mask() if problem.must_do else None,
        x.mask() if problem.skip else None,
        x.starts(),
        x.starts(),
        fake.vector(cutlass.Int32, 1) if problem.on_device else None,
        x.scales(False) if problem.int8 else None,
        x.scales(True) if problem.int8 else None,
        x.per_row() if problem.int8 else None,
        *(cutlass.Float32(1.0),) * 2,
        *(cutlass.Int32(1),) * 3,
    )


def means_arguments(problem: Problem) -> tuple:
    """Returns stand-ins for the arguments of `KeyMeans`: k, means, cu_seqlens and the number of sequences."""
    x = _Fakes(problem)
    return x.activation(True), x.means(), x.starts(), cutlass.Int32(1)


def quantize_arguments(problem: Problem, of_keys: bool) -> tuple:
    """Returns stand-ins for the arguments of `Quantize`.

    They are q or k, means of the keys, integers, their scales, shifts of lse, cu_seqlens, scale, number of tiles and of
    sequences.
    """
    x = _Fakes(problem)
    return (
        x.activation(of_keys),
        x.means(),
        x.activation(of_keys, int8_width(problem.head_dim) // 2),
        x.scales(of_keys),
        None if of_keys else x.per_row(),
        x.starts(),
        cutlass.Float32(1.0),
        *(cutlass.Int32(1),) * 2,
    )


def backward_arguments(config: BackwardConfig) -> tuple:
    """Returns stand-ins for the arguments of `LiteBackward`.

    They are q, k, v, dout, sums, mask (transposed unless the role is "queries"), dq (accumulators if the role is
    "both"), dk, dv, cu_seqlens_q and _k, scale, the same in log2 units, number of tiles and of sequences.
    """
    x = _Fakes(config.problem)
    keys = config.role != "queries"
    dq = {
        "both": lambda: x.per_tile(config.rows * config.width),
        "keys": lambda: None,
        "queries": lambda: x.activation(False),
    }[config.role]()
    return (
        x.activation(False),
        x.activation(True),
        x.activation(True),
        x.activation(False),
        x.per_tile(2 * config.rows),
        x.mask() if config.problem.skip else None,
        dq,
        x.activation(True) if keys else None,
        x.activation(True) if keys else None,
        x.starts(),
        x.starts(),
        *(cutlass.Float32(1.0),) * 2,
        *(cutlass.Int32(1),) * 2,
    )


def sums_arguments(config: BackwardConfig, with_dlse: bool) -> tuple:
    """Returns stand-ins for the arguments of `RowSums`.

    They are out, dout, lse, dlse, sums, accumulators of dq, cu_seqlens_q, number of tiles and of sequences.
    """
    x = _Fakes(config.problem)
    return (
        x.activation(False),
        x.activation(False),
        x.per_row(),
        x.per_row() if with_dlse else None,
        x.per_tile(2 * config.rows),
        x.per_tile(config.rows * config.width) if config.role == "both" else None,
        x.starts(),
        *(cutlass.Int32(1),) * 2,
    )


def gather_arguments(config: BackwardConfig) -> tuple:
    """Returns stand-ins for the arguments of `GatherDq`.

    They are accumulators, dq, cu_seqlens_q, scale, number of tiles and of sequences.
    """
    x = _Fakes(config.problem)
    return (
        x.per_tile(config.rows * config.width),
        x.activation(False),
        x.starts(),
        cutlass.Float32(1.0),
        *(cutlass.Int32(1),) * 2,
    )
