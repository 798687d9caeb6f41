"""The states in front of items of work and behind them."""

import cutlass
import cutlass.cute as cute

from ..config import RecurrenceConfig


class States:
    """Which state an item starts from, and where it goes.

    moves: an object of the architecture that knows which elements of a tile of a state [V, K] a thread holds in its
    registers. Its `read_state(s, state, column, place)` and `write_state(s, state, column, place)` move them, and
    `write_identity(s, column, place)` sets them to rows of the identity. place: what these need of the thread.
    """

    def __init__(self, config: RecurrenceConfig, moves):
        self.config, self.moves = config, moves

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
                elif item.first != 0:
                    if cutlass.const_expr(self.config.initial_state):
                        own = self.of_caller(initial, item.row, item.head)
                        self.moves.read_state(s, own, column, place)
            elif cutlass.const_expr(self.config.split):
                own = starts[item.segment, item.head, None, None]
                self.moves.read_state(s, own, column, place)
            elif cutlass.const_expr(self.config.initial_state):
                own = self.of_caller(initial, item.row, item.head)
                self.moves.read_state(s, own, column, place)

    @cute.jit
    def save(self, s: cute.Tensor, final, item, column, place):
        """Writes the state behind a sequence: none of padding slots in place, zero where results are separate."""
        if item.last != 0:
            if cutlass.const_expr(self.config.in_place):
                if item.row >= 0:
                    own = self.of_caller(final, item.row, item.head)
                    self.moves.write_state(s, own, column, place)
            else:
                own = self.of_caller(final, item.sequence, item.head)
                self.moves.write_state(s, own, column, place)
