# Vendored from packages/cula-cp-sm90/src/cula_cp_sm90/config.py by "nox -s vendor": edit the master.
"""What is fixed when a KDA kernel is compiled, and how a call is spread over the multiprocessors. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from .arch import (
    BLOCK_US,
    CHAIN_US,
    MERGE_STEP_US,
    MERGE_US,
    SCAN_BLOCK_US,
    SCAN_CHAIN_US,
    SCAN_STAGES,
    STAGES,
    START_US,
    V_TILE,
)

CHUNK = 64
HEAD_DIM = 128
V_TILES = HEAD_DIM // V_TILE
ACTIVATION_DTYPES = ("bfloat16", "float16")
GATE_DTYPES = ("float32", "bfloat16", "float16")
OPERAND_DTYPES = ("float16", "bfloat16")
GATES = ("log", "softplus", "safe")
MIN_SEGMENT_CHUNKS = 16
MAX_GRID_Z = 65_535  # chunks that one launch of the chunk-parallel kernel takes
SUB = 16  # rows of a sub-block of a chunk
# Elements of Aqk and T' [64, 64] without the sub-blocks above the diagonal, which are zero.
TRIANGLE = CHUNK * (CHUNK + SUB) // 2
# Of a chunk and value head: qg, kh, kg [64, 128], Aqk, T' in 16 bits, 128 decays in fp32.
BLOCK_BYTES = 2 * (3 * CHUNK * HEAD_DIM + 2 * TRIANGLE) + 4 * HEAD_DIM


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
    dense batch. intra: Aqk and (I + Akk)^-1 are wanted by the caller too. The others are the flags of the public
    function.
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
    intra: bool = False


@dataclass(frozen=True)
class FactorsConfig:
    """Static facts of the kernel that gives the caller w, u, qg and kg. dtype: of v and what it gives; the others as in
    `PrepareConfig`."""

    dtype: str
    operand: str = "float16"
    index_dtype: str | None = None


@dataclass(frozen=True)
class RecurrenceConfig:
    """Static facts of the kernel that walks through the chunks.

    dtype: of v and the outputs. operand: of the blocks. tiles: of V_TILE columns of v per CTA. split: sequences are cut
    into segments, which start from states that were merged before. scan: only what a segment does to the state is
    wanted, as a map: what it adds, and the matrix that it applies. The others say which states there are, as the public
    function has them.
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
        block = BLOCK_BYTES - (2 * (CHUNK * HEAD_DIM + TRIANGLE) if self.scan else 0)
        return block + 2 * CHUNK * V_TILE * self.tiles

    @property
    def stages(self) -> int:
        return SCAN_STAGES if self.scan else STAGES


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

    tiles: of V_TILE columns of v per CTA of the recurrence. segment_tokens: length of a segment, a multiple of 64; 0
    when sequences stay whole. segments: how many there may be in all. piece_slots: chunks that the workspace holds at
    once.
    """

    tiles: int
    segment_tokens: int
    segments: int
    pieces: int
    piece_slots: int

    @property
    def split(self) -> bool:
        return self.segment_tokens > 0


GAIN = 1.03  # cutting must win this much
MAX_PARTS = 16


def _pace_us(chain: float, memory: float) -> float:
    """What a chunk takes where a chain and the memory hinder each other: more than the slower of both."""
    return (chain**2.5 + memory**2.5) ** 0.4


def _tiles(sequences: int, value_heads: int, multiprocessors: int) -> int:
    """Tiles of v per CTA: one, as long as all of them fit on the card at once."""
    return 1 if V_TILES * sequences * value_heads <= multiprocessors else V_TILES


def _walk_us(length: int, segments: int, value_heads: int, multiprocessors: int) -> float:
    """The recurrence over segments of `length` chunks."""
    tiles = _tiles(segments, value_heads, multiprocessors)
    at_once = min(segments * value_heads, multiprocessors * tiles // V_TILES)
    pace = _pace_us(CHAIN_US[tiles], BLOCK_US * at_once)
    return START_US + length * pace * max(1.0, segments * value_heads / at_once)


def _scan_us(length: int, segments: int, value_heads: int, multiprocessors: int) -> float:
    """The scan: two CTAs a segment and head, one for the first segment, none for the last."""
    ctas = value_heads * max(1, 2 * segments - 3)
    at_once = min(ctas, multiprocessors)
    pace = _pace_us(SCAN_CHAIN_US, SCAN_BLOCK_US * at_once / 2)
    return START_US + length * pace * -(-ctas // multiprocessors)


def cut_us(longest: int, total: int, parts: int, value_heads: int, multiprocessors: int) -> float:
    """Scan, merge and recurrence, with the longest sequence in `parts`; in chunks, `total` of all sequences."""
    length = -(-longest // parts)
    segments = -(-total // length)
    merge = MERGE_US + MERGE_STEP_US * (parts - 2)
    scan = _scan_us(length, segments, value_heads, multiprocessors)
    return scan + merge + _walk_us(length, segments, value_heads, multiprocessors)


def whole_us(longest: int, total: int, value_heads: int, multiprocessors: int) -> float:
    """The recurrence over whole sequences."""
    return _walk_us(longest, -(-total // longest), value_heads, multiprocessors)


def parts_of(
    longest: int, total: int, value_heads: int, multiprocessors: int, wanted: str | bool
) -> int:
    """Into how many segments the longest sequence is cut; 1: sequences stay whole. Lengths are in chunks."""
    if wanted is False or longest < 2 * MIN_SEGMENT_CHUNKS:
        return 1
    # More segments than there are CTAs at once gain nothing.
    at_once = multiprocessors * longest // (value_heads * total)
    most = min(MAX_PARTS, longest // MIN_SEGMENT_CHUNKS, max(2, at_once))
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
    piece_slots = min(slots, workspace // (value_heads * BLOCK_BYTES), MAX_GRID_Z)
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
