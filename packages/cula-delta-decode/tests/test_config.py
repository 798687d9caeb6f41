"""Problems and tiles: which are legal, what a tile covers, and which one is selected."""

from __future__ import annotations

import itertools
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

from cula_delta_decode.config import (
    ACTIVATION_DTYPES,
    DTYPES,
    GATES,
    HEAD_DIMS,
    MAX_TOKENS,
    STRENGTHS,
    Config,
    Fused,
    Gate,
    Problem,
)
from cula_delta_decode.plan import candidates, select, supports_overlap

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GDN, KDA = Gate("softplus", strength="logits"), Gate("safe", channels=True, strength="logits")
TILES = [
    Problem("bfloat16", state, dim_k, dim_v, tokens, v_first, gate)
    for state, dim_k, dim_v, tokens, v_first, gate in itertools.product(
        DTYPES, HEAD_DIMS, HEAD_DIMS, (1, 2, 8), (False, True), (GDN, KDA)
    )
]
BASE = Problem("bfloat16", "float32", 128, 128, 1, True, GDN)
TURNED = replace(BASE, state_v_first=False)


def name(problem: Problem) -> str:
    order = "VK" if problem.state_v_first else "KV"
    gate = "KDA" if problem.gate.channels else "GDN"
    dims = f"{problem.head_dim_k}x{problem.head_dim_v}"
    return f"{problem.state_dtype}-{dims}-{order}-T{problem.tokens}-{gate}"


@pytest.mark.parametrize("problem", TILES, ids=name)
def test_every_element_of_a_tile_has_one_owner(problem):
    found = candidates(problem)
    assert found
    per_access = 16 // BYTES[problem.state_dtype]
    for config in found:
        dims = (problem.head_dim_k, config.tile_v)
        rows, columns = dims[::-1] if problem.state_v_first else dims
        assert (config.rows, config.columns, config.vector) == (rows, columns, per_access)
        lanes, accesses, deep = config.lanes, config.vectors_per_row, config.rows_per_thread
        assert (
            accesses == columns // (per_access * lanes) and deep == rows * lanes // config.threads
        )
        assert (
            config.bytes_per_thread == rows * columns * BYTES[problem.state_dtype] // config.threads
        )
        assert config.problem.direct == (problem.tokens == 1)
        assert problem.head_dim_v % config.tile_v == 0

        thread = torch.arange(config.threads).view(-1, 1, 1, 1)
        row = thread // lanes + torch.arange(deep).view(1, -1, 1, 1) * (config.threads // lanes)
        access = torch.arange(accesses).view(1, 1, -1, 1) * lanes + thread % lanes
        column = access * per_access + torch.arange(per_access)
        owners = torch.bincount((row * columns + column).flatten(), minlength=rows * columns)
        assert owners.numel() == rows * columns and (owners == 1).all()


@pytest.mark.parametrize("problem", TILES, ids=name)
def test_candidates_are_distinct_legal_and_hold_the_selected(problem):
    found = candidates(problem)
    assert len(set(found)) == len(found)
    assert [config.illegal() for config in found] == [None] * len(found)
    for arch in ARCHS:
        config = select(problem, arch)
        assert config == select(problem, arch)
        assert config.problem == problem and config.illegal() is None
        # How many shall share a multiprocessor is not enumerated.
        assert replace(config, resident=0) in found
        assert 0 <= config.resident * config.threads <= 1536


def test_what_a_kernel_reads_and_writes_does_not_change_the_tile():
    for problem, arch in itertools.product(TILES[::7], ("sm_89", "sm_90a")):
        config = select(problem, arch)
        for change in (
            {"dtype": "float16"},
            {"slots": 0},
            {"ends": False},
            {"redirected": True},
            {"every_token": True},
            {"packed": True},
            {"l2norm": False},
        ):
            other = replace(problem, **change)
            assert select(other, arch) == replace(config, problem=other)


@pytest.mark.parametrize(
    "fused", [Fused("bfloat16"), Fused(norm="silu"), Fused("float32", True, "sigmoid")], ids=str
)
def test_tiles_of_what_is_around_a_step(fused):
    """A norm needs all of V, both need staged tokens, and neither shares registers with more CTAs than fit by
    themselves."""
    for problem, arch in itertools.product(TILES[::3], ("sm_80", "sm_90a")):
        problem = replace(problem, fused=fused)
        config = select(problem, arch)
        assert config.illegal() is problem.illegal() is None and config in candidates(problem)
        assert not config.problem.direct and config.resident == 0
        assert fused.norm is None or config.tile_v * config.cluster == problem.head_dim_v
        assert config.cluster == 1 or arch in ("sm_90a", "sm_100a")


def test_few_states_are_summed_up_in_the_same_order():
    """A result must not depend on how many rows a call has: threads of [V, K] states share a row with as many others,
    and those of [K, V] states have as many rows."""
    changed = 0
    for problem, fused in itertools.product(TILES, (Fused(), Fused("bfloat16", norm="silu"))):
        problem = replace(problem, fused=fused)
        many = select(problem, "sm_90a")
        for few in (select(problem, "sm_90a", few=1), select(problem, "sm_90a", few=2)):
            changed += few != many
            if problem.state_v_first:
                assert few.lanes == many.lanes and few.vectors_per_row == many.vectors_per_row
            else:
                assert few.rows_per_thread == many.rows_per_thread
    assert changed


@pytest.mark.parametrize(
    "problem, tile, reason",
    [
        (BASE, (96, 128, 16), "tile_v=96 does not divide V=128"),
        (BASE, (256, 128, 16), "tile_v=256 does not divide V=128"),
        (BASE, (4, 128, 16), "tile_v=4 does not divide V=128 into eights"),
        (BASE, (32, 48, 16), "threads=48"),
        (BASE, (32, 0, 16), "threads=0"),
        (BASE, (32, 2048, 16), "threads=2048"),
        (BASE, (32, 128, 1), "128 columns"),
        (BASE, (32, 128, 3), "128 columns"),
        (BASE, (32, 128, 64), "128 columns"),
        (replace(BASE, state_dtype="bfloat16"), (32, 128, 32), "128 columns"),
        (BASE, (16, 1024, 32), "1024 threads do not cover 16 rows"),
        (BASE, (64, 96, 8), "96 threads do not cover 64 rows"),
        (BASE, (64, 64, 16), "do not fit the registers"),
        (TURNED, (8, 128, 8), "8 columns"),
        (TURNED, (64, 128, 8), "a thread has one vector"),
        (TURNED, (128, 128, 32), "do not fit the registers"),
        (
            replace(BASE, fused=Fused(norm="silu")),
            (16, 128, 16),
            "a warp that normalizes has whole columns of tile_v=16",
        ),
    ],
)
def test_illegal_tiles_say_why(problem, tile, reason):
    assert reason in Config(problem, *tile).illegal()


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": "float32"}, "dtype"),
        ({"state_dtype": "float64"}, "dtype"),
        ({"head_dim_k": 96}, "96"),
        ({"head_dim_v": 256}, "256"),
        ({"tokens": 0}, "not 0"),
        ({"tokens": 9}, "not 9"),
        ({"gate": Gate("hard")}, "gate"),
        ({"gate": Gate("none", strength="some")}, "gate"),
        ({"fused": Fused(norm="relu")}, "activation"),
    ],
)
def test_illegal_problems_say_why(change, reason):
    assert reason in replace(BASE, **change).illegal()


def test_legal_problems():
    for problem in TILES:
        assert problem.illegal() is None
    for dtype, kind, strength in itertools.product(ACTIVATION_DTYPES, GATES, STRENGTHS):
        gate = Gate(kind, strength=strength)
        assert replace(BASE, dtype=dtype, gate=gate).illegal() is None
    for tokens in range(1, MAX_TOKENS + 1):
        assert replace(BASE, tokens=tokens).illegal() is None


def test_problems_and_configs_are_values():
    assert hash(BASE) == hash(replace(BASE)) and BASE == replace(BASE)
    assert BASE != replace(BASE, tokens=2)
    for value, field in ((BASE, "tokens"), (Config(BASE, 64, 128, 16), "tile_v"), (GDN, "kind")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field, 3)


@pytest.mark.parametrize("arch", ARCHS)
def test_overlapping_launches_begin_with_hopper(arch):
    assert supports_overlap(arch) == (arch not in ("sm_80", "sm_86", "sm_89"))


def test_equal_problems_have_one_hash():
    """It is computed once, and must be that of the fields all the same."""
    first, second = TILES[0], replace(TILES[0])
    assert first == second and first is not second and hash(first) == hash(second)
    assert {first: 1}[second] == 1
    facts = {f.name: getattr(first, f.name) for f in fields(first)}
    for name, value in facts.items():
        other = replace(first, **{name: not value if isinstance(value, bool) else None})
        assert other != first and hash(other) != hash(first), name
