"""The decode kernel of the gated delta rule and KDA: one pass over the state, up to 8 tokens a row."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..config import Config
from .columns import Columns
from .operands import Numbers, Row
from .records import Rings
from .rows import Rows
from .states import Targets

# Percent of the memory of a multiprocessor that is shared by threads; three CTAs take about 30 KB.
CARVEOUT = 25


class DeltaDecode:
    """S <- diag(a) S;  u = b (v - S^T k);  S <- S + k u^T;  out = scale S^T q, token after token, on a pool of states.

    | what   | size                          | where                                                       |
    |--------|-------------------------------|-------------------------------------------------------------|
    | grid   | V / tile_v x HV / H, H, rows  | one CTA for tile_v columns of V of one state                |
    | rState | rows x columns over the CTA   | registers, fp32; 16-byte loads and stores of global memory  |
    | tokens | T x (2 K + tile_v + gates)    | shared memory, fp32; one token of [V, K] states is read as it is needed |

    The state is read once, all tokens run on the registers, and it is written once, or after every token, or not.
    """

    def __init__(self, config: Config, overlap: bool = False):
        """overlap: the launch may begin before the previous kernel has ended (sm_90 and newer)."""
        problem = config.problem
        self.config, self.overlap = config, overlap
        self.slots, self.packed, self.redirected = problem.slots, problem.packed, problem.redirected
        self.commits, self.long = problem.commits, problem.long
        self.tokens = problem.tokens
        self.width = problem.head_dim_k if problem.gate.channels else 1  # of a decay
        self.tiles, self.tile_v = problem.head_dim_v // config.tile_v, config.tile_v
        self.tile = Rows(config) if problem.state_v_first else Columns(config)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor | None,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mG: cute.Tensor | None,
        mBeta: cute.Tensor | None,
        mRate: cute.Tensor | None,
        mBias: cute.Tensor | None,
        mOut: cute.Tensor | None,
        mState: cute.Tensor | None,
        mNext: cute.Tensor | None,
        mSlots: cute.Tensor | None,
        mNextSlots: cute.Tensor | None,
        mAccepted: cute.Tensor | None,
        mTokenStates: cute.Tensor | None,
        mTokenSlots: cute.Tensor | None,
        mOffsets: cute.Tensor | None,
        mRingK: cute.Tensor | None,
        mRingU: cute.Tensor | None,
        mRingDecay: cute.Tensor | None,
        mCursor: cute.Tensor | None,
        mInputs: cute.Tensor | None,
        mPositions: cute.Tensor | None,
        mTaps: cute.Tensor | None,
        mTapBias: cute.Tensor | None,
        mGate: cute.Tensor | None,
        mNormWeight: cute.Tensor | None,
        scale: cutlass.Float32,
        bound: cutlass.Float32,
        threshold: cutlass.Float32,
        eps: cutlass.Float32,
        null_slot: Int32,
        rows: Int32,
        stream,
    ):
        """Launches the kernel with the arguments of `build.fake_arguments`."""
        if cutlass.const_expr(mBias is not None):
            layout = cute.make_layout((mV.shape[2], self.width), stride=(self.width, 1))
            mBias = cute.make_tensor(mBias.iterator, layout)
        self.kernel(
            mQ, mK, mV, mG, mBeta, mRate, mBias, mOut, mState, mNext, mSlots, mNextSlots, mAccepted, mTokenStates,
            mTokenSlots, mOffsets, mRingK, mRingU, mRingDecay, mCursor, mInputs, mPositions, mTaps, mTapBias, mGate,
            mNormWeight, scale, bound, 1.0 / bound, threshold, eps, null_slot,
        ).launch(
            grid=[self.tiles * (mV.shape[2] // mK.shape[2]), mK.shape[2], rows],
            cluster=[self.config.cluster, 1, 1] if self.config.cluster > 1 else None,
            block=[self.config.threads, 1, 1],
            min_blocks_per_mp=self.config.resident,
            # Said, because the compiler would ask the card at hand otherwise.
            preferred_smem_carveout=CARVEOUT if self.config.resident else None,
            stream=stream,
            use_pdl=self.overlap,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor | None,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mG: cute.Tensor | None,
        mBeta: cute.Tensor | None,
        mRate: cute.Tensor | None,
        mBias: cute.Tensor | None,
        mOut: cute.Tensor | None,
        mState: cute.Tensor | None,
        mNext: cute.Tensor | None,
        mSlots: cute.Tensor | None,
        mNextSlots: cute.Tensor | None,
        mAccepted: cute.Tensor | None,
        mTokenStates: cute.Tensor | None,
        mTokenSlots: cute.Tensor | None,
        mOffsets: cute.Tensor | None,
        mRingK: cute.Tensor | None,
        mRingU: cute.Tensor | None,
        mRingDecay: cute.Tensor | None,
        mCursor: cute.Tensor | None,
        mInputs: cute.Tensor | None,
        mPositions: cute.Tensor | None,
        mTaps: cute.Tensor | None,
        mTapBias: cute.Tensor | None,
        mGate: cute.Tensor | None,
        mNormWeight: cute.Tensor | None,
        scale: cutlass.Float32,
        bound: cutlass.Float32,
        inverse_bound: cutlass.Float32,
        threshold: cutlass.Float32,
        eps: cutlass.Float32,
        null_slot: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        x, head_k, number = cute.arch.block_idx()
        # Tiles and grouped heads share x, so that finding the query head takes no division.
        tile, member = x % self.tiles, x // self.tiles
        head = head_k * (cute.arch.grid_dim()[0] // self.tiles) + member
        if cutlass.const_expr(self.overlap):
            # The next launch may start now. Nothing here reads memory before the previous one is done.
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()

        batch, first, length = number, Int32(0), Int32(self.tokens)
        if cutlass.const_expr(self.packed):
            batch, first = Int32(0), mOffsets[number].to(Int32)
            whole = mOffsets[number + 1].to(Int32) - first
            length = whole if self.long else cutlass.min(whole, length)
        elif cutlass.const_expr(self.long):
            length = mK.shape[1]
        if cutlass.const_expr(self.commits):
            length = cutlass.min(length, cutlass.max(mAccepted[number], Int32(0)))
        own_v = (first, tile * self.tile_v)
        gOut = None
        if cutlass.const_expr(mOut is not None):
            gOut = cute.domain_offset(own_v, mOut[batch, None, head, None])
        gGate = gNormWeight = None
        if cutlass.const_expr(mGate is not None):
            gGate = cute.domain_offset(own_v, mGate[batch, None, head, None])
            gNormWeight = cute.domain_offset((tile * self.tile_v,), mNormWeight)
        rate = None
        if cutlass.const_expr(mRate is not None):
            rate = mRate[head]
        row = Row(
            gQ=self.from_token(mQ, batch, head_k, first),
            gK=self.from_token(mK, batch, head_k, first),
            gV=cute.domain_offset(own_v, mV[batch, None, head, None]),
            gG=self.from_token(mG, batch, head, first),
            gBeta=self.from_token(mBeta, batch, head, first),
            gOut=gOut,
            rate=rate,
            gBias=None if cutlass.const_expr(mBias is None) else mBias[head, None],
            length=length,
            number=number,
            head=head,
            head_k=head_k,
            leads=member == 0,
            tile=tile,
            tidx=tidx,
            gGate=gGate,
            gNormWeight=gNormWeight,
        )
        numbers = Numbers(scale, bound, inverse_bound, threshold, null_slot, eps)
        token = None
        if cutlass.const_expr(self.config.problem.direct and not self.packed):
            # What does not need the slot is on its way while the slot is read.
            token = self.tile.fetch(row, numbers)
        accepted = None
        if cutlass.const_expr(mAccepted is not None):
            accepted = mAccepted[number]
        begin = number
        if cutlass.const_expr(self.slots == 1):
            begin = mSlots[number]
        elif cutlass.const_expr(self.slots == 2):
            last = cutlass.min(cutlass.max(accepted, Int32(1)), mSlots.shape[1])
            begin = mSlots[number, last - 1]
        begin = cutlass.select_(begin == null_slot, Int32(-1), begin)
        end = begin
        if cutlass.const_expr(self.redirected):
            end = mNextSlots[number]
            end = cutlass.select_(end == null_slot, Int32(-1), end)
        if begin >= 0:
            gState = gNext = None
            if cutlass.const_expr(mState is not None):
                gState = mState[begin, head, None, None]
            if cutlass.const_expr(mNext is not None):
                gNext = mNext[cutlass.max(end, Int32(0)), head, None, None]
            seen = row
            if cutlass.const_expr(mInputs is not None):
                heads = mK.shape[2]
                pasts = self.tile.staging.convolution.open(
                    mInputs, mPositions, mTaps, mTapBias, begin, number, heads, head, head_k, tile
                )
                seen = row._replace(pasts=pasts)
            rings = Rings(mRingK, mRingU, mRingDecay, mCursor)
            targets = Targets(gNext, end >= 0, mTokenStates, mTokenSlots)
            self.tile.advance(seen, numbers, token, gState, targets, rings, begin, accepted)
        elif cutlass.const_expr(mOut is not None):
            for t in range(length):
                for i in range(tidx, self.tile_v, self.config.threads):
                    row.gOut[t, i] = row.gOut.element_type(0.0)

    @cute.jit
    def from_token(self, mX, batch, head, first: Int32):
        """Returns the tokens of a row for one head: [T, D], or [T] of numbers."""
        if cutlass.const_expr(mX is None):
            return None
        if cutlass.const_expr(cute.rank(mX) == 3):
            return cute.domain_offset((first,), mX[batch, None, head])
        return cute.domain_offset((first, 0), mX[batch, None, head, None])
