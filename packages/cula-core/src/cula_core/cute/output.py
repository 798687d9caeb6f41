"""Outputs of a warpgroup: tiles of 64 tokens and 64 columns, from registers through shared memory to global memory."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from .memory import cache_policy
from .work import SLOTS

GROUP = 128  # threads of a warpgroup
TOKENS = 64
COLUMNS = 64


class OutputTiles:
    """Two slots of shared memory per warpgroup, sent by TMA, or by ordinary stores where a chunk is not full.

    barrier: number of the first warpgroup's named barrier; the others have the next ones. group: number of the
    warpgroup, tidx: of the thread in it. turn: chunks that the warpgroup has stored before. policy: of the L2, None or
    `EVICT_FIRST`.
    """

    def __init__(self, dtype, barrier: int, policy=None):
        self.dtype, self.barrier, self.policy = dtype, barrier, policy

    @cute.jit
    def store(self, copy, o: cute.Tensor, target: cute.Tensor):
        """Rounds an accumulator and stores it to a slot."""
        rounded = cute.make_rmem_tensor(o.shape, self.dtype)
        rounded.store(o.load().to(self.dtype))
        cute.copy(copy, copy.retile(rounded), target)

    @cute.jit
    def send(self, tma, gO: cute.Tensor, sO: cute.Tensor, c, turn, group, tidx):
        """Sends a full chunk; after its barrier the other slot may be written again."""
        if tidx < 32:  # whichever thread of the warp is elected to copy
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=self.barrier + group, number_of_threads=GROUP)
        if tidx < 32:
            s, g = cpasync.tma_partition(
                tma, 0, cute.make_layout(1), cute.group_modes(sO[None, None, turn % SLOTS], 0, 2),
                cute.group_modes(gO[None, None, c], 0, 2),
            )  # fmt: skip
            cute.copy(tma, s, g, cache_policy=cache_policy(self.policy))
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def finish(
        self, tma, gO, sO, out, batch, token, length, head, column, chunks, turn, group, tidx
    ):
        """Sends chunk `chunks` - 1; a partial one by ordinary stores, its neighbours being others' tokens."""
        left = length - (chunks - 1) * TOKENS
        if left >= TOKENS:
            self.send(tma, gO, sO, chunks - 1, turn, group, tidx)
        else:
            if tidx < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=self.barrier + group, number_of_threads=GROUP)
            units, target = self.rows(out, batch, token + (chunks - 1) * TOKENS, head, column, tidx)
            source = units.partition_S(sO[None, None, turn % SLOTS])
            held = cute.make_rmem_tensor(source[None, 0, 0].shape, self.dtype)
            for i in cutlass.range_constexpr(cute.size(target, mode=[1])):
                if tidx // 8 + 16 * i < left:
                    cute.autovec_copy(source[None, i, 0], held)
                    cute.autovec_copy(held, target[None, i, 0])

    @cute.jit
    def clear(self, out, batch, token, length, head, column, tidx):
        """Writes zeros: the outputs of a skipped sequence."""
        for c in cutlass.range(cute.ceil_div(length, TOKENS), unroll=1):
            units, target = self.rows(out, batch, token + c * TOKENS, head, column, tidx)
            zeros = cute.make_rmem_tensor(target[None, 0, 0].shape, self.dtype)
            zeros.fill(0.0)
            for i in cutlass.range_constexpr(cute.size(target, mode=[1])):
                if tidx // 8 + 16 * i < length - c * TOKENS:
                    cute.autovec_copy(zeros, target[None, i, 0])

    def rows(self, out, batch, token, head, column, tidx):
        """Returns a copy by 16 bytes, and the thread's part of 64 tokens of a tile in global memory."""
        units = row_units(self.dtype, tidx)
        tokens = cute.domain_offset((token, 0), out[batch, None, head, None])
        return units, units.partition_D(cute.local_tile(tokens, (TOKENS, COLUMNS), (0, column)))


def row_units(dtype, tidx, threads=GROUP):
    """Returns a copy of [64, 64 n] elements by 16 bytes: thread t has unit t % 8 of row t // 8, and of every row that
    is `threads` / 8 further."""
    return cute.make_tiled_copy_tv(
        cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=128),
        cute.make_layout((threads // 8, 8), stride=(8, 1)),
        cute.make_layout((1, 8)),
    ).get_slice(tidx)
