"""Which tile a call's CTAs work on. Pure Python, from static facts alone."""

from __future__ import annotations

from .config import Config, Problem

# state_v_first, several tokens -> tile_v, threads, lanes for 16-byte vectors of fp32
_TILES = {
    (True, False): (16, 128, 32),
    (True, True): (32, 128, 8),
    (False, False): (64, 512, 16),
    (False, True): (64, 256, 16),
}


def candidates(problem: Problem) -> list[Config]:
    """Returns every tile worth compiling for a problem, the one that `select` takes included."""
    found = []
    for tile_v in (8, 16, 32, 64, 128):
        for threads in (64, 128, 256, 512):
            for lanes in (8, 16, 32):
                config = Config(problem, tile_v, threads, lanes)
                if config.illegal() is None and config.bytes_per_thread >= 32:
                    found.append(config)
    return found


def select(problem: Problem, arch: str, multiprocessors: int = 132) -> Config:
    """Returns the tile for every number of rows on an architecture ("sm_80", "sm_90a", ...)."""
    tile_v, threads, lanes = _TILES[problem.state_v_first, problem.tokens > 1]
    return min(
        candidates(problem),
        key=lambda c: (abs(c.lanes - lanes), abs(c.threads - threads), abs(c.tile_v - tile_v)),
    )


def supports_overlap(arch: str) -> bool:
    """Whether the next kernel's launch may overlap the end of this one (programmatic dependent launch)."""
    return int(arch.removeprefix("sm_").rstrip("af")) >= 90
