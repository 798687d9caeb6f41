"""What a thread of the chunk-parallel kernel knows of its two tokens: q, k, beta, norms and decays."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from ...cute.functions import exp2, sigmoid
from ...cute.memory import copy_async, view
from ...cute.types import F32, LOG2_E
from ..config import CHUNK
from .fragments import OF_WARP, ROUNDS, UNIT, fetch_first, place_in_line, rows_by_rows, widen

NORM_EPS = 1e-6
# A token's log2 decay is held at or above this where nothing bounds it: 2^-150 is zero in fp32.
FLOOR = -150.0


class Tokens:
    """Reads and transforms the inputs; part of `KdaPrepare`."""

    @cute.jit
    def load(self, x: cute.Tensor, units: cute.Tensor, rows, channel, first, lane):
        """Asks for 16 bytes of each of the rows from this channel on, for the lines [channel, place] of the warp."""
        for j in cutlass.range_constexpr(ROUNDS):
            source = view(x[rows[j], None].iterator, channel, 128 // x.element_type.width)
            copy_async(source, units[None, first + place_in_line(lane, j)])

    @cute.jit
    def strengths(self, mBeta: cute.Tensor, betas: cute.Tensor, token, left, tidx):
        if tidx < CHUNK:
            strength = F32(0.0)
            if tidx < left:
                strength = mBeta[token + tidx].to(F32)
                if cutlass.const_expr(self.config.beta_sigmoid):
                    strength = sigmoid(strength)
                if cutlass.const_expr(self.config.neg_eigval):
                    strength = strength * 2.0
            betas[tidx] = strength

    @cute.jit
    def normalize(
        self,
        sRaw: cute.Tensor,
        norms: cute.Tensor,
        norm: cute.Tensor,
        scale,
        inside,
        row,
        half,
        lane,
        tidx,
    ):
        """Factors of q and k for the thread's tokens: squares are the diagonal of the product of rows with rows."""
        norm.fill(1.0)
        if cutlass.const_expr(self.config.l2norm):
            mma = cute.make_mma_atom(warp.MmaF16BF16Op(self.dtype, F32, (16, 8, 16)))
            cute.arch.sync_warp()
            a = cute.make_rmem_tensor((2, 2, 2), self.dtype)
            b = cute.make_rmem_tensor((2, 2, 2), self.dtype)
            for which in cutlass.range_constexpr(2):
                acc = cute.make_rmem_tensor((4, 2), F32)
                acc.fill(0.0)
                units = sRaw[None, None, which]
                lines = (tidx - lane) // 32 * OF_WARP
                for m in cutlass.range_constexpr(2):
                    for step in cutlass.range_constexpr(2):
                        fetch_first(units, lines, m, step, lane, a)
                        # The same registers as a second operand, in its order.
                        for i in cutlass.range_constexpr(2):
                            for r in cutlass.range_constexpr(2):
                                b[None, i, r].store(a[None, r, i].load())
                        rows_by_rows(mma, acc, a, b)
                # Lane 4 n + n // 2 has the squares of tokens 2 n and 2 n + 1.
                if lane % 4 == lane // 8:
                    odd = lane // 4 % 2 == 1
                    norms[half, row, which] = acc[1, 0] if odd else acc[0, 0]
                    norms[half, row + 1, which] = acc[3, 1] if odd else acc[2, 1]
        cute.arch.sync_threads()
        if cutlass.const_expr(self.config.l2norm):
            squares = cute.make_rmem_tensor((2, 2), F32)
            for which in cutlass.range_constexpr(2):
                pair = view(norms.iterator, 2 * row + 2 * CHUNK * which, 4)
                cute.autovec_copy(pair, cute.make_tensor(squares.iterator, cute.make_layout(4)))
                for r in cutlass.range_constexpr(2):
                    total = squares[0, r] + squares[1, r]
                    norm[r, which] = cute.math.rsqrt(total + NORM_EPS, fastmath=True)
        for r in cutlass.range_constexpr(2):
            norm[r, 0] = norm[r, 0] * scale * inside[r]
            norm[r, 1] = norm[r, 1] * inside[r]

    @cute.jit
    def decays(self, gates, g: cute.Tensor, first: cutlass.Constexpr):
        """Running sums of log2 decays over the 16 tokens of the sub-block, for channels `first` and
        `first` + 1 of g.

        gates: raw gates [channel, token] and dt_bias of a unit, -exp(A_log) in log2 units, lower bound, 1 or for rows
        past the end 0, whether lanes below have earlier tokens."""
        raw, bias, speed, lower_bound, inside, earlier = gates
        if cutlass.const_expr(self.config.gate == "log"):
            # Or the compiler starts on all pairs at once, and runs out of registers.
            cute.arch.sync_warp()
        shift = cute.make_rmem_tensor(2, F32)
        if cutlass.const_expr(self.config.gate != "log"):
            cute.autovec_copy(view(bias.iterator, first, 2), shift)
        x = cute.make_rmem_tensor((2, 2), F32)
        for r in cutlass.range_constexpr(2):
            widen(
                cute.make_tensor(raw.iterator + first + UNIT * r, cute.make_layout(2)),
                x[None, r],
            )
        for i in cutlass.range_constexpr(2):
            steps = cute.make_rmem_tensor(2, F32)
            for r in cutlass.range_constexpr(2):
                if cutlass.const_expr(self.config.gate == "safe"):
                    y = x[i, r] * speed + shift[i] * speed
                    step = (lower_bound * LOG2_E * inside[r]) * cute.arch.rcp_approx(1.0 + exp2(y))
                elif cutlass.const_expr(self.config.gate == "softplus"):
                    y = (x[i, r] + shift[i]) * LOG2_E
                    grown = cute.math.log2(1.0 + exp2(-cute.math.absf(y)), fastmath=True)
                    rest = y if y > 0.0 else F32(0.0)
                    step = (speed / LOG2_E * inside[r]) * (grown + rest)
                else:
                    step = x[i, r] * LOG2_E if inside[r] > 0.0 else F32(0.0)
                if cutlass.const_expr(not self.config.bounded):
                    step = step if step > FLOOR else F32(FLOOR)
                steps[r] = step
            upto = steps[0] + steps[1]
            for p in cutlass.range_constexpr(3):
                before = cute.arch.shuffle_sync_up(upto, 4 << p, mask_and_clamp=0)
                upto = upto + before if earlier[p] else upto
            g[first + i, 0] = upto - steps[1]
            g[first + i, 1] = upto
