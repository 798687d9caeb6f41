"""The kernel that applies the certain records of a replay to the states of a pool."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..config import Config
from .columns import Columns
from .operands import Row
from .records import Rings
from .rows import Rows


class Flush:
    """One CTA for tile_v columns of V of one state, as in `DeltaDecode`, and the same threads on it."""

    def __init__(self, config: Config):
        problem = config.problem
        self.config, self.slots = config, problem.slots
        self.tiles = problem.head_dim_v // config.tile_v
        self.tile = Rows(config) if problem.state_v_first else Columns(config)

    @cute.jit
    def __call__(
        self,
        mState: cute.Tensor,
        mRingK: cute.Tensor,
        mRingU: cute.Tensor,
        mRingDecay: cute.Tensor,
        mCursor: cute.Tensor,
        mSlots: cute.Tensor | None,
        mAccepted: cute.Tensor | None,
        null_slot: Int32,
        rows: Int32,
        stream,
    ):
        heads = mRingK.shape[2]
        self.kernel(
            mState, mRingK, mRingU, mRingDecay, mCursor, mSlots, mAccepted, null_slot
        ).launch(
            grid=[self.tiles * (mState.shape[1] // heads), heads, rows],
            block=[self.config.threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mState: cute.Tensor,
        mRingK: cute.Tensor,
        mRingU: cute.Tensor,
        mRingDecay: cute.Tensor,
        mCursor: cute.Tensor,
        mSlots: cute.Tensor | None,
        mAccepted: cute.Tensor | None,
        null_slot: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        x, head_k, number = cute.arch.block_idx()
        tile, member = x % self.tiles, x // self.tiles
        head = head_k * (cute.arch.grid_dim()[0] // self.tiles) + member
        slot = number
        if cutlass.const_expr(self.slots == 1):
            slot = mSlots[number]
        slot = cutlass.select_(slot == null_slot, Int32(-1), slot)
        accepted = None
        if cutlass.const_expr(mAccepted is not None):
            accepted = mAccepted[number]
        nothing = dict.fromkeys(("gQ", "gK", "gV", "gG", "gBeta", "gOut", "rate", "gBias"))
        row = Row(
            **nothing,
            length=Int32(0),
            number=number,
            head=head,
            head_k=head_k,
            leads=Boolean(False),
            tile=tile,
            tidx=tidx,
        )
        if slot >= 0:
            rings = Rings(mRingK, mRingU, mRingDecay, mCursor)
            self.flush(row, mState[slot, head, None, None], rings, slot, accepted)

    @cute.jit
    def flush(self, row: Row, gState: cute.Tensor, rings: Rings, slot, accepted):
        """Applies the certain records to the tile, and forgets the others."""
        place = self.tile.states.place(row)
        cursor = self.tile.records.cursor(rings, slot, row)
        ring = self.tile.records.open(rings, slot, row, cursor, accepted, empties=True)
        rState = self.tile.replay(gState, ring, row, place)
        if ring.count > 0:
            self.tile.states.store(rState, gState, place)
