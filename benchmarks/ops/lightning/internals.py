"""What the benchmarks use of this family's packages beyond their public functions; no other file here imports that."""

from __future__ import annotations

from cula_core.delta_rule.backward import config
from cula_core.delta_rule.config import chunk_slots


def scratch_bytes(batch: int, tokens: int, heads: int, sequences: int | None) -> int:
    """Bytes that the kernels of the gated delta rule's backward hand to each other. sequences: packed ones, or None."""
    return config.scratch_bytes(chunk_slots(batch, tokens, sequences), heads)
