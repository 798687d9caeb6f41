"""Which tile a call's CTAs work on. Pure Python, from static facts alone."""

from __future__ import annotations

from .config import Config, Problem

# (fp32 state, state_v_first) -> threads, state bytes per thread, direct. Measured on an H200, the narrow ones on 80 of
# its multiprocessors; docs/lightning-decode.md has the figures of the others.
_ONE_TOKEN = {
    (True, False): (1024, 32, True),
    (True, True): (1024, 32, True),
    (False, False): (512, 64, True),
    (False, True): (64, 64, True),
}
_ONE_TOKEN_NARROW = {
    (True, False): (512, 64, True),
    (True, True): (64, 64, False),
    (False, False): (128, 128, False),
    (False, True): (64, 128, False),
}
_SEVERAL_TOKENS = {
    (True, False): (128, 256, False),
    (True, True): (128, 256, False),
    (False, False): (256, 64, False),
    (False, True): (64, 128, False),
}


def candidates(problem: Problem) -> list[Config]:
    """Returns every tile worth compiling for a problem, the one that `select` takes included.

    Reading the tokens directly pays for one token and little state per thread only.
    """
    every = [
        Config(problem, tile_v, threads, direct)
        for tile_v in (8, 16, 32, 64, 128, 256)
        for threads in (64, 128, 256, 512, 1024)
        for direct in (False, True)
    ]
    return [
        c
        for c in every
        if c.illegal() is None
        and c.bytes_per_thread >= 32
        and not (c.direct and (problem.tokens > 1 or c.bytes_per_thread > 64))
        and not (problem.tokens > 1 and c.bytes_per_thread < 64)
    ]


def select(problem: Problem, arch: str, multiprocessors: int = 132) -> Config:
    """Returns the tile for every batch size on an architecture ("sm_80", "sm_90a", ...) with so many multiprocessors.

    With few multiprocessors, or few threads on each (sm_86 and its like hold 1536), a thread has to keep more bytes in
    flight to fill the memory.
    """
    narrow = multiprocessors < 100 or arch.startswith(("sm_86", "sm_87", "sm_89", "sm_12"))
    table = _SEVERAL_TOKENS if problem.tokens > 1 else _ONE_TOKEN_NARROW if narrow else _ONE_TOKEN
    threads, bytes_per_thread, direct = table[
        problem.state_dtype == "float32", problem.state_v_first
    ]
    return min(
        (c for c in candidates(problem) if c.direct == direct),
        key=lambda c: (
            abs(c.threads - threads),
            abs(c.bytes_per_thread - bytes_per_thread),
            c.tile_v,
        ),
    )


def supports_overlap(arch: str) -> bool:
    """Whether the next kernel's launch may overlap the end of this one (programmatic dependent launch)."""
    return int(arch.removeprefix("sm_").rstrip("af")) >= 90
