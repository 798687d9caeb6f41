"""What models have around decode, in the same launch: the short convolution before it, the gated RMSNorm behind it."""

import operator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cula_core.cute.functions import sigmoid

from ..config import CONVOLUTION_WIDTH, Config

WARP = 32


class Past(NamedTuple):
    """What the convolution of q, k or v of one head needs. gInputs [L, D]: the input at position p lies at p mod L.
    gWeight [D, 4], gBias [D] or None."""

    gInputs: cute.Tensor
    gWeight: cute.Tensor
    gBias: cute.Tensor


class Pasts(NamedTuple):
    """Those of q, k and v. position: of the row's first token. last: L - 1."""

    q: Past
    k: Past
    v: Past
    position: Int32
    last: Int32


class Convolution:
    """y_t = silu(bias + sum over j of weight[j] x_(t - 3 + j)) per channel, rounded to the dtype of the activations.

    Inputs of earlier calls lie in a ring per slot. A call reads those of the 3 positions before its first token and
    writes those of its own tokens, other columns of the ring; so CTAs that share channels need not wait for each other.
    """

    def __init__(self, config: Config):
        self.tokens, self.tile_v, self.threads = (
            config.problem.tokens,
            config.tile_v,
            config.threads,
        )
        self.dim_k, self.dim_v = config.problem.head_dim_k, config.problem.head_dim_v

    @cute.jit
    def open(self, mInputs, mPositions, mWeight, mBias, slot, number, heads, head, head_k, tile):
        """Returns what a head and tile has of the channels, which are those of q, of k and of v."""
        q = head_k * self.dim_k
        k = (heads + head_k) * self.dim_k
        v = 2 * heads * self.dim_k + head * self.dim_v + tile * self.tile_v
        q, k, v = (self.past(mInputs, mWeight, mBias, slot, first) for first in (q, k, v))
        return Pasts(q, k, v, mPositions[number], mInputs.shape[1] - 1)

    @cute.jit
    def past(self, mInputs, mWeight, mBias, slot, first):
        """Returns the channels from `first` on."""
        gBias = None
        if cutlass.const_expr(mBias is not None):
            gBias = cute.domain_offset((first,), mBias)
        gInputs = cute.domain_offset((0, first), mInputs[slot, None, None])
        return Past(gInputs, cute.domain_offset((first, 0), mWeight), gBias)

    @cute.jit
    def fill(self, staged, row, pasts: Pasts):
        """Writes q, k and v of the row's tokens behind the convolution to shared memory, a channel per thread at a
        time; a barrier must follow."""
        width = 2 * self.dim_k + self.tile_v
        total = self.tokens * width
        for i in cutlass.range_constexpr((total + self.threads - 1) // self.threads):
            e = i * self.threads + row.tidx
            t, channel = e // width, e % width
            # The branches are those of whole warps.
            if t < row.length:
                if channel < self.dim_k:
                    staged.sQ[t, channel] = self.value(row.gQ, pasts.q, pasts, t, channel)
                elif channel < 2 * self.dim_k:
                    own = channel - self.dim_k
                    staged.sK[t, own] = self.value(row.gK, pasts.k, pasts, t, own)
                else:
                    own = channel - 2 * self.dim_k
                    staged.sV[t, own] = self.value(row.gV, pasts.v, pasts, t, own)

    @cute.jit
    def value(self, gX, past: Past, pasts: Pasts, t, channel):
        """Returns one element of token t behind the convolution, as fp32."""
        gWeight = past.gWeight[channel, None]
        size = CONVOLUTION_WIDTH * gWeight.element_type.width // 8
        wide = cute.make_ptr(
            gWeight.element_type,
            gWeight.iterator.toint(),
            cute.AddressSpace.gmem,
            assumed_align=size,
        )
        rWeight = cute.make_rmem_tensor(CONVOLUTION_WIDTH, gWeight.element_type)
        cute.autovec_copy(cute.make_tensor(wide, cute.make_layout(CONVOLUTION_WIDTH)), rWeight)
        total = Float32(0.0)
        if cutlass.const_expr(past.gBias is not None):
            total = past.gBias[channel].to(Float32)
        for j in cutlass.range_constexpr(CONVOLUTION_WIDTH):
            at = t - (CONVOLUTION_WIDTH - 1) + j
            # One load from either place: a branch would make the loads wait for each other.
            own = gX[cutlass.max(at, Int32(0)), None].iterator + channel
            kept = past.gInputs[(pasts.position + at) & pasts.last, None].iterator + channel
            address = cutlass.select_(at >= 0, own.toint(), kept.toint())
            source = cute.make_ptr(
                gX.element_type, address, cute.AddressSpace.gmem, assumed_align=2
            )
            x = cute.make_tensor(source, cute.make_layout(1))[0].to(Float32)
            x = cutlass.select_(pasts.position + at >= 0, x, Float32(0.0))
            total = total + rWeight[j].to(Float32) * x
        return (total * sigmoid(total)).to(gX.element_type).to(Float32)

    @cute.jit
    def remember(self, row, pasts: Pasts):
        """Writes the inputs of the row's tokens to the ring, once for all CTAs that share them."""
        for t in range(row.length):
            at = (pasts.position + t) & pasts.last
            if row.tile == 0 and row.leads:
                for i in range(row.tidx, self.dim_k, self.threads):
                    pasts.k.gInputs[at, i] = row.gK[t, i]
                    pasts.q.gInputs[at, i] = row.gQ[t, i]
            for i in range(row.tidx, self.tile_v, self.threads):
                pasts.v.gInputs[at, i] = row.gV[t, i]


class Norm:
    """out = o / sqrt(mean(o^2) + eps) * weight * silu(gate), or sigmoid; the mean is over V.

    Where several CTAs have the tiles of a state, they are a cluster, and each of them writes its sums of squares to the
    shared memory of all.
    """

    def __init__(self, config: Config):
        self.activation, self.tokens = config.problem.fused.norm, config.problem.tokens
        self.dim_v, self.tile_v, self.ctas = (
            config.problem.head_dim_v,
            config.tile_v,
            config.cluster,
        )
        self.warps = config.threads // WARP

    @cute.jit
    def begin(self):
        """Says that this CTA runs, so that others may write to its shared memory; all threads."""
        if cutlass.const_expr(self.ctas > 1):
            cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def factor(self, row, t, column):
        """Returns what the normalized output is multiplied by."""
        gate = row.gGate[t, column].to(Float32)
        factor = sigmoid(gate) * row.gNormWeight[column].to(Float32)
        if cutlass.const_expr(self.activation == "silu"):
            factor = factor * gate
        return factor

    @cute.jit
    def finish(self, row, sOut: cute.Tensor, sGate: cute.Tensor, sSquares, eps):
        """Writes the outputs of the row's tokens, a warp per token, from shared memory."""
        lane, warp = row.tidx % WARP, row.tidx // WARP
        if cutlass.const_expr(self.ctas > 1):
            cute.arch.cluster_wait()
            for i in cutlass.range_constexpr((self.tokens + self.warps - 1) // self.warps):
                t = i * self.warps + warp
                if t < row.length:
                    total = self.squares(sOut, t, lane)
                    if lane < self.ctas:
                        own = sSquares[t, None].iterator + row.tile
                        mapped = cute.arch.map_dsmem_ptr(own, lane).toint()
                        theirs = cute.make_ptr(
                            Float32, mapped, cute.AddressSpace.smem, assumed_align=4
                        )
                        cute.arch.store(theirs, total, ss="cluster")
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        for i in cutlass.range_constexpr((self.tokens + self.warps - 1) // self.warps):
            t = i * self.warps + warp
            if t < row.length:
                total = Float32(0.0)
                if cutlass.const_expr(self.ctas == 1):
                    total = self.squares(sOut, t, lane)
                else:
                    for n in cutlass.range_constexpr(self.ctas):
                        total = total + sSquares[t, n]
                norm = cute.math.rsqrt(total * (1.0 / self.dim_v) + eps)
                for j in cutlass.range_constexpr(self.tile_v // WARP):
                    column = j * WARP + lane
                    value = sOut[t, column] * norm * sGate[t, column]
                    row.gOut[t, column] = value.to(row.gOut.element_type)

    @cute.jit
    def squares(self, sOut: cute.Tensor, t, lane):
        """Returns the sum of squares of a token's outputs in this tile."""
        total = Float32(0.0)
        for j in cutlass.range_constexpr(self.tile_v // WARP):
            x = sOut[t, j * WARP + lane]
            total = total + x * x
        return cute.arch.warp_reduction(total, operator.add)
