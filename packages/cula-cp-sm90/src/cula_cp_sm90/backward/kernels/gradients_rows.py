"""Results of a chunk by rows of tokens: the backward of norms and gates, and the sums for rate and bias.

Matrices [64 tokens, 128 channels] of fp32 lie in shared memory in units of 4 channels; unit u of row r is at
u ^ (r % 8). Warp w takes rows w, w + 8, ..., and a lane 4 channels of each.
"""

import cutlass
import cutlass.cute as cute

from cula_core.constants import LOG2_E
from cula_core.cute.functions import exp2
from cula_core.cute.memory import view
from cula_core.cute.types import F32, I32
from cula_core.cute.warp import all_sums
from cula_core.cute.widen import read, write
from cula_core.delta_rule.backward.kernels.chunk import WARPS, address_of, elements_at
from cula_core.delta_rule.config import CHUNK, HEAD_DIM
from cula_core.delta_rule.kernels.block import SQUARE

UNIT = 4
ROUNDS, BATCH = CHUNK // WARPS, 4


def place_of(row, unit):
    """Returns where a unit of a row begins."""
    return row * HEAD_DIM + (unit ^ (row % 8)) * UNIT


@cute.jit
def first_places(w, lane):
    """Returns where a thread's first own elements [b, half] are in a matrix; those of tile n are 8 n rows further."""
    places = cute.make_rmem_tensor((2, 2), I32)
    for half in cutlass.range_constexpr(2):
        for b in cutlass.range_constexpr(2):
            unit = 4 * w + lane // 16 + 2 * half
            places[b, half] = place_of(lane % 4 * 2 + b, unit) + lane // 4 % UNIT
    return places


def place_in(matrix: cute.Pointer, places, b, half, n):
    """Returns an own element of a matrix, as a tensor of one element."""
    return view(matrix, places[b, half] + 8 * n * HEAD_DIM, 1)


class Rows:
    """Reads staged matrices and writes the caller's rows. target: [tokens, channels] of a head from the chunk's first
    token on. left: tokens from there on. What it writes of tokens past the end are no rows."""

    def __init__(self, config):
        self.config, self.gated = config, config.gate != "log"
        self.softplus = config.gate == "softplus"

    @cute.jit
    def store_inputs(
        self, matrix: cute.Pointer, raw: cute.Pointer, factor, factors, norms, target: cute.Tensor, left, w, lane
    ):  # fmt: skip
        """Writes dq or dk of a staged gradient of normalized ones. raw: q or k as TMA wrote it. factor: of the
        gradient; factors [64]: None, or more of its rows. norms [64]: 1 / norm of rows."""
        # Rows of a warp are 8 apart, so that their units are swapped alike.
        place = place_of(w, lane)
        at = lane // 16 * SQUARE + w * 64 + ((lane % 16 // 2) ^ w) * 8 + lane % 2 * UNIT
        address, step = address_of(target, w, UNIT * lane, WARPS)
        for batch in cutlass.range_constexpr(ROUNDS // BATCH):
            cute.arch.sync_warp()  # or the compiler loads all batches at once, and runs out of registers
            x = cute.make_rmem_tensor((UNIT, BATCH), F32)
            own = cute.make_rmem_tensor((UNIT, BATCH), F32)
            dots = []
            for j in cutlass.range_constexpr(BATCH):
                ahead = WARPS * (BATCH * batch + j)
                row = w + ahead
                cute.autovec_copy(view(matrix, place + ahead * HEAD_DIM, UNIT), x[None, j])
                own_factor = factor
                if cutlass.const_expr(factors is not None):
                    own_factor = factor * factors[row]
                x[None, j].store(x[None, j].load() * own_factor)
                if cutlass.const_expr(self.config.l2norm):
                    read(view(raw, at + ahead * 64, UNIT), own[None, j])
                    own[None, j].store(own[None, j].load() * norms[row])
                    dot = F32(0.0)
                    for i in cutlass.range_constexpr(UNIT):
                        dot = dot + x[i, j] * own[i, j]
                    dots.append(dot)
            if cutlass.const_expr(self.config.l2norm):
                dots = all_sums(dots, 32)
            for j in cutlass.range_constexpr(BATCH):
                row = w + WARPS * (BATCH * batch + j)
                if cutlass.const_expr(self.config.l2norm):
                    across = x[None, j].load() - own[None, j].load() * dots[j]
                    x[None, j].store(across * norms[row])
                if row < left:
                    write(x[None, j], elements_at(target, address, UNIT))
                address = address + step

    @cute.jit
    def load_gates(self, gates: cute.Tensor, bias, left, w, lane):
        """Returns the thread's elements of the caller's gates, zeros past the end, and of dt_bias, zeros without one.
        None for decays."""
        shift = cute.make_rmem_tensor(UNIT, F32)
        shift.fill(0.0)
        if cutlass.const_expr(not self.gated):
            return None, shift
        if cutlass.const_expr(self.config.bias):
            cute.autovec_copy(view(bias.iterator, UNIT * lane, UNIT), shift)
        raw = cute.make_rmem_tensor((UNIT, ROUNDS), gates.element_type)
        raw.fill(0.0)
        address, step = address_of(gates, w, UNIT * lane, WARPS)
        for j in cutlass.range_constexpr(ROUNDS):
            if w + WARPS * j < left:
                cute.autovec_copy(elements_at(gates, address, UNIT), raw[None, j])
            address = address + step
        return raw, shift

    @cute.jit
    def store_gates(
        self,
        matrix: cute.Pointer,
        raw,
        shift,
        rate,
        lower_bound,
        target: cute.Tensor,
        left,
        sums,
        w,
        lane,
    ):
        """Writes dg of the staged gradient of log decays, and the sums over the warp's rows: of bias [channel, warp],
        of rate behind them. raw, shift: from `load_gates`. rate: A_log of the head."""
        speed = F32(1.0)
        if cutlass.const_expr(self.config.rate):
            speed = exp2(rate * LOG2_E)
        place = place_of(w, lane)
        of_bias, of_rate = cute.make_rmem_tensor(UNIT, F32), F32(0.0)
        of_bias.fill(0.0)
        address, step = address_of(target, w, UNIT * lane, WARPS)
        for batch in cutlass.range_constexpr(ROUNDS // BATCH):
            x = cute.make_rmem_tensor((UNIT, BATCH), F32)
            for j in cutlass.range_constexpr(BATCH):
                ahead = WARPS * (BATCH * batch + j)
                cute.autovec_copy(view(matrix, place + ahead * HEAD_DIM, UNIT), x[None, j])
                if cutlass.const_expr(self.gated):
                    there = w + ahead < left
                    for i in cutlass.range_constexpr(UNIT):
                        shifted = raw[i, BATCH * batch + j].to(F32) + shift[i]
                        through, decay = self.through_gate(shifted, speed, lower_bound)
                        total = x[i, j] if there else F32(0.0)
                        x[i, j] = total * through
                        of_rate = of_rate + (total * decay if self.softplus else x[i, j] * shifted)
                        of_bias[i] = of_bias[i] + x[i, j]
            for j in cutlass.range_constexpr(BATCH):
                if w + WARPS * (BATCH * batch + j) < left:
                    write(x[None, j], elements_at(target, address, UNIT))
                address = address + step
        if cutlass.const_expr(self.config.bias):
            cute.autovec_copy(of_bias, view(sums, w * HEAD_DIM + UNIT * lane, UNIT))
        if cutlass.const_expr(self.config.rate):
            total = all_sums([of_rate], 32)[0]
            if lane == 0:
                view(sums, WARPS * HEAD_DIM + w, 1)[0] = total

    @cute.jit
    def through_gate(self, shifted, speed, lower_bound):
        """Returns the derivative of a log decay with respect to its gate, and with "softplus" the log decay."""
        y = shifted * (speed * LOG2_E if self.config.gate == "safe" else LOG2_E)
        if cutlass.const_expr(self.softplus):
            grown = cute.math.log2(1.0 + exp2(-cute.math.absf(y)), fastmath=True)
            decay = (grown + cutlass.max(y, F32(0.0))) * (-speed / LOG2_E)
            return -speed * cute.arch.rcp_approx(1.0 + exp2(-y)), decay
        # At most 2^126, whose product with the sigmoid is a number.
        grown = exp2(cutlass.min(-y, F32(126.0)))
        s = cute.arch.rcp_approx(1.0 + grown)
        return (lower_bound * speed) * (s * (s * grown)), None

    @cute.jit
    def store_sums(self, sums, of_rate: cute.Tensor, of_bias: cute.Tensor, slot, head, tidx):
        """Writes the sums over all rows. sums: None for a slot without a chunk, whose sums are zero."""
        if tidx < HEAD_DIM:
            if cutlass.const_expr(self.config.bias):
                total = F32(0.0)
                if cutlass.const_expr(sums is not None):
                    for w in cutlass.range_constexpr(WARPS):
                        total = total + view(sums, w * HEAD_DIM + tidx, 1)[0]
                of_bias[slot, head, tidx] = total
            if cutlass.const_expr(self.config.rate):
                if tidx == 0:
                    whole = F32(0.0)
                    if cutlass.const_expr(sums is not None):
                        for w in cutlass.range_constexpr(WARPS):
                            whole = whole + view(sums, WARPS * HEAD_DIM + w, 1)[0]
                    of_rate[slot, head] = whole
