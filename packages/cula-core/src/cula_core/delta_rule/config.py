"""What is fixed when a KDA kernel is compiled. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, field

CHUNK = 64
HEAD_DIM = 128
ACTIVATION_DTYPES = ("bfloat16", "float16")
GATE_DTYPES = ("float32", "bfloat16", "float16")
OPERAND_DTYPES = ("float16", "bfloat16")
GATES = ("log", "softplus", "safe")
MIN_SEGMENT_CHUNKS = 16
TEAMS = 3  # of 256 threads of a CTA that prepares chunks beside the recurrence
MOST_MACHINES = 128  # whose bounds that kernel keeps
UNCUT = 1 << 24  # chunks of a segment where sequences are whole
# Words of a line of the L2: what is looked at while it changes has one for itself.
LINE = 32
# Tiles of v of a machine: it walks through all of a head.
TILES_OF_MACHINE = 2
COUNTERS = 2  # of chunks that are prepared and of machines
# What `use_intracard_cp` may be, and how planners call it.
INTRACARD_CP: dict[bool | str, str] = {"auto": "auto", True: "on", False: "off"}
# Chunks that one launch of the chunk-parallel kernel takes: a grid has one CTA more there, for the table of segments.
MAX_GRID_Z = 65_534
SUB = 16  # rows of a sub-block of a chunk
# Bits of the bytes that say of a sequence whether it has an initial state, and what a scan computes of it beyond the
# segments in front of others: the map of its last segment, and the matrix of its first one.
HAS_STATE, GOES_ON, COMES_ON = 1, 2, 4
# Elements of Aqk and T' [64, 64] without the sub-blocks above the diagonal, which are zero.
TRIANGLE = CHUNK * (CHUNK + SUB) // 2
# Of a chunk and value head: qg, kh, kg [64, 128], Aqk, T' in 16 bits, 128 decays in fp32.
BLOCK_BYTES = 2 * (3 * CHUNK * HEAD_DIM + 2 * TRIANGLE) + 4 * HEAD_DIM


def chunk_slots(batch: int, tokens: int, sequences: int | None) -> int:
    """Returns how many chunks a call may have: exactly for a dense batch, at most for `sequences` packed ones."""
    return batch * -(-tokens // CHUNK) if sequences is None else tokens // CHUNK + sequences


def flag_words(machines: int, share: int) -> int:
    """Returns the words by which kernels beside each other tell how far they are (`kernels.flags`)."""
    return machines * ((share + 1) * LINE + TILES_OF_MACHINE) + COUNTERS


def workspace_bytes(batch: int, tokens: int, value_heads: int, sequences: int | None = None) -> int:
    """Returns the bytes of the workspace of a call in one piece."""
    return chunk_slots(batch, tokens, sequences) * value_heads * BLOCK_BYTES


@dataclass(frozen=True)
class TokensConfig:
    """Static facts of a chunk-parallel kernel that reads tokens as the caller has them.

    dtype: of q, k. operand: of what it writes for other kernels, or products take. gate: g holds log decays ("log") or
    what they are computed from. bounded: log decays are in [-5, 0). rate, bias: there is an A_log, a dt_bias.
    index_dtype: of cu_seqlens, None for a dense batch. The others are the flags of the public function.
    """

    dtype: str
    gate_dtype: str
    beta_dtype: str
    operand: str = "float16"
    gate: str = "safe"
    bounded: bool = True
    l2norm: bool = True
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    rate: bool = True
    bias: bool = True
    index_dtype: str | None = None


@dataclass(frozen=True)
class PrepareConfig(TokensConfig):
    """Static facts of the kernel that writes the blocks of chunks.

    intra: Aqk and (I + Akk)^-1 are written for the caller too. rooted: for a backward pass, keys have the roots of
    strengths, and factors of tokens are written too. peaks: so are the largest |do|.
    """

    intra: bool = False
    rooted: bool = False
    peaks: bool = False
    beside: bool = False


@dataclass(frozen=True)
class FactorsConfig:
    """Static facts of the kernel that computes w, u, qg and kg for the caller.

    dtype: of v and of the results; the others are as in `PrepareConfig`.
    """

    dtype: str
    operand: str = "float16"
    index_dtype: str | None = None


@dataclass(frozen=True)
class RecurrenceConfig:
    """Static facts of the kernel that walks through the chunks.

    dtype: of v and the outputs. operand: of the blocks. tiles: of v_tile columns of v per CTA. split: sequences are cut
    into segments, which start from states that were merged before. scan: the kernel computes the map of a segment
    instead: what it adds to a state, and the matrix that it applies to one. v_tile and stages are facts of the
    architecture (`Target`). redirected: final states have rows of their own. fresh: sequences say whether they have an
    initial state. checkpoints: states on the way are kept after "every" so many tokens, or "once"; placed: in rows that
    the caller names. rooted: blocks are those for a backward pass, and factors of tokens say what values are multiplied
    with. state_dtype, kept_dtype: of initial and final states, and of those on the way. The others say which states
    there are, as the public function has them.
    """

    dtype: str
    operand: str = "float16"
    tiles: int = 1
    split: bool = False
    scan: bool = False
    packed: bool = False
    state_v_first: bool = False
    initial_state: bool = False
    final_state: bool = True
    indexed: bool = False
    in_place: bool = False
    redirected: bool = False
    fresh: bool = False
    checkpoints: str | None = None
    placed: bool = False
    rooted: bool = False
    state_dtype: str = "float32"
    kept_dtype: str = "float32"
    beside: bool = False
    index_dtype: str | None = None
    v_tile: int = field(kw_only=True)
    stages: int = field(kw_only=True)

    @property
    def v_tiles(self) -> int:
        """Tiles of v per head."""
        return HEAD_DIM // self.v_tile

    @property
    def narrow(self) -> bool:
        """Whether stages lack qg and Aqk."""
        return self.scan

    @property
    def halves(self) -> int:
        """How many matrices [V, K] the columns of a head are: of a scan also the one that M becomes."""
        return 2 if self.scan else 1

    @property
    def stage_bytes(self) -> int:
        """Bytes that are loaded for one chunk: a block, for a scan without qg and Aqk, v of every tile, and roots."""
        block = BLOCK_BYTES - (2 * (CHUNK * HEAD_DIM + TRIANGLE) if self.narrow else 0)
        return block + 2 * CHUNK * self.v_tile * self.tiles + (4 * CHUNK if self.rooted else 0)


@dataclass(frozen=True)
class MergeConfig:
    """Static facts of the kernel that merges the maps of segments; as in `RecurrenceConfig` and `PrepareConfig`.

    fades: some segments are marked as forgetting what was before them. back: of gradients of states, from the last
    segment to the first.
    """

    state_v_first: bool = False
    initial_state: bool = False
    indexed: bool = False
    index_dtype: str | None = None
    fades: bool = False
    fresh: bool = False
    state_dtype: str = "float32"
    back: bool = False


@dataclass(frozen=True)
class FoldConfig:
    """Static facts of the kernel that folds maps of slices.

    back: gradients of states, against the tokens. whole: the map of each chain, and of states nothing else.
    """

    back: bool = False
    whole: bool = False


Config = PrepareConfig | FactorsConfig | RecurrenceConfig | MergeConfig | FoldConfig
