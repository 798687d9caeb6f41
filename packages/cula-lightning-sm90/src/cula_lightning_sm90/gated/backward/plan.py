"""In how many groups a backward pass does its heads. Pure Python, from shapes alone."""

from __future__ import annotations

from cula_core.delta_rule.backward.config import V_TILES

# Tokens times value heads of a call that is divided: smaller ones take little memory, and are over before the host has
# launched the kernels of two groups.
LEAST = 1 << 18
FILLED = 0.95  # of a card's multiprocessors: they count as all of them


def groups(
    batch: int, tokens: int, heads_k: int, heads: int, packed: bool, multiprocessors: int
) -> int:
    """Returns in how many groups value heads are done at least, one after the other in the same memory: two where that
    costs little, else one.

    The walks of a few heads run side by side, with V_TILES CTAs a head, and those of twice as many one after the other.
    So if the walks of half of the heads fill the card, both halves take as long as all heads together. The lengths of
    packed sequences are known to the device alone; where one is much longer than the others, only its walks run.
    """
    smaller = heads_k // 2 * (heads // heads_k)  # heads of q and k stay with their value heads
    ctas = 2 * V_TILES * batch * smaller
    large = batch * tokens * heads >= LEAST
    return 2 if large and not packed and ctas >= FILLED * multiprocessors else 1
