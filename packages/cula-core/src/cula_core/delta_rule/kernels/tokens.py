"""The inputs of the chunk-parallel kernel: q, k, beta, norms and decays of the two tokens that a thread has."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from ...constants import LOG2_E
from ...cute.functions import exp2, sigmoid
from ...cute.memory import copy_async, view
from ...cute.types import DTYPES, F32
from ..config import CHUNK, HEAD_DIM, SUB, PrepareConfig
from .fragments import (
    LINE,
    OF_WARP,
    ROUNDS,
    UNIT,
    fetch_first,
    place_in_line,
    place_of,
    place_of_unit,
    rows_by_rows,
    swizzle,
    unit_of,
    widen,
)
from .inverse import sync_team

NORM_EPS = 1e-6
# A token's log2 decay is held at or above this where nothing bounds it: 2^-150 is zero in fp32.
FLOOR = -150.0
# Roots of strengths are those of at least this: gradients are divided by them, and what has them as a factor is rounded
# to fp16.
LEAST_STRENGTH = 2.0**-18


class Gate(NamedTuple):
    """What the decays of a unit of channels are computed from.

    raw: gates [channel, token] of the thread's unit and two tokens. bias: dt_bias of the unit. speed: -exp(A_log) in
    log2 units. inside: 1 for each of the two tokens, 0 for rows past the end. earlier: whether the lanes 4, 8 and 16
    below have earlier tokens.
    """

    raw: cute.Tensor
    bias: cute.Tensor
    speed: cutlass.Float32
    lower_bound: cutlass.Float32
    inside: tuple
    earlier: tuple


class Tokens:
    """Loads the inputs and transforms them. thread and shared: `Thread` and `Shared` of the kernel."""

    def __init__(self, config: PrepareConfig):
        self.config = config
        self.dtype, self.gate_dtype = DTYPES[config.dtype], DTYPES[config.gate_dtype]
        self.plane = 128 // self.gate_dtype.width  # gates of 16 bytes

    def lines(self, token, left, thread):
        """Returns the rows of which a lane loads 16 bytes each, and the channel. The last row replaces later ones."""
        first = thread.sub * SUB + thread.lane // LINE
        rows = [token + cutlass.min(first + 4 * j, left - 1) for j in range(ROUNDS)]
        return rows, thread.half * (HEAD_DIM // 2) + thread.lane % LINE * UNIT

    @cute.jit
    def load_gates(self, gate: cute.Tensor, shared, rows, channel, token, left, thread):
        """Starts to load the warp's gates. Returns registers for a unit of two tokens, which hold those of the first 32
        channels where gates are fp32: shared memory holds the second half only."""
        raw = cute.make_rmem_tensor((UNIT, 2), self.gate_dtype)
        if cutlass.const_expr(self.plane < UNIT):
            for r in cutlass.range_constexpr(2):
                source = gate[token + cutlass.min(thread.row + r, left - 1), None]
                cute.autovec_copy(unit_of(source, thread.channel, UNIT), raw[None, r])
            channel = thread.half * (HEAD_DIM // 2) + 32 + thread.lane % LINE * self.plane
        self.load(gate, shared.gates, rows, channel, thread)
        return raw

    @cute.jit
    def fetch_gates(self, shared, raw: cute.Tensor, m: cutlass.Constexpr, thread):
        """Sets the registers to the thread's unit m of gates."""
        if cutlass.const_expr(m == 1 or self.plane == UNIT):
            at = place_of_unit(thread.place, m, 0)
            if cutlass.const_expr(self.plane < UNIT):
                at = thread.lines + place_of(thread.lane // 4, thread.lane % 4 * 2)
            for r in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(UNIT // self.plane):
                    part = cute.make_tensor(
                        raw.iterator + self.plane * i + UNIT * r, cute.make_layout(self.plane)
                    )
                    cute.autovec_copy(shared.gates[None, swizzle(at, i) + LINE * r], part)

    @cute.jit
    def load(self, x: cute.Tensor, units: cute.Tensor, rows, channel, thread):
        """Starts to load 16 bytes of each row from the channel on, by whole lines, to units [channel, place]."""
        for j in cutlass.range_constexpr(ROUNDS):
            source = view(x[rows[j], None].iterator, channel, 128 // x.element_type.width)
            copy_async(source, units[None, thread.lines + place_in_line(thread.lane, j)])

    @cute.jit
    def strengths(
        self, mBeta: cute.Tensor, betas: cute.Tensor, factors: cute.Tensor, token, left, tidx
    ):
        """Writes the strengths of the chunk's tokens, or their roots, to shared memory; zero past the end.

        Of roots r also the chunk's factors [4, token] are written: 0 is r, 3 is strengths divided by r, which differ
        from r where strengths are less than the least.
        """
        if tidx < CHUNK:
            strength = F32(0.0)
            if tidx < left:
                strength = self.strength(mBeta[token + tidx])
            if cutlass.const_expr(self.config.rooted):
                least = cutlass.max(strength, F32(LEAST_STRENGTH))
                # One below zero has no root: on a GPU no check refuses it.
                root = cute.math.sqrt(cutlass.select_(strength < 0.0, strength, least))
                factors[0, tidx] = root
                factors[3, tidx] = strength * cute.arch.rcp_approx(root)
                strength = root
            betas[tidx] = strength

    @cute.jit
    def normalize(self, shared, norm: cute.Tensor, scale, inside, thread):
        """Sets the factors of q and k for the thread's tokens [token, q or k], those of k with roots of strengths.

        Squares are the diagonal of the product of rows with rows.
        """
        row, half, lane = thread.row, thread.half, thread.lane
        norms = shared.norms
        norm.fill(1.0)
        if cutlass.const_expr(self.config.l2norm):
            mma = cute.make_mma_atom(warp.MmaF16BF16Op(self.dtype, F32, (16, 8, 16)))
            if cutlass.const_expr(not self.config.beside):  # else a barrier says that all is there
                cute.arch.sync_warp()
            a = cute.make_rmem_tensor((2, 2, 2), self.dtype)
            b = cute.make_rmem_tensor((2, 2, 2), self.dtype)
            for which in cutlass.range_constexpr(2):
                acc = cute.make_rmem_tensor((4, 2), F32)
                acc.fill(0.0)
                units = shared.raw[None, None, which]
                lines = (thread.tidx - lane) // 32 * OF_WARP
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
        sync_team(thread.team)
        if cutlass.const_expr(self.config.l2norm):
            squares = cute.make_rmem_tensor((2, 2), F32)
            for which in cutlass.range_constexpr(2):
                pair = view(norms.iterator, 2 * row + 2 * CHUNK * which, 4)
                cute.autovec_copy(pair, cute.make_tensor(squares.iterator, cute.make_layout(4)))
                for r in cutlass.range_constexpr(2):
                    total = squares[0, r] + squares[1, r]
                    norm[r, which] = cute.math.rsqrt(total + NORM_EPS, fastmath=True)
        if cutlass.const_expr(self.config.rooted):
            for r in cutlass.range_constexpr(2):
                norm[r, 1] = norm[r, 1] * shared.betas[row + r]
        for r in cutlass.range_constexpr(2):
            norm[r, 0] = norm[r, 0] * scale * inside[r]
            norm[r, 1] = norm[r, 1] * inside[r]

    @cute.jit
    def strength(self, beta):
        """Returns the strength that a token's beta stands for."""
        strength = beta.to(F32)
        if cutlass.const_expr(self.config.beta_sigmoid):
            strength = sigmoid(strength)
        if cutlass.const_expr(self.config.neg_eigval):
            strength = strength * 2.0
        return strength

    @cute.jit
    def write_norms(self, shared, factors: cute.Tensor, tidx):
        """Writes the chunk's other factors: 1 / norm of q and of k."""
        if tidx < 2 * CHUNK:
            which, token = tidx // CHUNK, tidx % CHUNK
            factor = F32(1.0)
            if cutlass.const_expr(self.config.l2norm):
                total = shared.norms[0, token, which] + shared.norms[1, token, which]
                factor = cute.math.rsqrt(total + NORM_EPS, fastmath=True)
            factors[1 + which, token] = factor

    @cute.jit
    def decays(self, gate, g: cute.Tensor, first: cutlass.Constexpr):
        """Computes the running sums of log2 decays over the 16 tokens of the sub-block, for channels `first` and
        `first` + 1 of g, from a `Gate`."""
        raw, bias, speed, lower_bound, inside, earlier = gate
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
