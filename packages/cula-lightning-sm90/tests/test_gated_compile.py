"""Every config of the gated delta rule's prefill cross-compiles without a GPU, and its machine code is as meant."""

from __future__ import annotations

import re

import pytest

from cula_core.cute.artifacts import artifacts
from cula_emulator import resources
from cula_emulator.covering import covering_cases
from cula_lightning_sm90.config import SHARED_MEMORY
from cula_lightning_sm90.gated import launch
from cula_lightning_sm90.gated.config import ACTIVATION_DTYPES, Config, TableConfig
from cula_lightning_sm90.gated.kernels.prefill import REGISTERS, THREADS
from cula_testing.compiled import assert_closed, report

FACTORS = {
    "dtype": ACTIVATION_DTYPES,
    "operand": ("float16", "bfloat16"),
    # (gate, bias, gate_dtype)
    "gate": (
        (None, False, "float32"),
        ("log", False, "float32"),
        ("log", False, "bfloat16"),
        ("softplus", False, "float16"),
        ("softplus", True, "bfloat16"),
    ),
    # (strength, strength_dtype)
    "strength": (
        (None, "float32"),
        ("given", "float32"),
        ("logits", "bfloat16"),
        ("doubled logits", "float16"),
    ),
    "l2norm": (True, False),
    "packed": (True, False),
    # (initial_state, final_state, indexed, redirected, fresh, in_place)
    "states": (
        (False, True, False, False, False, False),
        (False, False, False, False, False, False),
        (True, True, False, False, True, False),
        (True, False, True, False, False, False),
        (True, True, True, False, True, True),
        (True, True, True, True, True, True),
    ),
    "state_v_first": (True, False),
    "checkpoints": (True, False),
}


def config_of(case: dict) -> Config:
    gate, bias, gate_dtype = case["gate"]
    strength, strength_dtype = case["strength"]
    initial, final, indexed, redirected, fresh, in_place = case["states"]
    return Config(
        case["dtype"], case["operand"], gate, gate_dtype, bias, strength, strength_dtype, case["l2norm"],
        case["packed"], case["state_v_first"], initial, final, indexed, redirected, fresh, in_place,
        case["checkpoints"],
    )  # fmt: skip


def possible(case: dict) -> bool:
    return config_of(case).illegal() is None


CONFIGS = [config_of(case) for case in covering_cases(FACTORS, possible)]
# What asks most of registers.
CONFIGS += [
    Config(
        dtype, gate="softplus", gate_dtype="bfloat16", bias=True, strength="logits", strength_dtype="bfloat16",
        l2norm=True, packed=True, state_v_first=v_first, initial_state=True, indexed=True, redirected=True,
        fresh=True, in_place=True, checkpoints=True,
    )
    for dtype in ACTIVATION_DTYPES
    for v_first in (True, False)
]  # fmt: skip


def label(config: Config) -> str:
    flags = (
        "l2norm",
        "packed",
        "state_v_first",
        "initial_state",
        "indexed",
        "in_place",
        "checkpoints",
    )
    named = "".join(f"-{name}" for name in flags if getattr(config, name))
    return f"{config.dtype}-{config.operand}-{config.gate}-{config.strength}{named}"


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_machine_code(config):
    unit = launch.unit(config)
    kernel, ptx, log = report(unit).kernel, artifacts(unit).ptx, artifacts(unit).log
    resources.check(kernel, expect=("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"))
    assert "spill stores" in log and "serialized" not in log
    assert kernel.threads == (THREADS, 1, 1)
    spilled = (kernel.spill_stores, kernel.spill_loads, kernel.count("LDL"), kernel.count("STL"))
    assert spilled == (0, 0, 0, 0)
    assert not re.search(r"\b(ld|st)\.local|\.local \.", ptx)
    assert kernel.shared_bytes == 0 and kernel.dynamic_shared_bytes <= SHARED_MEMORY

    # What the roles ask for adds up to what the launch gives.
    asked = set(map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)))
    assert asked == set(REGISTERS)
    chain, helpers, rest = REGISTERS
    given = kernel.registers
    assert given == 65536 // THREADS // 8 * 8
    assert 128 * (chain + 3 * helpers + rest) <= given * THREADS
    # Asking for more by the instruction that gives back, or the other way round, is illegal on the card.
    for direction, count in re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", ptx):
        assert (int(count) > given) == (direction == "inc")
    assert ptx.count("griddepcontrol.wait") == config.packed

    # q k^T, k k^T, two products with the state, two with the inverse and Aqk, and the update in one term or two.
    terms = 2 if config.two_terms else 1
    assert kernel.count("HGMMA") == 4 * 8 + (2 + terms) * 4
    assert kernel.count("UTMALDG") == 2 * 2 + 1
    assert kernel.count("WARPGROUP.ARRIVE") == 6 + (terms - 1)
    # One wait per place where results are used: the compiler adds some where it does not trust the code.
    assert kernel.count("WARPGROUP.DEPBAR") == 6


def test_the_keys_of_kernels_hold_every_source_that_makes_them():
    for config in (TableConfig("int32"), Config("bfloat16")):
        assert_closed(launch.unit(config))
