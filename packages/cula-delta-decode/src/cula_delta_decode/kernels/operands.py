"""What a CTA knows of its row of tokens, and how it reads them: activations, gates, norms."""

import operator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cula_core.constants import LOG2_E
from cula_core.cute.functions import exp2, sigmoid

from ..config import Config
from .fused import Convolution, Norm, Pasts

WARP = 32
NORM_EPS = 1e-6


class Numbers(NamedTuple):
    """Arguments that are no tensors. bound: lower bound of the safe gate, or beta of softplus, with its threshold.
    eps: of the norm of the output."""

    scale: Float32
    bound: Float32
    inverse_bound: Float32
    threshold: Float32
    null_slot: Int32
    eps: Float32


class Row(NamedTuple):
    """One row of tokens and one value head, seen from a CTA with a tile of V.

    gQ, gK [T, K], gV, gOut [T, tile_v], gG [T, K] or [T], gBeta [T]: from the first token of the row on. rate: number
    A_log of the head. gBias [K] or [1]. length: tokens. number, head, head_k, tile: of the row, the value head, the
    query head, the tile. leads: the head is the first of those that share a query head. pasts: of the convolution, or
    None. gGate [T, V], gNormWeight [V]: of the norm, or None.
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
    pasts: Pasts = None
    gGate: cute.Tensor = None
    gNormWeight: cute.Tensor = None

    def part(self, first, tokens):
        """Returns up to `tokens` tokens of the row, from `first` on."""
        names = ("gQ", "gK", "gV", "gG", "gBeta", "gOut")
        shifted = {name: later(getattr(self, name), first) for name in names}
        return self._replace(**shifted, length=cutlass.min(self.length - first, Int32(tokens)))


class Token(NamedTuple):
    """What a thread has read of the only token of a row, and nothing is computed of yet.

    rQ, rK: its part of q and k by vectors. gates, biases: g and dt_bias of the channels whose factors it makes for the
    CTA, or one number of each. values: v of its columns of V. beta, rate: numbers. All but k and v may be None.
    """

    rQ: list
    rK: list
    gates: object
    biases: object
    values: list
    beta: object
    rate: object


def element(gX, at):
    """Returns one element of a vector, None of None."""
    return None if gX is None else gX[at]


def later(gX, first):
    """Returns the tokens from `first` on of a row's [T, D] or [T], None of None."""
    if gX is None:
        return None
    return cute.domain_offset((first, 0) if cute.rank(gX) == 2 else (first,), gX)


def first_token(gX):
    """Returns the vector of the first token, None of None."""
    return None if gX is None else gX[0, None]


class Gates:
    """Factors of the state and write strengths, from g and beta as they are given."""

    def __init__(self, config: Config):
        self.gate, self.dim_k = config.problem.gate, config.problem.head_dim_k
        # Channels whose factors a thread makes, of the only token.
        self.own = max(1, self.dim_k // config.threads)

    def allocate(self):
        """Returns the shared memory of the only token's factors, [1, K], None without a gate per channel."""
        if not self.gate.channels:
            return None
        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_ordered_layout((1, self.dim_k), order=(1, 0))
        return smem.allocate_tensor(Float32, layout, 16)

    @cute.jit
    def share(self, gX, tidx, aligned: cutlass.Constexpr):
        """Returns what a thread reads of gates or biases per channel, None of None."""
        if cutlass.const_expr(gX is None):
            return None
        return neighbours(gX, tidx % (self.dim_k // self.own) * self.own, self.own, aligned)

    @cute.jit
    def speed(self, rate):
        """Returns what a gate is multiplied by: exp(A_log), or 1."""
        speed = Float32(1.0)
        if cutlass.const_expr(rate is not None):
            speed = exp2(rate * LOG2_E)
        return speed

    @cute.jit
    def factor(self, x, bias, speed, numbers):
        """Returns exp of the log decay that belongs to the gate x. x and bias may be None."""
        if cutlass.const_expr(x is None):
            return Float32(1.0)
        x = x.to(Float32)
        if cutlass.const_expr(bias is not None):
            x = x + bias.to(Float32)
        if cutlass.const_expr(self.gate.kind == "softplus"):
            y = x * numbers.bound
            # The logarithm is not approximate: a rate multiplies its error.
            soft = cute.math.log(1.0 + exp2(y * LOG2_E)) * numbers.inverse_bound
            x = -speed * cutlass.select_(y > numbers.threshold, x, soft)
        elif cutlass.const_expr(self.gate.kind == "safe"):
            x = numbers.bound * sigmoid(speed * x)
        return exp2(x * LOG2_E)

    @cute.jit
    def alone(self, token: Token, numbers):
        """Returns the factor of the only token, one for all channels."""
        return self.factor(token.gates, token.biases, self.speed(token.rate), numbers)

    @cute.jit
    def fill(self, sFactor: cute.Tensor, token: Token, numbers, tidx):
        """Writes the factors of the only token to shared memory, all threads some of them; a barrier must follow."""
        speed = self.speed(token.rate)
        if tidx < self.dim_k // self.own:
            for i in cutlass.range_constexpr(self.own):
                bias = None
                if cutlass.const_expr(token.biases is not None):
                    bias = token.biases[i]
                factor = self.factor(token.gates[i], bias, speed, numbers)
                sFactor[0, tidx * self.own + i] = factor

    @cute.jit
    def strength(self, beta):
        """Returns the write strength that belongs to beta, which may be None."""
        value = Float32(1.0)
        if cutlass.const_expr(beta is not None):
            value = beta.to(Float32)
        if cutlass.const_expr(self.gate.strength == "logits"):
            value = sigmoid(value) * (2.0 if self.gate.doubled else 1.0)
        return value


@cute.jit
def neighbours(gX, first, count: cutlass.Constexpr, aligned: cutlass.Constexpr = True):
    """Returns `count` elements from `first` on, by one access where the pointers allow it."""
    rX = cute.make_rmem_tensor(count, gX.element_type)
    source = gX.iterator + cute.assume(first, divby=count)
    if cutlass.const_expr(aligned):
        size = min(count * gX.element_type.width // 8, 16)
        space = cute.AddressSpace.gmem
        wide = cute.make_ptr(gX.element_type, source.toint(), space, assumed_align=size)
        cute.autovec_copy(cute.make_tensor(wide, cute.make_layout(count)), rX)
    else:
        for i in cutlass.range_constexpr(count):
            rX[i] = source[i]
    return rX


@cute.jit
def staged_part(sX: cute.Tensor, t, first, count: cutlass.Constexpr):
    """Returns `count` elements of token or record t in shared memory, from `first` on, a multiple of `count`."""
    rX = cute.make_rmem_tensor(count, Float32)
    source = sX[t, None].iterator + cute.assume(first, divby=count)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), rX)
    return rX


class Staged(NamedTuple):
    """Shared memory that holds all tokens of a row, fp32.

    sQ: [T, K], normalized and scaled. sK: [T, K], normalized. sV: [T, tile_v]. sFactor: [T, K] or [T, 1]. sNumbers:
    [T, 3], the write strength, q.k, and what k was multiplied by to normalize it. With a norm of the output: sOut
    [T, tile_v], before it, sGate [T, tile_v], what it is multiplied by behind it, and of a cluster sSquares [T, CTAs].
    """

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sFactor: cute.Tensor
    sNumbers: cute.Tensor
    sOut: cute.Tensor
    sGate: cute.Tensor
    sSquares: cute.Tensor


STRENGTH, QK, NORM = range(3)


class Staging:
    """A warp prepares a token, and all of them the rows of V."""

    def __init__(self, config: Config):
        problem = config.problem
        self.gates = Gates(config)
        self.tokens, self.dim_k, self.tile_v = problem.tokens, problem.head_dim_k, config.tile_v
        self.channels, self.l2norm = problem.gate.channels, problem.l2norm
        self.threads, self.warps = config.threads, config.threads // WARP
        fused = problem.fused
        self.convolution = Convolution(config) if fused.convolution else None
        self.norm = Norm(config) if fused.norm else None

    def allocate(self):
        """Returns the shared memory of the tokens."""
        smem = cutlass.memory.SmemAllocator()

        def matrix(width):
            layout = cute.make_ordered_layout((self.tokens, width), order=(1, 0))
            return smem.allocate_tensor(Float32, layout, 16)

        factors = matrix(self.dim_k if self.channels else 1)
        k, q, v = matrix(self.dim_k), matrix(self.dim_k), matrix(self.tile_v)
        numbers, out, gate, squares = matrix(3), None, None, None
        if self.norm is not None:
            out, gate = matrix(self.tile_v), matrix(self.tile_v)
            squares = matrix(self.norm.ctas) if self.norm.ctas > 1 else None
        return Staged(q, k, v, factors, numbers, out, gate, squares)

    @cute.jit
    def fill(self, staged: Staged, row: Row, numbers: Numbers):
        """Writes what the tokens of the row are to shared memory; a barrier must follow."""
        if cutlass.const_expr(self.norm is not None):
            self.norm.begin()
        if cutlass.const_expr(self.convolution is not None):
            self.columns(staged, row)
            self.convolution.fill(staged, row, row.pasts)
            self.convolution.remember(row, row.pasts)
            cute.arch.sync_threads()
        lane, warp = row.tidx % WARP, row.tidx // WARP
        speed = self.gates.speed(row.rate)
        for i in cutlass.range_constexpr((self.tokens + self.warps - 1) // self.warps):
            t = i * self.warps + warp
            if t < row.length:
                self.token(staged, row, numbers, speed, t, lane)
        if cutlass.const_expr(self.convolution is None):
            self.columns(staged, row)

    @cute.jit
    def columns(self, staged: Staged, row: Row):
        """Writes what the tile's columns of V need of every token, but for v behind a convolution."""
        total = self.tokens * self.tile_v
        for i in cutlass.range_constexpr((total + self.threads - 1) // self.threads):
            e = i * self.threads + row.tidx
            t = e // self.tile_v
            if e < total and t < row.length:
                column = e % self.tile_v
                if cutlass.const_expr(self.convolution is None):
                    staged.sV[t, column] = row.gV[t, column].to(Float32)
                if cutlass.const_expr(self.norm is not None):
                    staged.sGate[t, column] = self.norm.factor(row, t, column)

    @cute.jit
    def outputs(self, staged: Staged, row: Row):
        """Returns the row as the tokens shall see it: its outputs go where `finish` finds them."""
        return row if self.norm is None else row._replace(gOut=staged.sOut)

    @cute.jit
    def finish(self, staged: Staged, row: Row, numbers: Numbers, waits: cutlass.Constexpr = True):
        """Normalizes the outputs of the row's tokens and writes them, if there is a norm. waits: no barrier has come
        behind the last output yet."""
        if cutlass.const_expr(self.norm is not None):
            if cutlass.const_expr(waits):
                cute.arch.sync_threads()
            self.norm.finish(row, staged.sOut, staged.sGate, staged.sSquares, numbers.eps)

    @cute.jit
    def token(self, staged: Staged, row: Row, numbers: Numbers, speed, t, lane):
        count = self.dim_k // WARP
        rQ, rK = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32)
        qq, kk, qk = Float32(0.0), Float32(0.0), Float32(0.0)
        for i in cutlass.range_constexpr(count):
            if cutlass.const_expr(self.convolution is None):
                rK[i] = row.gK[t, i * WARP + lane].to(Float32)
            else:
                rK[i] = staged.sK[t, i * WARP + lane]
            kk = kk + rK[i] * rK[i]
            if cutlass.const_expr(row.gQ is not None):
                if cutlass.const_expr(self.convolution is None):
                    rQ[i] = row.gQ[t, i * WARP + lane].to(Float32)
                else:
                    rQ[i] = staged.sQ[t, i * WARP + lane]
                qq, qk = qq + rQ[i] * rQ[i], qk + rQ[i] * rK[i]
        kk = cute.arch.warp_reduction(kk, operator.add)
        norm_q, norm_k = numbers.scale, Float32(1.0)
        if cutlass.const_expr(row.gQ is not None):
            qq, qk = (cute.arch.warp_reduction(x, operator.add) for x in (qq, qk))
        if cutlass.const_expr(self.l2norm):
            norm_q = numbers.scale * cute.math.rsqrt(qq + NORM_EPS)
            norm_k = cute.math.rsqrt(kk + NORM_EPS)
        for i in cutlass.range_constexpr(count):
            staged.sK[t, i * WARP + lane] = rK[i] * norm_k
            if cutlass.const_expr(row.gQ is not None):
                staged.sQ[t, i * WARP + lane] = rQ[i] * norm_q
            if cutlass.const_expr(self.channels):
                column = i * WARP + lane
                staged.sFactor[t, column] = self.gates.factor(
                    row.gG[t, column], element(row.gBias, column), speed, numbers
                )
        if lane == 0:
            staged.sNumbers[t, STRENGTH] = self.gates.strength(element(row.gBeta, t))
            staged.sNumbers[t, QK] = qk * norm_q * norm_k
            staged.sNumbers[t, NORM] = norm_k
            if cutlass.const_expr(not self.channels):
                staged.sFactor[t, 0] = self.gates.factor(
                    element(row.gG, t), element(row.gBias, 0), speed, numbers
                )
