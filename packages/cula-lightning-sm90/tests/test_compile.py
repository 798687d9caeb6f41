"""Every config cross-compiles without a GPU, and the machine code is what it is meant to be."""

from __future__ import annotations

import re

import pytest
import torch

from cula_core.compiled.artifacts import artifacts
from cula_core.constants import STATE_DTYPES
from cula_emulator import resources
from cula_emulator.covering import covering_cases
from cula_lightning_sm90 import launch
from cula_lightning_sm90.call import Call
from cula_lightning_sm90.config import (
    ACTIVATION_DTYPES,
    CHUNK,
    SHARED_MEMORY,
    Config,
    Problem,
    TableConfig,
    candidates,
)
from cula_lightning_sm90.plan import plan
from cula_testing.compiled import assert_closed, report

FACTORS = {
    "dims": ((64, 64), (64, 128), (128, 64), (128, 128)),
    # (gate_dtype, decay)
    "mode": ((None, False), (None, True), ("float32", False), ("bfloat16", True)),
    "packed": (False, True),
    # (initial_state, indexed, in_place, final_state)
    "states": (
        (False, False, False, False),
        (True, False, True, True),
        (True, True, False, True),
        (True, True, True, True),
    ),
    "state_v_first": (False, True),
    # (checkpoints, placed)
    "kept": ((None, False), ("every", False), ("every", True), ("once", False), ("once", True)),
    "l2norm": (False, True),
    "exact_state": (False, True),
    "fresh": (False, True),
    "dtype": ACTIVATION_DTYPES,
    "state_dtype": STATE_DTYPES,
    # (tiles, split, prescan, paired, shared, ends)
    "work": tuple(
        (c.tiles, c.split, c.prescan, c.paired, c.shared, c.ends)
        for c in candidates(Problem("bfloat16", 128, 128, "float32"))
    ),
}


def possible(case: dict) -> bool:
    return config_of(case).illegal() is None


def config_of(case: dict) -> Config:
    (gate_dtype, decay), (initial, indexed, in_place, final) = case["mode"], case["states"]
    flags = ("packed", "state_v_first", "l2norm", "fresh", "state_dtype")
    checkpoints, placed = case["kept"]
    problem = Problem(
        case["dtype"], *case["dims"], gate_dtype, decay, initial_state=initial, indexed=indexed, in_place=in_place,
        final_state=final, exact_state=case["exact_state"], checkpoints=checkpoints, placed=placed,
        **{name: case[name] for name in flags},
    )  # fmt: skip
    return Config(problem, *case["work"])


# What asks most of registers and shared memory: the largest matrices with everything that a call can want.
HEAVY = [
    {
        "dims": (128, 128), "mode": ("float32", True), "packed": packed, "states": (True, True, True, True),
        "state_v_first": False, "kept": ("once", True), "l2norm": True, "exact_state": True, "fresh": True,
        "dtype": "bfloat16", "state_dtype": states, "work": work,
    }
    for packed, states in ((True, "bfloat16"), (False, "float32"))
    for work in FACTORS["work"]
]  # fmt: skip
# The other values once: pairs are for the emulator, which spares no kernel that spills either.
COVERING = covering_cases(FACTORS, possible, list(filter(possible, HEAVY)), strength=1)
# Against time, with all that a gradient can want: every second kind of work.
REVERSED = [
    config
    for gate, packed in (("float32", False), (None, True))
    for config in candidates(
        Problem(
            "bfloat16", 128, 128, gate, packed=packed, initial_state=True, exact_state=not packed, reverse=True,
            dots=True, checkpoints="every",
        )
    )[::2]
]  # fmt: skip
CONFIGS = [config_of(case) for case in COVERING] + REVERSED


def label(config: Config) -> str:
    p = config.problem
    work = f"{config.tiles}{'-split' * config.split}{'-prescan' * config.prescan}"
    work += f"{'-paired' * config.paired}{'-shared' * config.shared}{'-ends' * config.ends}"
    work += f"-{p.gate_dtype}-gate" if p.gate_dtype else ""
    names = (
        "decay",
        "packed",
        "state_v_first",
        "placed",
        "l2norm",
        "exact_state",
        "in_place",
        "reverse",
        "dots",
    )
    flags = "".join("-" + name for name in names if getattr(p, name))
    if p.checkpoints:
        flags += f"-{p.checkpoints}"
    states = "" if p.state_dtype == "float32" else f"-{p.state_dtype}-states"
    return f"{p.dtype}-{p.head_dim_k}x{p.head_dim_v}-{work}{flags}{states}"


def products(config: Config) -> dict[str, int]:
    """Matrix instructions of k16 of one chunk: of the intra-chunk products, and of a tile's three."""
    dim_k, chunk = config.problem.head_dim_k // 16, CHUNK // 16
    state = chunk * (2 if config.problem.exact_state else 1)
    if config.prescan:
        return {"state": state}
    return {"intra": dim_k, "inter": dim_k, "values": chunk, "state": state}


def test_the_cases_hold_every_value():
    for name, values in FACTORS.items():
        assert {case[name] for case in COVERING} >= set(values)
    assert all(config.illegal() is None for config in CONFIGS)


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_machine_code(config):
    unit = launch.unit(config)
    kernel, ptx = report(unit).kernel, artifacts(unit).ptx
    expected = ("HGMMA", "UTMALDG", "USETMAXREG", *(() if config.prescan else ("UTMASTG",)))
    resources.check(kernel, expect=expected)
    log = artifacts(unit).log
    assert "spill stores" in log and "serialized" not in log
    assert kernel.threads == (config.threads, 1, 1)
    spilled = (kernel.spill_stores, kernel.spill_loads, kernel.count("LDL"), kernel.count("STL"))
    assert spilled == (0, 0, 0, 0)
    assert not re.search(r"\b(ld|st)\.local|\.local \.", ptx)
    assert kernel.shared_bytes == 0 and kernel.dynamic_shared_bytes <= SHARED_MEMORY
    assert config.stages >= 3

    # What the roles ask for adds up to what the launch gives, and both to no more than there is.
    weights, tiles, load = config.registers
    asked = re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)
    assert sorted(map(int, asked)) == sorted((weights, tiles, load))
    assert kernel.registers == 65536 // config.threads // 8 * 8
    assert 128 * (weights + config.tiles * tiles + load) <= kernel.registers * config.threads

    # Everybody who reads what an earlier kernel of the call wrote waits for it: segments, states.
    waits = config.problem.packed + (config.split and not config.prescan)
    assert ptx.count("griddepcontrol.wait") == waits
    assert ptx.count("griddepcontrol.launch_dependents") == config.prescan

    # Every product and every copy once: no loop that the compiler doubled, nothing that it found to be dead.
    assert kernel.count("HGMMA") == sum(products(config).values())
    panels = config.problem.head_dim_k // 64 * (1 if config.prescan else 2)
    dots = config.problem.dots and not config.prescan
    assert kernel.count("UTMALDG") == panels + config.tiles * (1 + dots) + config.paired
    # Half of P goes to the partner.
    assert kernel.count("UBLKCP") == (config.shared and not config.prescan)
    assert kernel.count("UTMASTG") == (0 if config.prescan else 2)  # in the loop and after it
    # One wait per place where results are used: the compiler adds some where it does not trust the code.
    waits = 1 if config.prescan else 3
    assert kernel.count("WARPGROUP.DEPBAR") == kernel.count("WARPGROUP.ARRIVE") == waits


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_segment_table(dtype):
    unit = launch.unit(TableConfig(dtype))
    resources.check(report(unit).kernel)
    assert not re.search(r"\.local\b", artifacts(unit).ptx)


def test_the_keys_of_kernels_hold_every_source_that_makes_them():
    smallest = Config(Problem("bfloat16", 64, 64, None), 1)
    for config in (TableConfig("int32"), smallest):
        assert_closed(launch.unit(config))


def launched(
    g, *, v_heads: int = 4, dim_v: int = 128, cu_seqlens=None, num_splits=1, multiprocessors=132
) -> list[Config]:
    """Configs of a call that nobody executes, dense [1, 500] or packed."""
    q = torch.empty(1, 500, 1, 128, dtype=torch.bfloat16)
    v = torch.empty(1, 500, v_heads, dim_v, dtype=torch.bfloat16)
    configs = []

    def kernels(config):
        configs.append(config)
        return lambda *arguments: grids.append(arguments[-1])

    grids: list[int] = []
    nothing = dict.fromkeys(
        ("head_decay", "initial_state", "state_pool", "state_indices", "final_state", "checkpoints")
    )
    call = Call(
        q, q, v, g, cu_seqlens=cu_seqlens, out=torch.empty_like(v), scale=1.0, decay_sign=-1, state_v_first=False,
        l2norm=False, exact_state=False, checkpoint_every=0, num_splits=num_splits, **nothing,
    )  # fmt: skip
    launch.run(call, multiprocessors=multiprocessors, kernels=kernels)
    for config, ctas in zip(configs, grids):
        assert not (isinstance(config, Config) and (config.paired or config.shared) and ctas % 2)
    return [config for config in configs if isinstance(config, Config)]


GATES = {
    "contiguous": (torch.empty(1, 500, 4), True),
    "16 bits, rows of 16 bytes": (torch.empty(1, 500, 8, dtype=torch.bfloat16)[..., :4], True),
    "16 bits, rows of 8 bytes": (torch.empty(1, 500, 4, dtype=torch.bfloat16), False),
    "rows of 20 bytes": (torch.empty(1, 500, 5)[..., :4], False),
    "an address that is no multiple of 16": (torch.empty(1, 500, 8)[..., 1:5], False),
    "every other head": (torch.empty(1, 500, 8)[..., ::2], False),
    "tokens together": (torch.empty(1, 4, 512)[..., :500].mT, False),
    "the same for all tokens": (torch.empty(1, 1, 4).expand(1, 500, 4), False),
}


@pytest.mark.parametrize("g, paired", GATES.values(), ids=GATES)
def test_gates_that_tma_can_load_are_loaded_in_pairs(g, paired):
    assert [config.paired for config in launched(g)] == [paired]


def test_who_has_a_partner():
    g = torch.empty(1, 500, 4)
    for options, paired in (
        ({"num_splits": 2}, [True, True]),
        ({"multiprocessors": 9}, [True]),
        ({"multiprocessors": 1, "dim_v": 64}, [False]),
        ({"multiprocessors": 4}, [False]),  # two tiles per CTA
        ({"cu_seqlens": torch.tensor([0, 500])}, [False]),
        ({"dim_v": 64}, [True]),
    ):
        assert [config.paired for config in launched(g, **options)] == paired, options
    odd = torch.empty(1, 500, 4)[..., :3]
    assert [c.paired for c in launched(odd, v_heads=3, dim_v=64)] == [False]
    assert [c.paired for c in launched(odd, v_heads=3)] == [True]
    assert [c.paired for c in launched(odd, v_heads=3, multiprocessors=7)] == [True]


def test_who_shares_a_head():
    for options, shared in (
        ({}, [True]),
        ({"num_splits": 2}, [True, True]),
        ({"multiprocessors": 9}, [True]),
        ({"v_heads": 3, "multiprocessors": 7}, [True]),
        ({"multiprocessors": 1}, [False]),
        ({"multiprocessors": 4}, [False]),  # two tiles per CTA
        ({"cu_seqlens": torch.tensor([0, 500])}, [False]),
        ({"dim_v": 64}, [False]),
    ):
        for g in (None, torch.empty(1, 500, options.get("v_heads", 4))):
            assert [config.shared for config in launched(g, **options)] == shared, options


@pytest.mark.parametrize(
    "batch, tokens, heads, pieces",
    [
        (1, 16384, 32, 6),  # two segments
        (1, 65536, 8, 3),  # eight
        (1, 16384, 8, 2),  # eight short ones
        (1, 131072, 32, 8),  # two, as long as eight pieces at most can be
        (1, 16384, 64, 1),  # not cut
    ],
)
def test_pieces_of_a_prescan(batch, tokens, heads, pieces):
    def spread(segment_tokens=0, **facts):
        problem = Problem("bfloat16", 128, 128, **facts)
        return plan(problem, batch, tokens, batch, heads, 132, segment_tokens=segment_tokens)

    chosen = spread()
    assert chosen.pieces == pieces
    assert chosen.piece_tokens % CHUNK == 0
    if chosen.split:
        most = pieces * chosen.piece_tokens
        assert most - chosen.piece_tokens < chosen.segment_tokens <= most
    others = (
        {"gate_dtype": "float32"},
        {"decay": False},
        {"packed": True},
        {"segment_tokens": 4096},
    )
    for facts in others:
        assert spread(**facts).pieces == 1
