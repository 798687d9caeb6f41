"""What both ways to lay a state over threads have in common: in which order a row's tokens run through its tile."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..config import Config
from .operands import Gates, Numbers, Row, Staged, Staging, Token, element, first_token
from .records import CHUNK, Fetched, Records, Ring, Rings
from .states import Place, States, Targets


class Tile:
    """Loads a tile, runs the tokens of a row through it, and stores what is wanted.

    A subclass says which part of a token a thread reads (`along`, `values`, `staged`, `alike`), how one token runs
    (`one_token`) and one of several (`token`), which part of a record it reads (`steps`), and how the tile changes
    (`fade`, `update`). Its `pieces` are the lengths of the vectors in which a thread has its channels of K. shared:
    what `allocate` returned. ring: None without a replay.
    """

    def __init__(self, config: Config):
        problem = config.problem
        self.config, self.tokens = config, problem.tokens
        self.direct, self.long, self.replayed = problem.direct, problem.long, problem.replay
        self.l2norm, self.channels = problem.l2norm, problem.gate.channels
        self.aligned = problem.aligned
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
        rState = ring = cursor = None
        if cutlass.const_expr(self.replayed):
            cursor = self.records.cursor(rings, slot, row)
        else:
            rState = self.states.load(gState, place)
        shared = self.allocate()
        if cutlass.const_expr(self.direct):
            sFactor = self.gates.allocate()
            if cutlass.const_expr(self.replayed):
                ring, rState = self.catch_up(gState, row, rings, slot, cursor, accepted, place)
            if row.length > 0:
                read = token if token is not None else self.fetch(row, numbers)
                factors = self.factors(sFactor, read, numbers, row, place)
                self.one_token(rState, row, numbers, read, factors, targets, ring, shared, place)
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
                    ring, rState = self.catch_up(gState, row, rings, slot, cursor, accepted, place)
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
            gates = self.gates.share(first_token(row.gG), row.tidx, self.aligned)
            biases = self.gates.share(row.gBias, row.tidx, True)
        else:
            gates, biases = element(row.gG, 0), element(row.gBias, 0)
        rQ = self.along(first_token(row.gQ), place)
        rK = self.along(first_token(row.gK), place)
        return Token(rQ, rK, gates, biases, values, beta, row.rate)

    @cute.jit
    def factors(self, sFactor, token: Token, numbers: Numbers, row: Row, place: Place):
        """Returns the factors of the thread's channels of K at the only token, while the state is on its way.

        Gates per channel are shared work: the CTA computes each of them once, and a barrier is among it.
        """
        if cutlass.const_expr(not self.channels):
            return self.alike(self.gates.alone(token, numbers))
        self.gates.fill(sFactor, token, numbers, row.tidx)
        cute.arch.sync_threads()
        return self.staged(sFactor, 0, place)

    @cute.jit
    def decays(self, sFactor: cute.Tensor, t, place: Place):
        """Returns the factors of the thread's channels of K at a token or record in shared memory."""
        if cutlass.const_expr(self.channels):
            return self.staged(sFactor, t, place)
        return self.alike(sFactor[t, 0])

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
    def catch_up(self, gState, row: Row, rings: Rings, slot, cursor, accepted, place: Place):
        """Returns the ring, and the tile with what it lacks, stored if the ring is full; barriers are among it."""
        ring = self.records.open(rings, slot, row, cursor, accepted)
        rState = self.replay(gState, ring, row, place)
        if ring.full:
            self.states.store(rState, gState, place)
        return ring, rState

    @cute.jit
    def replay(self, gState: cute.Tensor, ring: Ring, row: Row, place: Place):
        """Returns the tile behind the certain records.

        They are asked for first: behind the reads of the state they would wait for all of it.
        """
        fetched = self.records.allocate()
        share = self.records.fetch(ring, row, 0)
        rState = self.states.load(gState, place)
        self.records.keep(share, fetched, row)
        cute.arch.sync_threads()
        self.apply(rState, fetched, cutlass.min(ring.count, Int32(CHUNK)), place)
        for first in range(CHUNK, ring.count, CHUNK):
            # The next records take the place of these.
            cute.arch.sync_threads()
            self.records.keep(self.records.fetch(ring, row, first), fetched, row)
            cute.arch.sync_threads()
            self.apply(rState, fetched, cutlass.min(ring.count - first, Int32(CHUNK)), place)
        return rState

    @cute.jit
    def apply(self, rState: cute.Tensor, fetched: Fetched, count, place: Place):
        """Applies records, with one multiplication and addition for every element and record.

        The tile fades once, by all factors. What a record adds fades by those behind it: its key takes their product.
        """
        faded = self.products()
        for number in range(count):
            self.multiply(faded, self.decays(fetched.sDecay, number, place))
        self.fade(rState, self.spread(faded))
        behind = self.products()
        for number in range(count):
            last = count - 1 - number
            rK = self.staged(fetched.sK, last, place)
            self.multiply(rK, self.spread(behind))
            self.update(rState, rK, self.steps(fetched.sU, last, place))
            self.multiply(behind, self.decays(fetched.sDecay, last, place))

    @cute.jit
    def products(self):
        """Returns ones to multiply factors to: one for each of the thread's channels of K, or one for all."""
        products = []
        for size in self.pieces if self.channels else [1]:
            rOnes = cute.make_rmem_tensor(size, Float32)
            rOnes.fill(1.0)
            products.append(rOnes)
        return products

    @cute.jit
    def multiply(self, values, factors):
        """Multiplies values in registers by factors, as many as there are values."""
        for rX, rFactor in zip(values, factors):
            for i in cutlass.range_constexpr(cute.size(rX)):
                rX[i] = rX[i] * rFactor[i]

    def spread(self, products):
        """Returns a factor for each of the thread's channels."""
        return products if self.channels else self.alike(products[0][0])
