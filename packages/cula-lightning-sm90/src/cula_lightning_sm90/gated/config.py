"""What is fixed when kernels of the gated delta rule are compiled, and how they share memory. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from cula_core.constants import STATE_DTYPES
from cula_core.delta_rule.config import LINE as LINE
from cula_core.delta_rule.config import UNCUT as UNCUT
from cula_core.delta_rule.config import FoldConfig, MergeConfig

CHUNK = 64
V_TILE = 64
HEAD_DIM = 128
V_TILES = HEAD_DIM // V_TILE
SUB = 16  # rows of a block of a chunk's square matrices
# Elements of Aqk and T' [64, 64] without the blocks above the diagonal, which are zero.
TRIANGLE = CHUNK * (CHUNK + SUB) // 2
# What belongs to tokens, fp32: three tables; the decay of the whole chunk, and how it changes the size of a state; and
# powers of two, of 16 bits each.
TABLES = 3 * CHUNK + 8 + CHUNK // 2
# Of a chunk and state head, in elements of 16 bits: T', Aqk, tables; a multiple of 128 bytes.
BLOCK = -(-(2 * TRIANGLE + 2 * TABLES) // 64) * 64
# Tiles of 64 columns that a machine may have: of v, and of the map of the keys.
PLACES = 2 * V_TILES
# Steps that the ends of a packed sequence count, beside those of its slots.
ENDS = 1
# Log2 of what is left of a state at which it counts as nothing: fp32 has 24 bits, and the rest is a reserve.
FADED = -40.0
ACTIVATION_DTYPES = ("bfloat16", "float16")
GATE_DTYPES = ("float32", "bfloat16", "float16")
OPERAND_DTYPES = ("float16", "bfloat16")
GATES = ("log", "softplus")
STRENGTHS = ("given", "logits", "doubled logits")


@dataclass(frozen=True)
class Operands:
    """What both kernels of a call have to know.

    dtype: of q, k, v and outputs. operand: of what the kernels make of them and multiply again. l2norm: q and k are
    normalised. index_dtype: of cu_seqlens, None for a dense batch.
    """

    dtype: str
    operand: str = "float16"
    l2norm: bool = False
    index_dtype: str | None = None

    @property
    def packed(self) -> bool:
        """Whether the sequences are those of `cu_seqlens`."""
        return self.index_dtype is not None

    @property
    def converts(self) -> bool:
        """Whether k is converted before it is multiplied with the state and with what is added to it, for which
        bfloat16 is too short.

        Not q: one rounding of the state to bfloat16 does no harm that is added up.
        """
        return self.operand != self.dtype

    def illegal(self) -> str | None:
        """Why no kernel serves this problem, or None."""
        if self.dtype not in ACTIVATION_DTYPES:
            return f"activations must be {' or '.join(ACTIVATION_DTYPES)}, not {self.dtype}"
        if self.operand not in OPERAND_DTYPES:
            return f"operand_dtype must be {' or '.join(OPERAND_DTYPES)}, not {self.operand}"
        if (self.dtype, self.operand) == ("float16", "bfloat16"):
            return "float16 activations are multiplied in float16, not bfloat16"
        return None


@dataclass(frozen=True)
class PrepareConfig(Operands):
    """Static facts of the kernel that makes what belongs to single chunks.

    gate: g holds log decays ("log"), or what `-exp(A_log) softplus(g + dt_bias)` makes them of ("softplus"); None
    without g. bias: there is a dt_bias. strength: what beta holds, None without it. cut: a scan of segments comes next,
    which needs to know how states fade; otherwise the recurrence runs beside this kernel.
    """

    gate: str | None = None
    gate_dtype: str = "float32"
    bias: bool = False
    strength: str | None = None
    strength_dtype: str = "float32"
    cut: bool = False

    def illegal(self) -> str | None:
        """Why no kernel serves this problem, or None."""
        for what, dtype in (("g", self.gate_dtype), ("beta", self.strength_dtype)):
            if dtype not in GATE_DTYPES:
                return f"{what} must be {', '.join(GATE_DTYPES)}, not {dtype}"
        if self.gate not in (None, *GATES):
            return f"gate must be None, {', '.join(GATES)}, not {self.gate}"
        if self.strength not in (None, *STRENGTHS):
            return f"strength must be None, {', '.join(STRENGTHS)}, not {self.strength}"
        return super().illegal()


@dataclass(frozen=True)
class RecurrenceConfig(Operands):
    """Static facts of the kernel that walks through the chunks.

    scan: it only finds what every segment but the last ones of sequences does to a state. cut: segments begin with
    states that were found so. tiles: of 64 columns of v per CTA. indexed, redirected: sequences find the states that
    they begin and end with through indices, of which negative ones are padding. fresh: some sequences begin at zero
    whatever their states are, or are slices of longer ones (`cula_core.delta_rule.slices`). in_place: final states
    replace those of the pool. checkpoints: states on the way are kept after "every" so many tokens, or "once"; placed:
    in rows that the caller names. state_dtype: of all these states.
    """

    tiles: int = 1
    state_v_first: bool = False
    initial_state: bool = False
    final_state: bool = True
    indexed: bool = False
    redirected: bool = False
    fresh: bool = False
    in_place: bool = False
    checkpoints: str | None = None
    placed: bool = False
    scan: bool = False
    cut: bool = False
    state_dtype: str = "float32"

    @property
    def columns(self) -> int:
        """Tiles of 64 columns that a machine has."""
        return PLACES if self.scan else V_TILES

    @property
    def partly(self) -> bool:
        """Whether a chunk may not be full: a scan comes to the ends of slices alone."""
        return self.packed and (self.fresh or not self.scan)

    @property
    def waits(self) -> bool:
        """Whether the kernel runs beside the one that prepares, and not after it."""
        return not (self.scan or self.cut)

    def illegal(self) -> str | None:
        """Why no kernel serves this problem, or None."""
        if (self.indexed or self.fresh or self.in_place) and not self.initial_state:
            return "indices, fresh sequences and in-place states need states to begin with"
        if self.in_place and not self.final_state:
            return "an in-place state is a final state"
        if self.scan and (self.cut or self.final_state or self.checkpoints or self.tiles == 1):
            return "a scan begins with no other scan, has two tiles and writes no states"
        if self.state_dtype not in STATE_DTYPES:
            return f"states must be {', '.join(STATE_DTYPES)}, not {self.state_dtype}"
        if self.redirected and not (self.in_place and self.indexed):
            return "rows to end in are those of a pool that is updated through indices"
        return super().illegal()


Config = PrepareConfig | RecurrenceConfig | MergeConfig | FoldConfig
