"""Softmax attention over listed key tiles on Hopper: TMA loads, wgmma, one stream of steps per CTA.

A CTA draws query tiles of 128 rows one after the other, and its consumers never see where one ends: they get steps of
128 keys, FlashAttention-3's way (arXiv 2407.08608), each with flags. With a list only listed key tiles make steps, and
the call finds out which of them the next one needs (LiteAttention, arXiv 2511.11062).
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cula_core.cute.memory import swizzled
from cula_core.cute.types import DTYPES, I32

from ..config import MAX_WORDS, REGISTERS, STAGES, STEP, THREADS, UNIT, ForwardConfig
from .consumers import Consumers
from .loader import Loader
from .packed import tokens
from .shared import Shared, barrier_counts


class LiteForward:
    """Persistent CTAs of three warpgroups.

    | thread role | warps | work |
    |---|---|---|
    | load | 0 | turns lists into steps, loads q, k and v |
    | write | 1 | makes the lists for the next call from the votes |
    | store | 2 | stores outputs |
    | look ahead | 3 | draws query tiles, reads their lists |
    | rows w | 4 + 4w ... | scores, votes and outputs of 64 rows |

    | shared memory at D=128 | shape | bytes |
    |---|---|---|
    | q, later o of the same rows | [64, D], two halves, two slots | 65,536 |
    | k, v | [128, D], two stages each | 65,536 each |
    | votes of each warp, bit by visit | int32 [2, 8, 128] | 8,192 |
    """

    def __init__(self, config: ForwardConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.loader, self.consumers = Loader(config), Consumers(config)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        read: cute.Tensor,
        must_do: cute.Tensor,
        write: cute.Tensor,
        starts_q: cute.Tensor,
        starts_k: cute.Tensor,
        direction_at: cute.Tensor,
        work: cute.Tensor,
        scale_log2: cutlass.Float32,
        margin: cutlass.Float32,
        direction: cutlass.Int32,
        longest: cutlass.Int32 | None,
        ctas: cutlass.Int32,
        stream,
    ):
        """The arguments of `build.forward_arguments`, which describes them; what the problem does not have is None."""
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        box = swizzled((UNIT, UNIT), "k", self.dtype), (UNIT, UNIT)
        packed = self.config.packed is not None
        tma_q, mQ = cpasync.make_tiled_tma_atom(load, tokens(q, packed), *box)
        tma_k, mK = cpasync.make_tiled_tma_atom(load, tokens(k, packed), *box)
        tma_v, mV = cpasync.make_tiled_tma_atom(load, tokens(v, packed), *box)
        tma_o, mO = cpasync.make_tiled_tma_atom(store, tokens(out, packed), *box)
        self.kernel(
            tma_q, mQ, tma_k, mK, tma_v, mV, tma_o, mO, out, lse, read, must_do, write, starts_q, starts_k,
            direction_at, work, scale_log2, margin, direction, longest,
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        tma_o: cute.CopyAtom,
        mO: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        read: cute.Tensor,
        must_do: cute.Tensor,
        write: cute.Tensor,
        starts_q: cute.Tensor,
        starts_k: cute.Tensor,
        direction_at: cute.Tensor,
        work: cute.Tensor,
        scale_log2: cutlass.Float32,
        margin: cutlass.Float32,
        direction: cutlass.Int32,
        longest: cutlass.Int32 | None,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        counts = barrier_counts()
        barriers = smem.allocate_array(cutlass.Int64, len(counts))
        whole = STAGES * STEP * self.config.width
        q_base, k_base, v_base = (
            smem.allocate_array(self.dtype, whole, byte_alignment=1024) for _ in range(3)
        )
        records = smem.allocate_array(I32, 4 * STAGES, byte_alignment=16)
        places = smem.allocate_array(I32, self.loader.place_words * STAGES, byte_alignment=16)
        waiting = smem.allocate_array(I32, self.loader.waiting_words, byte_alignment=16)
        votes = None
        if cutlass.const_expr(self.config.skip):
            votes = smem.allocate_array(I32, STAGES * 8 * MAX_WORDS, byte_alignment=16)
        if tidx == 0:
            for i in cutlass.range_constexpr(len(counts)):
                cute.arch.mbarrier_init(barriers + i, counts[i])
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        shared = Shared(barriers, q_base, k_base, v_base, records, places, waiting, votes)
        if cutlass.const_expr(self.config.on_device):
            direction = direction_at[0]

        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp_idx == 0:
                self.loader.load(shared, tma_q, mQ, tma_k, mK, tma_v, mV, direction)
            if warp_idx == 2:
                self.loader.store(shared, tma_o, mO, out.shape[1])
            if warp_idx == 3:
                self.loader.look_ahead(
                    shared, mQ, mK, out, lse, read, write, work, direction, starts_q, starts_k, longest
                )  # fmt: skip
            if cutlass.const_expr(self.config.skip):
                if warp_idx == 1:
                    self.loader.write(shared, read, must_do, write, direction, mQ, mK)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            self.consumers.attend(
                shared, lse, out.shape[1], mK.shape[0], scale_log2, margin, warp_idx // 4 - 1, tidx % 128
            )  # fmt: skip
