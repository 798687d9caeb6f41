"""The states in front of items of work, behind them, and on the way."""

import cutlass
import cutlass.cute as cute

from ...cute.checkpoints import Checkpoints
from ...cute.types import I32
from ..config import CHUNK, HAS_STATE, RecurrenceConfig


class States:
    """Which state an item starts from, and where it goes.

    moves: an object of the architecture that knows which elements of a tile of a state [V, K] a thread holds in its
    registers. Its `read_state(s, state, column, place)` and `write_state(s, state, column, place)` move them, and
    `write_identity(s, column, place)` sets them to rows of the identity. place: what these need of the thread.
    """

    def __init__(self, config: RecurrenceConfig, moves):
        self.config, self.moves = config, moves
        self.kept = Checkpoints(config.checkpoints, config.placed, config.packed, CHUNK)

    @cute.jit
    def rows_of(self, sequence, indices, targets, fresh, null_slot):
        """Returns the rows of a sequence's initial and final state, negative for padding, and how it begins: 1 from the
        first of these states, 2 from zero."""
        row = sequence
        if cutlass.const_expr(self.config.indexed):
            row = indices[sequence]
            row = cutlass.select_(row == null_slot, I32(-1), row)
        target = row
        if cutlass.const_expr(self.config.redirected):
            target = targets[sequence]
            target = cutlass.select_((target == null_slot) | (row < 0), I32(-1), target)
        begins = I32(1)
        if cutlass.const_expr(self.config.fresh):
            begins = I32(2) - (I32(fresh[sequence]) & HAS_STATE)
        return row, target, begins

    def of_caller(self, pool, row, head):
        """Returns a state of the caller's as [V, K], whatever its layout."""
        state = pool[row, head, None, None]
        if not self.config.state_v_first:
            state = cute.make_tensor(state.iterator, cute.select(state.layout, mode=[1, 0]))
        return state

    @cute.jit
    def start(self, s: cute.Tensor, initial, starts, item, column, place):
        """Sets the registers to the state in front of an item."""
        s.fill(0.0)
        if item.row >= 0:
            if cutlass.const_expr(self.config.scan):
                if column >= self.config.v_tiles:
                    self.moves.write_identity(s, column - self.config.v_tiles, place)
                elif item.first == 1:
                    if cutlass.const_expr(self.config.initial_state):
                        own = self.of_caller(initial, item.row, item.head)
                        self.moves.read_state(s, own, column, place)
            elif cutlass.const_expr(self.config.split):
                own = starts[item.segment, item.head, None, None]
                self.moves.read_state(s, own, column, place)
            elif cutlass.const_expr(self.config.initial_state):
                own = self.of_caller(initial, item.row, item.head)
                if cutlass.const_expr(self.config.fresh):
                    if item.first == 1:
                        self.moves.read_state(s, own, column, place)
                else:
                    self.moves.read_state(s, own, column, place)

    @cute.jit
    def save(self, s: cute.Tensor, final, item, column, place):
        """Writes the state behind a sequence: none of padding slots in place, zero where results are separate."""
        if item.last != 0:
            if cutlass.const_expr(self.config.in_place):
                if item.target >= 0:
                    own = self.of_caller(final, item.target, item.head)
                    self.moves.write_state(s, own, column, place)
            else:
                own = self.of_caller(final, item.sequence, item.head)
                self.moves.write_state(s, own, column, place)

    @cute.jit
    def first_kept(self, item, offsets, every):
        """Returns the chunk of an item behind which the first state is kept."""
        return self.kept.first(item.sequence, offsets, every, item.chunk * CHUNK)

    @cute.jit
    def keep(
        self, s: cute.Tensor, checkpoints, rows, every, due, item, chunk, tokens, column, place
    ):
        """Writes the state behind a chunk of an item where it is due; returns the chunk where the next one is."""
        if (chunk == due) & (item.length >= (chunk + 1) * CHUNK):
            start, done = item.token - item.chunk * CHUNK, (item.chunk + chunk + 1) * CHUNK
            row = self.kept.row(item.sequence, start, tokens, rows, every, done)
            if row >= 0:
                own = self.of_caller(checkpoints, row, item.head)
                self.moves.write_state(s, own, column, place)
            due = self.kept.following(due, every)
        return due
