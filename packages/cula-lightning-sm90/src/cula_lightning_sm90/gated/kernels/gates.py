"""The warp that makes decays and write strengths of g and beta, some chunks ahead of the other warps."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline

from cula_core.cute.functions import exp2, sigmoid
from cula_core.cute.types import F32, LOG2_E
from cula_core.cute.work import SLOTS, receive

from ...kernels.chunks import sums_of_decays
from ..config import CHUNK
from .layout import GATE_SLOTS, GATES, Item, Layout, Memory, Pipes

# One token's log2 decay is held at or above this: 2^-150 is zero in fp32, and sums over a chunk stay exact enough.
FLOOR = -150.0
TOGETHER = 2  # chunks read together: registers hold them twice


class Gates(Layout):
    """Log2 decays summed up to and with each token of a chunk, and behind it, and write strengths.

    A lane has two neighbouring tokens. A difference of sums up to tokens would do for the sums behind, but for its
    rounding: after a gate that forgets everything, what matters are small sums behind, and the sums up to them are
    large. Tokens past the end of a sequence neither decay nor write.
    """

    @cute.jit
    def run(
        self,
        pipes: Pipes,
        memory: Memory,
        g: cute.Tensor,
        beta: cute.Tensor,
        rates: cute.Tensor,
        biases: cute.Tensor,
        softplus_beta: cutlass.Float32,
        inverse_beta: cutlass.Float32,
        threshold: cutlass.Float32,
    ):
        """Fills the slots of gates for all items. g, beta [B, T, HS], rates, biases [HS]; what there is none of is
        None."""
        lane = cute.arch.lane_idx()
        shape = (2, TOGETHER)
        near_g, far_g, near_b, far_b = None, None, None, None
        if cutlass.const_expr(g is not None):
            near_g = cute.make_rmem_tensor(shape, g.element_type)
            far_g = cute.make_rmem_tensor(shape, g.element_type)
        if cutlass.const_expr(beta is not None):
            near_b = cute.make_rmem_tensor(shape, beta.element_type)
            far_b = cute.make_rmem_tensor(shape, beta.element_type)
        steps, strengths = cute.make_rmem_tensor(2, F32), cute.make_rmem_tensor(2, F32)
        item_at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, SLOTS)
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, GATE_SLOTS)
        item = receive(Item, pipes.items, item_at, memory.items)
        item_at.advance()
        while item.valid != 0:
            length = cutlass.select_(item.row < 0, cutlass.Int32(0), item.length)
            speed, bias = F32(1.0), F32(0.0)
            if cutlass.const_expr(self.config.gate == "softplus"):
                speed = -exp2(rates[item.head] * LOG2_E) * LOG2_E
                if cutlass.const_expr(self.config.bias):
                    bias = biases[item.head]
            stride = TOGETHER * CHUNK
            self.read(far_g, g, item, 0, length, lane)
            self.read(far_b, beta, item, 0, length, lane)
            for start in cutlass.range(0, length, stride, unroll=1):
                self.shift(near_g, far_g)
                self.shift(near_b, far_b)
                self.read(far_g, g, item, start + stride, length, lane)
                self.read(far_b, beta, item, start + stride, length, lane)
                for j in cutlass.range_constexpr(TOGETHER):
                    first = start + j * CHUNK
                    if first < length:
                        for i in cutlass.range_constexpr(2):
                            inside = first + 2 * lane + i < length
                            step, strength = F32(0.0), F32(1.0)
                            if cutlass.const_expr(g is not None):
                                step = self.step(
                                    near_g[i, j].to(F32), speed, bias, softplus_beta, inverse_beta, threshold
                                )  # fmt: skip
                            if cutlass.const_expr(beta is not None):
                                strength = self.strength(near_b[i, j].to(F32))
                            steps[i] = step if inside else F32(0.0)
                            strengths[i] = strength if inside else F32(0.0)
                        self.publish(pipes.gates, at, memory.gates, steps, strengths, lane)
                        at.advance()
            item = receive(Item, pipes.items, item_at, memory.items)
            item_at.advance()

    @cute.jit
    def shift(self, near, far):
        """Takes what was read ahead."""
        if cutlass.const_expr(near is not None):
            near.store(far.load())

    @cute.jit
    def read(self, found, x, item: Item, first, length, lane):
        """Loads this lane's tokens of the chunks from `first` on; what lies past the end is undefined."""
        if cutlass.const_expr(x is not None):
            for j in cutlass.range_constexpr(TOGETHER):
                for i in cutlass.range_constexpr(2):
                    at = first + j * CHUNK + 2 * lane + i
                    if at < length:
                        found[i, j] = x[item.batch, item.token + at, item.head]

    @cute.jit
    def step(self, x, speed, bias, softplus_beta, inverse_beta, threshold):
        """Returns the log2 decay of a token from its gate."""
        if cutlass.const_expr(self.config.gate == "softplus"):
            x = x + bias
            y = x * softplus_beta
            # The logarithm is not approximate: a rate multiplies its error.
            soft = cute.math.log(1.0 + exp2(y * LOG2_E)) * inverse_beta
            step = speed * cutlass.select_(y > threshold, x, soft)
        else:
            step = x * LOG2_E
        return cutlass.select_(step < FLOOR, F32(FLOOR), step)

    @cute.jit
    def strength(self, x):
        """Returns how strongly a token writes, from its beta."""
        if cutlass.const_expr(self.config.strength != "given"):
            x = sigmoid(x)
            if cutlass.const_expr(self.config.strength == "doubled logits"):
                x = 2.0 * x
        return x

    @cute.jit
    def publish(self, gates, at, base: cute.Pointer, steps, strengths, lane):
        """Writes a chunk's sums and strengths to a slot, from those of every lane's two tokens."""
        found = cute.make_rmem_tensor((2, 3), F32)
        sums_of_decays(steps, found, lane)
        found[0, 2], found[1, 2] = strengths[0], strengths[1]
        layout = cute.make_layout((2, 32, 3, GATE_SLOTS), stride=(1, 2, CHUNK, GATES))
        by_lane = cute.make_tensor(base, layout)
        gates.producer_acquire(at)
        cute.autovec_copy(found, by_lane[None, lane, None, at.index])
        gates.producer_commit(at)
