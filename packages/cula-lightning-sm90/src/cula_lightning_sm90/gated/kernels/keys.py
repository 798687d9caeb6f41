"""Keys of bf16 become fp16 in shared memory, before products read them."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline

from cula_core.cute.memory import view
from cula_core.cute.widen import widened
from cula_core.cute.work import SLOTS, receive

from ..config import CHUNK, TABLES, RecurrenceConfig
from .items import Item
from .layout import SCALES, WIDE

CONVERTERS = 4  # warps
OWN = 8  # tokens of a lane


class Keys:
    """Keys of a stage, which are multiplied by a power of two each where they are normalised (`Tokens`)."""

    def __init__(self, config: RecurrenceConfig, stages):
        self.config, self.stages = config, stages
        self.dtype, self.operand = stages.dtype, stages.operand

    @cute.jit
    def convert(self, ring, prepared: cute.Pointer, ready: cute.Pointer, items, memory, part):
        """Converts a part of the keys of every stage; by one of the warps.

        Keys past the end of a sequence become zeros. A warp has half of the channels of half of the tokens, and a lane
        8 channels of each of 8 neighbouring tokens.
        """
        lane = cute.arch.lane_idx()
        half, tokens = part % 2, part // 2 * (CHUNK // 2) + lane // 8 * OWN
        keys = memory.stages + cute.assume(
            half * (WIDE // 2) + (tokens * 8 + lane % 8) * 8, divby=8
        )
        scales = cute.recast_ptr(memory.tables.align(16) + SCALES, dtype=cutlass.BFloat16)
        given = cute.make_rmem_tensor(8, self.dtype)
        found = cute.make_rmem_tensor(8, self.operand)
        scale = cute.make_rmem_tensor(4, cutlass.BFloat16)
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages.count)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        item = receive(Item, items, item_at, memory.items)
        item_at.advance()
        while item.valid != 0:
            for c in cutlass.range(item.chunks, unroll=1):
                ring.consumer_wait(at)
                if cutlass.const_expr(self.config.l2norm):
                    cute.arch.mbarrier_wait(prepared + at.index, at.phase)
                for four in cutlass.range(OWN // 4, unroll=1):
                    if cutlass.const_expr(self.config.l2norm):
                        at_scale = at.index * (2 * TABLES) + tokens + 4 * four
                        cute.autovec_copy(view(scales, at_scale, 4), scale)
                        powers = widened(scale)
                    for i in cutlass.range_constexpr(4):
                        place = view(keys, at.index * self.stages.size + 256 * four + 64 * i, 8)
                        source = cute.recast_ptr(place.iterator, dtype=self.dtype)
                        cute.autovec_copy(cute.make_tensor(source, place.layout), given)
                        wide = widened(given)
                        if cutlass.const_expr(self.config.l2norm):
                            for j in cutlass.range_constexpr(8):
                                wide[j] = wide[j] * powers[i]
                        found.store(wide.load().to(self.operand))
                        cute.autovec_copy(found, place)
                if cutlass.const_expr(self.config.packed):
                    left = item.length - c * CHUNK
                    if left < CHUNK:
                        found.fill(0.0)
                        for i in cutlass.range(cutlass.max(left - tokens, 0), OWN, unroll=1):
                            cute.autovec_copy(
                                found, view(keys, at.index * self.stages.size + 64 * i, 8)
                            )
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(ready + at.index)
                at.advance()
            item = receive(Item, items, item_at, memory.items)
            item_at.advance()
