"""Tiles: what they cover, what they cost, and which one is selected; every expectation is worked out again here."""

from __future__ import annotations

import functools
import itertools
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from cula_lightning_decode import plan
from cula_lightning_decode.config import (
    ACTIVATION_DTYPES,
    HEAD_DIMS,
    MAX_TOKENS,
    MODES,
    STATE_DTYPES,
    Config,
    Problem,
)
from cula_lightning_decode.plan import candidates, select, supports_overlap

ARCHS = (
    "sm_80",
    "sm_86",
    "sm_87",
    "sm_89",
    "sm_90a",
    "sm_100a",
    "sm_103a",
    "sm_110a",
    "sm_120a",
    "sm_121a",
)
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# What the smallest of the architectures gives to one CTA.
SHARED_LIMIT = 99 * 1024
TILES = [
    Problem("bfloat16", state, dim_k, dim_v, 1, v_first, True)
    for state, dim_k, dim_v, v_first in itertools.product(
        STATE_DTYPES, HEAD_DIMS, HEAD_DIMS, (False, True)
    )
]
EVERY = [
    replace(tile, tokens=tokens, mode=mode)
    for tile, tokens, mode in itertools.product(TILES, range(1, MAX_TOKENS + 1), MODES)
]


once = functools.cache(candidates)


@pytest.fixture
def enumerated_once(monkeypatch):
    """`select` takes the candidates of a problem, which no architecture changes, from the test before."""
    monkeypatch.setattr(plan, "candidates", once)


def name(problem: Problem) -> str:
    order = "VK" if problem.state_v_first else "KV"
    return f"{problem.state_dtype}-{problem.head_dim_k}x{problem.head_dim_v}-{order}"


@pytest.mark.parametrize("problem", TILES, ids=name)
def test_every_element_of_a_tile_has_one_owner(problem):
    found = candidates(problem)
    assert found
    per_access = 16 // BYTES[problem.state_dtype]
    for config in found:
        dims = (problem.head_dim_k, config.tile_v)
        rows, columns = dims[::-1] if problem.state_v_first else dims
        assert (config.rows, config.columns, config.vector) == (rows, columns, per_access)
        lanes = min(32, columns // per_access)
        accesses = columns // (per_access * lanes)
        deep = rows * lanes // config.threads
        assert (config.lanes, config.vectors_per_row, config.rows_per_thread) == (
            lanes,
            accesses,
            deep,
        )
        assert (
            config.bytes_per_thread == rows * columns * BYTES[problem.state_dtype] // config.threads
        )

        thread = torch.arange(config.threads).view(-1, 1, 1, 1)
        row = thread // lanes * deep + torch.arange(deep).view(1, -1, 1, 1)
        access = torch.arange(accesses).view(1, 1, -1, 1) * lanes + thread % lanes
        column = access * per_access + torch.arange(per_access)
        owners = torch.bincount((row * columns + column).flatten(), minlength=rows * columns)
        assert owners.numel() == rows * columns and (owners == 1).all()
        assert problem.head_dim_v % config.tile_v == 0


@pytest.mark.parametrize("problem", TILES, ids=name)
def test_neighbouring_lanes_touch_neighbouring_memory(problem):
    """A warp's access covers whole 32-byte sectors: at least 64 bytes in a row."""
    for arch, tokens in itertools.product(ARCHS, (1, 4)):
        assert select(replace(problem, tokens=tokens), arch).lanes * 16 >= 64


@pytest.mark.parametrize("problem", TILES, ids=name)
def test_candidates_are_distinct_legal_and_hold_the_selected(problem):
    found = candidates(problem)
    assert len(set(found)) == len(found)
    assert [config.illegal() for config in found] == [None] * len(found)
    for tokens, mode in itertools.product((1, 4, 8), MODES):
        wanted = replace(problem, tokens=tokens, mode=mode)
        found = candidates(wanted)
        for arch in ARCHS:
            config = select(wanted, arch)
            assert config == select(wanted, arch)
            assert config.problem == wanted and config.illegal() is None
            assert config in found


@pytest.mark.usefixtures("enumerated_once")
@pytest.mark.parametrize("arch", ARCHS)
def test_selected_tiles_fit_the_shared_memory_of_every_machine(arch, shared_bytes):
    sizes = {problem: shared_bytes(select(problem, arch)) for problem in EVERY}
    assert not {problem: size for problem, size in sizes.items() if size > SHARED_LIMIT}


@pytest.mark.usefixtures("enumerated_once")
@pytest.mark.parametrize("arch", ["sm_86", "sm_87", "sm_89", "sm_120a", "sm_121a"])
def test_ctas_divide_the_1536_threads_of_small_sms(arch):
    for problem in EVERY:
        threads = select(problem, arch).threads
        assert threads <= 512 and 1536 % threads == 0


def test_the_activation_dtype_and_the_flags_do_not_change_the_tile():
    for problem, arch in itertools.product(TILES[::5], ("sm_89", "sm_90a")):
        config = select(problem, arch)
        for change in ({"dtype": "float16"}, {"indexed": False}):
            other = replace(problem, **change)
            assert select(other, arch) == replace(config, problem=other)


BASE = Problem("bfloat16", "float32", 128, 128, 1, False, True)


@pytest.mark.parametrize(
    "tile_v, threads, reason",
    [
        (96, 128, "tile_v=96 does not divide V=128"),
        (256, 128, "tile_v=256 does not divide V=128"),
        (64, 48, "threads=48"),
        (64, 0, "threads=0"),
        (64, 2048, "threads=2048"),
        (2, 128, "2 columns"),
        (4, 1024, "1024 threads do not cover 128 rows"),
        (64, 96, "96 threads do not cover 128 rows"),
        (128, 32, "do not fit the registers"),
    ],
)
def test_illegal_tiles_say_why(tile_v, threads, reason):
    assert reason in Config(BASE, tile_v, threads).illegal()


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": "float32"}, "dtype"),
        ({"state_dtype": "float64"}, "dtype"),
        ({"mode": "prefill"}, "mode"),
        ({"head_dim_k": 96}, "96"),
        ({"head_dim_v": 512}, "512"),
        ({"tokens": 0}, "not 0"),
        ({"tokens": 9}, "not 9"),
        ({"stochastic": True}, "float32"),
        ({"stochastic": True, "state_dtype": "float16"}, "float16"),
    ],
)
def test_illegal_problems_say_why(change, reason):
    assert reason in replace(BASE, **change).illegal()


def test_legal_problems():
    for problem in EVERY:
        assert problem.illegal() is None
    for dtype in ACTIVATION_DTYPES:
        assert replace(BASE, dtype=dtype).illegal() is None
    assert replace(BASE, state_dtype="bfloat16", stochastic=True).illegal() is None


def test_problems_and_configs_are_values():
    assert hash(BASE) == hash(replace(BASE)) and BASE == replace(BASE)
    assert BASE != replace(BASE, tokens=2)
    for value, field in ((BASE, "tokens"), (Config(BASE, 64, 128), "tile_v")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field, 3)


@pytest.mark.parametrize("arch", ARCHS)
def test_overlapping_launches_begin_with_hopper(arch):
    assert supports_overlap(arch) == (arch not in ("sm_80", "sm_86", "sm_87", "sm_89"))
