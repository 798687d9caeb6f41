"""What the kernels of the backward pass share: the mma, and where accumulators go."""

import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from cula_core.cute.types import DTYPES, F32

from ..config import BLOCK_M, BackwardConfig
from .tiles import Tiles


class BackwardTiles(Tiles):
    """The mma of the backward kernels: two warps share the rows, the others the columns of every product."""

    def __init__(self, config: BackwardConfig):
        self.config, self.problem = config, config.problem
        dtype, dim = DTYPES[self.problem.dtype], self.problem.head_dim
        super().__init__(dtype, dim, config.width, 32 * config.warps)
        self.m, self.n = config.rows, config.keys
        # Columns of dq at a time: what registers leave room for beside dk and dv.
        self.chunk = {192: 64, 256: 32}.get(self.width, self.width)

    def chunk_shape(self, thr_mma):
        """Returns the shape of a thread's accumulators of one chunk of dq."""
        return thr_mma.partition_shape_C((self.m, self.chunk))

    def tiled_mma(self):
        """Returns the mma of all warps."""
        return cute.make_tiled_mma(
            warp.MmaF16BF16Op(self.dtype, F32, (16, 8, 16)),
            cute.make_layout((2, self.config.warps // 2, 1)),
            permutation_mnk=(32, 8 * self.config.warps, 16),
        )

    def store_rounded(self, acc, thr_mma, shared):
        """Stores rounded accumulators in a tile in shared memory."""
        rounded = cute.make_rmem_tensor(acc.shape, self.dtype)
        rounded.store(acc.load().to(self.dtype))
        cute.autovec_copy(rounded, thr_mma.partition_C(shared))

    def slot(self, first_row, sequence):
        """Returns the first tile of rows of a sequence among those of all; each begins at a multiple of 128 rows."""
        return (first_row // BLOCK_M + sequence) * (BLOCK_M // self.m)
