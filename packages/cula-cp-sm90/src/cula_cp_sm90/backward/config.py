"""What is fixed when a kernel of the backward pass is compiled. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from cula_core.delta_rule.config import BLOCK_BYTES, CHUNK, HEAD_DIM, TRIANGLE

from ..arch import TARGET

V_TILE = TARGET.v_tile
FACTOR_BYTES = 4 * CHUNK  # roots of strengths
# Of a chunk and value head: a kept state, and kept rows.
STATE_BYTES, ROW_BYTES = 2 * HEAD_DIM * HEAD_DIM, 2 * CHUNK * HEAD_DIM
# What a call may take between its kernels, as long as MIN_HEADS heads fit.
SCRATCH_BYTES = 3 << 30
MIN_HEADS = 16


def scratch_bytes(slots: int, heads: int) -> int:
    """Returns the bytes between the kernels of a backward pass: blocks, factors, states and rows of both walks."""
    return slots * heads * (BLOCK_BYTES + 4 * FACTOR_BYTES + 2 * (STATE_BYTES + ROW_BYTES))


def heads_at_once(slots: int, heads: int, scratch: int, multiple: int = 1) -> int:
    """Returns how many value heads are done together, so that groups are as few and as equal as the scratch allows.

    multiple: value heads that share a query head, and stay together.
    """
    units = heads // multiple
    most = max(max(scratch // scratch_bytes(slots, 1), MIN_HEADS) // multiple, 1)
    return -(-units // -(-units // most)) * multiple


@dataclass(frozen=True)
class WalkConfig:
    """Static facts of a walk through the chunks.

    dtype: of v or do. back: from the last chunk to the first, with the gradients of states, instead of forward with the
    states. operand: of the blocks and of what is written. tiles: of 64 columns of v per CTA. packed: sequences are in a
    table. start: there is a state in front of the walk (the initial one or, of a walk back, the gradient of the final
    one). end: what is left behind the walk is written. state_v_first: as the public function has it. state_dtype: of
    both of them.
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

    # As `Stages` asks for them: a walk forward needs of a block what a scan does.
    stages = TARGET.stages
    v_tile = V_TILE

    @property
    def scan(self) -> bool:
        """Whether stages lack qg and Aqk."""
        return not self.back

    @property
    def v_tiles(self) -> int:
        """Tiles of v per head."""
        return HEAD_DIM // V_TILE

    @property
    def stage_bytes(self) -> int:
        """Bytes that are loaded for one chunk: of a block, v or do of every tile, and forward roots of strengths."""
        block = BLOCK_BYTES - (0 if self.back else 2 * (CHUNK * HEAD_DIM + TRIANGLE))
        return block + 2 * CHUNK * V_TILE * self.tiles + (0 if self.back else FACTOR_BYTES)


@dataclass(frozen=True)
class GradientsConfig:
    """Static facts of the kernel that computes the gradients of a chunk.

    dtype: of q, k, do and of dq, dk, dv. gate_dtype, beta_dtype: of g, dg and of dbeta. operand: of states and of what
    products take. gate: g holds log decays ("log"), or what they are computed from ("safe", "softplus"). bounded: log
    decays are in [-5, 0). rate, bias: there is an A_log, a dt_bias. index_dtype: of cu_seqlens, None for a dense batch.
    grouped: dq, dk are fp32, since those of value heads that share a query head are summed. The others are the flags of
    the public function.
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
    grouped: bool = False
