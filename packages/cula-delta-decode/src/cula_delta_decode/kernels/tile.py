"""What both ways to lay a state over threads have in common: in which order a row's tokens run through its tile."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..config import Config
from .operands import Gates, Numbers, Row, Staged, Staging, Token, element, first_token
from .records import CHUNK, Records, Ring, Rings
from .states import Place, States, Targets


class Tile:
    """Loads a tile, runs the tokens of a row through it, and stores what is wanted.

    A subclass says which part of a token a thread reads (`along`, `values`), how one token runs (`one_token`), how one
    of several does (`token`), and how a record is applied (`apply`). shared: what `allocate` returned. ring: None
    without a replay.
    """

    def __init__(self, config: Config):
        problem = config.problem
        self.config, self.tokens = config, problem.tokens
        self.direct, self.long, self.replayed = config.direct, problem.long, problem.replay
        self.l2norm, self.channels = problem.l2norm, problem.gate.channels
        self.lanes, self.vector, self.rows = config.lanes, config.vector, config.rows_per_thread
        self.states, self.gates = States(config), Gates(config)
        self.staging, self.records = Staging(config), Records(config)

    def allocate(self):
        """Returns the shared memory that a token needs besides."""
        return None

    @cute.jit
    def advance(
        self,
        row: Row,
        numbers: Numbers,
        token,
        gState,
        targets: Targets,
        rings: Rings,
        slot,
        accepted,
    ):
        """Loads the tile, runs the tokens through it, and stores what is wanted. token: what `fetch` returned."""
        place = self.states.place(row)
        rState = ring = None
        if cutlass.const_expr(not self.replayed):
            rState = self.states.load(gState, place)
        shared = self.allocate()
        if cutlass.const_expr(self.direct):
            if cutlass.const_expr(self.replayed):
                ring, rState = self.catch_up(gState, row, rings, slot, accepted, place)
            if row.length > 0:
                read = token if token is not None else self.fetch(row, numbers)
                self.one_token(rState, row, numbers, read, targets, ring, shared, place)
        else:
            staged = self.staging.allocate()
            if cutlass.const_expr(self.long):
                for first in range(0, row.length, self.tokens):
                    part = row.part(first, self.tokens)
                    self.staging.fill(staged, part, numbers)
                    cute.arch.sync_threads()
                    self.several_tokens(rState, part, numbers, targets, None, staged, shared, place)
                    # The next tokens take the place of these.
                    cute.arch.sync_threads()
            else:
                self.staging.fill(staged, row, numbers)
                if cutlass.const_expr(self.replayed):
                    ring, rState = self.catch_up(gState, row, rings, slot, accepted, place)
                else:
                    cute.arch.sync_threads()
                self.several_tokens(rState, row, numbers, targets, ring, staged, shared, place)
        self.states.store_last(rState, targets, place)

    @cute.jit
    def fetch(self, row: Row, numbers: Numbers):
        """Reads what the thread needs of the only token; it depends on no state, and nothing is computed of it yet."""
        place = self.states.place(row)
        # Single numbers come first: what is read last the compiler moves to its use, behind the state.
        beta = element(row.gBeta, 0)
        values = self.values(row, place)
        if cutlass.const_expr(self.channels):
            gates = self.along(row.gG[0, None], place, numbers.aligned)
            biases = self.along(row.gBias, place, Boolean(True))
        else:
            gates, biases = element(row.gG, 0), element(row.gBias, 0)
        rQ = self.along(first_token(row.gQ), place, numbers.aligned)
        rK = self.along(row.gK[0, None], place, numbers.aligned)
        return Token(rQ, rK, gates, biases, values, beta, row.rate)

    @cute.jit
    def several_tokens(
        self,
        rState: cute.Tensor,
        row: Row,
        numbers: Numbers,
        targets: Targets,
        ring,
        staged: Staged,
        shared,
        place: Place,
    ):
        """All tokens of a row, or as many as shared memory holds."""
        seen = self.staging.outputs(staged, row)
        for t in cutlass.range_constexpr(self.tokens):
            if t < row.length:
                self.token(rState, seen, numbers, staged, targets, ring, shared, t, place)
        self.staging.finish(staged, row, numbers, waits=self.unordered)

    @property
    def unordered(self) -> bool:
        """Whether no barrier comes behind the outputs of the last token."""
        return True

    @cute.jit
    def catch_up(self, gState, row: Row, rings: Rings, slot, accepted, place: Place):
        """Returns the ring, and the tile with what it lacks, stored if the ring is full; barriers are among it."""
        ring = self.records.open(rings, slot, row, accepted)
        rState = self.replay(gState, ring, row, place)
        if ring.full:
            self.states.store(rState, gState, place)
        return ring, rState

    @cute.jit
    def replay(self, gState: cute.Tensor, ring: Ring, row: Row, place: Place):
        """Returns the tile behind the certain records.

        They are fetched first: behind the reads of the state they would wait for all of it.
        """
        fetched = self.records.allocate()
        if ring.count > 0:
            self.records.fetch(fetched, ring, row, 0)
        cute.arch.sync_threads()
        rState = self.states.load(gState, place)
        for number in range(cutlass.min(ring.count, Int32(CHUNK))):
            self.apply(rState, fetched, number, place)
        for first in range(CHUNK, ring.count, CHUNK):
            # The next records take the place of these.
            cute.arch.sync_threads()
            self.records.fetch(fetched, ring, row, first)
            cute.arch.sync_threads()
            for number in range(cutlass.min(ring.count - first, Int32(CHUNK))):
                self.apply(rState, fetched, number, place)
        return rState
