"""What a CTA knows of its row of tokens, and how it reads them: activations, gates, norms."""

import operator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..config import Config

WARP = 32
NORM_EPS = 1e-6


class Numbers(NamedTuple):
    """Arguments that are no tensors. bound: lower bound of the safe gate, or beta of softplus, with its threshold."""

    scale: Float32
    bound: Float32
    threshold: Float32
    null_slot: Int32
    aligned: Boolean


class Row(NamedTuple):
    """One row of tokens and one value head, seen from a CTA with a tile of V.

    gQ, gK [T, K], gV, gOut [T, tile_v], gG [T, K] or [T], gBeta [T]: from the first token of the row on. rate: number
    A_log of the head. gBias [K] or [1]. length: tokens. number, head, head_k, tile: of the row, the value head, the
    query head, the tile. leads: the head is the first of those that share a query head.
    """

    gQ: cute.Tensor
    gK: cute.Tensor
    gV: cute.Tensor
    gG: cute.Tensor
    gBeta: cute.Tensor
    gOut: cute.Tensor
    rate: Float32
    gBias: cute.Tensor
    length: Int32
    number: Int32
    head: Int32
    head_k: Int32
    leads: Boolean
    tile: Int32
    tidx: Int32


class Gates:
    """Factors of the state and write strengths, from g and beta as they are given."""

    def __init__(self, config: Config):
        self.gate = config.problem.gate

    @cute.jit
    def speed(self, rate):
        """Returns what a gate is multiplied by: exp(A_log), or 1."""
        speed = Float32(1.0)
        if cutlass.const_expr(rate is not None):
            speed = cute.math.exp(rate)
        return speed

    @cute.jit
    def factor(self, x, bias, speed, numbers):
        """Returns exp of the log decay that belongs to the gate x; bias: None or a number."""
        if cutlass.const_expr(bias is not None):
            x = x + bias
        if cutlass.const_expr(self.gate.kind == "softplus"):
            y = x * numbers.bound
            soft = cute.math.log(1.0 + cute.math.exp(y)) / numbers.bound
            x = -speed * cutlass.select_(y > numbers.threshold, x, soft)
        elif cutlass.const_expr(self.gate.kind == "safe"):
            x = numbers.bound / (1.0 + cute.math.exp(-speed * x))
        return cute.math.exp(x)

    @cute.jit
    def strength(self, gBeta, t):
        """Returns the write strength of token t."""
        value = Float32(1.0)
        if cutlass.const_expr(self.gate.strength != "one"):
            value = gBeta[t].to(Float32)
        if cutlass.const_expr(self.gate.strength == "logits"):
            value = (2.0 if self.gate.doubled else 1.0) / (1.0 + cute.math.exp(-value))
        return value


@cute.jit
def wide_fragment(gX, first, count: cutlass.Constexpr, aligned):
    """Returns `count` neighbours from `first` on as fp32, by one access where the pointers allow it."""
    rX = cute.make_rmem_tensor(count, gX.element_type)
    source = gX.iterator + cute.assume(first, divby=count)
    size = count * gX.element_type.width // 8
    if aligned:
        space = cute.AddressSpace.gmem
        wide = cute.make_ptr(gX.element_type, source.toint(), space, assumed_align=min(size, 16))
        cute.autovec_copy(cute.make_tensor(wide, cute.make_layout(count)), rX)
    else:
        for i in cutlass.range_constexpr(count):
            rX[i] = source[i]
    rWide = cute.make_rmem_tensor(count, Float32)
    rWide.store(rX.load().to(Float32))
    return rWide


class Staged(NamedTuple):
    """Shared memory that holds all tokens of a row, fp32.

    sQ: [T, K], normalized and scaled. sK: [T, K], normalized. sV: [T, tile_v]. sFactor: [T, K] or [T, 1]. sNumbers:
    [T, 3], the write strength, q.k, and what k was multiplied by to normalize it.
    """

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sFactor: cute.Tensor
    sNumbers: cute.Tensor


STRENGTH, QK, NORM = range(3)


class Staging:
    """A warp prepares a token, and all of them the rows of V."""

    def __init__(self, config: Config):
        problem = config.problem
        self.gates = Gates(config)
        self.tokens, self.dim_k, self.tile_v = problem.tokens, problem.head_dim_k, config.tile_v
        self.channels, self.l2norm = problem.gate.channels, problem.l2norm
        self.threads, self.warps = config.threads, config.threads // WARP

    def allocate(self):
        """Returns the shared memory of the tokens."""
        smem = cutlass.memory.SmemAllocator()

        def matrix(width):
            layout = cute.make_ordered_layout((self.tokens, width), order=(1, 0))
            return smem.allocate_tensor(Float32, layout, 16)

        factors = matrix(self.dim_k if self.channels else 1)
        k, q, v = matrix(self.dim_k), matrix(self.dim_k), matrix(self.tile_v)
        return Staged(q, k, v, factors, matrix(3))

    @cute.jit
    def fill(self, staged: Staged, row: Row, numbers: Numbers):
        """Writes what the tokens of the row are to shared memory; a barrier must follow."""
        lane, warp = row.tidx % WARP, row.tidx // WARP
        speed = self.gates.speed(row.rate)
        for i in cutlass.range_constexpr((self.tokens + self.warps - 1) // self.warps):
            t = i * self.warps + warp
            if t < row.length:
                self.token(staged, row, numbers, speed, t, lane)
        total = self.tokens * self.tile_v
        for i in cutlass.range_constexpr((total + self.threads - 1) // self.threads):
            e = i * self.threads + row.tidx
            t = e // self.tile_v
            if e < total and t < row.length:
                staged.sV[t, e % self.tile_v] = row.gV[t, e % self.tile_v].to(Float32)

    @cute.jit
    def token(self, staged: Staged, row: Row, numbers: Numbers, speed, t, lane):
        count = self.dim_k // WARP
        rQ, rK = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32)
        qq, kk, qk = Float32(0.0), Float32(0.0), Float32(0.0)
        for i in cutlass.range_constexpr(count):
            rQ[i] = row.gQ[t, i * WARP + lane].to(Float32)
            rK[i] = row.gK[t, i * WARP + lane].to(Float32)
            qq, kk, qk = qq + rQ[i] * rQ[i], kk + rK[i] * rK[i], qk + rQ[i] * rK[i]
        qq, kk, qk = (cute.arch.warp_reduction(x, operator.add) for x in (qq, kk, qk))
        norm_q, norm_k = numbers.scale, Float32(1.0)
        if cutlass.const_expr(self.l2norm):
            norm_q = numbers.scale * cute.math.rsqrt(qq + NORM_EPS)
            norm_k = cute.math.rsqrt(kk + NORM_EPS)
        for i in cutlass.range_constexpr(count):
            staged.sQ[t, i * WARP + lane] = rQ[i] * norm_q
            staged.sK[t, i * WARP + lane] = rK[i] * norm_k
            if cutlass.const_expr(self.channels):
                column = i * WARP + lane
                bias = None
                if cutlass.const_expr(row.gBias is not None):
                    bias = row.gBias[column].to(Float32)
                x = row.gG[t, column].to(Float32)
                staged.sFactor[t, column] = self.gates.factor(x, bias, speed, numbers)
        if lane == 0:
            staged.sNumbers[t, STRENGTH] = self.gates.strength(row.gBeta, t)
            staged.sNumbers[t, QK] = qk * norm_q * norm_k
            staged.sNumbers[t, NORM] = norm_k
            if cutlass.const_expr(not self.channels):
                staged.sFactor[t, 0] = self.head_factor(row, numbers, speed, t)

    @cute.jit
    def head_factor(self, row: Row, numbers: Numbers, speed, t):
        factor = Float32(1.0)
        if cutlass.const_expr(row.gG is not None):
            bias = None
            if cutlass.const_expr(row.gBias is not None):
                bias = row.gBias[0].to(Float32)
            factor = self.gates.factor(row.gG[t].to(Float32), bias, speed, numbers)
        return factor
