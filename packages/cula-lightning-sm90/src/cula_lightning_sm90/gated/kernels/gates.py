"""Decays and write strengths of a chunk's tokens, made of g and beta by one warp."""

import cutlass
import cutlass.cute as cute

from cula_core.constants import LOG2_E
from cula_core.cute.functions import exp2, sigmoid
from cula_core.cute.types import F32

from ...kernels.chunks import sums_of_decays
from ..config import CHUNK, PrepareConfig

# One token's log2 decay is held at or above this: 2^-150 is zero in fp32, and sums over a chunk stay exact enough.
FLOOR = -150.0


class Gates:
    """Log2 decays summed up to and with each token of a chunk, and behind it, and write strengths.

    A lane has two neighbouring tokens. A difference of sums up to tokens would do for the sums behind, but for its
    rounding: after a gate that forgets everything, what matters are small sums behind, and the sums up to them are
    large. Tokens past the end of a sequence neither decay nor write.
    """

    def __init__(self, config: PrepareConfig):
        self.config = config

    @cute.jit
    def read(self, x, batch, token, head, left, lane):
        """Returns this lane's two tokens of g or beta; what lies past the end is undefined. Without x: None."""
        found = None
        if cutlass.const_expr(x is not None):
            found = cute.make_rmem_tensor(2, x.element_type)
            for i in cutlass.range_constexpr(2):
                if 2 * lane + i < left:
                    found[i] = x[batch, token + 2 * lane + i, head]
        return found

    @cute.jit
    def write(
        self,
        g,
        beta,
        rates: cute.Tensor,
        biases: cute.Tensor,
        softplus_beta: cutlass.Float32,
        threshold: cutlass.Float32,
        head: cutlass.Int32,
        left: cutlass.Int32,
        target: cute.Pointer,
        lane: cutlass.Int32,
    ):
        """Writes the three tables of a chunk, of which `read` has returned g and beta, to shared memory.

        rates, biases [HS]: of raw gates, else None.
        """
        speed, bias, inverse_beta = F32(1.0), F32(0.0), F32(1.0)
        if cutlass.const_expr(self.config.gate == "softplus"):
            speed = -exp2(rates[head] * LOG2_E) * LOG2_E
            inverse_beta = 1.0 / softplus_beta
            if cutlass.const_expr(self.config.bias):
                bias = biases[head]
        steps = cute.make_rmem_tensor(2, F32)
        found = cute.make_rmem_tensor((2, 3), F32)
        for i in cutlass.range_constexpr(2):
            inside = 2 * lane + i < left
            step, strength = F32(0.0), F32(1.0)
            if cutlass.const_expr(g is not None):
                step = self.step(
                    g[i].to(F32), speed, bias, softplus_beta, inverse_beta, threshold
                )  # fmt: skip
            if cutlass.const_expr(beta is not None):
                strength = self.strength(beta[i].to(F32))
            steps[i] = step if inside else F32(0.0)
            found[i, 2] = strength if inside else F32(0.0)
        sums_of_decays(steps, found, lane)
        by_lane = cute.make_tensor(target, cute.make_layout((2, 32, 3), stride=(1, 2, CHUNK)))
        cute.autovec_copy(found, by_lane[None, lane, None])

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
