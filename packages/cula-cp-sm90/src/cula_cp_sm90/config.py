"""What is fixed when a KDA kernel is compiled, and how a call is spread over the multiprocessors. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 64
HEAD_DIM = 128
V_TILE = 64
ACTIVATION_DTYPES = ("bfloat16", "float16")
GATE_DTYPES = ("float32", "bfloat16", "float16")
OPERAND_DTYPES = ("float16", "bfloat16")
GATES = ("log", "softplus", "safe")
MIN_SEGMENT_CHUNKS = 16
MAX_GRID_Y = 65_535  # chunks that one launch of the chunk-parallel kernel takes
# Of a chunk and value head: qg, kh, kg [64, 128], Aqk, T' [64, 64] in 16 bits, 128 decays in fp32.
BLOCK_BYTES = 66_048


def dtype_name(dtype: object) -> str:
    """The name of a torch dtype, such as "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def chunk_slots(batch: int, tokens: int, sequences: int | None) -> int:
    """How many chunks a call may have: exactly for a dense batch, at most for `sequences` packed ones."""
    return batch * -(-tokens // CHUNK) if sequences is None else tokens // CHUNK + sequences


def workspace_bytes(batch: int, tokens: int, value_heads: int, sequences: int | None = None) -> int:
    """Bytes that a call in one piece keeps between its kernels."""
    return chunk_slots(batch, tokens, sequences) * value_heads * BLOCK_BYTES


@dataclass(frozen=True)
class PrepareConfig:
    """Static facts of the chunk-parallel kernel.

    dtype: of q, k. operand: of what it writes. gate: g holds log decays ("log") or what they are computed from.
    bounded: log decays are in [-5, 0). rate, bias: there is an A_log, a dt_bias. index_dtype: of cu_seqlens, None for a
    dense batch. The others are the flags of the public function.
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
class RecurrenceConfig:
    """Static facts of the kernel that walks through the chunks.

    dtype: of v and the outputs. operand: of the blocks. tiles: of 64 columns of v per CTA, each with a warpgroup of its
    own. split: sequences are cut into segments, which start from states that were merged before. scan: only what a
    segment does to the state is wanted, as a map: what it adds, and the matrix that it applies. The others say which
    states there are, as the public function has them.
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

    @property
    def stage_bytes(self) -> int:
        """What is loaded for one chunk: a block, for a scan without qg and Aqk, and v of every tile."""
        block = BLOCK_BYTES - (CHUNK * (HEAD_DIM + CHUNK) * 2 if self.scan else 0)
        return block + 2 * CHUNK * V_TILE * self.tiles

    @property
    def stages(self) -> int:
        return 3 if self.scan else 2

    @property
    def threads(self) -> int:
        """A warpgroup per tile and a warp that loads; registers move between whole warpgroups only."""
        return 128 * self.tiles + (32 if self.tiles == 1 else 128)


@dataclass(frozen=True)
class MergeConfig:
    """Static facts of the kernel that merges the maps of segments; as in `RecurrenceConfig` and `PrepareConfig`."""

    state_v_first: bool = False
    initial_state: bool = False
    indexed: bool = False
    index_dtype: str | None = None


@dataclass(frozen=True)
class Plan:
    """How a call is spread out.

    tiles: of 64 columns of v per CTA of the recurrence. segment_tokens: length of a segment, a multiple of 64; 0 when
    sequences stay whole. segments: how many there may be in all. piece_slots: chunks that the workspace holds at once.
    """

    tiles: int
    segment_tokens: int
    segments: int
    pieces: int
    piece_slots: int

    @property
    def split(self) -> bool:
        return self.segment_tokens > 0


# The cost model, in microseconds, fitted on an H200 (docs/kda-prefill.md). A chain is a CTA that walks through chunks one
# after the other; one tile of v per CTA is the faster chain, two of them are the fewer bytes.
START_US = 6.0  # of a kernel, until its first chunk is done
CHAIN_US = {1: 1.0, 2: 1.45}  # per chunk, by tiles
SCAN_US = 1.1
CHUNK_HEAD_BYTES_US = (
    96.5e3 * 1.024 / 4.05e6
)  # what a chunk and value head moves, at the memory's pace
SCAN_BYTES_US = 57.5e3 * 1.024 / 4.05e6
MERGE_US, MERGE_STEP_US = 6.0, 1.5
GAIN = 1.03  # cutting must win this much
MAX_PARTS = 16


def _tiles(segments: int, value_heads: int, multiprocessors: int) -> int:
    """Tiles of v per CTA: one, as long as all of them fit on the card at once."""
    return 1 if 2 * segments * value_heads <= multiprocessors else 2


def _walk_us(longest: int, total: int, tiles: int, multiprocessors: int) -> float:
    """The recurrence over `total` chunks of all heads together, of which a chain has `longest` at least."""
    chains = multiprocessors * tiles / 2
    pace = max(total * CHAIN_US[tiles] / chains, total * CHUNK_HEAD_BYTES_US)
    return START_US + max(longest * CHAIN_US[tiles], pace)


def cut_us(longest: int, total: int, parts: int, value_heads: int, multiprocessors: int) -> float:
    """Scan, merge and recurrence, with the longest sequence in `parts`; in chunks, `total` of all sequences."""
    length = -(-longest // parts)
    work = total * value_heads
    segments = -(-total // length)
    scanned = work * (parts - 1) / parts
    scan = START_US + max(
        length * SCAN_US, scanned * SCAN_US / multiprocessors, scanned * SCAN_BYTES_US
    )
    merge = MERGE_US + MERGE_STEP_US * parts
    tiles = _tiles(segments, value_heads, multiprocessors)
    return scan + merge + _walk_us(length, work, tiles, multiprocessors)


def whole_us(longest: int, total: int, value_heads: int, multiprocessors: int) -> float:
    """The recurrence over whole sequences."""
    sequences = -(-total // longest)
    tiles = _tiles(sequences, value_heads, multiprocessors)
    return _walk_us(longest, total * value_heads, tiles, multiprocessors)


def parts_of(
    longest: int, total: int, value_heads: int, multiprocessors: int, wanted: str | bool
) -> int:
    """Into how many segments the longest sequence is cut; 1: sequences stay whole. Lengths are in chunks."""
    if wanted is False or longest < 2 * MIN_SEGMENT_CHUNKS:
        return 1
    most = min(MAX_PARTS, longest // MIN_SEGMENT_CHUNKS)
    costs = {
        parts: cut_us(longest, total, parts, value_heads, multiprocessors)
        for parts in range(2, most + 1)
    }
    best = min(costs, key=lambda parts: costs[parts])
    if wanted is True:
        return best
    whole = whole_us(longest, total, value_heads, multiprocessors)
    return best if costs[best] * GAIN < whole else 1


def plan(
    batch: int,
    tokens: int,
    value_heads: int,
    sequences: int | None,
    multiprocessors: int,
    workspace: int,
    intracard_cp: str | bool = "auto",
    longest: int | None = None,
) -> Plan:
    """Decides from shapes alone, so that a captured CUDA graph holds for every packing of its tokens.

    sequences: of packed input, else None. workspace: its bytes. longest: tokens of the longest sequence where it is
    known; otherwise one sequence may hold all tokens but one of each other.
    """
    count = batch if sequences is None else sequences
    slots = chunk_slots(batch, tokens, sequences)
    piece_slots = min(slots, workspace // (value_heads * BLOCK_BYTES), MAX_GRID_Y)
    pieces = -(-slots // piece_slots)
    if longest is None:
        longest = tokens if sequences is None else max(tokens - sequences + 1, 1)
    chunks = max(1, -(-longest // CHUNK))
    total = max(chunks, batch * -(-tokens // CHUNK))
    parts = 1
    if pieces == 1:
        parts = parts_of(chunks, total, value_heads, multiprocessors, intracard_cp)
    length = -(-chunks // parts) * CHUNK if parts > 1 else 0
    segments = count
    if length:
        segments = batch * -(-tokens // length) if sequences is None else tokens // length + count
    alike = -(-total // chunks) if not length else -(-total * CHUNK // length)
    tiles = _tiles(alike, value_heads, multiprocessors)
    return Plan(tiles, length, segments, pieces, piece_slots)
