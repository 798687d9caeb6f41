"""Which tile a call's CTAs work on. Pure Python, from static facts alone."""

from __future__ import annotations

from .config import Config, Problem

# (tile_v, threads, lanes, CTAs that share a multiprocessor) for K = V = 128, as measured on an H200. One token, by
# (fp32 state, state_v_first, gate per channel):
_ONE_TOKEN = {
    (True, True, False): (8, 64, 32, 16),
    (True, True, True): (8, 64, 32, 16),
    (True, False, False): (64, 512, 16, 2),
    (True, False, True): (64, 512, 16, 3),
    (False, True, False): (16, 64, 16, 0),
    (False, True, True): (16, 64, 16, 0),
    (False, False, False): (128, 512, 16, 2),
    (False, False, True): (64, 128, 8, 0),
}
# One token of so few states that they do not fill the GPU: more threads for each, which sum up in the same order.
FEW_STATES = 64
_FEW = (8, 128, 32, 12)
# Several tokens, by (state_v_first, more than 4). Up to 4 with a gate per channel leave room for six CTAs.
_SEVERAL_TOKENS = {
    (True, False): (32, 128, 16, 0),
    (True, True): (32, 128, 16, 0),
    (False, False): (64, 128, 16, 0),
    (False, True): (32, 128, 8, 8),
}
# Tokens and records of earlier ones, which every tile of a state reads, by (state_v_first, one token).
_REPLAY = {
    (True, True): (32, 128, 16, 0),
    (True, False): (64, 128, 16, 0),
    (False, True): (64, 128, 16, 0),
    (False, False): (32, 128, 8, 0),
}
# With a norm of the output alone, by a cluster that has all of V.
_NORM = (32, 128, 16, 0)
# With a convolution, which every CTA of a head repeats for q and k; several tokens of few states have more threads.
_BOTH, _BOTH_SEVERAL, _BOTH_FEW = (128, 512, 32, 0), (128, 256, 16, 0), (128, 512, 16, 0)
# Where there are no clusters a CTA has all of V, by (state_v_first, one token, more than 4): not measured, but nothing
# spills.
_NORM_ALONE = {
    (True, True, False): (32, 128, 16, 0),
    (True, False, False): (64, 128, 16, 0),
    (True, False, True): (32, 128, 4, 0),
    (False, True, False): (64, 128, 16, 0),
    (False, False, False): (64, 128, 16, 0),
    (False, False, True): (64, 128, 16, 0),
}
_TILES = (8, 16, 32, 64, 128)
_THREADS = (64, 128, 256, 512, 1024)
_LANES = (4, 8, 16, 32)


def candidates(problem: Problem) -> list[Config]:
    """Returns every tile worth compiling for a problem, the one that `select` takes included."""
    found = [
        Config(problem, tile_v, threads, lanes)
        for tile_v in _TILES
        for threads in _THREADS
        for lanes in _LANES
    ]
    return [c for c in found if c.illegal() is None and c.bytes_per_thread >= 32]


def select(problem: Problem, arch: str, multiprocessors: int = 132, few: bool = False) -> Config:
    """Returns the tile for an architecture ("sm_80", "sm_90a", ...). few: the call has up to FEW_STATES states, which
    changes no bit of the result."""
    wide, v_first = problem.state_dtype == "float32", problem.state_v_first
    clusters = _at_least_sm90(arch)
    several = problem.tokens > 1
    if problem.fused.norm and not clusters:
        tile = _NORM_ALONE[v_first, not several, problem.tokens > 4]
    elif problem.fused.norm and problem.fused.convolution:
        tile = _BOTH if not several else _BOTH_FEW if few and v_first else _BOTH_SEVERAL
    elif problem.fused.norm:
        tile = _NORM
    elif problem.flushes:
        tile = _REPLAY[v_first, False]
    elif problem.replay:
        tile = _REPLAY[v_first, problem.tokens == 1]
    elif several or problem.fused:
        tile = _SEVERAL_TOKENS[v_first, problem.tokens > 4]
        if v_first and wide and several and problem.tokens <= 4 and problem.gate.channels:
            tile = (*tile[:3], 6)
    elif few and wide and v_first:
        tile = _FEW
    else:
        tile = _ONE_TOKEN[wide, v_first, problem.gate.channels]
    tile_v, threads, lanes, resident = tile
    if problem.fused:
        resident = 0  # the registers of a thread would not suffice
    bytes_per_thread = tile_v * 512 // threads if wide else tile_v * 256 // threads
    found = min(
        (c for c in candidates(problem) if clusters or c.cluster == 1),
        key=lambda c: (
            abs(c.bytes_per_thread - bytes_per_thread),
            abs(c.threads - threads),
            abs(c.lanes - lanes),
            abs(c.tile_v - tile_v),
        ),
    )
    return Config(problem, found.tile_v, found.threads, found.lanes, resident)


def supports_overlap(arch: str) -> bool:
    """Whether the next kernel's launch may overlap the end of this one (programmatic dependent launch)."""
    return _at_least_sm90(arch)


def _at_least_sm90(arch: str) -> bool:
    return int(arch.removeprefix("sm_").rstrip("af")) >= 90
