"""A CTA's tile of one state, spread over the registers of its threads."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cula_core.cute.types import DTYPES
from cula_core.cute.widen import widened

from ..config import Config
from .operands import Numbers, Row


class Targets(NamedTuple):
    """Where states go. gNext: after the last token, if `ends`. mTokens, mTokenSlots: after each token."""

    gNext: cute.Tensor
    ends: Boolean
    mTokens: cute.Tensor
    mTokenSlots: cute.Tensor


class Place(NamedTuple):
    """The first row and column of a thread, in the tile, and the offset of that element in the matrix."""

    row: Int32
    column: Int32
    offset: Int32


class States:
    """Thread t holds rows [g * rows_per_thread, ...) with g = t // lanes, and the 16-byte columns t % lanes, lanes +
    t % lanes, ... Columns are contiguous in memory."""

    def __init__(self, config: Config):
        problem = config.problem
        self.dtype = DTYPES[problem.state_dtype]
        self.v_first, self.tile_v = problem.state_v_first, config.tile_v
        self.pitch = problem.head_dim_k if self.v_first else problem.head_dim_v
        self.lanes, self.vector, self.vectors = config.lanes, config.vector, config.vectors_per_row
        self.rows = config.rows_per_thread
        # One token of 16-bit states stays packed, which leaves room for twice as many.
        self.packed = problem.direct and not problem.replay and self.dtype.width == 16

    @cute.jit
    def place(self, row: Row):
        """Returns where the thread is in the tile."""
        first = row.tidx // self.lanes * self.rows
        column = row.tidx % self.lanes * self.vector
        tile = row.tile * self.tile_v * (self.pitch if self.v_first else 1)
        return Place(first, column, tile + first * self.pitch + column)

    @cute.jit
    def part(self, gState: cute.Tensor, place: Place):
        """Returns the thread's elements [vector, vectors, rows] of a matrix in global memory."""
        layout = cute.make_layout(
            (self.vector, self.vectors, self.rows),
            stride=(1, self.lanes * self.vector, self.pitch),
        )
        offset = cute.assume(place.offset, divby=self.vector)
        return cute.make_tensor(gState.iterator + offset, layout)

    @cute.jit
    def load(self, gState, place: Place):
        """Returns the thread's elements in fp32, or as they are stored if they stay `packed`; zero without a state."""
        if cutlass.const_expr(gState is None):
            rState = cute.make_rmem_tensor((self.vector, self.vectors, self.rows), Float32)
            rState.fill(0.0)
            return rState
        gPart = self.part(gState, place)
        rStored = cute.make_rmem_tensor(gPart.shape, self.dtype)
        cute.copy(self.wide(), gPart, rStored)
        return rStored if self.packed else widened(rStored)

    @cute.jit
    def row(self, rState: cute.Tensor, r: cutlass.Constexpr, again: cutlass.Constexpr = False):
        """Returns one row of the thread's elements in fp32, [vector, vectors]. again: for the second time."""
        part = rState[None, None, r]
        if cutlass.const_expr(rState.element_type is Float32):
            return part
        return widened(part, again)

    @cute.jit
    def set_row(self, rState: cute.Tensor, r: cutlass.Constexpr, rRow: cute.Tensor):
        """Takes what `row` returned, changed, as the row's new elements."""
        if cutlass.const_expr(rState.element_type is not Float32):
            rState[None, None, r].store(rRow.load().to(self.dtype))

    @cute.jit
    def store(self, rState: cute.Tensor, gState: cute.Tensor, place: Place):
        """Writes the thread's elements."""
        gPart = self.part(gState, place)
        rStored = rState
        if cutlass.const_expr(rState.element_type is not self.dtype):
            rStored = cute.make_rmem_tensor(gPart.shape, self.dtype)
            rStored.store(rState.load().to(self.dtype))
        cute.copy(self.wide(), rStored, gPart)

    def wide(self):
        return cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)

    @cute.jit
    def store_token(self, rState, targets: Targets, row: Row, numbers: Numbers, t, place: Place):
        """Writes the state after token t to the slot that belongs to it, if it is one."""
        if cutlass.const_expr(targets.mTokens is not None):
            slot = targets.mTokenSlots[row.number, t]
            if slot >= 0 and slot != numbers.null_slot:
                self.store(rState, targets.mTokens[slot, row.head, None, None], place)

    @cute.jit
    def store_last(self, rState, targets: Targets, place: Place):
        """Writes the state after the last token, if it is wanted."""
        if cutlass.const_expr(targets.gNext is not None):
            if targets.ends:
                self.store(rState, targets.gNext, place)
