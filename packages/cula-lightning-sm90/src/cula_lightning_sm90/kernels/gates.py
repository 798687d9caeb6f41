"""The warp that reads per-token log decays and sums them up over chunks, some chunks ahead of the other warps."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cula_core.constants import LOG2_E
from cula_core.cute.types import DTYPES, F32
from cula_core.cute.work import SLOTS, receive

from ..config import CHUNK, Config
from .chunks import sums_of_decays
from .layout import GATE_SLOTS, PAIR_SLOTS, Item, Layout, floored


class Gates(Layout):
    """Sums of log2 decays up to and with each token of a chunk, and behind it. A lane has two neighbouring tokens.

    A difference of sums up to tokens would do for the second, but for its rounding: after a gate that forgets
    everything, what matters are small sums behind, and the sums up to them are large.
    """

    def __init__(self, config: Config):
        super().__init__(config)
        self.together = 4 // self.tiles  # chunks read together: registers hold them twice

    @cute.jit
    def run(
        self,
        items,
        gates,
        pair,
        item_words: cute.Pointer,
        sums: cute.Pointer,
        pair_base: cute.Pointer,
        tma_g,
        g: cute.Tensor,
        head_decay: cute.Tensor,
        decay_factor: cutlass.Float32,
    ):
        """Sums up the gates of all items. g [B, T, HV] is read by single elements; what pairs of CTAs need is None."""
        lane = cute.arch.lane_idx()
        shape = (2, self.together)
        near = cute.make_rmem_tensor(shape, g.element_type)
        far = cute.make_rmem_tensor(shape, g.element_type)
        steps = cute.make_rmem_tensor(2, F32)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, GATE_SLOTS)
        item = receive(Item, items, item_at, item_words)
        item_at.advance()
        while item.valid != 0:
            length = item.length
            if item.row < 0:
                length = 0
            slope = self.slope(head_decay, item.head, decay_factor)
            last = (cute.ceil_div(length, CHUNK) - 1) * CHUNK  # where the last chunk begins
            stride = self.together * CHUNK
            own = cute.domain_offset((item.token + 2 * lane,), g[item.batch, None, item.head])
            left = length - 2 * lane  # tokens from this lane's first on
            self.read(far, own, 0, last, left)
            for start in cutlass.range(0, length, stride, unroll=1):
                near.store(far.load())
                for j in cutlass.range_constexpr(self.together):
                    if cutlass.const_expr(j == 1):  # after the first, for which everybody waits
                        self.read(far, own, start + stride, last, left)
                    if start + j * CHUNK < length:
                        first = self.first_of(start, j, last)
                        for i in cutlass.range_constexpr(2):
                            step = floored(near[i, j].to(F32) * LOG2_E + slope)
                            steps[i] = step if first + i < left else F32(0.0)
                        self.publish(gates, at, sums, steps, lane)
                        at.advance()
            item = receive(Item, items, item_at, item_words)
            item_at.advance()

    @cute.jit
    def read(self, found: cute.Tensor, own: cute.Tensor, start, last, left):
        """Loads gates of this lane's tokens of the chunks that come behind `start` tokens of others.

        What lies past either end is undefined.
        """
        for j in cutlass.range_constexpr(self.together):
            for i in cutlass.range_constexpr(2):
                at = self.first_of(start, j, last) + i
                there = at < left
                if cutlass.const_expr(self.reverse):
                    there = there & (at >= 0)
                if there:
                    found[i, j] = own[at]

    def first_of(self, start, j, last):
        """Returns where chunk j of those behind `start` tokens begins; last: where the last one of the item does."""
        return last - (start + j * CHUNK) if self.reverse else start + j * CHUNK

    @cute.jit
    def publish(self, gates, at, sums: cute.Pointer, steps: cute.Tensor, lane):
        """Writes the sums of a chunk, from the log2 decays of every lane's two tokens, to a slot for the weights."""
        found = cute.make_rmem_tensor((2, 2), F32)
        sums_of_decays(steps, found, lane)
        by_lane = cute.make_tensor(sums, cute.make_layout((2, 32, 2, GATE_SLOTS)))
        gates.producer_acquire(at)
        cute.autovec_copy(found, by_lane[None, lane, None, at.index])
        gates.producer_commit(at)


class PairedGates(Gates):
    """The same sums where two CTAs of a cluster walk through the same chunks of the same heads, or of neighbours.

    g is [B, T, HV]: a warp that reads one head fetches 32 bytes for every 4 that it needs, which slows down a kernel
    that is limited by the traffic between L2 and the multiprocessors. So each CTA loads 32 of the 64 tokens, 16 bytes
    of heads wide, and TMA writes them to the shared memory of both.
    """

    def __init__(self, config: Config):
        super().__init__(config)
        self.heads = 128 // DTYPES[self.problem.gate_dtype].width  # in 16 bytes

    def make_tma(self, g):
        """Returns the copy of [64 tokens, heads] to both CTAs, and its source: g as (T, HV, B)."""
        by_head = cute.make_tensor(g.iterator, cute.select(g.layout, mode=[1, 2, 0]))
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SMulticastOp(),
            by_head,
            cute.select(self.slots_of_pairs(), mode=[0, 1]),
            (CHUNK, self.heads),
            num_multicast=2,
        )

    def slots_of_pairs(self):
        return cute.make_ordered_layout((CHUNK, self.heads, PAIR_SLOTS), order=(1, 0, 2))

    def allocate(self, smem: SmemAllocator):
        size = cute.size(self.slots_of_pairs())
        return smem.allocate_array(DTYPES[self.problem.gate_dtype], size, byte_alignment=128)

    def make_pipeline(self, barriers):
        """Returns the pipeline of pairs: slots are full when both halves are there, free when both CTAs read them."""
        thread = pipeline.Agent.Thread
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=PAIR_SLOTS,
            producer_group=pipeline.CooperativeGroup(thread),
            consumer_group=pipeline.CooperativeGroup(thread, 2),
            tx_count=16 * CHUNK,
            cta_layout_vmnk=cute.make_layout((1, 2, 1, 1)),
            defer_sync=True,
        )

    @cute.jit
    def run(
        self,
        items,
        gates,
        pair,
        item_words: cute.Pointer,
        sums: cute.Pointer,
        pair_base: cute.Pointer,
        tma_g,
        g: cute.Tensor,
        head_decay: cute.Tensor,
        decay_factor: cutlass.Float32,
    ):
        """Sums up the gates of all items, loaded by pairs of CTAs. g is (T, HV, B)."""
        lane = cute.arch.lane_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        shared = cute.make_tensor(pair_base, self.slots_of_pairs())
        steps = cute.make_rmem_tensor(2, F32)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, GATE_SLOTS)
        put_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, PAIR_SLOTS)
        take_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, PAIR_SLOTS)
        item = receive(Item, items, item_at, item_words)
        item_at.advance()
        while item.valid != 0:
            slope = self.slope(head_decay, item.head, decay_factor)
            chunks = cute.ceil_div(item.length, CHUNK)
            if item.row < 0:
                chunks = 0
            rows = cute.domain_offset((item.token, 0), g[None, None, item.batch])
            tiles = cute.local_tile(rows, (CHUNK, self.heads), (None, item.head // self.heads))
            target, source = cpasync.tma_partition(
                tma_g,
                rank,
                cute.make_layout(2),
                cute.group_modes(shared, 0, 2),
                cute.group_modes(tiles, 0, 2),
            )
            for c in cutlass.range(chunks + PAIR_SLOTS - 1, unroll=1):
                if c < chunks:
                    pair.producer_acquire(put_at)
                    cute.copy(
                        tma_g,
                        source[None, self.place(c, chunks)],
                        target[None, put_at.index],
                        tma_bar_ptr=pair.producer_get_barrier(put_at),
                        mcast_mask=cutlass.Int16(3),
                    )
                    put_at.advance()
                done = c - (PAIR_SLOTS - 1)
                if (done >= 0) & (done < chunks):
                    pair.consumer_wait(take_at)
                    for i in cutlass.range_constexpr(2):
                        step = shared[2 * lane + i, item.head % self.heads, take_at.index].to(F32)
                        step = floored(step * LOG2_E + slope)
                        at_token = self.place(done, chunks) * CHUNK + 2 * lane + i
                        steps[i] = step if at_token < item.length else F32(0.0)
                    cute.arch.sync_warp()
                    pair.consumer_release(take_at)
                    take_at.advance()
                    self.publish(gates, at, sums, steps, lane)
                    at.advance()
            item = receive(Item, items, item_at, item_words)
            item_at.advance()
        pair.producer_tail(put_at)  # nobody leaves while the other may send to it
