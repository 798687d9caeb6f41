"""Which tile a call's CTAs work on. Pure Python, from static facts alone."""

from __future__ import annotations

from .config import Config, Problem

# (tile_v, threads, lanes, CTAs that share a multiprocessor) for K = V = 128, as measured on an H200. One token, by
# (fp32 state, state_v_first, gate per channel):
_ONE_TOKEN = {
    (True, True, False): (8, 32, 32, 0),
    (True, True, True): (8, 32, 32, 0),
    (True, False, False): (64, 256, 16, 0),
    (True, False, True): (64, 256, 16, 3),
    (False, True, False): (16, 64, 16, 16),
    (False, True, True): (16, 32, 16, 0),
    (False, False, False): (128, 256, 16, 3),
    (False, False, True): (128, 256, 16, 3),
}
# [K, V] states of fp16 with a gate per channel, for which 80 registers do not suffice.
_CHANNELS_OF_FLOAT16 = (128, 256, 16, 2)
# One token where `crowding` is 1 or 2: smaller tiles or more threads for each state, which sum up in the same order. By
# (fp32 state, state_v_first); what is not here stays as it is.
_FEW = {
    (True, True): {1: (8, 64, 32, 16), 2: (8, 128, 32, 12)},
    (True, False): {2: (16, 64, 4, 12)},
    (False, True): {1: (16, 64, 16, 16), 2: (16, 128, 16, 8)},
    (False, False): {1: (32, 64, 4, 9), 2: (32, 64, 4, 9)},
}
# One token where few multiprocessors share the card's memory, so that each has to do more: by (fp32 state,
# state_v_first, gate per channel); what is not here stays as it is.
_NARROW = {
    (False, True, False): (32, 64, 16, 0),
    (False, True, True): (32, 64, 16, 0),
    (True, False, False): (64, 256, 16, 4),
}
_FEW_MULTIPROCESSORS = 100
# Several tokens, by (state_v_first, gate per channel, more than 4).
_SEVERAL_TOKENS = {
    (True, False, False): (64, 128, 16, 0),
    (True, True, False): (32, 128, 16, 0),
    (True, False, True): (32, 128, 16, 0),
    (True, True, True): (32, 128, 16, 0),
    (False, False, False): (32, 128, 8, 0),
    (False, True, False): (64, 128, 16, 0),
    (False, False, True): (32, 128, 8, 7),
    (False, True, True): (32, 128, 8, 7),
}
# [V, K] states with a gate per channel: up to 4 tokens of 16-bit states, two or three of others.
_SEVERAL_CHANNELS_16, _TWO_OR_THREE_CHANNELS = (64, 128, 16, 0), (64, 128, 16, 4)
# Several tokens of [V, K] states where `crowding` is 2, by gate per channel.
_SEVERAL_FEW = {False: (16, 256, 16, 0), True: (16, 128, 16, 0)}
# Tokens and records of earlier ones, which every tile of a state reads. [K, V] states, and 2 to 4 tokens without a gate
# per channel, run in more registers.
_REPLAY, _REPLAY_WIDE = (64, 128, 16, 4), (64, 128, 16, 0)
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
# States up to which `crowding` is 2 and 1. With a convolution a state is a CTA, and as many run at once.
_UP_TO_VERY_FEW, _UP_TO_FEW, _UP_TO_FEW_CONVOLVED = 64, 256, 128
MANY_STATES, FEW_STATES, VERY_FEW_STATES = range(3)
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


def select(
    problem: Problem, arch: str, multiprocessors: int = 132, few: int = MANY_STATES
) -> Config:
    """Returns the tile for an architecture ("sm_80", "sm_90a", ...). few: what `crowding` says of a call, which changes
    no bit of the result."""
    wide, v_first = problem.state_dtype == "float32", problem.state_v_first
    clusters = _at_least_sm90(arch)
    several, channels = problem.tokens > 1, problem.gate.channels
    if problem.fused.norm and not clusters:
        tile = _NORM_ALONE[v_first, not several, problem.tokens > 4]
    elif problem.fused.norm and problem.fused.convolution:
        # Beside the records of a single token 256 threads have too few registers.
        crowded = problem.replay and not several
        tile = _BOTH_SEVERAL if several else _BOTH[channels]
        if crowded or (few and v_first):
            tile = _BOTH_FEW
    elif problem.fused.norm:
        tile = _NORM
    elif problem.replay:
        wider = not v_first or (not channels and 1 < problem.tokens <= 4)
        tile = _REPLAY_WIDE if wider else _REPLAY
    elif several or problem.fused:
        tile = _SEVERAL_TOKENS[v_first, channels, problem.tokens > 4]
        if v_first and channels and problem.tokens <= 4:
            if not wide:
                tile = _SEVERAL_CHANNELS_16
            elif 2 <= problem.tokens <= 3:
                tile = _TWO_OR_THREE_CHANNELS
        if several and v_first and few == VERY_FEW_STATES and not problem.fused:
            tile = _SEVERAL_FEW[channels]
    elif few in _FEW[wide, v_first]:
        tile = _FEW[wide, v_first][few]
    elif multiprocessors < _FEW_MULTIPROCESSORS and (wide, v_first, channels) in _NARROW:
        tile = _NARROW[wide, v_first, channels]
    else:
        tile = _ONE_TOKEN[wide, v_first, channels]
        if problem.state_dtype == "float16" and channels and not v_first:
            tile = _CHANNELS_OF_FLOAT16
    tile_v, threads, lanes, resident = tile
    if problem.fused or (problem.head_dim_k, problem.head_dim_v) != (128, 128):
        resident = 0  # the registers of a thread might not suffice
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


def crowding(problem: Problem, states: int) -> int:
    """Returns whether a call's states fill a GPU (0), leave some of it idle (1), or most of it (2)."""
    if problem.fused.convolution:
        return FEW_STATES if states <= _UP_TO_FEW_CONVOLVED else MANY_STATES
    if states <= _UP_TO_VERY_FEW:
        return VERY_FEW_STATES
    return FEW_STATES if states <= _UP_TO_FEW else MANY_STATES


def supports_overlap(arch: str) -> bool:
    """Whether the next kernel's launch may overlap the end of this one (programmatic dependent launch)."""
    return _at_least_sm90(arch)


def _at_least_sm90(arch: str) -> bool:
    return int(arch.removeprefix("sm_").rstrip("af")) >= 90
