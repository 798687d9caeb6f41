"""Per-token log decays: summed over chunks by a kernel in front, loaded by a warp of the prefill kernel.

A warp of that kernel that read g itself would fetch 32 bytes for every 4 it wants, [B, T, HV] being what it is. That is
slower where the traffic between L2 and the multiprocessors binds; docs/lightning-prefill.md says more.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import cpasync

from .common import F32, GATE_SLOTS, I32, LOG2_E, SLOTS, Layout, floored
from .config import CHUNK

WARPS, HEADS = 16, 8  # per CTA; neighbouring heads per warp
RUN = CHUNK * HEADS // 32  # tokens of a thread


class GateSums:
    """[B, T, HV] -> [HV, chunks, 2 * 64]: log2 decays summed up to and with each token, and behind it, in its chunk.

    A difference of sums up to tokens would do for the second, but for its rounding: after a gate that forgets
    everything, what matters are small sums behind, and the sums up to them are large.

    Chunks of dense batches are numbered row by row. Chunk c of packed sequence n, which starts at token a, has the
    number a // 64 + n + c: no two chunks share one, and no host has to know the lengths.
    """

    def __init__(self, decay: bool, packed: bool):
        self.decay, self.packed = decay, packed

    @cute.jit
    def __call__(
        self,
        g: cute.Tensor,
        head_decay: cute.Tensor,
        cu_seqlens: cute.Tensor,
        sums: cute.Tensor,
        decay_factor: cutlass.Float32,
        stream,
    ):
        """g [B, T, HV], natural log; head_decay [HV] or None, times decay_factor in log2; cu_seqlens [N + 1] or None;
        sums fp32 [HV, chunks, 2 * 64], written where a chunk has tokens. Past the end of a sequence nothing is added.
        """
        warps = sums.shape[1] * cute.ceil_div(sums.shape[0], HEADS)
        self.kernel(g, head_decay, cu_seqlens, sums, decay_factor).launch(
            grid=(cute.ceil_div(warps, WARPS), 1, 1), block=(32 * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        g: cute.Tensor,
        head_decay: cute.Tensor,
        cu_seqlens: cute.Tensor,
        sums: cute.Tensor,
        decay_factor: cutlass.Float32,
    ):
        block, _, _ = cute.arch.block_idx()
        lane, warp = cute.arch.lane_idx(), block * WARPS + cute.arch.warp_idx()
        groups = cute.ceil_div(sums.shape[0], HEADS)
        chunk, head = warp // groups, warp % groups * HEADS + lane % HEADS
        run = lane // HEADS
        batch, first, left = self.find(chunk, g.shape[1], cu_seqlens, lane)
        if (chunk < sums.shape[1]) & (left > 0):
            mine = cutlass.min(head, sums.shape[0] - 1)
            slope = F32(0.0)
            if cutlass.const_expr(self.decay):
                slope = head_decay[mine] * decay_factor
            found = cute.make_rmem_tensor(RUN, g.element_type)
            for i in cutlass.range_constexpr(
                RUN
            ):  # no branches, so that all are on their way together
                found[i] = g[batch, first + cutlass.min(run * RUN + i, left - 1), mine]
            steps = cute.make_rmem_tensor(RUN, F32)
            total = F32(0.0)
            for i in cutlass.range_constexpr(RUN):
                step = floored(found[i].to(F32) * LOG2_E + slope)
                steps[i] = step if run * RUN + i < left else F32(0.0)
                total = total + steps[i]
            before, behind = F32(0.0), F32(0.0)
            for i in cutlass.range_constexpr(32 // HEADS):
                other = cute.arch.shuffle_sync(total, i * HEADS + lane % HEADS)
                before = before + other if i < run else before
                behind = behind + other if i > run else behind
            upto, rest = cute.make_rmem_tensor(RUN, F32), cute.make_rmem_tensor(RUN, F32)
            for i in cutlass.range_constexpr(RUN):
                before = before + steps[i]
                upto[i] = before
            for i in cutlass.range_constexpr(RUN - 1, -1, -1):
                rest[i] = behind
                behind = behind + steps[i]
            if head < sums.shape[0]:
                target = cute.logical_divide(sums[head, chunk, None], cute.make_layout(RUN))
                cute.autovec_copy(upto, target[None, run])
                cute.autovec_copy(rest, target[None, CHUNK // RUN + run])
        # At the end: CTAs of the next kernel that start among these ones would run out of step with each other.
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def find(self, chunk, tokens, cu_seqlens: cute.Tensor, lane):
        """(batch, first token, tokens left in the sequence) of a chunk."""
        if cutlass.const_expr(self.packed):
            low, span = I32(0), I32(cute.size(cu_seqlens) - 1)
            while (
                span > 1
            ):  # the last sequence whose first chunk is not behind this one; 32 candidates a step
                step = cute.ceil_div(span, 32)
                candidate = low + lane * step
                before = False
                if lane * step < span:
                    before = I32(cu_seqlens[candidate]) // CHUNK + candidate <= chunk
                last = cute.arch.popc(cute.arch.vote_ballot_sync(before)) - 1
                low = low + last * step
                span = cutlass.min(step, span - last * step)
            start = I32(cu_seqlens[low])
            first = start + (chunk - start // CHUNK - low) * CHUNK
            return I32(0), first, I32(cu_seqlens[low + 1]) - first
        else:
            per_row = cute.ceil_div(tokens, CHUNK)
            first = chunk % per_row * CHUNK
            return chunk // per_row, first, tokens - first


class Gates(Layout):
    """The warp of the prefill kernel that loads these sums."""

    @cute.jit
    def run(
        self,
        items,
        gates,
        item_words: cute.Pointer,
        shared: cute.Pointer,
        sums: cute.Tensor,
        segment_tokens: cutlass.Int32,
        tokens: cutlass.Int32,
    ):
        cute.arch.griddepcontrol_wait()
        target = cute.make_tensor(shared, cute.make_layout((2 * CHUNK, GATE_SLOTS)))
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), F32)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, GATE_SLOTS)
        item = self.receive(items, item_at, item_words)
        item_at.advance()
        while item.valid != 0:
            length = item.length
            if item.row < 0:
                length = 0
            before = item.part * segment_tokens  # tokens of the sequence in other segments
            chunk = before // CHUNK + item.batch * cute.ceil_div(tokens, CHUNK)
            if cutlass.const_expr(self.problem.packed):
                chunk = before // CHUNK + (item.token - before) // CHUNK + item.sequence
            for c in cutlass.range(cute.ceil_div(length, CHUNK), unroll=1):
                gates.producer_acquire(at)
                barrier = gates.producer_get_barrier(at)
                with cute.arch.elect_one():
                    cute.copy(
                        bulk,
                        sums[item.head, chunk + c, None],
                        target[None, at.index],
                        mbar_ptr=barrier,
                    )
                at.advance()
            item = self.receive(items, item_at, item_words)
            item_at.advance()
