"""Which tile a call's CTAs work on. Pure Python, from static facts alone."""

from __future__ import annotations

from .config import Config, Problem

# (tile_v, threads, lanes, CTAs that share a multiprocessor) for K = V = 128, as measured on an H200. One token, by
# (fp32 state, state_v_first, gate per channel):
_ONE_TOKEN = {
    (True, True, False): (8, 32, 32, 0),
    (True, True, True): (8, 32, 32, 0),
    (True, False, False): (64, 256, 16, 4),
    (True, False, True): (64, 256, 16, 3),
    (False, True, False): (16, 64, 16, 16),
    (False, True, True): (16, 32, 16, 0),
    (False, False, False): (128, 256, 16, 3),
    (False, False, True): (128, 256, 16, 3),
}
# One token of so few states that they do not fill the GPU: more threads for each, which sum up in the same order. By
# fp32 state, [V, K].
_FEW = {True: (8, 128, 32, 12), False: (16, 128, 16, 8)}
# Several tokens, by (state_v_first, gate per channel, more than 4).
_SEVERAL_TOKENS = {
    (True, False, False): (64, 128, 16, 0),
    (True, True, False): (32, 128, 16, 0),
    (True, False, True): (32, 128, 16, 0),
    (True, True, True): (32, 128, 16, 0),
    (False, False, False): (64, 256, 16, 4),
    (False, True, False): (64, 128, 16, 0),
    (False, False, True): (64, 256, 16, 4),
    (False, True, True): (64, 256, 16, 4),
}
# Tokens and records of earlier ones, which every tile of a state reads, by (state_v_first, one token).
_REPLAY = {
    (True, True): (64, 128, 16, 4),
    (True, False): (32, 128, 16, 0),
    (False, True): (64, 128, 16, 0),
    (False, False): (64, 128, 16, 0),
}
# With a norm of the output alone, by a cluster that has all of V.
_NORM = (32, 128, 16, 0)
# With a convolution, which every CTA of a head repeats for q and k, by gate per channel; more threads where the states
# leave multiprocessors idle. Then several tokens.
_BOTH = {False: (128, 512, 16, 0), True: (128, 256, 16, 0)}
_BOTH_FEW, _BOTH_SEVERAL = (128, 512, 16, 0), (128, 256, 16, 0)
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
# States of a call up to which they are few. With a convolution a state is a CTA, and as many run at once.
_FEW_STATES, _FEW_CONVOLVED = 64, 128
_TILES = (8, 16, 32, 64, 128)
_THREADS = (32, 64, 128, 256, 512, 1024)
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
    """Returns the tile for an architecture ("sm_80", "sm_90a", ...). few: the call has up to `few_states` states, which
    changes no bit of the result."""
    wide, v_first = problem.state_dtype == "float32", problem.state_v_first
    channels = problem.gate.channels
    clusters = _at_least_sm90(arch)
    several = problem.tokens > 1
    if problem.fused.norm and not clusters:
        tile = _NORM_ALONE[v_first, not several, problem.tokens > 4]
    elif problem.fused.norm and problem.fused.convolution:
        tile = _BOTH_SEVERAL if several else _BOTH[channels]
        tile = _BOTH_FEW if few and v_first else tile
    elif problem.fused.norm:
        tile = _NORM
    elif problem.flushes:
        tile = _REPLAY[v_first, False]
    elif problem.replay:
        tile = _REPLAY[v_first, problem.tokens == 1]
    elif several or problem.fused:
        tile = _SEVERAL_TOKENS[v_first, channels, problem.tokens > 4]
    elif few and v_first:
        tile = _FEW[wide]
    else:
        tile = _ONE_TOKEN[wide, v_first, channels]
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


def few_states(problem: Problem) -> int:
    """Returns up to how many states a call has few of them."""
    return _FEW_CONVOLVED if problem.fused.convolution else _FEW_STATES


def supports_overlap(arch: str) -> bool:
    """Whether the next kernel's launch may overlap the end of this one (programmatic dependent launch)."""
    return _at_least_sm90(arch)


def _at_least_sm90(arch: str) -> bool:
    return int(arch.removeprefix("sm_").rstrip("af")) >= 90
