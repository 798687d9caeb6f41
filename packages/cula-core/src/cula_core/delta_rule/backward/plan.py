"""How both walks of a backward pass are spread over the multiprocessors. Pure Python, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import CHUNK
from ..plan import CostModel, Costs
from .config import V_TILES

# Fitted to the times on an H200 of backward passes of 4 to 32 value heads in 1 to 16 segments. Two tiles of a CTA are
# memory-bound where both walks fill the card.
COSTS = Costs(
    start_us=8.0,
    chain_us={1: 1.3, 2: 1.75},
    block_us=0.026,
    scan_chain_us=1.6,
    scan_block_us=0.026,
    merge_us=8.0,
    merge_step_us=3.4,
)


@dataclass(frozen=True)
class Spread:
    """How both walks are spread out.

    tiles: of 64 columns of v per CTA. cut: whether sequences are cut into segments. segment_tokens: a length that no
    segment or whole sequence exceeds, a multiple of 64 where they are cut. segments: how many there may be in all.
    """

    tiles: int
    cut: bool
    segment_tokens: int
    segments: int


class _BothWalks(CostModel):
    """The time of both walks side by side: every value head counts twice."""

    def halves(self, segments: int) -> int:
        """Returns the halves of maps that a value head's scans give, for each of both walks: forward the first segment
        gives one and the last one none, and back every segment but the first gives one."""
        return -(-3 * segments // 2) - 2


def plan(
    batch: int,
    tokens: int,
    value_heads: int,
    sequences: int | None,
    multiprocessors: int,
    intracard_cp: str = "auto",
    longest: int | None = None,
    segment_tokens: int = 0,
) -> Spread:
    """Decides from shapes alone, as the plan of the forward pass does, whose arguments these are."""
    model = _BothWalks(COSTS, V_TILES, 2 * value_heads, multiprocessors)
    cut = model.cut(batch, tokens, sequences, intracard_cp, longest, segment_tokens)
    if cut.segment_tokens:
        return Spread(model.tiles(cut.alike), True, cut.segment_tokens, cut.segments)
    # Whole sequences have two CTAs a head while those of one walk fit, even if both walks do not then.
    tiles = 1 if V_TILES * cut.segments * value_heads <= multiprocessors else V_TILES
    return Spread(tiles, False, max(tokens, CHUNK), cut.segments)
