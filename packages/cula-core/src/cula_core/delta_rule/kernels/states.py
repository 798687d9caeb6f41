"""The states in front of items of work and behind them."""

import cutlass
import cutlass.cute as cute


class States:
    """Part of `KdaRecurrence`, which says what of a state [V, K] a thread holds: `get`, `put` and `identity` move that,
    of a tile of v_tile columns of v. where: what they want to know of the thread."""

    def of_caller(self, pool, row, head):
        """A state of the caller's as [V, K], whatever its layout."""
        state = pool[row, head, None, None]
        if not self.config.state_v_first:
            state = cute.make_tensor(state.iterator, cute.select(state.layout, mode=[1, 0]))
        return state

    @cute.jit
    def start(self, s: cute.Tensor, initial, starts, item, column, where):
        """The state in front of an item."""
        s.fill(0.0)
        if item.row >= 0:
            if cutlass.const_expr(self.config.scan):
                if column >= self.config.v_tiles:  # rows of the identity
                    self.identity(s, column - self.config.v_tiles, where)
                elif item.first != 0:
                    if cutlass.const_expr(self.config.initial_state):
                        self.get(s, self.of_caller(initial, item.row, item.head), column, where)
            elif cutlass.const_expr(self.config.split):
                self.get(s, starts[item.segment, item.head, None, None], column, where)
            elif cutlass.const_expr(self.config.initial_state):
                self.get(s, self.of_caller(initial, item.row, item.head), column, where)

    @cute.jit
    def save(self, s: cute.Tensor, final, item, column, where):
        """The state behind a sequence. Nothing for padding slots in place; zero where results are separate."""
        if item.last != 0:
            if cutlass.const_expr(self.config.in_place):
                if item.row >= 0:
                    self.put(s, self.of_caller(final, item.row, item.head), column, where)
            else:
                self.put(s, self.of_caller(final, item.sequence, item.head), column, where)
