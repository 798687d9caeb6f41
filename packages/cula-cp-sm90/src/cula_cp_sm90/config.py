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


def _recurrence_us(chunks: int, columns: int, wide: bool) -> float:
    return 0.0


def plan(
    batch: int,
    tokens: int,
    value_heads: int,
    sequences: int | None,
    multiprocessors: int,
    workspace: int,
    intracard_cp: str | bool = "auto",
    longest: int | None = None,
    segment_chunks: int | None = None,
) -> Plan:
    """Decides from shapes alone, so that a captured CUDA graph holds for every packing of its tokens."""
    count = batch if sequences is None else sequences
    slots = chunk_slots(batch, tokens, sequences)
    piece_slots = min(slots, workspace // (value_heads * BLOCK_BYTES))
    pieces = -(-slots // piece_slots)
    bound = tokens if sequences is None else max(tokens - sequences + 1, 1)
    longest = bound if longest is None else longest
    parts = 1
    if intracard_cp is not False and pieces == 1:
        chunks = -(-longest // CHUNK)
        at_once = max(1, -(-tokens * batch // max(longest, 1)))
        parts = min(
            16, multiprocessors // (2 * value_heads * at_once), chunks // MIN_SEGMENT_CHUNKS
        )
        if intracard_cp is True:
            parts = max(parts, 2)
    length = -(-longest // (parts * CHUNK)) * CHUNK if parts > 1 else 0
    if length:
        per_row = -(-tokens // length)
        segments = batch * per_row if sequences is None else tokens // length + sequences
    else:
        segments = count
    narrow = 2 * segments * value_heads <= multiprocessors
    return Plan(1 if narrow else 2, length, segments, pieces, piece_slots)
