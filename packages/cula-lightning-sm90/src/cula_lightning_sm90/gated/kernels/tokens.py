"""What belongs to the tokens of a chunk: norms, and every factor that products are multiplied by."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Uint32

from cula_core.cute.functions import exp2
from cula_core.cute.types import F32
from cula_core.cute.widen import widened

from ..config import CHUNK, SUB, TABLES, PrepareConfig
from .layout import ADDED, DECAY, READ, SCALES, SEEN, TOTAL

# What `Gates` makes of a chunk, fp32 per token: log2 decays summed up to and with the token, and behind it; strength.
SUM, BEHIND, STRENGTH = 0, CHUNK, 2 * CHUNK
GATES = 3 * CHUNK
# Behind the tables that the recurrence reads: those that only the weights of products need.
NEAR, NORM = TABLES, TABLES + CHUNK
ALL_TABLES = TABLES + 2 * CHUNK
NORM_EPS = 1e-6


class Tokens:
    """Tables over tokens. With r = 1 over the norm, or 1, sums G and the end E of the token's block of 16:

        SEEN 2^G r(k)    READ scale 2^G r(q)    ADDED 2^(behind) r(k)    NEAR 2^(E - G) r(k)    NORM r(k)

    Where keys are normalised and converted to fp16, whose range is small, the power of two of r(k) multiplies the keys
    (SCALES), and SEEN and ADDED have what is left of r(k), which is less than 1. Warp w has tokens 16 w ...
    """

    def __init__(self, config: PrepareConfig, dtype):
        self.config, self.dtype = config, dtype

    @cute.jit
    def norm(self, base: cute.Pointer, w, lane):
        """Returns 1 / |x| of token lane % 16 of the warp, whose halves the lanes of two half warps sum up."""
        token = SUB * w + lane % SUB
        # Where the 128-byte swizzle puts the token's first 8 elements of a half; the others differ in three bits.
        row = base + cute.assume(lane // SUB * (CHUNK * 64) + token * 64, divby=64)
        sums = [F32(0.0)] * 4
        for unit in cutlass.range_constexpr(64 // 8):
            at = row + cute.assume((unit ^ token % 8) * 8, divby=8)
            eight = cute.make_rmem_tensor(8, self.dtype)
            cute.autovec_copy(cute.make_tensor(at, cute.make_layout(8)), eight)
            wide = widened(eight)
            for i in cutlass.range_constexpr(8):
                sums[i % 4] = sums[i % 4] + wide[i] * wide[i]
        square = (sums[0] + sums[1]) + (sums[2] + sums[3])
        square = square + cute.arch.shuffle_sync_bfly(square, SUB)
        return cute.math.rsqrt(square + NORM_EPS)

    @cute.jit
    def write_tables(self, gate, table, q_factor, k_factor, w, lane):
        """Writes what belongs to the warp's 16 tokens; half of the lanes write what looks back, half what looks on."""
        token = SUB * w + lane % SUB
        here = gate[SUM + token]
        left = k_factor
        if cutlass.const_expr(self.config.converts and self.config.l2norm):
            left, power = split(k_factor)
        if lane < SUB:
            if cutlass.const_expr(self.config.converts and self.config.l2norm):
                scales = cute.recast_ptr(table.iterator + SCALES, dtype=BFloat16)
                cute.make_tensor(scales, cute.make_layout(CHUNK))[token] = power.to(BFloat16)
            kept = exp2(here)
            table[SEEN + token] = kept * left
            table[READ + token] = kept * q_factor
            table[NORM + token] = k_factor
        else:
            table[ADDED + token] = exp2(gate[BEHIND + token]) * left
            table[NEAR + token] = exp2(gate[SUM + SUB * w + SUB - 1] - here) * k_factor
        if (w == 0) & (lane == 0):
            table[TOTAL] = exp2(gate[SUM + CHUNK - 1])
            if cutlass.const_expr(self.config.cut):
                table[DECAY] = gate[SUM + CHUNK - 1]


@cute.jit
def split(x):
    """Returns (mantissa, power of two) of a positive number, the mantissa at least 1/2 and less than 1."""
    parts = cute.make_rmem_tensor(2, F32)
    parts.fill(x)
    bits = cute.recast_tensor(parts, Uint32)
    bits[0] = (bits[0] & Uint32(0x007FFFFF)) | Uint32(0x3F000000)
    bits[1] = (bits[1] & Uint32(0x7F800000)) + Uint32(0x00800000)
    return parts[0], parts[1]
