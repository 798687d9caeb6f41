"""What is fixed when a prefill kernel is compiled. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from cula_core.constants import STATE_DTYPES

CHUNK = 64
V_TILE = 64
WARPS = 4  # of a tile
# Tokens of a sequence between two states that a pass leaves for gradients of decays, a multiple of CHUNK. A state of
# 128 x 128 takes 64 KiB in fp32, which is as much as 256 tokens of q, so that the states of both passes take half as
# much memory as q and k.
EVERY = 512
# A log decay over a chunk behind which nothing of what lies before it is left in fp32.
FORGOTTEN = -16.0
# Below any log decay that the kernel tells from it.
FLOOR = -104.0
HEAD_DIMS = (64, 128)
ACTIVATION_DTYPES = ("bfloat16", "float16")
GATE_DTYPES = ("float32", "bfloat16", "float16")
SHARED_MEMORY = 232_448

_MAX_STAGES = 6


@dataclass(frozen=True)
class Problem:
    """The static facts of a call: batch, lengths, head counts, strides, scale and intervals are not among them.

    gate_dtype: dtype of the per-token log decay, None without one. decay: there is a log decay per head. packed: the
    sequences are those of `cu_seqlens`. indexed: sequences find their state through indices, negative ones are skipped.
    in_place: the final state replaces the initial one. checkpoints: states on the way are kept after "every" so many
    tokens, or "once"; placed: in rows that the caller names. l2norm, exact_state: see the public functions. fresh:
    sequences say whether they have an initial state. state_dtype: of all states. reverse: time runs backwards, as in a
    gradient: a token's decay is that of the state behind it, and the state begins behind the last token. dots: products
    of the outputs with another tensor are summed up over channels, before and after what a chunk adds.
    """

    dtype: str
    head_dim_k: int
    head_dim_v: int
    gate_dtype: str | None = None
    decay: bool = True
    packed: bool = False
    state_v_first: bool = False
    initial_state: bool = False
    final_state: bool = True
    indexed: bool = False
    in_place: bool = False
    checkpoints: str | None = None
    placed: bool = False
    l2norm: bool = False
    exact_state: bool = False
    fresh: bool = False
    state_dtype: str = "float32"
    reverse: bool = False
    dots: bool = False

    @property
    def forgets(self) -> bool:
        """Whether a head's decay alone says how far back its state reaches."""
        return self.decay and self.gate_dtype is None

    def illegal(self) -> str | None:
        """Why no kernel serves this problem, or None."""
        if self.dtype not in ACTIVATION_DTYPES:
            return f"activations must be {' or '.join(ACTIVATION_DTYPES)}, not {self.dtype}"
        if self.gate_dtype is not None and self.gate_dtype not in GATE_DTYPES:
            return f"g must be {', '.join(GATE_DTYPES)}, not {self.gate_dtype}"
        if self.state_dtype not in STATE_DTYPES:
            return f"states must be {', '.join(STATE_DTYPES)}, not {self.state_dtype}"
        if self.head_dim_k not in HEAD_DIMS or self.head_dim_v not in HEAD_DIMS:
            return f"K and V must be in {HEAD_DIMS}, not {self.head_dim_k}, {self.head_dim_v}"
        if (self.indexed or self.in_place or self.fresh) and not self.initial_state:
            return "state indices, in-place and fresh states need an initial state"
        if self.in_place and not self.final_state:
            return "an in-place state is a final state"
        if self.placed and self.checkpoints is None:
            return "rows are named for states that are kept"
        if self.reverse and (self.checkpoints == "once" or self.in_place or self.l2norm):
            return "against time states are kept every so many tokens or not, none is replaced, nothing normalised"
        return None


@dataclass(frozen=True)
class Config:
    """A problem, what one CTA works on, and which pass it is.

    tiles: V tiles of 64 columns per CTA, each with a warpgroup of its own. split: sequences are cut into segments; then
    the pass "prescan" computes what every segment adds to the state, and the pass "forward" starts every segment from
    the sum over its predecessors. Without a split there is only "forward". ends: of which the last segments alone, as
    final states are all that is wanted. paired: two CTAs form a cluster and load gates for each other. shared: the two
    CTAs have the V tiles of one head, load q and k for each other, and make half of P each.
    """

    problem: Problem
    tiles: int
    split: bool = False
    prescan: bool = False
    paired: bool = False
    shared: bool = False
    ends: bool = False

    @property
    def stage_bytes(self) -> int:
        """The bytes that are loaded for one chunk: q (unless prescan), k, v of every tile, and as much for dots."""
        wide = V_TILE * self.tiles * (1 + (self.problem.dots and not self.prescan))
        return 2 * CHUNK * (self.problem.head_dim_k * (2 - self.prescan) + wide)

    @property
    def follows(self) -> bool:
        """Whether the call launches another kernel before this one, whose results it needs."""
        return self.problem.packed or (self.split and not self.prescan)

    @property
    def stages(self) -> int:
        # Two slots of intra-chunk products and two of outputs; gates; tables, barriers and alignment.
        fixed = 8192 * (1 + self.paired)
        if not self.prescan:
            fixed += 2 * 2 * CHUNK * (CHUNK + V_TILE * self.tiles)
        return min(_MAX_STAGES, (SHARED_MEMORY - fixed) // self.stage_bytes)

    @property
    def threads(self) -> int:
        """The threads of a CTA: a warpgroup for weights and intra-chunk products, one per tile, one that loads."""
        return 128 * (2 + self.tiles)

    @property
    def registers(self) -> tuple[int, int, int]:
        """The registers per thread of the weights', the tiles' and the loading warpgroup."""
        return (208, 240, 56) if self.tiles == 1 else (96, 192, 32)

    def illegal(self) -> str | None:
        """Why the kernel cannot be built, or None."""
        if self.problem.illegal():
            return self.problem.illegal()
        if self.tiles not in (1, 2) or V_TILE * self.tiles > self.problem.head_dim_v:
            return f"{self.tiles} tiles of {V_TILE} columns do not fit V={self.problem.head_dim_v}"
        if self.problem.dots and self.tiles > 1:
            return "dots of two tiles leave no shared memory for a third stage"
        if self.prescan and not self.split:
            return "only split sequences are scanned in advance"
        if self.ends and (not self.split or self.prescan):
            return "only the forward pass of split sequences can begin with their last segments"
        if self.paired and (
            self.problem.gate_dtype is None or self.problem.packed or self.tiles > 1
        ):
            return "only gates of dense batches with one tile per CTA are loaded in pairs"
        if self.shared and (
            self.problem.packed or self.tiles > 1 or self.problem.head_dim_v != 2 * V_TILE
        ):
            return "only the two V tiles of a head of a dense batch are shared by two CTAs"
        return None


def candidates(problem: Problem) -> list[Config]:
    """Returns every config worth compiling for a problem."""
    every = [
        Config(problem, tiles, **way, paired=paired, shared=shared)
        for tiles in (1, 2)
        for way in (
            {},
            {"split": True},
            {"split": True, "prescan": True},
            {"split": True, "ends": True},
        )
        for paired in (False, True)
        for shared in (False, True)
    ]
    return [c for c in every if c.illegal() is None]


@dataclass(frozen=True)
class TableConfig:
    """The kernel that makes the segment table of packed sequences. index_dtype: of cu_seqlens."""

    index_dtype: str


@dataclass(frozen=True)
class DecaysConfig:
    """The kernel that makes gradients of log decays. parts: of the sums of every token. size: elements of a state, or
    None where none is left. started, ended: sums of initial states, and of final ones, with their gradients are given.
    gate_dtype: of the log decays per token, which then have gradients; decay: so have those per head. packed: sequences
    are in a table."""

    parts: int
    size: int | None
    started: bool
    ended: bool
    gate_dtype: str | None
    decay: bool
    packed: bool
