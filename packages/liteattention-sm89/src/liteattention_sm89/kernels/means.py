"""The kernel of the keys' means, by which 8-bit keys are centred."""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from cula_core.cute.types import DTYPES, F32

from ..config import MEANS_THREADS, Problem
from .tiles import tokens_of


class KeyMeans:
    """The mean of the keys of a head and sequence, 0 where there are none.

    One CTA per (head, sequence). A thread adds up eight columns of every `rows`-th key, and then a thread per column
    what these have: an order that depends on the length alone.
    """

    threads = MEANS_THREADS
    ahead = 8  # keys that a thread loads at a time

    def __init__(self, problem: Problem):
        self.problem = problem
        self.dtype, self.dim = DTYPES[problem.dtype], problem.head_dim
        self.lanes = next(n for n in (1, 2, 4, 8, 16, 32) if 8 * n >= self.dim)  # of a key
        self.rows = self.threads // self.lanes

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
            grid=(k.shape[2], sequences, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, k: cute.Tensor, means: cute.Tensor, starts: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        head, sequence, _ = cute.arch.block_idx()
        batch, first, length = tokens_of(sequence, starts, k)
        column, row = tidx % self.lanes * 8, tidx // self.lanes
        sums = SmemAllocator().allocate_tensor(
            F32, cute.make_layout((self.rows, self.lanes * 8), stride=(self.lanes * 8, 1)), 16
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
        cute.autovec_copy(total, cute.local_tile(sums[row, None], (8,), (column // 8,)))
        cute.arch.sync_threads()
        if tidx < self.dim:
            whole = F32(0.0)
            for other in cutlass.range(self.rows, unroll=8):
                whole = whole + sums[other, tidx]
            count = length if length > 0 else 1
            means[sequence, head, tidx] = whole / F32(count)
