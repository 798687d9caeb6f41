"""What is fixed when a kernel of the backward pass of the gated delta rule is compiled. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

# Where a CTA sums up dq and dk over value heads, in fp32: [dq or dk, part, thread, 4 numbers].
SUMS = (2, 16, 128, 4)


@dataclass(frozen=True)
class ChunkConfig:
    """What both kernels know of chunks.

    dtype: of q, k, do. gate_dtype, beta_dtype: of log decays and of strengths. operand: of what products take.
    index_dtype: of cu_seqlens, None for a dense batch. The others are the flags of the public function.
    """

    dtype: str
    gate_dtype: str
    beta_dtype: str
    operand: str = "float16"
    l2norm: bool = True
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    index_dtype: str | None = None


@dataclass(frozen=True)
class PrepareConfig(ChunkConfig):
    """Static facts of the kernel that writes the blocks of chunks."""

    # As parts of KDA's kernel ask for them: keys have roots of strengths, nothing is written for the caller, and other
    # kernels come behind this one.
    rooted = True
    intra = False
    beside = False


@dataclass(frozen=True)
class GradientsConfig(ChunkConfig):
    """Static facts of the kernel that computes the gradients of a chunk.

    grouped: several value heads share a head of q and k, over which dq and dk are summed.
    """

    grouped: bool = False
