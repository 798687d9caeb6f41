"""What is fixed when a walk of a backward pass is compiled, and how large what lies between kernels is. Pure Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..config import BLOCK_BYTES, CHUNK, HEAD_DIM, TRIANGLE

# Columns of v that a group of threads of a walk has, and chunks that it holds at once: facts of Hopper.
V_TILE, STAGES = 64, 2
V_TILES = HEAD_DIM // V_TILE
# Numbers of a token that a chunk-parallel kernel writes: the root r of its strength, 1 / norm of q and of k, and the
# strength divided by r.
FACTORS = 4
FACTOR_BYTES = 4 * CHUNK
# Of a chunk and value head: a kept state, and kept rows.
STATE_BYTES, ROW_BYTES = 2 * HEAD_DIM * HEAD_DIM, 2 * CHUNK * HEAD_DIM
# Rows of the map of a segment [rows, 128] in fp32: transposed, what it adds to a state, the matrix that it applies to
# one, and what it adds to the gradient of one.
MAP_ROWS = 3 * HEAD_DIM
# What a call may take between its kernels, unless a user says another number: up to FULL_BYTES for FULL_HEADS heads,
# both of whose walks fill a card side by side, and whatever MIN_HEADS heads take.
SCRATCH_BYTES, FULL_BYTES = 3 << 30, 12 << 30
FULL_HEADS, MIN_HEADS = 32, 16
SCRATCH_LIMIT = "CULA_SCRATCH_LIMIT"  # the environment variable


def block_bytes(slots: int, heads: int) -> int:
    """Returns the bytes of blocks and factors."""
    return slots * heads * (BLOCK_BYTES + FACTORS * FACTOR_BYTES)


def scratch_bytes(slots: int, heads: int) -> int:
    """Returns the bytes between the kernels of a backward pass: blocks, factors, states and rows of both walks."""
    return block_bytes(slots, heads) + slots * heads * 2 * (STATE_BYTES + ROW_BYTES)


def heads_at_once(
    slots: int,
    heads: int,
    scratch: int | None = None,
    multiple: int = 1,
    groups: int = 1,
    size: Callable[[int, int], int] = scratch_bytes,
) -> int:
    """Returns how many value heads are done together, so that groups are as few and as equal as the scratch allows.

    scratch: bytes; None: SCRATCH_BYTES, and more for FULL_HEADS or MIN_HEADS heads. multiple: value heads that share a
    query head, and stay together. groups: how many there are at least where scratch is None, if value heads can be
    divided so. size: returns the bytes of so many slots and heads.
    """
    units, one = heads // multiple, size(slots, 1)
    if scratch is None:
        most = max(SCRATCH_BYTES // one, min(FULL_HEADS, FULL_BYTES // one), MIN_HEADS)
    else:
        most = scratch // one
    count = -(-units // max(most // multiple, 1))
    if scratch is None:
        count = max(count, groups)
    return -(-units // count) * multiple


@dataclass(frozen=True)
class PeaksConfig:
    """Static facts of the kernel that finds the largest |do|: the dtypes of do and of cu_seqlens, None for a dense
    batch."""

    dtype: str
    index_dtype: str | None = None


@dataclass(frozen=True)
class WalkConfig:
    """Static facts of a walk through the chunks.

    dtype: of v or do. back: from the last chunk to the first, with the gradients of states, instead of forward with the
    states. operand: of the blocks and of what is written. tiles: of 64 columns of v per CTA. packed: sequences are in a
    table. start: there is a state in front of the walk (the initial one or, of a walk back, the gradient of the final
    one). end: what is left behind the walk is written. state_v_first: as the public function has it. state_dtype: of
    both of them. split: sequences are cut into segments; those that do not come first on the walk start from states
    that were merged before. scan: the kernel keeps nothing and computes the maps of segments instead: forward what they
    add and the matrix that they apply, back what they add. kept: states and rows are kept; else, as in a scan, nothing.
    """

    dtype: str
    back: bool
    operand: str = "float16"
    tiles: int = 1
    packed: bool = False
    start: bool = False
    end: bool = False
    state_v_first: bool = False
    state_dtype: str = "float32"
    split: bool = False
    scan: bool = False
    kept: bool = True

    # As `Stages` and `Loader` ask for them.
    stages = STAGES
    v_tile = V_TILE
    v_tiles = V_TILES

    @property
    def keeps(self) -> bool:
        """Whether states and rows are written."""
        return self.kept and not self.scan

    @property
    def narrow(self) -> bool:
        """Whether stages lack qg and Aqk."""
        return not self.back

    @property
    def halves(self) -> int:
        """How many matrices [V, K] the columns of a head are: of a scan forward also the one that M becomes."""
        return 2 if self.scan and not self.back else 1

    @property
    def stage_bytes(self) -> int:
        """Bytes that are loaded for one chunk: of a block, v or do of every tile, and forward roots of strengths."""
        block = BLOCK_BYTES - (0 if self.back else 2 * (CHUNK * HEAD_DIM + TRIANGLE))
        return block + 2 * CHUNK * V_TILE * self.tiles + (0 if self.back else FACTOR_BYTES)
