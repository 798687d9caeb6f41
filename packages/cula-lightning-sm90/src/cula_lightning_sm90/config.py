"""What is fixed when a prefill kernel is compiled, and how a call is spread over the multiprocessors. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, replace

CHUNK = 64
V_TILE = 64
HEAD_DIMS = (64, 128)
ACTIVATION_DTYPES = ("bfloat16", "float16")
GATE_DTYPES = ("float32", "bfloat16", "float16")
SHARED_MEMORY = 232_448

_MAX_STAGES = 6
# Segments shorter than this cost more in their own start-up than they win.
_MIN_SEGMENT = 1024
_MAX_SEGMENTS = 16


def dtype_name(dtype: object) -> str:
    """The name of a torch dtype, such as "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Problem:
    """The static facts of a call: batch, lengths, head counts, strides, scale and intervals are not among them.

    gate_dtype: dtype of the per-token log decay, None without one. decay: there is a log decay per head. packed: the
    sequences are those of `cu_seqlens`. indexed: sequences find their state through indices, negative ones are
    skipped. in_place: the final state replaces the initial one. l2norm, exact_state: see the public functions.
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
    checkpoints: bool = False
    l2norm: bool = False
    exact_state: bool = False

    def illegal(self) -> str | None:
        """Why no kernel serves this problem, or None."""
        if self.dtype not in ACTIVATION_DTYPES:
            return f"activations must be {' or '.join(ACTIVATION_DTYPES)}, not {self.dtype}"
        if self.gate_dtype is not None and self.gate_dtype not in GATE_DTYPES:
            return f"g must be {', '.join(GATE_DTYPES)}, not {self.gate_dtype}"
        if self.head_dim_k not in HEAD_DIMS or self.head_dim_v not in HEAD_DIMS:
            return f"K and V must be in {HEAD_DIMS}, not {self.head_dim_k}, {self.head_dim_v}"
        if (self.indexed or self.in_place) and not self.initial_state:
            return "state indices and in-place states need an initial state"
        if self.in_place and not self.final_state:
            return "an in-place state is a final state"
        return None


@dataclass(frozen=True)
class Config:
    """A problem, what one CTA works on, and which pass it is.

    tiles: V tiles of 64 columns per CTA, each with a warpgroup of its own. split: sequences are cut into segments; then
    the pass "prescan" computes what every segment adds to the state, and the pass "forward" starts every segment from
    the sum over its predecessors. Without a split there is only "forward". paired: two CTAs form a cluster and load
    gates for each other.
    """

    problem: Problem
    tiles: int
    split: bool = False
    prescan: bool = False
    paired: bool = False

    @property
    def stage_bytes(self) -> int:
        """What is loaded for one chunk: q (unless prescan), k, and v of every tile."""
        return 2 * CHUNK * (self.problem.head_dim_k * (2 - self.prescan) + V_TILE * self.tiles)

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
        """A warpgroup that makes the weights and intra-chunk products, one per tile, one that loads."""
        return 128 * (2 + self.tiles)

    @property
    def registers(self) -> tuple[int, int, int]:
        """Per thread of the weights', the tiles' and the loading warpgroup."""
        return (208, 240, 56) if self.tiles == 1 else (96, 192, 32)

    def illegal(self) -> str | None:
        """Why the kernel cannot be built, or None."""
        if self.problem.illegal():
            return self.problem.illegal()
        if self.tiles not in (1, 2) or V_TILE * self.tiles > self.problem.head_dim_v:
            return f"{self.tiles} tiles of {V_TILE} columns do not fit V={self.problem.head_dim_v}"
        if self.prescan and not self.split:
            return "only split sequences are scanned in advance"
        if self.paired and (
            self.problem.gate_dtype is None or self.problem.packed or self.tiles > 1
        ):
            return "only gates of dense batches with one tile per CTA are loaded in pairs"
        return None


def candidates(problem: Problem) -> list[Config]:
    """Every config worth compiling for a problem."""
    every = [
        Config(problem, tiles, split, prescan, paired)
        for tiles in (1, 2)
        for split, prescan in ((False, False), (True, False), (True, True))
        for paired in (False, True)
    ]
    return [c for c in every if c.illegal() is None]


@dataclass(frozen=True)
class Plan:
    """How a call is spread out.

    segments: how many segments there may be in all. segment_tokens: their length, a multiple of 64; 0 when sequences
    stay whole. parts: segments of one sequence of a dense batch. ctas: of the grid, at most one per multiprocessor.
    paired: two CTAs form a cluster; both always have the same segment, and heads that are neighbours or the same.
    """

    tiles: int
    segments: int
    segment_tokens: int
    parts: int
    ctas: int
    paired: bool

    @property
    def split(self) -> bool:
        return self.segment_tokens > 0


def plan(
    problem: Problem,
    batch: int,
    tokens: int,
    sequences: int,
    heads_v: int,
    multiprocessors: int,
    num_splits: int | None = None,
    gate_rows: bool = False,
) -> Plan:
    """Decides from shapes alone, so that a captured CUDA graph holds for every packing of its tokens.

    A head's V tiles go to CTAs of their own while those fit on the card; sequences are cut where even that leaves most
    of it idle. Lengths of packed sequences are unknown here: cutting by tokens bounds the longest piece whatever they
    are, and short sequences stay whole. gate_rows: TMA can load gates of neighbouring heads.
    """
    v_tiles = problem.head_dim_v // V_TILE
    columns = heads_v * v_tiles * (1 if problem.packed else batch)
    if num_splits is None:
        num_splits = max(1, min(multiprocessors // columns, tokens // _MIN_SEGMENT, _MAX_SEGMENTS))
    length = -(-tokens // (num_splits * CHUNK)) * CHUNK if num_splits > 1 else 0
    if length >= tokens:
        length = 0
    parts = -(-tokens // length) if length else 1
    if problem.packed:
        segments = sequences + (tokens // length if length else 0)
    else:
        segments = batch * parts
    fits = sequences * heads_v * v_tiles <= multiprocessors
    tiles = 1 if v_tiles == 1 or fits or length else 2
    ctas = min(multiprocessors, segments * heads_v * v_tiles // tiles)
    paired = (
        gate_rows and not problem.packed and tiles == 1 and heads_v * v_tiles % 2 == 0 and ctas > 1
    )
    if paired:
        ctas = ctas // 2 * 2
    return Plan(tiles, segments, length, parts, ctas, paired)


def configs(problem: Problem, spread: Plan) -> tuple[Config, ...]:
    """The passes of a call, in order."""
    forward = Config(problem, spread.tiles, spread.split, paired=spread.paired)
    return (replace(forward, prescan=True), forward) if spread.split else (forward,)
