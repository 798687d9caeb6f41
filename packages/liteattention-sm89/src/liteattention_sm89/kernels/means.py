"""The kernel of the keys' means, by which 8-bit keys are centred."""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from cula_core.cute.types import DTYPES, F32

from ..config import Problem
from .tiles import tokens_of


class KeyMeans:
    """The mean of the keys of a head and sequence, 0 where there are none.

    One CTA per (32 columns of a head, sequence). A thread adds up eight columns of every `rows`-th key, and then a
    thread per column what these have: an order that depends on the length alone.
    """

    threads, columns, lanes = 1024, 32, 4  # lanes: of a key
    rows = threads // lanes
    ahead = 4  # keys that a thread loads at a time

    def __init__(self, problem: Problem):
        self.problem = problem
        self.dtype, self.dim = DTYPES[problem.dtype], problem.head_dim
        self.groups = -(-self.dim // self.columns)

    @cute.jit
    def __call__(
        self,
        k: cute.Tensor,
        means: cute.Tensor,
        starts: cute.Tensor,
        sequences: cutlass.Int32,
        stream,
    ):
        """The arguments of `build.means_arguments`."""
        self.kernel(k, means, starts).launch(
            grid=(self.groups, k.shape[2], sequences), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, k: cute.Tensor, means: cute.Tensor, starts: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        group, head, sequence = cute.arch.block_idx()
        batch, first, length = tokens_of(sequence, starts, k)
        lane, row = tidx % self.lanes, tidx // self.lanes
        column = group * self.columns + lane * 8
        sums = SmemAllocator().allocate_tensor(
            F32, cute.make_layout((self.rows, self.columns), stride=(self.columns, 1)), 16
        )
        total = cute.make_rmem_tensor(8, F32)
        total.fill(0.0)
        values = cute.make_rmem_tensor(cute.make_layout((8, self.ahead)), self.dtype)
        for start in cutlass.range(0, length, self.rows * self.ahead):
            values.fill(0.0)
            for i in cutlass.range_constexpr(self.ahead):
                token = start + i * self.rows + row
                if (token < length) & (column < self.dim):
                    unit = cute.local_tile(
                        k[batch, first + token, head, None], (8,), (column // 8,)
                    )
                    cute.autovec_copy(unit, values[None, i])
            for i in cutlass.range_constexpr(self.ahead):
                for c in cutlass.range_constexpr(8):
                    total[c] = total[c] + F32(values[c, i])
        cute.autovec_copy(total, cute.local_tile(sums[row, None], (8,), (lane,)))
        cute.arch.sync_threads()
        own = group * self.columns + tidx
        if (tidx < self.columns) & (own < self.dim):
            whole = F32(0.0)
            for other in cutlass.range(self.rows, unroll=8):
                whole = whole + sums[other, tidx]
            count = length if length > 0 else 1
            means[sequence, head, own] = whole / F32(count)
